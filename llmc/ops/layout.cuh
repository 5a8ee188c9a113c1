// Copies on CUDA. Contract and formulas: layout.h. All are bound by memory.
#pragma once
#include "layout.h"
#include "warp.cuh"

inline namespace CUDA_BACKEND {
// One block copies a row.
template <class T, int N> __global__ void copy_rows_kernel1(T *out, size_t out_stride, const T *x, size_t x_stride, size_t C) {
    const size_t r = blockIdx.x;
    for (size_t c = threadIdx.x * N; c < C; c += blockDim.x * N)
        Vec<T, N>::load(x + r * x_stride + c).store(out + r * out_stride + c);
}

template <class X, class T>
void copy_rows(Cuda<X> dev, T *out, size_t out_stride, const T *x, size_t x_stride, size_t n, size_t C) {
    constexpr int N = Vec<T>::size;
    const bool wide = fit_vectors<N>(C, out, x) && out_stride % N == 0 && x_stride % N == 0;
    launch(dev, wide ? copy_rows_kernel1<T, N> : copy_rows_kernel1<T, 1>, Grid{n}, 128, 0, out, out_stride, x, x_stride, C);
}

// One block adds a row.
template <int N> __global__ void add_rows_kernel1(float *out, size_t out_stride, const float *x, size_t x_stride, size_t C) {
    const size_t r = blockIdx.x;
    for (size_t c = threadIdx.x * N; c < C; c += blockDim.x * N) {
        auto sum = Vec<float, N>::load(out + r * out_stride + c);
        const auto term = Vec<float, N>::load(x + r * x_stride + c);
        for (int j = 0; j < N; j++) sum[j] += term[j];
        sum.store(out + r * out_stride + c);
    }
}

template <class X>
void add_rows(Cuda<X> dev, float *out, size_t out_stride, const float *x, size_t x_stride, size_t n, size_t C) {
    constexpr int N = Vec<float>::size;
    const bool wide = fit_vectors<N>(C, out, x) && out_stride % N == 0 && x_stride % N == 0;
    launch(dev, wide ? add_rows_kernel1<N> : add_rows_kernel1<1>, Grid{n}, 128, 0, out, out_stride, x, x_stride, C);
}

// A thread clears N elements.
template <int N> __global__ void clear_floats_kernel1(float *out, size_t n) {
    const size_t i = (blockIdx.x * size_t(blockDim.x) + threadIdx.x) * N;
    if (i >= n) return;
    Vec<float, N> zeros;
    for (int j = 0; j < N; j++) zeros[j] = 0;
    zeros.store(out + i);
}

template <class X> void clear_floats(Cuda<X> dev, float *out, size_t n) {
    constexpr unsigned threads = 256;
    constexpr int N = Vec<float>::size;
    const bool wide = fit_vectors<N>(n, out);
    launch(dev, wide ? clear_floats_kernel1<N> : clear_floats_kernel1<1>, Grid{ceil_div(n, threads * (wide ? N : 1))}, threads, 0,
           out, n);
}

// A thread rounds N elements.
template <class X, int N> __global__ void round_floats_kernel2(X *out, const float *x, size_t n) {
    const size_t i = (blockIdx.x * size_t(blockDim.x) + threadIdx.x) * N;
    if (i >= n) return;
    const auto from = Vec<float, N>::load(x + i);
    Vec<X, N> rounded;
    for (int j = 0; j < N; j++) rounded[j] = from[j];
    rounded.store(out + i);
}

template <class X> void round_floats(Cuda<X> dev, X *out, const float *x, size_t n) {
    constexpr unsigned threads = 256;
    constexpr int N = Vec<float>::size;
    const bool wide = fit_vectors<N>(n, out, x);
    launch(dev, wide ? round_floats_kernel2<X, N> : round_floats_kernel2<X, 1>, Grid{ceil_div(n, threads * (wide ? N : 1))},
           threads, 0, out, x, n);
}
}  // namespace CUDA_BACKEND
