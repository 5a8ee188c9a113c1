// score on CUDA. Contract and formulas: score.h.
#pragma once
#include "score.h"
#include "warp.cuh"

inline namespace CUDA_BACKEND {
// One block computes the score of a document. The kernel moves C elements of x for each.
template <class X, int N>
__global__ void score_forward_kernel1(float *scores, const X *x, const X *w, const int32_t *predictors, size_t C) {
    const X *row = x + size_t(predictors[blockIdx.x]) * C;
    float sum = 0;
    for (size_t c = threadIdx.x * N; c < C; c += blockDim.x * N) {
        const auto v = Vec<X, N>::load(row + c), weight = Vec<X, N>::load(w + c);
        for (int i = 0; i < N; i++) sum += float(v[i]) * float(weight[i]);
    }
    sum = block_sum(sum, shared_mem<WarpSums<float>>().partial);
    if (threadIdx.x == 0) scores[blockIdx.x] = sum;
}

template <class X>
void score_forward(Cuda<X> dev, float *scores, const X *x, const X *w, const int32_t *predictors, size_t C, size_t N) {
    constexpr int n = Vec<X>::size;
    launch(dev, fit_vectors<n>(C, x, w) ? score_forward_kernel1<X, n> : score_forward_kernel1<X, 1>, Grid{N}, 128,
           sizeof(WarpSums<float>), scores, x, w, predictors, C);
}

// One block clears a row.
template <class X, int N> __global__ void score_clear_kernel1(X *dx, size_t C) {
    for (size_t c = threadIdx.x * N; c < C; c += blockDim.x * N) Vec<X, N>{}.store(dx + blockIdx.x * C + c);
}

// A thread has N channels of all documents, so that it alone adds to its part of dw. The kernel moves 2 C elements (x, dx) per document.
template <class X, int N>
__global__ void score_backward_kernel1(X *dx, float *dw, const X *x, const X *w, const int32_t *predictors, const float *dscores,
                                       size_t C, size_t documents) {
    const size_t c = (blockIdx.x * size_t(blockDim.x) + threadIdx.x) * N;
    if (c >= C) return;
    const auto weight = Vec<X, N>::load(w + c);
    auto sum = Vec<float, N>::load(dw + c);
    for (size_t n = 0; n < documents; n++) {
        const size_t at = size_t(predictors[n]) * C + c;
        const auto v = Vec<X, N>::load(x + at);
        Vec<X, N> gradient;
        for (int i = 0; i < N; i++) {
            gradient[i] = dscores[n] * float(weight[i]);
            sum[i] += dscores[n] * float(v[i]);
        }
        gradient.store(dx + at);
    }
    sum.store(dw + c);
}

template <class X>
void score_backward(Cuda<X> dev, X *dx, float *dw, const X *x, const X *w, const int32_t *predictors, const float *dscores,
                    size_t T, size_t C, size_t N) {
    constexpr int n = Vec<X>::size;
    constexpr unsigned threads = 32;  // few: C is small, and there are many multiprocessors
    const bool wide = fit_vectors<n>(C, dx, dw, x, w);
    launch(dev, wide ? score_clear_kernel1<X, n> : score_clear_kernel1<X, 1>, Grid{T}, 128, 0, dx, C);
    launch(dev, wide ? score_backward_kernel1<X, n> : score_backward_kernel1<X, 1>, Grid{ceil_div(C, threads * (wide ? n : 1))},
           threads, 0, dx, dw, x, w, predictors, dscores, C, N);
}
}  // namespace CUDA_BACKEND
