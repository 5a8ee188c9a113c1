// Root-mean-square normalisation (Zhang and Sennrich, 2019, arXiv:1910.07467), the norm of every Llama-class model.
//
//   rmsnorm_forward (dev, out, rstd, x, w, shape)
//       rstd[t] = 1 / sqrt(mean_c x[t,c]^2 + eps)            out[t,c] = x[t,c] * rstd[t] * (w0 + w[c])
//   residual_rmsnorm_forward(dev, sum, out, rstd, x, y, w, shape)
//       sum = x + y, rounded to X                            out, rstd = rmsnorm_forward of the rounded sum
//   rmsnorm_backward(dev, dx, dw, scratch, dresidual, dout, x, w, rstd, shape)
//       with g = dout * (w0 + w), xh = x * rstd:                 dx = dresidual + rstd * (g - xh * mean_c(g * xh))
//                                                            dw += sum_t dout * xh
//
//   out, sum, x, y, dx, dresidual, dout (T, C) X     w (C) X     rstd (T) float     dw (C) float, accumulated
//   shape: T, C, eps, w0 (NormShape in norm.h)
//   scratch: rmsnorm_scratch(dev, C) floats     dresidual may be null (nothing is added), and so may dw (the weight is frozen)
//   out may alias x, sum may alias x or y, dx may alias dout or dresidual.
//
// Everything between reading and writing an element is float. (Hugging Face rounds x * rstd to the storage type before it
// multiplies by w: in bf16 the results differ by one rounding.) Sums are taken in an order that depends on the sizes alone,
// never on threads.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "../core/device.h"
#include "norm.h"

// ---- one row ----------------------------------------------------------------------------------------------------------------

// Returns w0 + w[c]; a caller with many rows computes it once.
template <class X> std::vector<float> rmsnorm_weights(const X *w, size_t C, float w0) {
    std::vector<float> out(C);
    for (size_t c = 0; c < C; c++) out[c] = w0 + float(w[c]);
    return out;
}

template <class X> float rmsnorm_rstd(const X *x, size_t C, float eps) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (size_t c = 0; c < C; c++) sum += float(x[c]) * float(x[c]);
    return 1.0f / std::sqrt(sum / float(C) + eps);
}

template <class X> float rmsnorm_row(X *out, const X *x, const float *w, size_t C, float eps) {  // returns rstd
    const float rstd = rmsnorm_rstd(x, C, eps);
#pragma omp simd
    for (size_t c = 0; c < C; c++) out[c] = float(x[c]) * rstd * w[c];
    return rstd;
}

template <class X>
void rmsnorm_backward_row(X *dx, float *dw, const X *dresidual, const X *dout, const X *x, const float *w, float rstd, size_t C) {
    float dot = 0;
#pragma omp simd reduction(+ : dot)
    for (size_t c = 0; c < C; c++) dot += float(dout[c]) * w[c] * float(x[c]);
    const float mean = dot * rstd / float(C);
#pragma omp simd
    for (size_t c = 0; c < C; c++) {
        const float xh = float(x[c]) * rstd, g = float(dout[c]) * w[c];
        dw[c] += float(dout[c]) * xh;  // comes before dx, which may overwrite dout
        dx[c] = (dresidual ? float(dresidual[c]) : 0.0f) + rstd * (g - xh * mean);
    }
}

// ---- the norm of the residual stream ----------------------------------------------------------------------------------------

template <class X> size_t rmsnorm_scratch(Cpu<X>, size_t C) { return norm_runs * C; }

template <class X> void rmsnorm_forward(Cpu<X> dev, X *out, float *rstd, const X *x, const X *w, NormShape shape) {
    const size_t T = shape.T, C = shape.C;
    const std::vector<float> weights = rmsnorm_weights(w, C, shape.w0);
#pragma omp parallel for num_threads(dev.threads)
    for (size_t t = 0; t < T; t++) rstd[t] = rmsnorm_row(out + t * C, x + t * C, weights.data(), C, shape.eps);
}

template <class X>
void residual_rmsnorm_forward(Cpu<X> dev, X *sum, X *out, float *rstd, const X *x, const X *y, const X *w, NormShape shape) {
    const size_t T = shape.T, C = shape.C;
    const std::vector<float> weights = rmsnorm_weights(w, C, shape.w0);
#pragma omp parallel for num_threads(dev.threads)
    for (size_t t = 0; t < T; t++) {
        norm_add_row(sum + t * C, x + t * C, y + t * C, C);
        rstd[t] = rmsnorm_row(out + t * C, sum + t * C, weights.data(), C, shape.eps);
    }
}

template <class X>
void rmsnorm_backward(Cpu<X> dev, X *dx, float *dw, float *scratch, const X *dresidual, const X *dout, const X *x, const X *w,
                      const float *rstd, NormShape shape) {
    const size_t T = shape.T, C = shape.C;
    const std::vector<float> weights = rmsnorm_weights(w, C, shape.w0);
    norm_for_runs(dev, scratch, 1, T, C, [&](size_t t, float *dw_run) {
        rmsnorm_backward_row(dx + t * C, dw_run, dresidual ? dresidual + t * C : nullptr, dout + t * C, x + t * C, weights.data(),
                             rstd[t], C);
    });
    if (dw) norm_add_runs(dev, dw, scratch, NormRuns(T).count, C);
}

REHEARSED(rmsnorm_forward);
REHEARSED(residual_rmsnorm_forward);
REHEARSED(rmsnorm_backward);
ASKED(rmsnorm_scratch);
