// score on CUDA. Contract and formulas: score.h.
#pragma once
#include "score.h"
#include "warp.cuh"

inline namespace CUDA_BACKEND {
// One block computes the score of a document. The kernel moves C elements of x per document.
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

template <int N> struct ScoreSums { Vec<float, N> of[32][32]; };  // of warps and lanes

// A block has 32 N channels of all documents, and each of its warps has every blockDim.x / 32-th document (a critic has one document per token). The
// first warp adds the warps' sums in order. The kernel moves 2 C elements (x, dx) per document.
template <class X, int N>
__global__ void __launch_bounds__(1024)
    score_backward_kernel2(X *dx, float *dw, const X *x, const X *w, const int32_t *predictors, const float *dscores, size_t C,
                           size_t documents) {
    auto &sums = shared_mem<ScoreSums<N>>();
    const unsigned warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const size_t c = (blockIdx.x * size_t(32) + lane) * N;
    if (c < C) {
        const auto weight = Vec<X, N>::load(w + c);
        Vec<float, N> sum = {};
        for (size_t n = warp; n < documents; n += warps) {
            const size_t at = size_t(predictors[n]) * C + c;
            const auto v = Vec<X, N>::load(x + at);
            Vec<X, N> gradient;
            for (int i = 0; i < N; i++) {
                gradient[i] = dscores[n] * float(weight[i]);
                sum[i] += dscores[n] * float(v[i]);
            }
            gradient.store(dx + at);
        }
        sums.of[warp][lane] = sum;
    }
    __syncthreads();
    if (warp > 0 || c >= C) return;
    auto total = Vec<float, N>::load(dw + c);
    for (unsigned i = 0; i < warps; i++)
        for (int j = 0; j < N; j++) total[j] += sums.of[i][lane][j];
    total.store(dw + c);
}

template <class X>
void score_backward(Cuda<X> dev, X *dx, float *dw, const X *x, const X *w, const int32_t *predictors, const float *dscores,
                    size_t T, size_t C, size_t N) {
    constexpr int n = 4;  // few channels per thread, because C is small and there are many multiprocessors
    const unsigned threads = 32 * unsigned(std::clamp<size_t>(N, 1, 32));
    const bool wide = fit_vectors<n>(C, dx, dw, x, w);
    launch(dev, wide ? score_clear_kernel1<X, n> : score_clear_kernel1<X, 1>, Grid{T}, 128, 0, dx, C);
    launch(dev, wide ? score_backward_kernel2<X, n> : score_backward_kernel2<X, 1>, Grid{ceil_div(C, size_t(wide ? 32 * n : 32))},
           threads, wide ? sizeof(ScoreSums<n>) : sizeof(ScoreSums<1>), dx, dw, x, w, predictors, dscores, C, N);
}
}  // namespace CUDA_BACKEND
