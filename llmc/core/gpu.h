// Selects the device of a run. gpu_query.cu queries the driver, and gpu.cpp decides, so every decision can be tested.
#pragma once
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

struct GpuQuery {
    bool compiled = false;        // true if the program has kernels
    std::vector<int> archs;       // compute capabilities of the kernels, 10 * major + minor, ascending
    int runtime = 0, driver = 0;  // CUDA versions, 1000 * major + 10 * minor; driver 0: none, 1: of unknown version
    struct Gpu {
        std::string name;
        int arch;
    };
    std::vector<Gpu> gpus;
    std::string error;  // the runtime's message if it finds no GPU
};

GpuQuery query_gpus();  // in gpu_query.cu, which only programs with kernels have

// Returns true if the run uses the GPU. `device` is auto, cpu or cuda; auto uses a GPU if possible. `note` explains why no GPU can be used; it is
// empty if a GPU is used, and without a driver, where nobody expects a GPU. Dies with the reason if cuda was requested and cannot be used.
bool use_gpu(const std::string &device, const GpuQuery &query, std::string &note);

// Dies if the program has no kernels for this GPU: a machine may have several kinds.
void need_kernels(const GpuQuery &query, size_t device);

// Returns the number of a rank's GPU, among the `count` GPUs that it sees. hosts[r] is the host of rank r, and gpus[r] names the GPUs
// that rank r sees. Ranks that see the same GPUs use one each, in order. Dies if there are too few.
int pick_gpu(const std::vector<std::string> &hosts, const std::vector<std::string> &gpus, size_t rank, int count);

// Returns the peak FLOP/s of a GPU's tensor cores with `dtype`. `device` is the driver's name ("NVIDIA H100 80GB HBM3"). Returns 0 if the
// peak is unknown: for another name, and for f32, which does not run on tensor cores.
double gpu_peak(const std::string &device, const std::string &dtype);

// Returns the usable memory of a GPU in bytes. `name` is --gpu's value: "h100", or a number of GiB. The overhead of driver, libraries
// and page granularity is subtracted.
size_t gpu_memory(const std::string &name);

// True if a GPU, named as for gpu_memory(), supports 8-bit products; also true for an unknown GPU.
bool gpu_has_fp8(const std::string &name);

// The rates of a GPU per second, only for predictions (docs/memory.md, "How long a step takes").
struct GpuRates {
    double products, grouped;    // FLOP in bf16, as counted in op_list.h: of matrices; of experts' matrices
    double delta;                // FLOP of a block of the gated delta rule's forward pass
    double peak;                 // from the data sheet
    double memory;               // bytes that ops read and write
    double link, network, host;  // bytes per direction: to a GPU of the same host, to another host, to the host's memory
    double spread = 0;           // a measured step may take this share more or less than predicted
    bool wgmma = false;          // true: attention uses Hopper's kernels (../ops/attention_hopper.h)
};

// Returns attention's FLOP per second, for head size D and documents in which a query sees up to `keys` keys.
double attention_rate(const GpuRates &gpu, size_t D, size_t keys, bool backward);

// Returns the rates of a GPU. `name` is a value of --gpu. Returns nothing for a number of GiB, and for GPUs where the rate of our kernels is unknown.
std::optional<GpuRates> gpu_rates(const std::string &name);
