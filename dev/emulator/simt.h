// Runs CUDA kernels on the CPU, so they can be tested and debugged without a GPU. With -DLLMC_EMULATE the compiler
// includes this header before the file (Makefile).
//
// Every CUDA thread is a fiber, every block runs on one CPU core, blocks in an OpenMP loop. A fiber runs until it must wait: for its
// warp (shuffle, mma, ldmatrix, __syncwarp) or at a barrier. The stream selects the order of threads: CUstream_st{0} runs the lowest ready
// thread, {1} the highest, {seed} a random one, and also interrupts threads that need not wait. A correct kernel gives the same results in
// all orders.
//
// Undefined behaviour, which a GPU may tolerate, always fails here: shared memory and cudaMalloc'ed memory start as NaN, cp.async lands only
// at its wait, and launch() throws an Error that names kernel, block, thread and source line. It does so for a lane that is missing from a
// mask, has returned, or is at another operation; a __syncthreads at two places; a deadlock; and misaligned or foreign addresses of
// cp.async and ldmatrix. Built with -fsanitize=address, the report names the line of an access out of bounds. Kernel files that are
// built with -fsanitize=thread, but linked without it, call the race detector (races.cpp) at every load and store.
//
// Streams run in the order of the calls, or interleaved in a random order that respects events: streams.h.
//
// Not emulated: wgmma, TMA, clusters, textures, __activemask, kernels launched by kernels. A loop in which a thread waits for another thread's
// atomic may never end.
#pragma once
#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <source_location>
#include <type_traits>

#include "../../llmc/core/launch.cuh"
#include "streams.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
#define __shared__ static_assert(false, "use shared_mem<T>()");
#define SIMT_INLINE inline __attribute__((always_inline))  // keeps the return address in the kernel, for messages
#define SIMT_AT std::source_location at = std::source_location::current()

inline namespace CUDA_BACKEND {
struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

namespace simt {
struct ThreadInfo {
    uint3 index;
    int lane;
};
struct BlockInfo {
    uint3 index;
    dim3 threads, grid;
    unsigned char *shared;
    size_t shared_bytes;
};
extern constinit thread_local const ThreadInfo *self;  // the CUDA thread on this CPU thread; null outside kernels
extern constinit thread_local const BlockInfo *self_block;

void launch(unsigned order, const void *kernel, Grid grid, unsigned threads, size_t shared, const std::function<void()> &body);
void *shared_bytes(size_t bytes);  // of the block; at most the bytes that launch() was given

void sync_warp(unsigned mask, std::source_location at);
void shuffle(const char *name, unsigned mask, void *value, size_t bytes, int source_lane, std::source_location at);
unsigned ballot(const char *name, unsigned mask, bool vote, std::source_location at);
void barrier(int id, int threads, bool wait, std::source_location at);  // id 0 is __syncthreads

enum class Atomic { add, min, max, bit_and, bit_or, bit_xor, exchange, compare_and_swap };
template <class T>  // int, unsigned, unsigned long long, float, double
T atomic(Atomic operation, T *p, T value, T expected, std::source_location at);

// twins of ops/ptx.cuh
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], SIMT_AT);
void ldmatrix(uint32_t (&r)[4], const void *row, bool transposed, std::source_location at);
SIMT_INLINE void ldmatrix_x4(uint32_t (&r)[4], const void *row, SIMT_AT) { ldmatrix(r, row, false, at); }
SIMT_INLINE void ldmatrix_x4_trans(uint32_t (&r)[4], const void *row, SIMT_AT) { ldmatrix(r, row, true, at); }
void cp_async_16(void *to, const void *from, bool valid = true, SIMT_AT);
void cp_async_commit();
void cp_async_wait_group(int still_open);
template <int N> void cp_async_wait() { cp_async_wait_group(N); }
SIMT_INLINE void bar_sync(int id, int threads, SIMT_AT) { barrier(id, threads, true, at); }
SIMT_INLINE void bar_arrive(int id, int threads, SIMT_AT) { barrier(id, threads, false, at); }
inline uint32_t pack_bf16(float low, float high) { return bf16(low).bits | uint32_t(bf16(high).bits) << 16; }
inline float exp2_approx(float x) { return exp2f(x); }
}  // namespace simt

// ---- what CUDA defines ------------------------------------------------------------------------------------------------------------

#define threadIdx (simt::self->index)
#define blockIdx (simt::self_block->index)
#define blockDim (simt::self_block->threads)
#define gridDim (simt::self_block->grid)

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

