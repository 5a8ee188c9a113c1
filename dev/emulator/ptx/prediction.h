// From the counts of a launch to its least time on a GPU. The model, its sources and its limits: docs/gpu_model.md.
#pragma once
#include "interpreter.h"

namespace ptx {

// A GPU as the model knows it; rates are per multiprocessor and cycle unless they say otherwise.
struct Gpu {
    const char *name;
    int multiprocessors;
    double clock;                    // Hz
    double dram, l2;                 // bytes a second, of the GPU
    std::array<double, units> rate;  // warp instructions, in the order of Unit
    int warps, blocks;               // that a multiprocessor holds at most
    size_t shared;                   // bytes of a multiprocessor that can be shared memory
};
extern const std::array<Gpu, 3> gpus;

struct Prediction {
    double seconds;
    const char *bound;  // "DRAM", "L2", "issue", ...: what takes so long
};
Prediction predict(const std::vector<Demand> &demands, const Traffic &traffic, const Gpu &gpu);

// Whether the GPU's multiprocessors have the shared memory of a block, with the 1 KB that the system takes.
bool holds(const Gpu &gpu, const Launch &launch);

// What ptxas said of a kernel.
struct MachineCode {
    int registers = 0;
    size_t spilled = 0;  // bytes that are stored
};
std::map<std::string, MachineCode> read_ptxas(const std::string &path);  // by mangled name; empty if there is no such file

// Occupancy: resident warps of a multiprocessor, as a share of its limit.
double occupancy(const Launch &launch, int registers, const Gpu &gpu);
}  // namespace ptx
