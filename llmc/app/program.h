// The main function of a trainer: flags, devices, ranks, then the tasks of run.h.
#pragma once
#include <algorithm>
#include <memory>

#include "../core/device.h"
#include "../core/gpu.h"
#include "../parallel/comm.h"
#include "../train/options.h"
#include "../train/run.h"

struct Program {
    const char *name;  // "train_llama"
    std::string
        called;  // its name for a shell: "./train_llama", or "train_llama" if it was called by that name, which PATH then has
    Device (*cpu_device)(const Options &);
    // Null in a program without kernels. With `own_gpu` each rank uses a GPU of its host, and `gpu_comm` becomes the communicator between the GPUs'
    // memories. Otherwise ranks are threads that share a GPU, and `host` moves data within its memory.
    Device (*cuda_device)(const Options &, const ModelFactory &cpu, Comm &host, bool own_gpu, std::unique_ptr<Comm> &gpu_comm);
    GpuQuery (*query_gpus)();
    std::vector<std::string> bundled;  // the arguments of a run without a task; empty: the demo
};

// `arguments` is argv without the program's name. Returns the exit code.
int run_program(const Program &program, const std::vector<std::string> &arguments);
std::string called_name(const char *name, const char *argv0);

// ---- for a trainer's file -------------------------------------------------------------------------------------------------------------

// Defined in the trainer's CUDA half.
Device cuda_device(const Options &, const ModelFactory &cpu, Comm &host, bool own_gpu, std::unique_ptr<Comm> &gpu_comm);

template <template <class> class M> Device make_cpu_device(const Options &options) {
    const int threads = int(options.threads);
    std::shared_ptr<Context> ctx = make_context();
    const auto make_model = [=, bf16_storage = options.dtype == Dtype::bf16, exact = options.exact](const ModelConfig &config,
                                                                                                    const ModelLimits &limits) {
        const std::shared_ptr<Context> own = limits.concurrent ? make_context() : ctx;
        const int share = limits.concurrent ? std::max(1, threads / 2) : threads;
        std::unique_ptr<Model> model;
        if (bf16_storage) model = std::make_unique<M<CpuBf16>>(CpuBf16{share, own.get(), exact}, config, limits);
        else model = std::make_unique<M<CpuF32>>(CpuF32{share, own.get(), exact}, config, limits);
        model->device_state = own;
        return model;
    };
    return {make_model, [] { return std::make_unique<HostMemory>(); }};
}

// M<Dev> is the model, for example Llama.
template <template <class> class M>
int run_program(const char *name, int argc, char **argv, const std::vector<std::string> &bundled = {}) {
#ifdef LLMC_CUDA
    const Program program{name, called_name(name, argv[0]), make_cpu_device<M>, cuda_device, query_gpus, bundled};
#else
    const Program program{name, called_name(name, argv[0]), make_cpu_device<M>, nullptr, nullptr, bundled};
#endif
    return run_program(program, {argv + 1, argv + argc});
}
