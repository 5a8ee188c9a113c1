// The rows of a mixture of experts on CUDA. Contract and formulas: expert_rows.h.
#pragma once
#include "expert_rows.h"
#include "warp.cuh"

inline namespace CUDA_BACKEND {
// Each block counts the rows of one expert. Together the blocks read E T K numbers, most of them from the cache.
template <class X> __global__ void count_rows_kernel1(int32_t *counts, const int32_t *chosen, size_t pairs) {
    auto &s = shared_mem<WarpSums<int>>();
    int n = 0;
    for (size_t i = threadIdx.x; i < pairs; i += blockDim.x) n += chosen[i] == int32_t(blockIdx.x);
    n = block_sum(n, s.partial);
    if (threadIdx.x == 0) counts[blockIdx.x] = n;
}

// Each block assigns positions to the rows of one expert, in the order of the tokens: a (token, choice) pair follows the pairs of lower threads
// and of earlier rounds. The order is fixed, without atomics.
template <class X>
__global__ void place_rows_kernel1(int32_t *starts, int32_t *row_of, int32_t *token_of, const int32_t *counts,
                                   const int32_t *chosen, size_t pairs, size_t E, size_t K) {
    auto &s = shared_mem<WarpSums<int>>();
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int before = 0;
    for (size_t e = threadIdx.x; e < blockIdx.x; e += blockDim.x) before += counts[e];
    int next = block_sum(before, s.partial);
    if (threadIdx.x == 0) {
        starts[blockIdx.x] = next;
        if (blockIdx.x + 1 == E) starts[E] = next + counts[blockIdx.x];
    }
    for (size_t first = 0; first < pairs; first += blockDim.x) {
        const size_t i = first + threadIdx.x;
        const unsigned ours = __ballot_sync(all_lanes, i < pairs && chosen[i] == int32_t(blockIdx.x));
        if (lane == 0) s.partial[warp] = __popc(ours);
        __syncthreads();
        int row = next + __popc(ours & ((1u << lane) - 1));
        for (unsigned w = 0; w < blockDim.x / 32; w++) {
            if (w < warp) row += s.partial[w];
            next += s.partial[w];
        }
        if (ours >> lane & 1) row_of[i] = row, token_of[row] = int32_t(i / K);
        __syncthreads();
    }
}

template <class X>
void sort_by_expert(Cuda<X> dev, int32_t *starts, int32_t *counts, int32_t *row_of, int32_t *token_of, const int32_t *chosen,
                    size_t T, size_t E, size_t K) {
    launch(dev, count_rows_kernel1<X>, Grid{E}, 256, sizeof(WarpSums<int>), counts, chosen, T * K);
    launch(dev, place_rows_kernel1<X>, Grid{E}, 256, sizeof(WarpSums<int>), starts, row_of, token_of, counts, chosen, T * K, E,
           K);
}

// Each block combines the rows of one token. The kernel moves T (K + 2) C elements.
template <class X, int N>
__global__ void combine_rows_kernel1(X *out, const X *base, const X *rows, const float *weights, const int32_t *row_of, size_t K,
                                     size_t C) {
    const size_t t = blockIdx.x;
    for (size_t c = threadIdx.x * N; c < C; c += blockDim.x * N) {
        float sum[N] = {};
        if (base) {
            const auto v = Vec<X, N>::load(base + t * C + c);
            for (int j = 0; j < N; j++) sum[j] = v[j];
        }
        for (size_t i = t * K; i < (t + 1) * K; i++) {
            const auto v = Vec<X, N>::load(rows + (row_of ? size_t(row_of[i]) : i) * C + c);
            for (int j = 0; j < N; j++) sum[j] += (weights ? weights[i] : 1.0f) * float(v[j]);
        }
        Vec<X, N> rounded;
        for (int j = 0; j < N; j++) rounded[j] = sum[j];
        rounded.store(out + t * C + c);
    }
}

template <class X>
void combine_rows(Cuda<X> dev, X *out, const X *base, const X *rows, const float *weights, const int32_t *row_of, size_t T,
                  size_t K, size_t C) {
    constexpr int N = Vec<X>::size;
    launch(dev, fit_vectors<N>(C, out, base, rows) ? combine_rows_kernel1<X, N> : combine_rows_kernel1<X, 1>, Grid{T}, 128, 0,
           out, base, rows, weights, row_of, K, C);
}

// Each of these kernels moves 3 R numbers.
template <class X> __global__ void sort_weights_kernel1(float *of_rows, const float *weights, const int32_t *row_of, size_t R) {
    const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < R) of_rows[row_of[i]] = weights[i];
}
template <class X> __global__ void unsort_weights_kernel1(float *weights, const float *of_rows, const int32_t *row_of, size_t R) {
    const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < R) weights[i] = of_rows[row_of[i]];
}
template <class X> void sort_weights(Cuda<X> dev, float *of_rows, const float *weights, const int32_t *row_of, size_t R) {
    launch(dev, sort_weights_kernel1<X>, Grid{ceil_div(R, 256)}, 256, 0, of_rows, weights, row_of, R);
}
template <class X> void unsort_weights(Cuda<X> dev, float *weights, const float *of_rows, const int32_t *row_of, size_t R) {
    launch(dev, unsort_weights_kernel1<X>, Grid{ceil_div(R, 256)}, 256, 0, weights, of_rows, row_of, R);
}

// Each block weights one row. The kernel moves 4 T K F elements.
template <class X, int N>
__global__ void weigh_rows_backward_kernel1(float *dweights, X *dact, X *act, const float *weights, const int32_t *row_of,
                                            size_t F) {
    auto &s = shared_mem<WarpSums<float>>();
    const size_t i = blockIdx.x, r = row_of ? size_t(row_of[i]) : i;
    const float w = weights[i];
    float sum = 0;
    for (size_t f = threadIdx.x * N; f < F; f += blockDim.x * N) {
        auto d = Vec<X, N>::load(dact + r * F + f), a = Vec<X, N>::load(act + r * F + f);
        for (int j = 0; j < N; j++) {
            sum += float(d[j]) * float(a[j]);
            d[j] = float(d[j]) * w, a[j] = float(a[j]) * w;
        }
        d.store(dact + r * F + f), a.store(act + r * F + f);
    }
    sum = block_sum(sum, s.partial);
    if (threadIdx.x == 0) dweights[i] = sum;
}

template <class X>
void weigh_rows_backward(Cuda<X> dev, float *dweights, X *dact, X *act, const float *weights, const int32_t *row_of, size_t T,
                         size_t K, size_t F) {
    constexpr int N = Vec<X>::size;
    launch(dev, fit_vectors<N>(F, dact, act) ? weigh_rows_backward_kernel1<X, N> : weigh_rows_backward_kernel1<X, 1>, Grid{T * K},
           128, sizeof(WarpSums<float>), dweights, dact, act, weights, row_of, F);
}
}  // namespace CUDA_BACKEND
