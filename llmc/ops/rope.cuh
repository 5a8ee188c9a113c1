// rope on CUDA. Contract and formulas: rope.h.
#pragma once
#include "rope.h"
#include "warp.cuh"

inline namespace CUDA_BACKEND {
// Rotates N neighbouring pairs (a[i], b[i]) by sign times the angles whose cos and sin begin at `angles`. The fused multiply-adds are explicit:
// otherwise nvcc fuses one product of x cos - y sin in one kernel and the other in another kernel, and their bits differ.
template <int N, class X> __device__ void rope_turn(X *a, X *b, const float *angles, float sign) {
    const auto turn = Vec<float, 2 * N>::load(angles);
    for (int i = 0; i < N; i++) {
        const float cos = turn[2 * i], sin = sign * turn[2 * i + 1];
        const float x = a[i], y = b[i];
        a[i] = fmaf(x, cos, -(y * sin));
        b[i] = fmaf(y, cos, x * sin);
    }
}

// One block rotates a token, and a thread N neighbouring pairs of a head. The kernel moves 2 T heads D elements; the row of the table comes
// from the cache.
template <class X, int N>
__global__ void rope_kernel4(X *qkv, const float *table, const int32_t *doc_pos, unsigned heads, unsigned D, unsigned R,
                             size_t stride, float sign) {
    const unsigned half = R / 2, vectors = half / N;
    const float *row = table + size_t(doc_pos[blockIdx.x]) * R;
    for (unsigned i = threadIdx.x; i < heads * vectors; i += blockDim.x) {
        const unsigned h = i / vectors, c = i % vectors * N;
        X *first = qkv + blockIdx.x * stride + h * D + c, *second = first + half;
        auto a = Vec<X, N>::load(first), b = Vec<X, N>::load(second);
        rope_turn<N>(a.v, b.v, row + 2 * c, sign);
        a.store(first);
        b.store(second);
    }
}

// Rotates by sign * angle: sign is +1 forward and -1 backward.
template <class X>
void rope_rotate(Cuda<X> dev, X *qkv, const float *table, const int32_t *doc_pos, size_t T, size_t heads, size_t D, size_t R,
                 size_t stride, float sign) {
    constexpr int N = Vec<X>::size;
    const bool wide = R % (2 * N) == 0 && fit_vectors<N>(stride, qkv) && fit_vectors<N>(D) && fit_vectors<N>(R, table);
    launch(dev, wide ? rope_kernel4<X, N> : rope_kernel4<X, 1>, Grid{T}, 128, 0, qkv, table, doc_pos, unsigned(heads),
           unsigned(D), unsigned(R), stride, sign);
}

template <class X>
void rope_forward(Cuda<X> dev, X *qkv, const float *table, const int32_t *doc_pos, size_t T, size_t heads, size_t D, size_t R,
                  size_t stride) {
    rope_rotate(dev, qkv, table, doc_pos, T, heads, D, R, stride, 1.0f);
}

template <class X>
void rope_backward(Cuda<X> dev, X *dqkv, const float *table, const int32_t *doc_pos, size_t T, size_t heads, size_t D, size_t R,
                   size_t stride) {
    rope_rotate(dev, dqkv, table, doc_pos, T, heads, D, R, stride, -1.0f);
}
}  // namespace CUDA_BACKEND
