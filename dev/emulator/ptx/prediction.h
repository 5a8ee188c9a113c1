// From the counts of a launch to its time on a GPU. The model, its sources and how far it is off: docs/gpu_model.md.
#pragma once
#include "interpreter.h"

namespace ptx {

// A GPU as the model knows it; rates are per multiprocessor and cycle unless they say otherwise.
struct Gpu {
    const char *name;
    int multiprocessors;
    double clock;                    // Hz
    double dram, l2, bulk;           // bytes a second, of the GPU; bulk: of L2 by TMA
    double sustained;                // the share of the clock that is left while wgmma keeps the tensor cores busy
    std::array<double, units> rate;  // PTX instructions of a warp, in the order of Unit
    int warps, blocks;               // that a multiprocessor holds at most
    size_t shared;                   // bytes of a multiprocessor that can be shared memory
};
extern const std::array<Gpu, 4> gpus;

// A launch as it was counted. Of a grid that was not run as a whole, `blocks` are a sample.
struct LaunchWork {
    Launch launch;  // with static shared memory
    int registers;  // of a thread; 0: not known
    std::vector<BlockWork> blocks;
    Traffic traffic;
};

struct Prediction {
    double seconds;
    const char *bound;  // "DRAM", "L2", "issue", ..., "latency": what takes so long
};
Prediction predict(const LaunchWork &work, const Gpu &gpu);

// What ptxas said of a kernel.
struct MachineCode {
    int registers = 0;
    size_t spilled = 0;  // bytes that are stored
};
std::map<std::string, MachineCode> read_ptxas(const std::string &path);  // by mangled name; empty if there is no such file

// Blocks that a multiprocessor holds at a time, and the share of its warps that are then resident: the occupancy.
int resident_blocks(const Launch &launch, int registers, const Gpu &gpu);
double occupancy(const Launch &launch, int registers, const Gpu &gpu);
}  // namespace ptx
