// swiglu on CUDA. Contract and formulas: swiglu.h.
#pragma once
#include "swiglu.h"
#include "warp.cuh"

inline namespace CUDA_BACKEND {
// A thread computes one vector, from one of gates and one of ups. The kernel moves 3 T F elements.
template <Gate form, class X, int N> __global__ void swiglu_forward_kernel4(X *out, const X *gate_up, size_t F) {
    const size_t t = blockIdx.x, f = (blockIdx.y * size_t(blockDim.x) + threadIdx.x) * N;
    if (f >= F) return;
    const auto gate = Vec<X, N>::load(gate_up + t * 2 * F + f), up = Vec<X, N>::load(gate_up + t * 2 * F + F + f);
    Vec<X, N> act;
    for (int i = 0; i < N; i++) act[i] = divide<X>(gate[i], 1.0f + expf(gate_exponent<form>(float(gate[i])))) * float(up[i]);
    act.store(out + t * F + f);
}

template <class X> void swiglu_forward(Cuda<X> dev, X *out, const X *gate_up, size_t T, size_t F, Gate gate) {
    constexpr unsigned threads = 128;
    constexpr int N = Vec<X>::size;
    const bool wide = fit_vectors<N>(F, out, gate_up);
    with_form(gate, [&]<Gate form> {
        launch(dev, wide ? swiglu_forward_kernel4<form, X, N> : swiglu_forward_kernel4<form, X, 1>,
               Grid{T, ceil_div(F, threads * (wide ? N : 1))}, threads, 0, out, gate_up, F);
    });
}

// Computes both gradients in one pass. The kernel moves 5 T F elements.
template <Gate form, class X, int N>
__global__ void swiglu_backward_kernel4(X *dgate_up, const X *dout, const X *gate_up, size_t F) {
    const size_t t = blockIdx.x, f = (blockIdx.y * size_t(blockDim.x) + threadIdx.x) * N;
    if (f >= F) return;
    auto gate = Vec<X, N>::load(gate_up + t * 2 * F + f), up = Vec<X, N>::load(gate_up + t * 2 * F + F + f);
    const auto dact = Vec<X, N>::load(dout + t * F + f);
    for (int i = 0; i < N; i++) {
        const float g = gate[i], u = up[i], d = dact[i];
        // expf is accurate enough that 1 - s is 0 when it multiplies a huge gate.
        const float s = 1.0f / (1.0f + expf(gate_exponent<form>(g)));
        gate[i] = d * u * s * (1.0f + g * (1.0f - s) * gate_slope<form>(g));
        up[i] = d * g * s;
    }
    gate.store(dgate_up + t * 2 * F + f);
    up.store(dgate_up + t * 2 * F + F + f);
}

template <class X>
void swiglu_backward(Cuda<X> dev, X *dgate_up, const X *dout, const X *gate_up, size_t T, size_t F, Gate gate) {
    constexpr unsigned threads = 128;
    constexpr int N = Vec<X>::size;
    const bool wide = fit_vectors<N>(F, dgate_up, dout, gate_up);
    with_form(gate, [&]<Gate form> {
        launch(dev, wide ? swiglu_backward_kernel4<form, X, N> : swiglu_backward_kernel4<form, X, 1>,
               Grid{T, ceil_div(F, threads * (wide ? N : 1))}, threads, 0, dgate_up, dout, gate_up, F);
    });
}
}  // namespace CUDA_BACKEND
