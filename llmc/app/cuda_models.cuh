// The GPU's half of a trainer: makes its models on CUDA. Contract: cuda_models of program.h.
#pragma once
#include "../ops/kernels.cuh"
#include "../parallel/comm_nccl.h"
#include "../parallel/slices.cuh"
#include "program.h"

struct CudaHalf {
    CudaStream stream;
    std::unique_ptr<CudaContext> ctx;
};

template <template <class> class M>
ModelFactory make_cuda_models(const Options &options, Comm &host, bool own_gpu, std::unique_ptr<Comm> &gpu_comm) {
    std::shared_ptr<CudaHalf> half;  // is made late, because a plan needs no GPU
    if (!options.plan) {
        if (own_gpu) select_gpu(host);
        half = std::make_shared<CudaHalf>();
        half->ctx = make_cuda_context(int(options.threads), options.tf32);
        if (own_gpu) gpu_comm = make_gpu_comm(host, half->stream, options.comm_timeout);
        else host.memory = device_slices(half->stream);
    }
    return [half, bf16_storage = options.dtype == "bf16"](const ModelConfig &config,
                                                          const ModelLimits &limits) -> std::unique_ptr<Model> {
        const auto model_on = [&](auto dev) -> std::unique_ptr<Model> {
            if (half) dev.stream = half->stream, dev.ctx = half->ctx.get();
            return std::make_unique<M<decltype(dev)>>(dev, config, limits);
        };
        return bf16_storage ? model_on(CudaBf16()) : model_on(CudaF32());
    };
}
