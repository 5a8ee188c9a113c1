// The GPU's half of a trainer: makes its models on CUDA. Contract: cuda_models of program.h.
#pragma once
#include <chrono>

#include "../ops/kernels.cuh"
#include "../parallel/comm_nccl.h"
#include "../parallel/slices.cuh"
#include "gpu_check.h"
#include "program.h"

// Each rank checks its own GPU, before any model is there; one rank says so.
template <class X> void check_gpu(Cuda<X> dev, const Options &options, bool is_main_rank) {
    int driver = 0, number = 0;
    char place[32];
    cuda_check(cudaDriverGetVersion(&driver), "the driver does not tell its version");
    cuda_check(cudaGetDevice(&number), "no current GPU");
    cuda_check(cudaDeviceGetPCIBusId(place, sizeof place, number), "the GPU does not tell its place");
    const std::string device = make_memory(dev)->device();
    const std::string key = format("%s at %s of %s, driver for CUDA %d, %s%s", device.c_str(), place, host_name().c_str(), driver,
                                   options.dtype.c_str(), options.tf32 ? ", TF32" : "");
    if (!gpu_check_is_due(options.gpu_check, key)) return;
    const auto begin = std::chrono::steady_clock::now();
    const size_t ops = compare_ops(run_ops(dev), cpu_op_results(options.dtype), options.tf32 || sizeof(X) == 2, device);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (is_main_rank) printf("GPU check: %zu ops agree with the CPU (%.1f s)\n", ops, seconds);
    if (options.gpu_check == "once") remember_gpu_check(key);
}

struct CudaHalf {
    CudaStream stream;
    std::unique_ptr<CudaContext> ctx;

    explicit CudaHalf(const Options &options) : ctx(make_cuda_context(int(options.threads), options.tf32, options.autotune)) {}
};

template <template <class> class M>
ModelFactory make_cuda_models(const Options &options, Comm &host, bool own_gpu, std::unique_ptr<Comm> &gpu_comm) {
    std::shared_ptr<CudaHalf> half;  // is made late, because a plan needs no GPU
    if (!options.plan) {
        if (own_gpu) select_gpu(host);
        half = std::make_shared<CudaHalf>(options);
        const auto check = [&](auto dev) {
            dev.stream = half->stream, dev.ctx = half->ctx.get();
            agree(host, [&] { check_gpu(dev, options, host.rank == 0); });
        };
        options.dtype == "bf16" ? check(CudaBf16()) : check(CudaF32());
        if (own_gpu) gpu_comm = make_gpu_comm(host, half->stream, options.comm_timeout);
        else host.memory = device_slices(half->stream);
    }
    return [half, options](const ModelConfig &config, const ModelLimits &limits) {
        const auto own = half && limits.concurrent ? std::make_shared<CudaHalf>(options) : half;
        const auto model_on = [&](auto dev) -> std::unique_ptr<Model> {
            if (own) dev.stream = own->stream, dev.ctx = own->ctx.get();
            return std::make_unique<M<decltype(dev)>>(dev, config, limits);
        };
        auto model = options.dtype == "bf16" ? model_on(CudaBf16()) : model_on(CudaF32());
        model->device_state = own;
        return model;
    };
}
