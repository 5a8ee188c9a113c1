// adamw on CUDA. Contract and formulas: adamw.h.
#pragma once
#include "adamw.h"
#include "warp.cuh"

inline namespace CUDA_BACKEND {
// Four parameters per thread. Moves 28 bytes a parameter, and its rounded value.
template <class X, int N>
__global__ void adamw_kernel2(X *params, float *master, float *m, float *v, const float *grads, AdamWFactors f, size_t n) {
    const size_t i = (blockIdx.x * size_t(blockDim.x) + threadIdx.x) * N;
    if (i >= n) return;
    const auto grad = Vec<float, N>::load(grads + i);
    auto p = Vec<float, N>::load(master + i), m_i = Vec<float, N>::load(m + i), v_i = Vec<float, N>::load(v + i);
    Vec<X, N> rounded;
    for (int j = 0; j < N; j++) {
        f.update(p[j], m_i[j], v_i[j], grad[j]);
        rounded[j] = p[j];
    }
    m_i.store(m + i);
    v_i.store(v + i);
    p.store(master + i);
    rounded.store(params + i);  // where X is float, the same to the same place
}

template <class X>
void adamw_update(Cuda<X> dev, X *params, float *master, float *m, float *v, const float *grads, AdamW a, size_t n) {
    constexpr unsigned threads = 256;
    constexpr int N = Vec<float>::size;
    const bool wide = fit_vectors<N>(n, params, master, m, v, grads);
    launch(dev, wide ? adamw_kernel2<X, N> : adamw_kernel2<X, 1>, Grid{ceil_div(n, threads * (wide ? N : 1))}, threads, 0, params,
           master, m, v, grads, AdamWFactors(a), n);
}
}  // namespace CUDA_BACKEND
