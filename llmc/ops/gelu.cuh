// gelu on CUDA. Contract and formulas: gelu.h.
#pragma once
#include "gelu.h"
#include "warp.cuh"

inline namespace CUDA_BACKEND {
// A thread computes one vector. The kernel moves 2 n elements.
template <Gelu form, class X, int N> __global__ void gelu_forward_kernel3(X *out, const X *x, size_t n) {
    const size_t i = (blockIdx.x * size_t(blockDim.x) + threadIdx.x) * N;
    if (i >= n) return;
    auto v = Vec<X, N>::load(x + i);
    for (int j = 0; j < N; j++) {
        const float at = v[j];
        v[j] = at * gelu_factor<form>(at, expf(gelu_exponent<form>(at))).P;
    }
    v.store(out + i);
}

template <class X> void gelu_forward(Cuda<X> dev, X *out, const X *x, size_t n, Gelu gelu) {
    constexpr unsigned threads = 256;
    constexpr int N = Vec<X>::size;
    const bool wide = fit_vectors<N>(n, out, x);
    with_form(gelu, [&]<Gelu form> {
        launch(dev, wide ? gelu_forward_kernel3<form, X, N> : gelu_forward_kernel3<form, X, 1>,
               Grid{ceil_div(n, threads * (wide ? N : 1))}, threads, 0, out, x, n);
    });
}

// The kernel moves 3 n elements.
template <Gelu form, class X, int N> __global__ void gelu_backward_kernel3(X *dx, const X *dout, const X *x, size_t n) {
    const size_t i = (blockIdx.x * size_t(blockDim.x) + threadIdx.x) * N;
    if (i >= n) return;
    const auto v = Vec<X, N>::load(x + i);
    auto d = Vec<X, N>::load(dout + i);
    for (int j = 0; j < N; j++) {
        const float at = v[j];
        const GeluFactor f = gelu_factor<form>(at, expf(gelu_exponent<form>(at)));
        d[j] = float(d[j]) * (f.P + at * f.slope);
    }
    d.store(dx + i);
}

template <class X> void gelu_backward(Cuda<X> dev, X *dx, const X *dout, const X *x, size_t n, Gelu gelu) {
    constexpr unsigned threads = 256;
    constexpr int N = Vec<X>::size;
    const bool wide = fit_vectors<N>(n, dx, dout, x);
    with_form(gelu, [&]<Gelu form> {
        launch(dev, wide ? gelu_backward_kernel3<form, X, N> : gelu_backward_kernel3<form, X, 1>,
               Grid{ceil_div(n, threads * (wide ? N : 1))}, threads, 0, dx, dout, x, n);
    });
}
}  // namespace CUDA_BACKEND