using std::max;
using std::min;
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __umulhi(unsigned x, unsigned y) { return unsigned(uint64_t(x) * y >> 32); }
template <class T> T __ldg(const T *p) { return *p; }

SIMT_INLINE void __syncthreads(SIMT_AT) { simt::barrier(0, 0, true, at); }
SIMT_INLINE void __syncwarp(unsigned mask = 0xffffffff, SIMT_AT) { simt::sync_warp(mask, at); }

template <class T> SIMT_INLINE T __shfl_sync(unsigned mask, T v, int lane, SIMT_AT) {
    simt::shuffle("__shfl_sync", mask, &v, sizeof v, lane & 31, at);
    return v;
}
template <class T> SIMT_INLINE T __shfl_xor_sync(unsigned mask, T v, int bits, SIMT_AT) {
    simt::shuffle("__shfl_xor_sync", mask, &v, sizeof v, simt::self->lane ^ bits, at);
    return v;
}
template <class T>
SIMT_INLINE T __shfl_down_sync(unsigned mask, T v, unsigned distance, SIMT_AT) {  // a lane beyond the warp gives the own value
    const int lane = simt::self->lane, from = lane + int(distance);
    simt::shuffle("__shfl_down_sync", mask, &v, sizeof v, from < 32 ? from : lane, at);
    return v;
}
template <class T> SIMT_INLINE T __shfl_up_sync(unsigned mask, T v, unsigned distance, SIMT_AT) {
    const int lane = simt::self->lane, from = lane - int(distance);
    simt::shuffle("__shfl_up_sync", mask, &v, sizeof v, from >= 0 ? from : lane, at);
    return v;
}
SIMT_INLINE unsigned __ballot_sync(unsigned mask, int vote, SIMT_AT) { return simt::ballot("__ballot_sync", mask, vote, at); }
SIMT_INLINE int __any_sync(unsigned mask, int vote, SIMT_AT) { return simt::ballot("__any_sync", mask, vote, at) != 0; }
SIMT_INLINE int __all_sync(unsigned mask, int vote, SIMT_AT) { return simt::ballot("__all_sync", mask, !vote, at) == 0; }

#define ATOMIC(name, operation, types)                                                   \
    template <class T>                                                                   \
    requires types<T> SIMT_INLINE T name(T *p, std::type_identity_t<T> value, SIMT_AT) { \
        return simt::atomic(simt::Atomic::operation, p, value, {}, at);                  \
    }
ATOMIC(atomicAdd, add, std::is_arithmetic_v)
ATOMIC(atomicMin, min, std::is_integral_v)
ATOMIC(atomicMax, max, std::is_integral_v)
ATOMIC(atomicAnd, bit_and, std::is_integral_v)
ATOMIC(atomicOr, bit_or, std::is_integral_v)
ATOMIC(atomicXor, bit_xor, std::is_integral_v)
ATOMIC(atomicExch, exchange, std::is_arithmetic_v)
#undef ATOMIC
template <class T>
requires std::is_integral_v<T> SIMT_INLINE T atomicCAS(T *p, std::type_identity_t<T> expected, std::type_identity_t<T> value,
                                                       SIMT_AT) {
    return simt::atomic(simt::Atomic::compare_and_swap, p, value, expected, at);
}

// ---- launch.cuh -------------------------------------------------------------------------------------------------------------------

template <class T> T &shared_mem() { return *static_cast<T *>(simt::shared_bytes(sizeof(T))); }

template <class X, class... Params, class... Args>
void launch(Cuda<X> dev, void (*kernel)(Params...), Grid grid, unsigned threads, size_t shared, Args... args) {
    simt::enqueue(dev.stream, [=, order = dev.stream ? dev.stream->order : 0] {
        simt::launch(order, reinterpret_cast<const void *>(kernel), grid, threads, shared, [=] { kernel(Params(args)...); });
    });
}

// ---- the runtime: device memory is host memory; copies, streams and events are in streams.h -------------------------------------------

struct cudaDeviceProp {
    char name[32] = "the emulator";
};
inline cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int) { return snprintf(id, size_t(length), "none"), cudaSuccess; }
inline cudaError_t cudaDriverGetVersion(int *version) { return *version = 13000, cudaSuccess; }
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int) { return *properties = {}, cudaSuccess; }

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char *cudaGetErrorString(cudaError_t error) { return error ? "out of memory" : "no error"; }
}  // namespace CUDA_BACKEND
