// The norm of a linear attention's outputs: each head of a token is normed over its channels and multiplied by a gate (gated DeltaNet, Yang, Kautz
// and Hatamizadeh, 2024, arXiv:2412.06464).
//
//   gated_rmsnorm_forward (dev, out, x, z, w, shape)
//       with r = 1 / sqrt(mean_c x[t,c]^2 + eps), s = 1 / (1 + exp(-z)), per row t:       out = x * r * (w0 + w[c]) * z * s
//   gated_rmsnorm_backward(dev, dx, dz, dw, scratch, dout, x, z, w, shape)
//       with xh = x * r, g = dout * z * s * (w0 + w[c]):                                   dx = r * (g - xh * mean_c(g * xh))
//       dz = dout * xh * (w0 + w[c]) * s * (1 + z * (1 - s))                               dw += sum_t dout * z * s * xh
//
//   out, x, z, dx, dz, dout (T, C) X     w (C) X     dw (C) float, accumulated; null if the weight is frozen
//   shape: T (tokens times heads), C, eps, w0 (NormShape in norm.h)     scratch: gated_rmsnorm_scratch(dev, C) floats
//   out may alias x or z; dx may alias dout or x; dz may alias z.
//
// Everything between reading and writing an element is float; r is computed again in the backward pass. (Hugging Face rounds x * r to the storage type
// before it multiplies by w.) Sums are taken in an order that depends on the sizes alone.
#pragma once
#include "rmsnorm.h"
#include "simd.h"

template <class X> size_t gated_rmsnorm_scratch(Cpu<X> dev, size_t C) { return rmsnorm_scratch(dev, C); }

template <class X> void gated_rmsnorm_forward(Cpu<X> dev, X *out, const X *x, const X *z, const X *w, NormShape shape) {
    const size_t T = shape.T, C = shape.C;
    const std::vector<float> weights = rmsnorm_weights(w, C, shape.w0);
#pragma omp parallel for num_threads(dev.threads)
    for (size_t t = 0; t < T; t++) {
        const float r = rmsnorm_rstd(x + t * C, C, shape.eps);
        simd::for_each(C, [&]<class V>(size_t c) {
            const V v = simd::load<V>(x + t * C + c), gate = simd::load<V>(z + t * C + c);
            simd::store(out + t * C + c, v * r * simd::load<V>(&weights[c]) * (gate / (1.0f + fast_exp(-gate))));
        });
    }
}

// dw: this run's sum, of C elements
template <class X>
void gated_rmsnorm_backward_row(X *dx, X *dz, float *dw, const X *dout, const X *x, const X *z, const float *w, size_t C,
                                float eps) {
    const float r = rmsnorm_rstd(x, C, eps);
    float dot = 0;
#pragma omp simd reduction(+ : dot)
    for (size_t c = 0; c < C; c++) {
        const float gate = z[c];
        dot += float(dout[c]) * (gate / (1.0f + fast_exp(-gate))) * w[c] * float(x[c]);
    }
    const float mean = dot * r / float(C);
    simd::for_each(C, [&]<class V>(size_t c) {
        const V d = simd::load<V>(dout + c), xh = simd::load<V>(x + c) * r, gate = simd::load<V>(z + c),
                weight = simd::load<V>(w + c);
        const V s = 1.0f / (1.0f + fast_exp(-gate)), gated = d * gate * s;
        simd::store(dw + c, simd::load<V>(dw + c) + gated * xh);
        simd::store(dz + c, d * xh * weight * s * (1.0f + gate * (1.0f - s)));
        simd::store(dx + c, r * (gated * weight - xh * mean));
    });
}

template <class X>
void gated_rmsnorm_backward(Cpu<X> dev, X *dx, X *dz, float *dw, float *scratch, const X *dout, const X *x, const X *z,
                            const X *w, NormShape shape) {
    const size_t T = shape.T, C = shape.C;
    const std::vector<float> weights = rmsnorm_weights(w, C, shape.w0);
    norm_for_runs(dev, scratch, 1, T, C, [&](size_t t, float *dw_run) {
        gated_rmsnorm_backward_row(dx + t * C, dz + t * C, dw_run, dout + t * C, x + t * C, z + t * C, weights.data(), C,
                                   shape.eps);
    });
    if (dw) norm_add_runs(dev, dw, scratch, NormRuns(T).count, C);
}

REHEARSED(gated_rmsnorm_forward);
REHEARSED(gated_rmsnorm_backward);
ASKED(gated_rmsnorm_scratch);
