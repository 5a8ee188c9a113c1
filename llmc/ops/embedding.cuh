// embedding on CUDA. Contract and formulas: embedding.h.
#pragma once
#include "embedding.h"
#include "warp.cuh"

inline namespace CUDA_BACKEND {
// One block computes a row. The kernel moves 2 T C elements, or 3 T C with positions; p may be null.
template <class X, int N>
__global__ void embedding_forward_kernel2(X *out, const X *w, const int32_t *tokens, const X *p, const int32_t *pos, size_t C,
                                          unsigned V) {
    const unsigned token = unsigned(tokens[blockIdx.x]);
    const X *row = w + token * C, *position = p ? p + size_t(pos[blockIdx.x]) * C : p;
    for (size_t c = threadIdx.x * N; c < C; c += blockDim.x * N) {
        auto v = token < V ? Vec<X, N>::load(row + c) : Vec<X, N>{};
        if (p) {
            const auto q = Vec<X, N>::load(position + c);
            for (int i = 0; i < N; i++) v[i] = float(v[i]) + float(q[i]);
        }
        v.store(out + blockIdx.x * C + c);
    }
}

template <class X>
void embedding_forward(Cuda<X> dev, X *out, const X *w, const int32_t *tokens, const X *p, const int32_t *pos, size_t T, size_t C,
                       size_t V) {
    constexpr int N = Vec<X>::size;
    const bool wide = fit_vectors<N>(C, out, w, p);
    launch(dev, wide ? embedding_forward_kernel2<X, N> : embedding_forward_kernel2<X, 1>, Grid{T}, 128, 0, out, w, tokens, p, pos,
           C, unsigned(V));
}

template <class X> void embedding_forward(Cuda<X> dev, X *out, const X *w, const int32_t *tokens, size_t T, size_t C, size_t V) {
    const X *no_positions = nullptr;
    embedding_forward(dev, out, w, tokens, no_positions, tokens, T, C, V);
}

// The range is divided among the warps of a row of the grid. A warp reads all tokens, 256 at a time with overlapping loads, and adds the
// gradients of the tokens in its part, in the order of the text, in its slice of 32 N channels. No two warps share an element of dw, so the kernel
// needs no atomics, no sorting and no scratch. It moves C elements of dout and 2 C floats of dw for each token of the range, and loads T tokens
// per warp from the cache.
template <class X, int N>
__global__ void embedding_backward_kernel5(float *dw, const X *dout, const int32_t *tokens, size_t T, size_t C, unsigned first,
                                           size_t count) {
    constexpr unsigned loads = 8, none = ~0u;
    const unsigned lane = threadIdx.x % 32, warps = blockDim.x / 32, part = blockIdx.x * warps + threadIdx.x / 32,
                   parts = gridDim.x * warps;
    const size_t c = (blockIdx.y * size_t(32) + lane) * N;
    for (size_t begin = 0; begin < T; begin += loads * 32) {
        unsigned rows[loads];  // wraps to a large number for a token before the range
#pragma unroll
        for (unsigned i = 0; i < loads; i++) {
            const size_t t = begin + i * 32 + lane;
            rows[i] = t < T ? unsigned(tokens[t]) - first : none;
        }
#pragma unroll
        for (unsigned i = 0; i < loads; i++) {
            const bool ours = rows[i] < count && rows[i] % parts == part;
            for (unsigned left = __ballot_sync(all_lanes, ours); left; left &= left - 1) {
                const unsigned from = unsigned(__ffs(int(left))) - 1, row = __shfl_sync(all_lanes, rows[i], from);
                if (c >= C) continue;
                const auto d = Vec<X, N>::load(dout + (begin + i * 32 + from) * C + c);
                auto sum = Vec<float, N>::load(dw + row * C + c);
                for (int k = 0; k < N; k++) sum[k] += float(d[k]);
                sum.store(dw + row * C + c);
            }
        }
    }
}

template <class X>
void embedding_backward(Cuda<X> dev, float *dw, const X *dout, const int32_t *tokens, size_t T, size_t C, size_t first,
                        size_t count) {
    constexpr int N = Vec<X>::size;
    const bool wide = fit_vectors<N>(C, dw, dout);
    launch(dev, wide ? embedding_backward_kernel5<X, N> : embedding_backward_kernel5<X, 1>,
           Grid{32, ceil_div(C, 32 * (wide ? N : 1))}, 256, 0, dw, dout, tokens, T, C, unsigned(first), count);
}
}  // namespace CUDA_BACKEND
