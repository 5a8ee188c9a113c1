// Runs nvcc's PTX on the CPU, block after block with warps in lockstep, and checks every memory access. An error of the kernel or an unsupported
// instruction ends the launch with a message that names the kernel, the line of the PTX, the block and the thread.
//
//     ptx::Module module = ptx::Module::read("rope.ptx");
//     ptx::DeviceMemory memory;   memory.add(x, bytes);
//     ptx::Counts counts = ptx::run(module.kernel("_Z4ropePfm"), {.grid = {4}, .threads = {128}}, {&x, &n}, memory);
#pragma once
#include <array>
#include <string>
#include <vector>

#include "kernel.h"

namespace ptx {

// The host memory that kernels may access.
class DeviceMemory {
  public:
    struct Allocation {
        uintptr_t begin = 0;
        size_t bytes = 0;
        bool holds(uintptr_t at, size_t n) const { return at >= begin && at - begin + n <= bytes; }
    };
    void add(const void *p, size_t bytes) { allocations_[uintptr_t(p)] = bytes; }
    void remove(const void *p) { allocations_.erase(uintptr_t(p)); }
    Allocation at_or_before(uintptr_t address) const;  // with 0 bytes if there is none

  private:
    std::map<uintptr_t, size_t> allocations_;
};

struct Extent {
    unsigned x = 1, y = 1, z = 1;
    unsigned operator[](int axis) const { return axis == 0 ? x : axis == 1 ? y : z; }
    size_t count() const { return size_t(x) * y * z; }
    bool operator==(const Extent &) const = default;
    std::string text() const { return y * z == 1 ? std::to_string(x) : format("%u x %u x %u", x, y, z); }
};

struct Launch {
    Extent grid = {}, threads = {32};
    size_t shared = 0;           // dynamic
    bool count_memory = false;   // also count sectors and wavefronts
    Extent cluster = {0, 0, 0};  // blocks per cluster; 0: the kernel's own value
    size_t sample = 0;           // clusters that run, one from each equal part of the grid; their counts are scaled up. 0: all
    bool last_first = false;     // the last cluster starts first; a waiting cluster continues after those with lower indices
    bool sums_in_order = false;  // blocks may add floats by TMA only in an order that releases and acquires determine
};

// The counts of one instruction, or of a launch.
struct Count {
    uint64_t executed = 0, threads = 0;             // warps and threads that executed it
    uint64_t requests = 0, sectors = 0, lines = 0;  // of global memory: per warp; of 32 bytes; of 128 bytes
    uint64_t shared_requests = 0;                   // of shared memory, per warp
    uint64_t wavefronts = 0,
             least_wavefronts = 0;  // of shared memory: with its bank conflicts, and without any
    uint64_t flop = 0;              // of tensor cores; only in sums over instructions
    void operator+=(const Count &other);
};

// Units of an SM that work in parallel. A block's work is counted in warp instructions per unit, except for `shared`, which counts wavefronts: 128
// bytes between registers and shared memory or L1. `issue` counts all instructions, `access` counts loads and stores.
enum class Unit : uint8_t { issue, integer, fp32, fp64, special, convert, tensor, wgmma, access, shared };
constexpr size_t units = 10;
using Demand = std::array<double, units>;

// A block's demand on each unit of an SM; `latency`: cycles that the block takes alone (timing.h).
struct BlockWork {
    Demand demand{};
    double latency = 0;
};

// Bytes, in whole sectors. `read` and `written` count each sector that a launch touches once, as if L2 held all of them. `l2` counts every access
// except L1 hits, which are sectors that the block has read before. `bulk` is the part of `l2` that TMA moves.
struct Traffic {
    uint64_t read = 0, written = 0, l2 = 0, bulk = 0;
    void operator+=(const Traffic &o) { read += o.read, written += o.written, l2 += o.l2, bulk += o.bulk; }
};

struct Counts {
    std::vector<Count> instructions;  // as in Kernel::code
    uint64_t barriers = 0, divergent_branches = 0;
    double seconds = 0;             // that the interpreter has run
    std::vector<BlockWork> blocks;  // one for each block that was run, if memory is counted
    Traffic traffic;

    void multiply(double factor);
    Count total() const;
    std::array<Count, pipes> by_pipe(const Kernel &kernel) const;
    Demand demand(const Kernel &kernel) const;  // of all blocks so far
};

// Each argument is passed by pointer, as to cudaLaunchKernel.
Counts run(const Kernel &kernel, const Launch &launch, const std::vector<const void *> &arguments, DeviceMemory &memory);
}  // namespace ptx
