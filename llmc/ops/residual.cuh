// residual on CUDA. Contract: residual.h.
#pragma once
#include "residual.h"
#include "warp.cuh"

inline namespace CUDA_BACKEND {
// A thread adds one vector. The kernel moves 3 n elements.
template <class X, int N> __global__ void residual_forward_kernel2(X *out, const X *a, const X *b, size_t n) {
    const size_t i = (blockIdx.x * size_t(blockDim.x) + threadIdx.x) * N;
    if (i >= n) return;
    auto sum = Vec<X, N>::load(a + i);
    const auto other = Vec<X, N>::load(b + i);
    for (int j = 0; j < N; j++) sum[j] = float(sum[j]) + float(other[j]);
    sum.store(out + i);
}

template <class X> void residual_forward(Cuda<X> dev, X *out, const X *a, const X *b, size_t n) {
    constexpr unsigned threads = 256;
    constexpr int N = Vec<X>::size;
    const bool wide = fit_vectors<N>(n, out, a, b);
    launch(dev, wide ? residual_forward_kernel2<X, N> : residual_forward_kernel2<X, 1>,
           Grid{ceil_div(n, threads * (wide ? N : 1))}, threads, 0, out, a, b, n);
}
}  // namespace CUDA_BACKEND
