// The state of a launch while it runs: clusters, their blocks, warps and shared memory.
#pragma once
#include <algorithm>
#include <bit>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>

#include "../transactions.h"
#include "interpreter.h"
#include "timing.h"

namespace ptx {

// Lanes of a warp at the same instruction, and the instruction where other lanes join them.
struct Path {
    uint32_t mask;
    int at, join;
};

struct Copy {  // a cp.async of one lane, in flight
    int lane, bytes;
    uint32_t group;  // cp.async group of the lane, counted from the start
    uint32_t to;
    uint8_t data[16];
};

// A vector clock: one time per agent. The agents of a cluster are its warps; its warpgroups, as the readers of wgmma's operands; and its mbarriers,
// as the writers of the copies that complete on them. A warp's time advances at barriers, arrivals and fences, where other agents can learn of its
// work. A warpgroup's time is the number of wgmma groups that have ended, and an mbarrier's is the number of phases.
class Clock {
  public:
    uint32_t of(size_t agent) const { return agent < times_.size() ? times_[agent] : 0; }
    void set(size_t agent, uint32_t time) {
        if (agent >= times_.size()) times_.resize(agent + 1);
        times_[agent] = time;
    }
    void join(const Clock &other) {
        if (other.times_.size() > times_.size()) times_.resize(other.times_.size());
        for (size_t n = 0; n < other.times_.size(); n++) times_[n] = std::max(times_[n], other.times_[n]);
    }

  private:
    std::vector<uint32_t> times_;
};

// For each agent, the time up to which its work has happened before a warp's next instruction. A barrier joins the views of its warps.
struct View {
    Clock known;
    Clock proxied;    // the part of `known` that a fence.proxy.async has made visible to the async proxy, for TMA and wgmma
    Clock announced;  // initialised mbarriers that a fence.mbarrier_init has made visible to the cluster
    Clock
        elsewhere;  // for warps of other clusters, by number in the launch; passed on by releases and acquires (device_memory.h)
    Clock elsewhere_proxied;
    void join(const View &other) {
        known.join(other.known), proxied.join(other.proxied), announced.join(other.announced);
        elsewhere.join(other.elsewhere), elsewhere_proxied.join(other.elsewhere_proxied);
    }
};

// The state of a few bytes of shared memory that are checked together.
struct Cell {
    uint32_t written = 0;    // time of the last write, by the writing agent's clock; 0: never written
    uint32_t thread = 0;     // last writer: agent * lanes + lane
    uint16_t in_flight = 0;  // number of copies to these bytes in flight
    uint16_t reading = 0;    // number of wgmma and copies in flight that read these bytes
    uint32_t line = 0;       // of the instruction in flight, or else of the last one
    uint32_t updated = 0;    // time of the last atomic, by the clock of its warp
    uint32_t updater = 0;    // thread of the last atomic
    bool several = false;    // several threads of that warp made an atomic at the same time
    bool mbarrier = false;   // true if the bytes belong to an mbarrier
};

// The use of a warp's register, for the rules of wgmma: other instructions may access it only before a fence, and while no wgmma uses it.
struct RegisterUse {
    uint32_t fences = 0;             // wgmma.fence that the warp had executed at the last access by another instruction
    uint16_t read = 0, written = 0;  // by wgmma in flight
    bool constant = false;
};

struct Block;
struct Wgmma;
struct BulkCopy;
// Up to four words that a load in a loop has read in successive iterations.
struct LoopedLoad {
    uint32_t first[lanes] = {}, mask = 0;  // addresses of the first words
    uint32_t words = 0;
    transactions::Wavefronts counted = {};
};

// A value in device memory that a loop may be polling.
struct Polled {
    const Instruction *instruction = nullptr;
    uint64_t address = 0, value = 0;
    bool operator==(const Polled &) const = default;
};

struct Warp {
    Block *block = nullptr;
    const Instruction *instruction = nullptr;  // current instruction, executed by the lanes in `active`
    int number = 0;                            // in its block
    size_t agent = 0;                          // number in its cluster
    size_t group = 0;                          // its warpgroup, an agent
    uint32_t active = 0, live = 0, exist = 0;  // sets of lanes: executing the instruction; not yet returned; existing
    uint8_t *registers = nullptr;
    std::vector<Path> paths;  // the last path runs
    std::vector<Copy> copies;
    uint32_t committed[lanes] = {};  // groups of cp.async
    int waits_at = -1;               // barrier

    View view;
    uint32_t synced = 0;  // time of the last synchronisation of the lanes

    // An instruction that cannot proceed yet stalls, and the warp retries it later. A warp that no other warp can help has expired: its try_wait,
    // which is bounded in time, gives up.
    bool stalled = false, expired = false;
    Polled polled;
    std::function<std::string()> why;

    std::vector<RegisterUse> uses;  // by slot, in kernels with wgmma
    uint32_t fences = 0;            // wgmma.fence executed
    std::deque<std::shared_ptr<Wgmma>> wgmmas;
    uint64_t wgmma_groups = 0;                         // committed
    std::vector<std::shared_ptr<BulkCopy>> outward;    // copies from shared memory
    uint32_t bulk_groups[lanes] = {};                  // committed
    uint64_t cluster_arrivals = 0, cluster_waits = 0;  // at the cluster's barrier
    uint32_t registers_of_thread = 0;                  // changed by setmaxnreg; 0: unknown

    WarpTiming timing;  // if memory is counted
    std::vector<LoopedLoad> looped;

