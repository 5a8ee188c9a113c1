// sigmoid_gate on CUDA. Contract and formulas: sigmoid_gate.h.
#pragma once
#include "sigmoid_gate.h"
#include "warp.cuh"

inline namespace CUDA_BACKEND {
// A thread computes one vector. The kernel moves 3 T C elements.
template <class X, int N>
__global__ void sigmoid_gate_forward_kernel1(X *out, const X *x, const X *gate, size_t C, size_t stride) {
    const size_t t = blockIdx.x, c = (blockIdx.y * size_t(blockDim.x) + threadIdx.x) * N;
    if (c >= C) return;
    const auto g = Vec<X, N>::load(gate + t * stride + c);
    auto v = Vec<X, N>::load(x + t * C + c);
    for (int i = 0; i < N; i++) v[i] = divide<X>(v[i], 1.0f + expf(-float(g[i])));
    v.store(out + t * C + c);
}

template <class X> void sigmoid_gate_forward(Cuda<X> dev, X *out, const X *x, const X *gate, size_t T, size_t C, size_t stride) {
    constexpr unsigned threads = 128;
    constexpr int N = Vec<X>::size;
    const bool wide = stride % N == 0 && fit_vectors<N>(C, out, x, gate);
    launch(dev, wide ? sigmoid_gate_forward_kernel1<X, N> : sigmoid_gate_forward_kernel1<X, 1>,
           Grid{T, ceil_div(C, threads * (wide ? N : 1))}, threads, 0, out, x, gate, C, stride);
}

// Computes both gradients in one pass. The kernel moves 5 T C elements.
template <class X, int N>
__global__ void sigmoid_gate_backward_kernel1(X *dx, X *dgate, const X *dout, const X *x, const X *gate, size_t C,
                                              size_t stride) {
    const size_t t = blockIdx.x, c = (blockIdx.y * size_t(blockDim.x) + threadIdx.x) * N;
    if (c >= C) return;
    auto g = Vec<X, N>::load(gate + t * stride + c), d = Vec<X, N>::load(dout + t * C + c);
    const auto v = Vec<X, N>::load(x + t * C + c);
    for (int i = 0; i < N; i++) {
        const float s = 1.0f / (1.0f + expf(-float(g[i])));
        g[i] = float(d[i]) * float(v[i]) * s * (1.0f - s);
        d[i] = float(d[i]) * s;
    }
    g.store(dgate + t * stride + c);
    d.store(dx + t * C + c);
}

template <class X>
void sigmoid_gate_backward(Cuda<X> dev, X *dx, X *dgate, const X *dout, const X *x, const X *gate, size_t T, size_t C,
                           size_t stride) {
    constexpr unsigned threads = 128;
    constexpr int N = Vec<X>::size;
    const bool wide = stride % N == 0 && fit_vectors<N>(C, dx, dgate, dout, x, gate);
    launch(dev, wide ? sigmoid_gate_backward_kernel1<X, N> : sigmoid_gate_backward_kernel1<X, 1>,
           Grid{T, ceil_div(C, threads * (wide ? N : 1))}, threads, 0, dx, dgate, dout, x, gate, C, stride);
}
}  // namespace CUDA_BACKEND
