// The output gate of attention (Qiu et al., 2025, arXiv:2505.06708), in which every channel of a head has its own gate.
//
//   sigmoid_gate_forward (dev, out, x, gate, T, C, stride)              out = x * s                     with s = 1 / (1 + exp(-gate))
//   sigmoid_gate_backward(dev, dx, dgate, dout, x, gate, T, C, stride)  dx = dout * s                   dgate = dout * x * s * (1 - s)
//
//   out, x, dx, dout (T, C) X     gate, dgate: T rows of `stride` elements X, of which the first C are gates
//   out may alias x, dx may alias dout, dgate may alias gate
#pragma once
#include <cstddef>

#include "../core/device.h"
#include "simd.h"

template <class X> void sigmoid_gate_forward(Cpu<X> dev, X *out, const X *x, const X *gate, size_t T, size_t C, size_t stride) {
#pragma omp parallel for num_threads(dev.threads)
    for (size_t t = 0; t < T; t++)
        simd::for_each(C, [&]<class V>(size_t c) {
            const V g = simd::load<V>(gate + t * stride + c);
            simd::store(out + t * C + c, simd::load<V>(x + t * C + c) / (1.0f + fast_exp(-g)));
        });
}

template <class X>
void sigmoid_gate_backward(Cpu<X> dev, X *dx, X *dgate, const X *dout, const X *x, const X *gate, size_t T, size_t C,
                           size_t stride) {
#pragma omp parallel for num_threads(dev.threads)
    for (size_t t = 0; t < T; t++)
        simd::for_each(C, [&]<class V>(size_t c) {
            const V g = simd::load<V>(gate + t * stride + c), v = simd::load<V>(x + t * C + c);
            const V d = simd::load<V>(dout + t * C + c), s = 1.0f / (1.0f + fast_exp(-g));
            simd::store(dgate + t * stride + c, d * v * s * (1.0f - s));
            simd::store(dx + t * C + c, d * s);
        });
}

REHEARSED(sigmoid_gate_forward);
REHEARSED(sigmoid_gate_backward);