    template <class T> T *values(int slot) { return reinterpret_cast<T *>(registers + size_t(slot) * slot_bytes); }
    uint32_t &predicate(int slot) { return *values<uint32_t>(slot); }
    template <class T> void write(int slot, const T *from) {
        T *to = values<T>(slot);
        if (active == ~0u) memcpy(to, from, lanes * sizeof(T));
        else each_lane(active, [&](int l) { to[l] = from[l]; });
    }
    void write_predicate(int slot, uint32_t bits) {
        uint32_t &p = predicate(slot);
        p = (p & ~active) | (bits & active);
    }
    template <class F> static void each_lane(uint32_t mask, F f) {
        for (; mask; mask &= mask - 1) f(std::countr_zero(mask));
    }
    Count &count() const;  // counts of the current instruction
    [[noreturn]] void fail(int lane, const std::string &what) const;
    void need_all_lanes() const;
    uint32_t one(int slot) { return values<uint32_t>(slot)[std::countr_zero(active)]; }  // value of the first active lane
    uint32_t time() const { return view.known.of(agent); }
    void advance() { view.known.set(agent, time() + 1); }
    void sync_lanes() { advance(), synced = time(); }
    void learn(const View &other) {  // adds earlier events, including arrivals of this warp's own lanes
        view.join(other);
        synced = std::max(synced, other.known.of(agent) + 1);
    }
    template <class F> void stall(F explain) { stalled = true, why = explain; }
};

struct Barrier {
    int arrived = 0, expected = 0;  // threads
    View view;                      // the joined views of the arrived warps
    float time = 0;                 // the cycle of the last arrival (timing.h)
    int voters = 0, votes = 0;      // for bar.red: threads, and threads with a true predicate
};

// The sectors of device memory that a launch has touched, by allocation.
class TouchedSectors {
  public:
    struct Sector {
        uint32_t block = 0;  // last reader, counted from 1
        bool read = false, written = false;
    };
    struct Touched {
        std::vector<Sector> sectors;     // the first contains the beginning of the allocation
        uint64_t read = 0, written = 0;  // bytes
    };
    Touched &in(const DeviceMemory::Allocation &allocation) {
        if (allocation.begin != begin_ || !touched_) {
            begin_ = allocation.begin, touched_ = &all_[begin_];
            touched_->sectors.resize(allocation.bytes / 32 + 2);
        }
        return *touched_;
    }
    const std::map<uintptr_t, Touched> &all() const { return all_; }

  private:
    std::map<uintptr_t, Touched> all_;
    uintptr_t begin_ = 0;
    Touched *touched_ = nullptr;
};

// The last write to 16 bytes of device memory in this launch.
struct LastWrite {
    uint32_t warp = 0;                    // the writer's number in the launch, counted from 1; 0: none
    uint32_t started = 0, completed = 0;  // by the writer's clock
    uint32_t line = 0;
};

struct Running {  // a launch
    const Kernel *kernel;
    const Launch *launch;
    DeviceMemory *memory;
    const std::vector<uint8_t> *parameters;
    Counts *counts;
    double scale = 1;                    // clusters of the grid per cluster that has run
    DeviceMemory::Allocation last = {};  // of the last access
    TouchedSectors touched = {};
    std::map<uintptr_t, std::vector<LastWrite>> writes = {};  // by allocation, for each 16 bytes; in kernels with TMA
    std::map<uint64_t, Clock> released = {};                  // by address: the clock of the last st.release there
};

struct MBarrier {
    size_t agent = 0;                   // stands for the copies that complete on this mbarrier, as their writer
    size_t initialiser = 0;             // the agent of the warp that initialised it
    uint32_t initialised = 0;           // time by that warp's clock
    int count = 0, pending = 0;         // arrivals per phase; arrivals still pending
    int64_t expected = 0, arrived = 0;  // bytes of copies in this phase
    uint32_t phase = 0;                 // number of ended phases
    View now, ended;                    // joined views of the arrivals in this phase, and in all ended phases
    float last = 0, over = 0;           // the cycles of this phase's last arrival, and of the previous phase's end (timing.h)
};

struct Cluster;
struct Block {
    Running *running;
    Cluster *cluster = nullptr;
    unsigned index[3] = {};
    unsigned rank = 0;                   // in its cluster
    uint32_t number = 0;                 // counted from 1
    bool ended = false;                  // all its threads have returned
    std::vector<uint8_t> shared, local;  // local memory: (threads, bytes)
    std::vector<Cell> cells;
    std::vector<uint32_t> reads;  // (cells, readers of the cluster): time of the reader's last read, by its clock
    std::vector<Warp> warps;
    Barrier barriers[16];
    Queues queues;
    float given_back = 0;                    // the cycle in which a warp last released registers
    std::map<uint32_t, MBarrier> mbarriers;  // by address
    uint8_t *registers = nullptr;            // (warps, slots, lanes)

    Extent thread(int number) const;  // its index
};

// Blocks that run at the same time and can access each other's shared memory; usually a single block.
struct Cluster {
    Running *running;
    Extent shape = {};  // in blocks
    std::vector<Block> blocks;
    size_t warps = 0, readers = 0, agents = 0;      // numbers of warps of all blocks; plus warpgroups; plus mbarriers
    std::vector<std::shared_ptr<BulkCopy>> inward;  // copies to shared memory in flight
    uint64_t phase = 0;                             // of the cluster's barrier: number of ended phases
    View now, ended;                                // joined views of its arrivals in this phase, and in all ended phases
    float last = 0, over = 0;                       // its cycles, as for an mbarrier
    uint64_t events = 0;                            // counts events that may let a stalled warp proceed

    std::unique_ptr<uint8_t, decltype(&free)> registers{nullptr, free};  // of all blocks
};
}  // namespace ptx
