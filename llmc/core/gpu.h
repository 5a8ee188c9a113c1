// Which device a run takes. The question to the driver (gpu_query.cu) and the answer (gpu.cpp) are apart, so that every answer can be tested.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

struct GpuQuery {
    bool compiled = false;        // the program has kernels
    std::vector<int> archs;       // for these compute capabilities, 10 * major + minor, rising
    int runtime = 0, driver = 0;  // CUDA versions, 1000 * major + 10 * minor; driver 0: none
    struct Gpu {
        std::string name;
        int arch;
    };
    std::vector<Gpu> gpus;
    std::string error;  // what the runtime says where it finds no GPU
};

GpuQuery query_gpus();  // gpu_query.cu: only in programs with kernels

// Whether to use the GPU. `device` is auto, cpu or cuda; auto takes a GPU that can be used. `note` says why there is none, or is empty.
// Dies with the reason when cuda was asked for and cannot be had.
bool use_gpu(const std::string &device, const GpuQuery &query, std::string &note);

// The number of the GPU that a rank takes, of the `count` that it sees. hosts[r]: where rank r runs; gpus[r]: names of the GPUs that it sees.
// Ranks that see the same ones take one each, in order; dies if there are too few.
int pick_gpu(const std::vector<std::string> &hosts, const std::vector<std::string> &gpus, size_t rank, int count);

// FLOP/s that a GPU's tensor cores reach at most with `dtype`, by the name that the driver gives it ("NVIDIA H100 80GB HBM3"); 0 where that
// is not known: another name, or f32, which does not run on them.
double gpu_peak(const std::string &device, const std::string &dtype);

// Memory of a GPU in bytes, by name as in --gpu ("h100") or as a number of GiB, less what driver, libraries and page granularity take.
size_t gpu_memory(const std::string &name);
