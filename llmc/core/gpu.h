// Which device a run takes. One file asks the driver (gpu_query.cu) and another one decides (gpu.cpp), so that every decision can be tested.
#pragma once
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

struct GpuQuery {
    bool compiled = false;        // the program has kernels
    std::vector<int> archs;       // compute capabilities of the kernels, 10 * major + minor, in rising order
    int runtime = 0, driver = 0;  // CUDA versions, 1000 * major + 10 * minor; driver 0: none, 1: of unknown version
    struct Gpu {
        std::string name;
        int arch;
    };
    std::vector<Gpu> gpus;
    std::string error;  // the runtime's message if it finds no GPU
};

GpuQuery query_gpus();  // gpu_query.cu: only in programs with kernels

// Returns whether to use the GPU. `device` is auto, cpu or cuda; auto takes a GPU if one can be used. `note` says why none can. It is empty if
// one is taken, and where there is no driver: nobody expects a GPU there. Dies with the reason if cuda was asked for and cannot be used.
bool use_gpu(const std::string &device, const GpuQuery &query, std::string &note);

// Dies if the program has no kernels for this one of the GPUs: one machine may have several kinds.
void need_kernels(const GpuQuery &query, size_t device);

// Returns the number of the GPU that a rank takes, of the `count` GPUs that it sees. hosts[r] is where rank r runs, and gpus[r] names the GPUs
// that rank r sees. Ranks that see the same GPUs take one each, in order. Dies if there are too few.
int pick_gpu(const std::vector<std::string> &hosts, const std::vector<std::string> &gpus, size_t rank, int count);

// Returns the peak FLOP/s of a GPU's tensor cores with `dtype`. `device` is the name that the driver gives ("NVIDIA H100 80GB HBM3"). Returns 0 if the
// peak is unknown: for another name, and for f32, which does not run on tensor cores.
double gpu_peak(const std::string &device, const std::string &dtype);

// Returns the usable memory of a GPU in bytes. `name` is --gpu's value: "h100", or a number of GiB. The overhead of driver, libraries
// and page granularity is subtracted.
size_t gpu_memory(const std::string &name);

// Whether a GPU, by a name that gpu_memory() takes, multiplies numbers of 8 bits; of an unknown one nothing is said against it.
bool gpu_has_fp8(const std::string &name);

// What a GPU does in a second, for predictions alone (docs/memory.md, "Seconds").
struct GpuRates {
    double products, grouped;    // FLOP in bf16, as op_list.h counts them: with matrices, and with those of experts
    double peak;                 // of the data sheet
    double memory;               // bytes that ops read and write
    double link, network, host;  // bytes in one direction: to a GPU of the same host, to another host, to the host's memory
    double spread = 0;           // a measured step may take this share more or less than predicted
    bool wgmma = false;          // attention has Hopper's kernels (../ops/attention_hopper.h)
};

// Returns the FLOP that attention does in a second, with heads of D and documents in which a query sees up to `keys` keys.
double attention_rate(const GpuRates &gpu, size_t D, size_t keys, bool backward);

// Returns the rates of a GPU. `name` is a value of --gpu. Nothing is returned for a number of GiB, and where the rate of our kernels cannot be guessed.
std::optional<GpuRates> gpu_rates(const std::string &name);
