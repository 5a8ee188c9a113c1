// SwiGLU and its sister GEGLU (Shazeer, 2020, arXiv:2002.05202) on the fused projection of gate and up.
//
//   swiglu_forward(dev, out, gate_up, T, F, gate)                 out = gate * s * up                      with s = 1 / (1 + exp(-e(gate)))
//   swiglu_backward(dev, dgate_up, dout, gate_up, T, F, gate)     dgate = dout * up * s * (1 + gate * (1 - s) * e'(gate)),  dup = dout * gate * s
//
//   Gate::silu    e(g) = g: gate * s is silu(gate), as in Llama
//   Gate::gelu    e(g) = 2 u, and gate * s is gelu(gate) in its tanh form (gelu.h), as in Gemma
//
//   gate_up, dgate_up (T, 2F) X: a row is F gates, then F ups     out, dout (T, F) X     dgate_up may alias gate_up
#pragma once
#include <cstddef>

#include "../core/device.h"
#include "gelu.h"
#include "settings.h"
#include "simd.h"

template <Gate form, class F> HOST_DEVICE inline F gate_exponent(F g) {  // -e
    if constexpr (form == Gate::silu) return -g;
    else return gelu_exponent<Gelu::tanh>(g);
}
template <Gate form, class F> HOST_DEVICE inline F gate_slope(F g) {  // e'
    if constexpr (form == Gate::silu) return F{} + 1.0f;
    else return gelu_slope(g);
}

// Calls f<form>(): the form is chosen once for an array, and is a constant for its elements.
template <class F> void with_form(Gate gate, F f) {
    switch (gate) {
        case Gate::silu: return f.template operator()<Gate::silu>();
        case Gate::gelu: return f.template operator()<Gate::gelu>();
    }
}

template <Gate form, class X> void swiglu_forward_as(Cpu<X> dev, X *out, const X *gate_up, size_t T, size_t F) {
#pragma omp parallel for num_threads(dev.threads)
    for (size_t t = 0; t < T; t++) {
        const X *gate = gate_up + t * 2 * F, *up = gate + F;
        X *out_t = out + t * F;
        simd::for_each(F, [&]<class V>(size_t f) {
            const V g = simd::load<V>(gate + f), u = simd::load<V>(up + f);
            simd::store(out_t + f, g / (1.0f + fast_exp(gate_exponent<form>(g))) * u);
        });
    }
}

template <class X> void swiglu_forward(Cpu<X> dev, X *out, const X *gate_up, size_t T, size_t F, Gate gate) {
    with_form(gate, [&]<Gate form> { swiglu_forward_as<form>(dev, out, gate_up, T, F); });
}

template <Gate form, class X>
void swiglu_backward_as(Cpu<X> dev, X *dgate_up, const X *dout, const X *gate_up, size_t T, size_t F) {
#pragma omp parallel for num_threads(dev.threads)
    for (size_t t = 0; t < T; t++) {
        const X *gate = gate_up + t * 2 * F, *up = gate + F, *dout_t = dout + t * F;
        X *dgate = dgate_up + t * 2 * F, *dup = dgate + F;
        simd::for_each(F, [&]<class V>(size_t f) {
            const V g = simd::load<V>(gate + f), u = simd::load<V>(up + f), d = simd::load<V>(dout_t + f);
            const V s = 1.0f / (1.0f + fast_exp(gate_exponent<form>(g)));
            simd::store(dgate + f, d * u * s * (1.0f + g * (1.0f - s) * gate_slope<form>(g)));
            simd::store(dup + f, d * g * s);
        });
    }
}

template <class X> void swiglu_backward(Cpu<X> dev, X *dgate_up, const X *dout, const X *gate_up, size_t T, size_t F, Gate gate) {
    with_form(gate, [&]<Gate form> { swiglu_backward_as<form>(dev, dgate_up, dout, gate_up, T, F); });
}

REHEARSED(swiglu_forward);
REHEARSED(swiglu_backward);
