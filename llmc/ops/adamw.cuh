// adamw on CUDA. Contract and formulas: adamw.h.
#pragma once
#include "adamw.h"
#include "warp.cuh"

inline namespace CUDA_BACKEND {
// A thread updates four parameters. The kernel moves 28 bytes per parameter (also in bf16), 8 less if the moments are bf16, and 2 less if
// the gradients are.
template <class X, class M, class G, int N>
__global__ void adamw_kernel4(Floats<X> params, M *m, M *v, const G *grads, AdamWFactors f, size_t n) {
    const size_t i = (blockIdx.x * size_t(blockDim.x) + threadIdx.x) * N;
    if (i >= n) return;
    const auto grad = Vec<G, N>::load(grads + i);
    auto m_i = Vec<M, N>::load(m + i), v_i = Vec<M, N>::load(v + i);
    auto rounded = Vec<X, N>::load(params.rounded + i);
    Vec<int16_t, N> lower;
    if constexpr (Floats<X>::halves) lower = Vec<int16_t, N>::load(params.lower + i);
    const Floats<X> params_i{rounded.v, lower.v};
    for (int j = 0; j < N; j++) {
        float p = params_i.load(j), m_j = m_i[j], v_j = v_i[j];
        f.update(p, m_j, v_j, grad[j]);
        f.store(m_i[j], v_i[j], m_j, v_j, i + j);
        params_i.store(j, p);
    }
    m_i.store(m + i);
    v_i.store(v + i);
    rounded.store(params.rounded + i);
    if constexpr (Floats<X>::halves) lower.store(params.lower + i);
}

template <class X, class M, class G>
void adamw_update(Cuda<X> dev, Floats<X> params, M *m, M *v, const G *grads, AdamW a, size_t n) {
    constexpr unsigned threads = 256;
    constexpr int N = Vec<float>::size;
    const bool wide = fit_vectors<N>(n, params.rounded, params.lower, m, v, grads);
    launch(dev, wide ? adamw_kernel4<X, M, G, N> : adamw_kernel4<X, M, G, 1>, Grid{ceil_div(n, threads * (wide ? N : 1))},
           threads, 0, params, m, v, grads, AdamWFactors(a), n);
}

struct BlockwiseShared {
    float of_m[Fractions::count], of_v[Fractions::count], partial[32];
};

// A block of threads updates a block of parameters. The first and the last block of an array may be shorter.
template <class X, class G>
__global__ void adamw_blockwise_kernel(Floats<X> params, Blockwise m, Blockwise v, const G *grads, AdamWFactors f, Fractions of_m,
                                       Fractions of_v) {
    BlockwiseShared &s = shared_mem<BlockwiseShared>();
    s.of_m[threadIdx.x] = of_m.of[threadIdx.x], s.of_v[threadIdx.x] = of_v.of[threadIdx.x];
    __syncthreads();
    const size_t at = blockIdx.x * Blockwise::size + threadIdx.x, i = at - m.skip;
    const bool in = at >= m.skip && i < m.count;
    float m_i = 0, v_i = 0;
    if (in) {
        m_i = s.of_m[m.codes[i]] * m.scales[blockIdx.x], v_i = s.of_v[v.codes[i]] * v.scales[blockIdx.x];
        float p = params.load(i);
        f.update(p, m_i, v_i, grads[i]);
        params.store(i, p);
    }
    const float most_m = block_max(fabsf(m_i), s.partial), most_v = block_max(v_i, s.partial);
    if (in) m.codes[i] = code_of(s.of_m, most_m, m_i), v.codes[i] = code_of(s.of_v, most_v, v_i);
    if (threadIdx.x == 0) m.scales[blockIdx.x] = most_m, v.scales[blockIdx.x] = most_v;
}

template <class X, class G>
void adamw_update(Cuda<X> dev, Floats<X> params, Blockwise m, Blockwise v, const G *grads, AdamW a, size_t) {
    static_assert(Blockwise::size == Fractions::count, "a thread for each number of a block and for each fraction");
    launch(dev, adamw_blockwise_kernel<X, G>, Grid{m.blocks()}, Blockwise::size, sizeof(BlockwiseShared), params, m, v, grads,
           AdamWFactors(a), fractions(true), fractions(false));
}
}  // namespace CUDA_BACKEND
