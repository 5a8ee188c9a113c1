// Layer normalisation (Ba, Kiros and Hinton, 2016, arXiv:1607.06450), the norm of GPT-2, whose layer_norm_epsilon is 1e-5.
//
//   layernorm_forward (dev, out, stats, x, weights, shape)
//       mean[t] = mean_c x[t,c]     rstd[t] = 1 / sqrt(mean_c (x[t,c] - mean[t])^2 + eps)
//       out[t,c] = (x[t,c] - mean[t]) * rstd[t] * w[c] + bias[c]
//   residual_layernorm_forward(dev, sum, out, stats, x, y, weights, shape)
//       sum = x + y, rounded to X                            out, stats = layernorm_forward of the rounded sum
//   layernorm_backward(dev, dx, dweights, scratch, dresidual, dout, x, w, stats, shape)
//       with g = dout * w and xh = (x - mean) * rstd:        dx = dresidual + rstd * (g - mean_c(g) - xh * mean_c(g * xh))
//                                                            dw += sum_t dout * xh     dbias += sum_t dout
//
//   out, sum, x, y, dx, dresidual, dout (T, C) X     weights: w, bias (C) X     stats: mean, rstd (T) float     shape: T, C, eps (norm.h)
//   dweights: dw, dbias (C) float, accumulated; they may be null: the weights are frozen
//   scratch: layernorm_scratch(dev, C) floats     dresidual may be null: nothing is added
//   out may alias x, sum may alias x or y, dx may alias dout or dresidual.
//
// Everything between reading and writing an element is float. Sums are taken in an order that depends on the sizes alone, never
// on threads. The variance is the mean of squared differences, not mean(x^2) - mean(x)^2, which cancels if the mean is far from zero.
// The same differences correct the rounding error of the mean (Chan, Golub and LeVeque, 1983): their mean, which should be 0, is
// added to it. So a constant row has variance 0, and its output is the bias.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "../core/device.h"
#include "norm.h"

struct LayerNormStats {
    float *mean, *rstd;  // (T) each

    auto pointers() const { return std::tuple(mean, rstd); }  // ../core/rehearsal.h

    HOST_DEVICE LayerNormStats from(size_t t) const { return {mean + t, rstd + t}; }
};

template <class T> struct LayerNormWeights {  // of const X; or their gradients, of float
    T *w, *bias;                              // (C) each

    auto pointers() const { return std::tuple(w, bias); }  // ../core/rehearsal.h
};

// ---- one row ----------------------------------------------------------------------------------------------------------------

// The weights may be X or float: a caller with many rows converts them once.
template <class X, class W>
void layernorm_row(X *out, LayerNormStats stats, const X *x, const W *w, const W *bias, size_t C, float eps) {
    float sum = 0, rest = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
    for (size_t c = 0; c < C; c++) sum += float(x[c]);
    const float rough = sum / float(C);
#pragma omp simd reduction(+ : rest, squares)
    for (size_t c = 0; c < C; c++) {
        const float d = float(x[c]) - rough;
        rest += d;
        squares += d * d;
    }
    const float shift = rest / float(C), m = rough + shift;
    const float r = 1.0f / std::sqrt(std::max(squares / float(C) - shift * shift, 0.0f) + eps);
#pragma omp simd
    for (size_t c = 0; c < C; c++) out[c] = (float(x[c]) - m) * r * float(w[c]) + float(bias[c]);
    *stats.mean = m;
    *stats.rstd = r;
}

template <class X, class W>
void layernorm_backward_row(X *dx, float *dw, float *dbias, const X *dresidual, const X *dout, const X *x, const W *w, float mean,
                            float rstd, size_t C) {
    float sum = 0, dot = 0;
#pragma omp simd reduction(+ : sum, dot)
    for (size_t c = 0; c < C; c++) {
        const float g = float(dout[c]) * float(w[c]);
        sum += g;
        dot += g * (float(x[c]) - mean);
    }
    const float mean_g = sum / float(C), mean_gx = dot * rstd / float(C);
#pragma omp simd
    for (size_t c = 0; c < C; c++) {
        const float xh = (float(x[c]) - mean) * rstd, g = float(dout[c]) * float(w[c]);
        dw[c] += float(dout[c]) * xh;  // both come before dx, which may overwrite dout
        dbias[c] += float(dout[c]);
        dx[c] = (dresidual ? float(dresidual[c]) : 0.0f) + rstd * (g - mean_g - xh * mean_gx);
    }
}

// ---- the norm of the residual stream ----------------------------------------------------------------------------------------

template <class X> size_t layernorm_scratch(Cpu<X>, size_t C) { return 2 * norm_runs * C; }

template <class X>
void layernorm_forward(Cpu<X> dev, X *out, LayerNormStats stats, const X *x, LayerNormWeights<const X> weights, NormShape shape) {
    const size_t T = shape.T, C = shape.C;
    const std::vector<float> w(weights.w, weights.w + C), bias(weights.bias, weights.bias + C);
#pragma omp parallel for num_threads(dev.threads)
    for (size_t t = 0; t < T; t++) layernorm_row(out + t * C, stats.from(t), x + t * C, w.data(), bias.data(), C, shape.eps);
}

template <class X>
void residual_layernorm_forward(Cpu<X> dev, X *sum, X *out, LayerNormStats stats, const X *x, const X *y,
                                LayerNormWeights<const X> weights, NormShape shape) {
    const size_t T = shape.T, C = shape.C;
    const std::vector<float> w(weights.w, weights.w + C), bias(weights.bias, weights.bias + C);
#pragma omp parallel for num_threads(dev.threads)
    for (size_t t = 0; t < T; t++) {
        norm_add_row(sum + t * C, x + t * C, y + t * C, C);
        layernorm_row(out + t * C, stats.from(t), sum + t * C, w.data(), bias.data(), C, shape.eps);
    }
}

template <class X>
void layernorm_backward(Cpu<X> dev, X *dx, LayerNormWeights<float> dweights, float *scratch, const X *dresidual, const X *dout,
                        const X *x, const X *w, LayerNormStats stats, NormShape shape) {
    const size_t T = shape.T, C = shape.C;
    const size_t runs = NormRuns(T).count;
    const std::vector<float> w32(w, w + C);
    norm_for_runs(dev, scratch, 2, T, C, [&](size_t t, float *dw_run) {
        layernorm_backward_row(dx + t * C, dw_run, dw_run + runs * C, dresidual ? dresidual + t * C : nullptr, dout + t * C,
                               x + t * C, w32.data(), stats.mean[t], stats.rstd[t], C);
    });
    if (dweights.w) norm_add_runs(dev, dweights.w, scratch, runs, C);
    if (dweights.bias) norm_add_runs(dev, dweights.bias, scratch + runs * C, runs, C);
}

REHEARSED(layernorm_forward);
REHEARSED(residual_layernorm_forward);
REHEARSED(layernorm_backward);
ASKED(layernorm_scratch);
