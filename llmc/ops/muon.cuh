// muon on CUDA. Contract and formulas: muon.h. All kernels are bound by memory.
#pragma once
#include "muon.h"
#include "reduce.cuh"
#include "warp.cuh"

inline namespace CUDA_BACKEND {
// A thread computes N elements and moves 14 bytes for each in bf16 (with float gradients and momentum), or 16 in f32.
template <class X, class M, class G, int N>
__global__ void muon_momentum_kernel1(X *u, M *m, const G *grads, MuonFactors f, size_t n) {
    const size_t i = (blockIdx.x * size_t(blockDim.x) + threadIdx.x) * N;
    if (i >= n) return;
    const auto grad = Vec<G, N>::load(grads + i);
    auto m_i = Vec<M, N>::load(m + i);
    Vec<X, N> u_i;
    for (int j = 0; j < N; j++) {
        float m_j = m_i[j];
        u_i[j] = f.update(m_j, grad[j]);
        f.store(m_i[j], m_j, i + j);
    }
    m_i.store(m + i);
    u_i.store(u + i);
}

template <class X, class M, class G> void muon_momentum(Cuda<X> dev, X *u, M *m, const G *grads, const AdamW &a, size_t n) {
    constexpr unsigned threads = 256;
    constexpr int N = Vec<float>::size;
    const bool wide = fit_vectors<N>(n, u, m, grads);
    launch(dev, wide ? muon_momentum_kernel1<X, M, G, N> : muon_momentum_kernel1<X, M, G, 1>,
           Grid{ceil_div(n, threads * (wide ? N : 1))}, threads, 0, u, m, grads, MuonFactors(a), n);
}

// A thread updates N parameters.
template <class X, int N> __global__ void muon_update_kernel1(Floats<X> params, const X *x, float decay, float step, size_t n) {
    const size_t i = (blockIdx.x * size_t(blockDim.x) + threadIdx.x) * N;
    if (i >= n) return;
    const auto x_i = Vec<X, N>::load(x + i);
    auto rounded = Vec<X, N>::load(params.rounded + i);
    Vec<int16_t, N> lower;
    if constexpr (Floats<X>::halves) lower = Vec<int16_t, N>::load(params.lower + i);
    const Floats<X> params_i{rounded.v, lower.v};
    for (int j = 0; j < N; j++) params_i.store(j, params_i.load(j) * decay - step * float(x_i[j]));
    rounded.store(params.rounded + i);
    if constexpr (Floats<X>::halves) lower.store(params.lower + i);
}

template <class X> void muon_update(Cuda<X> dev, Floats<X> params, const X *x, const AdamW &a, double size, size_t n) {
    constexpr unsigned threads = 256;
    constexpr int N = Vec<float>::size;
    const bool wide = fit_vectors<N>(n, params.rounded, params.lower, x);
    launch(dev, wide ? muon_update_kernel1<X, N> : muon_update_kernel1<X, 1>, Grid{ceil_div(n, threads * (wide ? N : 1))},
           threads, 0, params, x, float(1 - a.lr * a.weight_decay), float(a.lr * size), n);
}

// A thread computes N elements.
template <class X, class In, int N>
__global__ void scale_and_shift_kernel1(X *out, const In *x, float scale, float shift, size_t n, size_t C) {
    const size_t i = (blockIdx.x * size_t(blockDim.x) + threadIdx.x) * N;
    if (i >= n) return;
    const auto from = Vec<In, N>::load(x + i);
    Vec<X, N> to;
    for (int j = 0; j < N; j++) to[j] = scale * float(from[j]) + (shift != 0 && (i + size_t(j)) % (C + 1) == 0 ? shift : 0.0f);
    to.store(out + i);
}

template <class X, class In>
void scale_and_shift(Cuda<X> dev, X *out, const In *x, float scale, float shift, size_t n, size_t C) {
    constexpr unsigned threads = 256;
    constexpr int N = Vec<float>::size;
    const bool wide = fit_vectors<N>(n, out, x);
    launch(dev, wide ? scale_and_shift_kernel1<X, In, N> : scale_and_shift_kernel1<X, In, 1>,
           Grid{ceil_div(n, threads * (wide ? N : 1))}, threads, 0, out, x, scale, shift, n, C);
}
}  // namespace CUDA_BACKEND
