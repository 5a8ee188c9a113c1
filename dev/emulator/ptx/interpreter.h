// Runs the PTX that nvcc makes on the CPU: block after block, its warps in lockstep, and checks every access to memory. An error, of the
// kernel, or an unsupported instruction, ends the launch with a message that names the kernel, the line of the PTX, block and thread.
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

// Memory of the host that kernels may touch.
class DeviceMemory {
  public:
    struct Allocation {
        uintptr_t begin = 0;
        size_t bytes = 0;
        bool holds(uintptr_t at, size_t n) const { return at >= begin && at - begin + n <= bytes; }
    };
    void add(const void *p, size_t bytes) { allocations_[uintptr_t(p)] = bytes; }
    void remove(const void *p) { allocations_.erase(uintptr_t(p)); }
    Allocation at_or_before(uintptr_t address) const;  // of no bytes if there is none

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
    bool count_memory = false;   // sectors and wavefronts, too
    Extent cluster = {0, 0, 0};  // blocks of a cluster; 0: as the kernel says
    size_t sample = 0;           // clusters that run, one of each equal part of the grid; their counts are multiplied. 0: all
    bool last_first = false;     // the last cluster starts first, and one that waits goes on behind those in front of it
    bool sums_in_order = false;  // blocks may add floats by TMA only in an order that a release and an acquire fix
};

// Of one instruction, or of a launch.
struct Count {
    uint64_t executed = 0, threads = 0;             // warps and threads that executed it
    uint64_t requests = 0, sectors = 0, lines = 0;  // of global memory: by warps, of 32 and of 128 bytes
    uint64_t shared_requests = 0;                   // of shared memory, by warps
    uint64_t wavefronts = 0,
             least_wavefronts = 0;  // of shared memory: as its banks allow, and if no two words of a warp met in a bank
    uint64_t flop = 0;              // of tensor cores, in sums over instructions
    void operator+=(const Count &other);
};

// Units of a multiprocessor that work in parallel. A block's work is counted in warp instructions per unit, for the last one in wavefronts: 128 bytes
// that go between registers and shared memory or L1. `issue` is the sum of all instructions, `access` of loads and stores.
enum class Unit : uint8_t { issue, integer, fp32, fp64, special, convert, tensor, wgmma, access, shared };
constexpr size_t units = 10;
using Demand = std::array<double, units>;

// What a block asks of a multiprocessor; `latency`: cycles that it would take alone (timing.h).
struct BlockWork {
    Demand demand{};
    double latency = 0;
};

// Bytes in sectors. Device memory is read or written once for each sector that a launch touches, as if L2 held everything; L2 answers all but
// what L1 has: of a sector that a block has read before. `bulk` is the part of it that TMA moves.
struct Traffic {
    uint64_t read = 0, written = 0, l2 = 0, bulk = 0;
    void operator+=(const Traffic &o) { read += o.read, written += o.written, l2 += o.l2, bulk += o.bulk; }
};

struct Counts {
    std::vector<Count> instructions;  // as in Kernel::code
    uint64_t barriers = 0, divergent_branches = 0;
    double seconds = 0;             // that the interpreter took
    std::vector<BlockWork> blocks;  // of each block that was run, if memory is counted
    Traffic traffic;

    void multiply(double factor);
    Count total() const;
    std::array<Count, pipes> by_pipe(const Kernel &kernel) const;
    Demand demand(const Kernel &kernel) const;  // of all blocks so far
};

// Arguments are passed as to cudaLaunchKernel: a pointer to each.
Counts run(const Kernel &kernel, const Launch &launch, const std::vector<const void *> &arguments, DeviceMemory &memory);
}  // namespace ptx
