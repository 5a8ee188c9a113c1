// The devices that a trainer can be instantiated for. A device value is the first argument of every op. The value carries the resources of the op;
// its type determines the memory of the arrays and the storage type of weights and activations.
#pragma once
#include <memory>

#include "dtype.h"

// Alignment of all arrays in bytes, in every plan. cuBLASLt's choice of algorithm depends on alignment, so it chooses the same algorithm for every
// plan, and the fastest.
constexpr size_t array_alignment = 256;

struct Context;  // the state that a CPU device keeps between calls (oneDNN's primitives): ops/matmul.cpp
struct ContextDeleter {
    void operator()(Context *) const;
};
using ContextPtr = std::unique_ptr<Context, ContextDeleter>;
ContextPtr make_context();  // owned by run(); it must outlive the device value

template <class Storage> struct Cpu {
    using X = Storage;  // weights and activations; sums, statistics, parameter gradients and the optimizer are float
    int threads;
    Context *ctx = nullptr;  // only matmul and attention read it
    bool exact = false;  // forward products and attention give a token the same bits in any row and in generation: docs/exact.md
};
using CpuF32 = Cpu<float>;
using CpuBf16 = Cpu<bf16>;

// nvcc compiles the kernels for the GPU, and g++ compiles them with -DLLMC_EMULATE for the emulator dev/emulator/simt.h. Code that both compilers
// see is in this inline namespace, so both instances of one .cuh can be linked into one binary.
#ifdef LLMC_EMULATE
#define CUDA_BACKEND emulated
#else
#define CUDA_BACKEND gpu
#endif
#if defined(LLMC_EMULATE) || defined(__CUDACC__)
#define CUDA_HALF  // this compilation is the CUDA half of a file that is compiled for both CPU and GPU
#endif

// ---- rehearsals -------------------------------------------------------------------------------------------------------------------------

// A device that computes nothing: its ops only note the arrays that they touch (rehearsal.h). Each op's header has a line for it, without which the
// models do not compile: REHEARSED(op), REHEARSED_PRODUCT(op) for a matrix product, or for a function of sizes ASKED(function), which
// asks the real device. A struct among an op's arguments has a member function pointers(), which returns a tuple of its pointers.
template <class Dev> struct Rehearsal;
#define REHEARSED(op) \
    template <class D, class... A> void op(const Rehearsal<D> &dev, const A &...a) { dev.note(a...); }
#define REHEARSED_PRODUCT(op) \
    template <class D, class... A> void op(const Rehearsal<D> &dev, const A &...a) { dev.note(a...), dev.note_product(a...); }
#define ASKED(size) \
    template <class D, class... A> constexpr auto size(const Rehearsal<D> &dev, const A &...a) { return size(dev.real, a...); }

// ---- CUDA -------------------------------------------------------------------------------------------------------------------------------

struct CUstream_st;  // declared in cuda_runtime.h, which g++ may lack
using cudaStream_t = CUstream_st *;

inline namespace CUDA_BACKEND {
struct CudaContext;  // the state that a CUDA device keeps between calls (cuBLASLt's algorithms and workspace): ops/matmul.cuh

template <class Storage> struct Cuda {
    using X = Storage;
    cudaStream_t stream = nullptr;  // in the emulator it selects the order of threads
    CudaContext *ctx = nullptr;     // only matmul reads it
};
using CudaF32 = Cuda<float>;
using CudaBf16 = Cuda<bf16>;
}  // namespace CUDA_BACKEND
