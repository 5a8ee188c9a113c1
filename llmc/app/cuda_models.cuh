// The GPU half of a trainer. Contract: cuda_device of program.h.
#pragma once
#include <chrono>
#include <set>

#include "../ops/kernels.cuh"
#include "../parallel/comm_nccl.h"
#include "../parallel/slices.cuh"
#include "gpu_check.h"
#include "program.h"

// The key of a passed check: this GPU with this driver.
inline std::string name_of_gpu(Memory &memory) {
    int driver = 0, number = 0;
    char place[32];
    cuda_check(cudaDriverGetVersion(&driver), "the driver does not tell its version");
    cuda_check(cudaGetDevice(&number), "no current GPU");
    cuda_check(cudaDeviceGetPCIBusId(place, sizeof place, number), "the GPU does not tell its place");
    return format("%s at %s of %s, driver for CUDA %d", memory.device().c_str(), place, host_name().c_str(), driver);
}

struct CudaHalf {
    CudaStream stream;
    std::unique_ptr<CudaContext> ctx;

    // Without a cache, products are not tuned: the next run would choose other algorithms, with other bits.
    explicit CudaHalf(const Options &options)
        : ctx(make_cuda_context(int(options.threads), options.dtype == Dtype::tf32, cache_is_writable())) {}
};

// Each rank checks its own GPU, once for each kind of model that it creates; one rank prints the result.
template <template <class> class M>
Device make_cuda_device(const Options &options, const ModelFactory &cpu, Comm &host, bool own_gpu,
                        std::unique_ptr<Comm> &gpu_comm) {
    std::shared_ptr<CudaHalf> half;  // created late, because a plan needs no GPU
    if (!options.plan) {
        if (own_gpu) select_gpu(host);
        half = std::make_shared<CudaHalf>(options);
        if (own_gpu) gpu_comm = make_gpu_comm(host, half->stream, options.comm_timeout);
        else host.memory = device_slices(half->stream);
    }
    const ModelFactory make = [half, options](const ModelConfig &config, const ModelLimits &limits) {
        const auto own = half && limits.concurrent ? std::make_shared<CudaHalf>(options) : half;
        const auto model_on = [&](auto dev) -> std::unique_ptr<Model> {
            if (own) dev.stream = own->stream, dev.ctx = own->ctx.get();
            return std::make_unique<M<decltype(dev)>>(dev, config, limits);
        };
        auto model = options.dtype == Dtype::bf16 ? model_on(CudaBf16()) : model_on(CudaF32());
        model->device_state = own;
        return model;
    };
    const ModelFactory check = [make, cpu, options, main = host.rank == 0, checked = std::make_shared<std::set<std::string>>()](
                                   const ModelConfig &config, const ModelLimits &limits) {
        auto model = make(config, limits);
        const std::string key = name_of_gpu(model->memory()) + ", " + name_of(options.dtype) + ", " + kernels_of(config, limits);
        if (limits.concurrent || !checked->insert(key).second || !gpu_check_is_due(options.gpu_check, key)) return model;
        const auto begin = std::chrono::steady_clock::now();
        const size_t ops = check_gpu(make, cpu, config, limits, options.dtype != Dtype::f32);
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        if (main) printf("GPU check: %zu ops of a step agree with the CPU (%.1f s)\n", ops, seconds);
        if (options.gpu_check == GpuCheck::once) remember_gpu_check(key);
        return model;
    };
    const auto make_gpu_memory = [half] { return make_memory(CudaF32{.stream = half ? cudaStream_t(half->stream) : nullptr}); };
    return {half ? check : make, make_gpu_memory};
}
