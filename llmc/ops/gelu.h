// GELU (Hendrycks and Gimpel, 2016, arXiv:1606.08415): x times the probability P(x) that a normal variable is below x.
//
//   gelu_forward(dev, out, x, n, gelu)          out = x * P(x)
//   gelu_backward(dev, dx, dout, x, n, gelu)    dx = dout * (P(x) + x * P'(x))
//
//   Gelu::erf     P(x) = (1 + erf(x / sqrt 2)) / 2                                   Hugging Face's "gelu"
//   Gelu::tanh    P(x) = (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u))                     "gelu_new", which is GPT-2's, and "gelu_pytorch_tanh"
//                 with u = sqrt(2 / pi) * (x + 0.044715 x^3)
//
//   out, x, dx, dout (n) X     out may alias x, dx may alias dout or x
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>

#include "../core/device.h"
#include "settings.h"
#include "simd.h"

// ---- one element, on every device: both forms of P take one exp, which is the device's own. F is float or simd::Vector --------------

// x^2, bounded for u. At the bound P has long been 0 or 1, and beyond it the product of an infinite u' and P (1 - P) = 0 would be NaN.
template <class F> HOST_DEVICE inline F gelu_square(F x) { return x * x < 1e4f ? x * x : F{} + 1e4f; }

template <Gelu form, class F> HOST_DEVICE inline F gelu_exponent(F x) {
    if constexpr (form == Gelu::erf) return -0.5f * x * x;
    else return -x * (1.59576912f + 0.0713548163f * gelu_square(x));  // -2 u
}
template <class F> HOST_DEVICE inline F gelu_slope(F x) { return 1.59576912f + 3 * 0.0713548163f * gelu_square(x); }  // 2 u'

struct GeluFactor {
    float P, slope;
};  // slope: P'

template <Gelu form> HOST_DEVICE inline GeluFactor gelu_factor(float x, float exponential) {  // exp(gelu_exponent(x))
    if constexpr (form == Gelu::erf) {
        // The tail P(-|x|) = exp(-x^2 / 2) Q(|x|), where Q falls from 1/2 like 1 / |x|: a polynomial in t = 1 / (1 + 0.21 |x|),
        // fitted to the smallest relative error, 1.7e-8 up to |x| = 14, where the tail is no longer a float.
        const float t = 1.0f / (1.0f + 0.21f * fabsf(x));
        float p = -0.0716562605f * t + 0.283588301f;
        p = p * t - 0.330252787f;
        p = p * t + 0.349400283f;
        p = p * t - 0.0939246840f;
        p = p * t + 0.124872498f;
        p = p * t + 0.0691922299f;
        p = p * t + 0.0850688494f;
        p = p * t + 0.0837115762f;
        const float tail = exponential * t * p;
        return {x > 0 ? 1.0f - tail : tail, 0.398942280f * exponential};
    } else {
        const float s = 1.0f / (1.0f + exponential);
        return {s, s * (1.0f - s) * gelu_slope(x)};
    }
}

// ---- arrays --------------------------------------------------------------------------------------------------------------------

// Calls f<form>(): the form is chosen once for an array, and is a constant for its elements.
template <class F> void with_form(Gelu gelu, F f) {
    switch (gelu) {
        case Gelu::erf: return f.template operator()<Gelu::erf>();
        case Gelu::tanh: return f.template operator()<Gelu::tanh>();
    }
}

// An element's bits do not depend on its place in the array: the last block is as long as the others.
template <Gelu form, class X> void gelu_forward_as(Cpu<X> dev, X *out, const X *x, size_t n) {
    constexpr size_t block = 64;
    const auto of_block = [](X *out, const X *x) {
#pragma omp simd
        for (size_t i = 0; i < block; i++) {
            const float v = x[i];
            out[i] = v * gelu_factor<form>(v, fast_exp(gelu_exponent<form>(v))).P;
        }
    };
#pragma omp parallel for num_threads(dev.threads)
    for (size_t begin = 0; begin < n; begin += block) {
        X last[block] = {};
        if (n - begin >= block) of_block(out + begin, x + begin);
        else std::copy(x + begin, x + n, last), of_block(last, last), std::copy_n(last, n - begin, out + begin);
    }
}

template <class X> void gelu_forward(Cpu<X> dev, X *out, const X *x, size_t n, Gelu gelu) {
    with_form(gelu, [&]<Gelu form> { gelu_forward_as<form>(dev, out, x, n); });
}

template <Gelu form, class X> void gelu_backward_as(Cpu<X> dev, X *dx, const X *dout, const X *x, size_t n) {
#pragma omp parallel for simd num_threads(dev.threads)
    for (size_t i = 0; i < n; i++) {
        const float v = x[i];
        const GeluFactor f = gelu_factor<form>(v, fast_exp(gelu_exponent<form>(v)));
        dx[i] = float(dout[i]) * (f.P + v * f.slope);
    }
}

template <class X> void gelu_backward(Cpu<X> dev, X *dx, const X *dout, const X *x, size_t n, Gelu gelu) {
    with_form(gelu, [&]<Gelu form> { gelu_backward_as<form>(dev, dx, dout, x, n); });
}

REHEARSED(gelu_forward);
REHEARSED(gelu_backward);
