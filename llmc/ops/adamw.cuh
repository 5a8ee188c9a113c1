// adamw on CUDA. Contract and formulas: adamw.h.
#pragma once
#include "adamw.h"
#include "warp.cuh"

inline namespace CUDA_BACKEND {
// Four parameters per thread. Moves 28 bytes a parameter, in bf16 too.
template <class X, int N>
__global__ void adamw_kernel2(Floats<X> params, float *m, float *v, const float *grads, AdamWFactors f, size_t n) {
    const size_t i = (blockIdx.x * size_t(blockDim.x) + threadIdx.x) * N;
    if (i >= n) return;
    const auto grad = Vec<float, N>::load(grads + i);
    auto m_i = Vec<float, N>::load(m + i), v_i = Vec<float, N>::load(v + i);
    auto rounded = Vec<X, N>::load(params.rounded + i);
    Vec<int16_t, N> lower;
    if constexpr (Floats<X>::halves) lower = Vec<int16_t, N>::load(params.lower + i);
    const Floats<X> params_i{rounded.v, lower.v};
    for (int j = 0; j < N; j++) {
        float p = params_i.load(j);
        f.update(p, m_i[j], v_i[j], grad[j]);
        params_i.store(j, p);
    }
    m_i.store(m + i);
    v_i.store(v + i);
    rounded.store(params.rounded + i);
    if constexpr (Floats<X>::halves) lower.store(params.lower + i);
}

template <class X> void adamw_update(Cuda<X> dev, Floats<X> params, float *m, float *v, const float *grads, AdamW a, size_t n) {
    constexpr unsigned threads = 256;
    constexpr int N = Vec<float>::size;
    const bool wide = fit_vectors<N>(n, params.rounded, params.lower, m, v, grads);
    launch(dev, wide ? adamw_kernel2<X, N> : adamw_kernel2<X, 1>, Grid{ceil_div(n, threads * (wide ? N : 1))}, threads, 0, params,
           m, v, grads, AdamWFactors(a), n);
}
}  // namespace CUDA_BACKEND
