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

// The lanes of a warp that are at the same instruction, and the instruction where others join them.
struct Path {
    uint32_t mask;
    int at, join;
};

struct Copy {  // a cp.async of one lane, in flight
    int lane, bytes;
    uint32_t group;  // of that lane, counted from the start
    uint32_t to;
    uint8_t data[16];
};

// A time of each agent: of each warp of a cluster; of each of its warpgroups, which are the readers of wgmma's operands; and of each of its
// mbarriers, which are the writers of the copies that complete on them. A warp's time goes on where others can begin to know of it: at
// barriers, arrivals and fences. A warpgroup's is the number of groups of wgmma that have ended, an mbarrier's the number of phases.
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

// Up to which time of each agent all has happened before a warp's next instruction. Barriers join the views of those who meet.
struct View {
    Clock known;
    Clock proxied;    // part of it that a fence.proxy.async has made visible to the async proxy: to TMA and wgmma
    Clock announced;  // initialised mbarriers that a fence.mbarrier_init has made visible to the cluster
    Clock elsewhere;  // of warps of other clusters, by number in the launch, as releases and acquires tell it (device_memory.h)
    Clock elsewhere_proxied;
    void join(const View &other) {
        known.join(other.known), proxied.join(other.proxied), announced.join(other.announced);
        elsewhere.join(other.elsewhere), elsewhere_proxied.join(other.elsewhere_proxied);
    }
};

// Bytes of shared memory that are written and read as one.
struct Cell {
    uint32_t written = 0;    // the time, of the agent that wrote it last; 0: never
    uint32_t thread = 0;     // that wrote it last: agent * lanes + lane
    uint16_t in_flight = 0;  // copies to it
    uint16_t reading = 0;    // wgmma and copies from it that are on their way
    uint32_t line = 0;       // of the instruction that is on its way, or was last
    uint32_t updated = 0;    // by an atomic: the time, of the warp that did it last
    uint32_t updater = 0;    // the thread
    bool several = false;    // other threads of that warp updated it at the same time
    bool mbarrier = false;   // part of one
};

// The registers of a warp as wgmma needs them: accessed only outside of its operations, and before a fence.
struct RegisterUse {
    uint32_t fences = 0;  // how many wgmma.fence the warp had executed when another instruction accessed the register last
    uint16_t read = 0, written = 0;  // by operations on their way
    bool constant = false;
};

struct Block;
struct Wgmma;
struct BulkCopy;
// Words that a load in a loop has read in successive iterations, up to four of them.
struct LoopedLoad {
    uint32_t first[lanes] = {}, mask = 0;  // addresses of the first words
    uint32_t words = 0;
    transactions::Wavefronts counted = {};
};

// A value of device memory that a loop may be waiting for.
struct Polled {
    const Instruction *instruction = nullptr;
    uint64_t address = 0, value = 0;
    bool operator==(const Polled &) const = default;
};

struct Warp {
    Block *block = nullptr;
    const Instruction *instruction = nullptr;  // which runs now, by the lanes in `active`
    int number = 0;                            // in its block
    size_t agent = 0;                          // number in its cluster
    size_t group = 0;                          // its warpgroup, an agent
    uint32_t active = 0, live = 0, exist = 0;  // lanes: that execute the instruction, have not returned, and are there at all
    uint8_t *registers = nullptr;
    std::vector<Path> paths;  // the last one runs
    std::vector<Copy> copies;
    uint32_t committed[lanes] = {};  // groups of cp.async
    int waits_at = -1;               // barrier

    View view;
    uint32_t synced = 0;  // the time since which lanes have not met

    // An instruction that cannot go on yet stalls; the warp tries it again later. A warp that nobody else can help has expired: its
    // try_wait, which is bounded in time, gives up.
    bool stalled = false, expired = false;
    Polled polled;
    std::function<std::string()> why;

