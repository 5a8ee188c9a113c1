// The devices a trainer can be instantiated for. A device value travels as the first argument of every op; it carries what the
// op needs to run, and its type says where the arrays live and how weights and activations are stored.
#pragma once
#include <memory>

#include "dtype.h"

struct Context;  // what a device remembers between calls (oneDNN primitives): ops/matmul.cpp
struct ContextDeleter {
    void operator()(Context *) const;
};
using ContextPtr = std::unique_ptr<Context, ContextDeleter>;
ContextPtr make_context();  // owned by run(), alive as long as the device value

template <class Storage> struct Cpu {
    using X = Storage;  // weights and activations; sums, statistics, parameter gradients and the optimizer are float
    int threads;
    Context *ctx = nullptr;  // only matmul and attention need one
};
using CpuF32 = Cpu<float>;
using CpuBf16 = Cpu<bf16>;

// Kernels are compiled by nvcc for the GPU, and by g++ with -DLLMC_EMULATE for the emulator dev/cuda/simt.h. Whatever both compilers
// see stands in this inline namespace, so that the two instances of one .cuh can be linked into one binary.
#ifdef LLMC_EMULATE
#define CUDA_BACKEND emulated
#else
#define CUDA_BACKEND gpu
#endif
#if defined(LLMC_EMULATE) || defined(__CUDACC__)
#define CUDA_HALF  // of a file that is compiled for both, CPU and GPU
#endif

struct CUstream_st;  // as in cuda_runtime.h, which g++ need not have
using cudaStream_t = CUstream_st *;

inline namespace CUDA_BACKEND {
struct CudaContext;  // what such a device remembers between calls (cuBLASLt's algorithms and workspace): ops/matmul.cuh

template <class Storage> struct Cuda {
    using X = Storage;
    cudaStream_t stream = nullptr;  // in the emulator it says in which order threads run
    CudaContext *ctx = nullptr;     // only matmul needs one
};
using CudaF32 = Cuda<float>;
using CudaBf16 = Cuda<bf16>;
}  // namespace CUDA_BACKEND
