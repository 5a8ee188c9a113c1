// wide_norm on CUDA. Contract and formulas: wide_norm.h.
#pragma once
#include "norm.cuh"
#include "wide_norm.h"

inline namespace CUDA_BACKEND {
constexpr unsigned wide_norm_threads = 128;

// A warp sums a token's terms a b w, where b has rows of C elements or, for squares, is a itself, and w may be null.
template <class X, int N>
__global__ void __launch_bounds__(wide_norm_threads)
    wide_norm_sum_kernel1(float *sum, const X *a, const X *b, size_t b_stride, const X *w, WideNormShape s) {
    const size_t t = blockIdx.x * size_t(wide_norm_threads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (t >= s.T) return;
    float terms = 0;
    for (size_t c = lane * N; c < s.C; c += 32 * N) {
        const auto left = Vec<X, N>::load(a + t * s.stride + c), right = Vec<X, N>::load(b + t * b_stride + c);
        Vec<X, N> weight;
        for (int i = 0; i < N; i++) weight[i] = 1.0f;
        if (w) weight = Vec<X, N>::load(w + c);
        for (int i = 0; i < N; i++) terms += float(left[i]) * float(weight[i]) * float(right[i]);
    }
    terms = warp_sum(terms);
    if (lane == 0) sum[t] = terms;
}

template <class X>
void wide_norm_sum(Cuda<X> dev, float *sum, const X *a, const X *b, size_t b_stride, const X *w, WideNormShape s) {
    constexpr int N = Vec<X>::size;
    const bool wide = s.stride % N == 0 && fit_vectors<N>(s.C, a, b, w);
    launch(dev, wide ? wide_norm_sum_kernel1<X, N> : wide_norm_sum_kernel1<X, 1>, Grid{ceil_div(s.T, wide_norm_threads / 32)},
           wide_norm_threads, 0, sum, a, b, b_stride, w, s);
}
template <class X> void wide_norm_squares(Cuda<X> dev, float *sum, const X *x, WideNormShape s) {
    const X *no_weight = nullptr;
    wide_norm_sum(dev, sum, x, x, s.stride, no_weight, s);
}
template <class X> void wide_norm_dots(Cuda<X> dev, float *sum, const X *dx, const X *raw, const X *w, WideNormShape s) {
    wide_norm_sum(dev, sum, dx, raw, s.C, w, s);
}

// A thread computes one vector. The kernel moves 3 T C elements.
template <class X, int N>
__global__ void __launch_bounds__(wide_norm_threads)
    wide_norm_forward_kernel1(X *x, X *raw, float *rstd, const X *w, const float *sums, WideNormShape s) {
    const size_t t = blockIdx.x, c = (blockIdx.y * size_t(wide_norm_threads) + threadIdx.x) * N;
    if (c >= s.C) return;
    const float r = rsqrtf(s.mean(sums, t) + s.eps);
    auto v = Vec<X, N>::load(x + t * s.stride + c);
    const auto weight = Vec<X, N>::load(w + c);
    v.store(raw + t * s.C + c);
    for (int i = 0; i < N; i++) v[i] = float(v[i]) * r * float(weight[i]);
    v.store(x + t * s.stride + c);
    if (c == 0) rstd[t] = r;
}

template <class X>
void wide_norm_forward(Cuda<X> dev, X *x, X *raw, float *rstd, const X *w, const float *sums, WideNormShape s) {
    constexpr int N = Vec<X>::size;
    const bool wide = s.stride % N == 0 && fit_vectors<N>(s.C, x, raw, w);
    launch(dev, wide ? wide_norm_forward_kernel1<X, N> : wide_norm_forward_kernel1<X, 1>,
           Grid{s.T, ceil_div(s.C, wide_norm_threads * (wide ? N : 1))}, wide_norm_threads, 0, x, raw, rstd, w, sums, s);
}

// A block has a run of tokens, and a thread N of their channels, so no sum crosses threads. The kernel moves 3 T C elements.
template <class X, int N>
__global__ void __launch_bounds__(wide_norm_threads)
    wide_norm_backward_kernel1(X *dx, float *scratch, const X *raw, const X *w, const float *rstd, const float *sums,
                               WideNormShape s) {
    const size_t c = (blockIdx.y * size_t(wide_norm_threads) + threadIdx.x) * N;
    if (c >= s.C) return;
    const size_t begin = s.T * blockIdx.x / gridDim.x, end = s.T * (blockIdx.x + 1) / gridDim.x;
    const auto weight = Vec<X, N>::load(w + c);
    Vec<float, N> dw = {};
    for (size_t t = begin; t < end; t++) {
        const float r = rstd[t], mean = r * s.mean(sums, t);
        auto d = Vec<X, N>::load(dx + t * s.stride + c);
        const auto v = Vec<X, N>::load(raw + t * s.C + c);
        for (int i = 0; i < N; i++) {
            const float xh = float(v[i]) * r;
            dw[i] += float(d[i]) * xh;
            d[i] = r * (float(d[i]) * float(weight[i]) - xh * mean);
        }
        d.store(dx + t * s.stride + c);
    }
    dw.store(scratch + blockIdx.x * s.C + c);
}

template <class X>
void wide_norm_backward(Cuda<X> dev, X *dx, float *dw, float *scratch, const X *raw, const X *w, const float *rstd,
                        const float *sums, WideNormShape s) {
    constexpr int N = Vec<X>::size;
    const size_t runs = std::min(s.T, norm_blocks);
    const bool wide = s.stride % N == 0 && fit_vectors<N>(s.C, dx, raw, w, scratch);
    launch(dev, wide ? wide_norm_backward_kernel1<X, N> : wide_norm_backward_kernel1<X, 1>,
           Grid{runs, ceil_div(s.C, wide_norm_threads * (wide ? N : 1))}, wide_norm_threads, 0, dx, scratch, raw, w, rstd, sums,
           s);
    if (dw) norm_add_runs(dev, dw, scratch, runs, s.C);
}
}  // namespace CUDA_BACKEND
