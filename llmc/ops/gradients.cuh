// Gradients in bf16 on CUDA. Contract: gradients.h. Memory bandwidth limits both kernels: 6 bytes per element.
#pragma once
#include "gradients.h"
#include "warp.cuh"

inline namespace CUDA_BACKEND {
// A thread widens N elements.
template <int N> __global__ void widen_gradients_kernel1(float *out, const bf16 *stored, size_t n) {
    const size_t i = (blockIdx.x * size_t(blockDim.x) + threadIdx.x) * N;
    if (i >= n) return;
    const auto from = Vec<bf16, N>::load(stored + i);
    Vec<float, N> to;
    for (int j = 0; j < N; j++) to[j] = from[j];
    to.store(out + i);
}

template <class X> void widen_gradients(Cuda<X> dev, float *out, const bf16 *stored, size_t n) {
    constexpr unsigned threads = 256;
    constexpr int N = Vec<bf16>::size;
    const bool wide = fit_vectors<N>(n, out, stored);
    launch(dev, wide ? widen_gradients_kernel1<N> : widen_gradients_kernel1<1>, Grid{ceil_div(n, threads * (wide ? N : 1))},
           threads, 0, out, stored, n);
}

// A thread rounds a group. The first and the last group of an array may be shorter.
template <bool wide>
__global__ void round_gradients_kernel1(bf16 *stored, const float *x, size_t n, Random random, size_t first) {
    constexpr int N = int(rounding_group);
    const size_t group = first / N + blockIdx.x * size_t(blockDim.x) + threadIdx.x, at = group * N;
    if (at >= first + n) return;
    const Counter block = random.block(group);
    if constexpr (wide) {
        const auto from = Vec<float, N>::load(x + (at - first));
        Vec<bf16, N> to;
        for (int j = 0; j < N; j++) to[j] = round_stochastically(from[j], rounding_bits(block, size_t(j)));
        to.store(stored + (at - first));
    } else {
#pragma unroll
        for (int j = 0; j < N; j++)
            if (const size_t number = at + size_t(j); number >= first && number < first + n)
                stored[number - first] = round_stochastically(x[number - first], rounding_bits(block, size_t(j)));
    }
}

template <class X> void round_gradients(Cuda<X> dev, bf16 *stored, const float *x, size_t n, Random random, size_t first) {
    constexpr unsigned threads = 256;
    constexpr int N = int(rounding_group);
    const bool wide = fit_vectors<N>(n, stored, x) && first % N == 0;
    const size_t groups = n ? ceil_div(first + n, N) - first / N : 0;
    launch(dev, wide ? round_gradients_kernel1<true> : round_gradients_kernel1<false>, Grid{ceil_div(groups, threads)}, threads,
           0, stored, x, n, random, first);
}
}  // namespace CUDA_BACKEND
