// A device's context and scratch memory for products outside a trainer.
#pragma once
#include "../../llmc/ops/matmul.cuh"
#include "check.cuh"

class MatmulContext {
    std::unique_ptr<CudaContext> context_;
    DeviceArray<char> scratch_{matmul_scratch(CudaF32{})};

  public:
    explicit MatmulContext(bool autotune = false) : context_(make_cuda_context(2, false, autotune)) {
        matmul_use_scratch(CudaF32{nullptr, get()}, scratch_.data());
    }
    CudaContext *get() const { return context_.get(); }
    template <class Dev> Dev device(Dev dev) const {
        dev.ctx = get();
        return dev;
    }
};
