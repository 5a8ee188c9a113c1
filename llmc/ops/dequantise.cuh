// dequantise on CUDA. Contract: dequantise.h.
#pragma once
#include "dequantise.h"
#include "warp.cuh"

inline namespace CUDA_BACKEND {
__device__ inline int nf4_code(const uint8_t *codes, size_t i) { return i % 2 ? codes[i / 2] & 15 : codes[i / 2] >> 4; }

struct Nf4Values {
    float of[16];
};

// A thread writes N weights: one, or 8 of one block, whose codes are one load. The 16 values are in shared memory, in 16 different banks; lanes of a
// warp that read the same value share the read.
template <class X, int N> __global__ void dequantise_nf4_kernel3(X *out, Quantised q) {
    auto &values = shared_mem<Nf4Values>().of;
    if (threadIdx.x == 0) {
#pragma unroll
        for (int code = 0; code < 16; code++) values[code] = nf4_value(code);  // constants in the code, without a table in memory
    }
    __syncthreads();
    const size_t first = (blockIdx.x * size_t(blockDim.x) + threadIdx.x) * N;
    if (first >= q.count()) return;
    const float m = nf4_magnitude(q, first / nf4_block);
    if constexpr (N == 1) {
        out[first] = values[nf4_code(q.codes, first)] * m;
    } else {
        const auto codes = Vec<uint8_t, N / 2>::load(q.codes + first / 2);
        Vec<X, N> w;
        for (int i = 0; i < N; i++) w[i] = values[nf4_code(codes.v, size_t(i))] * m;
        w.store(out + first);
    }
}

// A thread writes N weights of a row.
template <class X, int N> __global__ void dequantise_rows_kernel3(X *out, Quantised q) {
    const size_t row = blockIdx.x, first = row * q.columns + (blockIdx.y * size_t(blockDim.x) + threadIdx.x) * N;
    if (first >= (row + 1) * q.columns) return;
    const auto codes = Vec<int8_t, N>::load(reinterpret_cast<const int8_t *>(q.codes) + first);
    Vec<X, N> w;
    for (int i = 0; i < N; i++) w[i] = float(codes[i]) * q.scales[row];
    w.store(out + first);
}

template <class X> void dequantise(Cuda<X> dev, X *out, Quantised q) {
    constexpr unsigned threads = 256;
    constexpr int N = 8;
    if (q.bits == 8) {
        const bool wide = fit_vectors<N>(q.columns, out, q.codes);
        launch(dev, wide ? dequantise_rows_kernel3<X, N> : dequantise_rows_kernel3<X, 1>,
               Grid{q.rows, ceil_div(q.columns, threads * (wide ? N : 1))}, threads, 0, out, q);
    } else {
        const bool wide = fit_vectors<N>(q.count(), out) && fit_vectors<N / 2>(q.count(), q.codes);
        launch(dev, wide ? dequantise_nf4_kernel3<X, N> : dequantise_nf4_kernel3<X, 1>,
               Grid{ceil_div(q.count(), threads * (wide ? N : 1))}, threads, sizeof(Nf4Values), out, q);
    }
}
}  // namespace CUDA_BACKEND
