// Predicts the time of a launch on a GPU from its counts. The model, its sources and its errors: dev/emulator/gpu_model.md.
#pragma once
#include "interpreter.h"

namespace ptx {

// The model's parameters of a GPU. Rates are per SM and cycle unless noted otherwise.
struct Gpu {
    const char *name;
    int multiprocessors;
    double clock;                    // Hz
    double dram, l2, bulk;           // bytes per second of the whole GPU; bulk: TMA's, from L2
    double sustained;                // share of the clock rate that remains while wgmma keeps the tensor cores busy
    std::array<double, units> rate;  // warp instructions of PTX, in the order of Unit
    int warps, blocks;               // at most, per SM
    size_t shared;                   // bytes per SM
};
extern const std::array<Gpu, 4> gpus;

// The counts of a launch. If only a sample of the grid was run, `blocks` are that sample.
struct LaunchWork {
    Launch launch;  // its shared memory includes the static part
    int registers;  // per thread; 0: not known
    std::vector<BlockWork> blocks;
    Traffic traffic;
};

struct Prediction {
    double seconds;
    const char *bound;  // the limit: "DRAM", "L2", "issue", ..., "latency"
};
Prediction predict(const LaunchWork &work, const Gpu &gpu);

// ptxas's report on a kernel.
struct MachineCode {
    int registers = 0;
    size_t spilled = 0;  // bytes of spill stores
};
std::map<std::string, MachineCode> read_ptxas(const std::string &path);  // by mangled name; empty if the file does not exist

// resident_blocks: blocks that an SM holds at a time. occupancy: the share of its warps that are then resident.
int resident_blocks(const Launch &launch, int registers, const Gpu &gpu);
double occupancy(const Launch &launch, int registers, const Gpu &gpu);
}  // namespace ptx
