// The state of a launch while it runs: blocks, their warps and shared memory.
#pragma once
#include <bit>
#include <cstring>

#include "interpreter.h"

namespace ptx {

// The lanes of a warp that are at the same instruction, and the instruction where others join them.
struct Path {
    uint32_t mask;
    int at, join;
};

struct Copy {  // a cp.async of one lane, on its way
    int lane, bytes;
    uint32_t group;  // of that lane, counted from the start
    uint32_t to;
    uint8_t data[16];
};

// Bytes of shared memory that are written and read as one.
struct Cell {
    uint32_t written = 0;  // the time, of the warp that wrote it last; 0: never
    uint16_t thread = 0;   // that wrote it last
    uint16_t in_flight = 0;
    uint32_t updated = 0;  // by an atomic: the time, of the warp that did it last
    uint16_t updater = 0;  // the thread
    bool several = false;  // other threads of that warp did, too, at that time
};

struct Block;
struct Warp {
    Block *block = nullptr;
    const Instruction *instruction = nullptr;  // which runs now, by the lanes in `active`
    int number = 0;
    uint32_t active = 0, live = 0, exist = 0;  // lanes: that execute the instruction, have not returned, and are there at all
    uint8_t *registers = nullptr;
    std::vector<Path> paths;  // the last one runs
    std::vector<Copy> copies;
    uint32_t committed[lanes] = {};  // groups of cp.async
    int waits_at = -1;               // barrier

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
};

// Up to which time of every warp a warp knows that all has happened: it has met that warp at a barrier since. A warp's own time goes on at
// each barrier and __syncwarp.
using Clock = std::vector<uint32_t>;

struct Barrier {
    int arrived = 0, expected = 0;  // threads
    Clock clock;                    // joined clocks of the arrived warps
    int voters = 0, votes = 0;      // of bar.red: threads, and those whose predicate holds
};

// Which sectors of device memory a launch has touched.
class TouchedSectors {
  public:
    struct Sector {
        uint32_t block = 0;  // that read it last, counted from 1
        bool read = false, written = false;
    };
    Sector &at(const DeviceMemory::Allocation &allocation, uint64_t sector) {
        if (allocation.begin != begin_ || !sectors_) {
            begin_ = allocation.begin, sectors_ = &all_[begin_];
            sectors_->resize(allocation.bytes / 32 + 2);
        }
        return (*sectors_)[sector - begin_ / 32];
    }

  private:
    std::map<uintptr_t, std::vector<Sector>> all_;
    uintptr_t begin_ = 0;
    std::vector<Sector> *sectors_ = nullptr;
};

struct Running {  // a launch
    const Kernel *kernel;
    const Launch *launch;
    DeviceMemory *memory;
    const std::vector<uint8_t> *parameters;
    Counts *counts;
    DeviceMemory::Allocation last = {};  // that an access was found in
    TouchedSectors touched = {};
};

struct Block {
    Running *running;
    unsigned index[3] = {};
    uint32_t number = 0;                 // counted from 1
    std::vector<uint8_t> shared, local;  // local memory: (threads, bytes)
    std::vector<Cell> cells;
    std::vector<uint32_t> reads;  // (cells, warps): the time of the warp when it read the cell last
    std::vector<Clock> clocks;    // of the warps
    std::vector<Warp> warps;
    Barrier barriers[16];
    uint8_t *registers = nullptr;  // (warps, slots, lanes)

    Extent thread(int number) const;  // its index
};
}  // namespace ptx