    std::vector<RegisterUse> uses;  // of slots, in kernels with wgmma
    uint32_t fences = 0;            // wgmma.fence executed
    std::deque<std::shared_ptr<Wgmma>> wgmmas;
    uint64_t wgmma_groups = 0;                         // committed
    std::vector<std::shared_ptr<BulkCopy>> outward;    // copies from shared memory
    uint32_t bulk_groups[lanes] = {};                  // committed
    uint64_t cluster_arrivals = 0, cluster_waits = 0;  // at the cluster's barrier
    uint32_t registers_of_thread = 0;                  // by setmaxnreg; 0: as it started

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
    Count &count() const;  // of the instruction that runs
    [[noreturn]] void fail(int lane, const std::string &what) const;
    void need_all_lanes() const;
    uint32_t one(int slot) { return values<uint32_t>(slot)[std::countr_zero(active)]; }  // of the first active lane
    uint32_t time() const { return view.known.of(agent); }
    void advance() { view.known.set(agent, time() + 1); }
    void sync_lanes() { advance(), synced = time(); }
    void learn(const View &other) {  // earlier events, arrivals of this warp's own lanes included
        view.join(other);
        synced = std::max(synced, other.known.of(agent) + 1);
    }
    template <class F> void stall(F explain) { stalled = true, why = explain; }
};

struct Barrier {
    int arrived = 0, expected = 0;  // threads
    View view;                      // joined views of the arrived warps
    float time = 0;                 // the cycle in which the last of them arrived (timing.h)
    int voters = 0, votes = 0;      // of bar.red: threads, and threads with a true predicate
};

// Which sectors of device memory a launch has touched, by allocation.
class TouchedSectors {
  public:
    struct Sector {
        uint32_t block = 0;  // that read it last, counted from 1
        bool read = false, written = false;
    };
    struct Touched {
        std::vector<Sector> sectors;     // from the one on in which the allocation begins
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

// What has written bytes of device memory last in this launch.
struct LastWrite {
    uint32_t warp = 0;                    // its number in the launch, counted from 1; 0: none
    uint32_t started = 0, completed = 0;  // times of the warp
    uint32_t line = 0;
};

struct Running {  // a launch
    const Kernel *kernel;
    const Launch *launch;
    DeviceMemory *memory;
    const std::vector<uint8_t> *parameters;
    Counts *counts;
    double scale = 1;                    // clusters of the grid for each that has been run
    DeviceMemory::Allocation last = {};  // that an access was found in
    TouchedSectors touched = {};
    std::map<uintptr_t, std::vector<LastWrite>> writes = {};  // by allocation, of each 16 bytes; in kernels with TMA
    std::map<uint64_t, Clock> released = {};  // by address: what the warp knew that stored by st.release there last
};

struct MBarrier {
    size_t agent = 0;                   // its own, the writer of the copies that complete on it
    size_t initialiser = 0;             // the warp, an agent
    uint32_t initialised = 0;           // the time, of that warp
    int count = 0, pending = 0;         // arrivals: of a phase, and still missing
    int64_t expected = 0, arrived = 0;  // bytes of copies in this phase
    uint32_t phase = 0;                 // how many have ended
    View now, ended;                    // of the arrivals in this phase, and in all that have ended
    float last = 0, over = 0;  // the cycles of the last arrival in this phase, and of the end of the one before it (timing.h)
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
    std::vector<uint32_t> reads;  // (cells, readers of the cluster): the time of the agent when it read the cell last
    std::vector<Warp> warps;
    Barrier barriers[16];
    Queues queues;
    float given_back = 0;                    // the cycle in which a warp gave registers back
    std::map<uint32_t, MBarrier> mbarriers;  // by address
    uint8_t *registers = nullptr;            // (warps, slots, lanes)

    Extent thread(int number) const;  // its index
};

// Blocks that run at the same time and access each other's shared memory; usually one.
struct Cluster {
    Running *running;
    Extent shape = {};  // in blocks
    std::vector<Block> blocks;
    size_t warps = 0, readers = 0, agents = 0;      // warps of all blocks; with warpgroups; with mbarriers
    std::vector<std::shared_ptr<BulkCopy>> inward;  // copies to shared memory on their way
    uint64_t phase = 0;                             // of the cluster's barrier: how many have ended
    View now, ended;                                // of its arrivals in this phase, and in all that have ended
    float last = 0, over = 0;                       // their cycles, as of an mbarrier
    uint64_t events = 0;                            // that may help a stalled warp

    std::unique_ptr<uint8_t, decltype(&free)> registers{nullptr, free};  // of all blocks
};
}  // namespace ptx
