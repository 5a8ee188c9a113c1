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
    ModelFactory (*cpu_models)(const Options &);
    // Null in a program without kernels. With `own_gpu` each rank takes a GPU of its host, and `gpu_comm` becomes the communicator between
    // the GPUs' memories. Otherwise ranks are threads that share a GPU, and `host` moves data within its memory.
    ModelFactory (*cuda_models)(const Options &, const ModelFactory &cpu, Comm &host, bool own_gpu,
                                std::unique_ptr<Comm> &gpu_comm);
    GpuQuery (*query_gpus)();
    std::vector<std::string> bundled;  // the arguments of a run without a task; empty: the demo
};

int run_program(const Program &program,
                const std::vector<std::string> &arguments);  // argv without the name; returns the exit code

// ---- for a trainer's file -------------------------------------------------------------------------------------------------------------

ModelFactory cuda_models(const Options &, const ModelFactory &cpu, Comm &host, bool own_gpu,
                         std::unique_ptr<Comm> &gpu_comm);  // in its CUDA half

template <template <class> class M> ModelFactory make_cpu_models(const Options &options) {
    const int threads = int(options.threads);
    std::shared_ptr<Context> ctx = make_context();
    return [=, bf16_storage = options.dtype == "bf16"](const ModelConfig &config, const ModelLimits &limits) {
        const std::shared_ptr<Context> own = limits.concurrent ? make_context() : ctx;
        const int share = limits.concurrent ? std::max(1, threads / 2) : threads;
        std::unique_ptr<Model> model;
        if (bf16_storage) model = std::make_unique<M<CpuBf16>>(CpuBf16{share, own.get()}, config, limits);
        else model = std::make_unique<M<CpuF32>>(CpuF32{share, own.get()}, config, limits);
        model->device_state = own;
        return model;
    };
}

// M<Dev> is the model, for example Llama.
template <template <class> class M>
int run_program(const char *name, int argc, char **argv, const std::vector<std::string> &bundled = {}) {
#ifdef LLMC_CUDA
    const Program program{name, make_cpu_models<M>, cuda_models, query_gpus, bundled};
#else
    const Program program{name, make_cpu_models<M>, nullptr, nullptr, bundled};
#endif
    return run_program(program, {argv + 1, argv + argc});
}
