// rmsnorm (rmsnorm.h) of all query heads of a token as one vector, and of all its key heads as another (OLMo 2). Under tensor parallelism a rank has some
// of the heads, and the ranks exchange their parts of each token's sum between two calls.
//
//   wide_norm_squares (dev, sum, x, shape)                              sum[t] = sum_c x[t,c]^2
//   wide_norm_forward (dev, x, raw, rstd, w, sums, shape)
//       rstd[t] = 1 / sqrt(sum_r sums[r,t] / whole + eps)               raw = x     x[t,c] = raw[t,c] * rstd[t] * w[c]
//   wide_norm_dots    (dev, sum, dx, raw, w, shape)                     sum[t] = sum_c dx[t,c] * w[c] * raw[t,c]
//   wide_norm_backward(dev, dx, dw, scratch, raw, w, rstd, sums, shape)
//       with xh = raw * rstd, mean = rstd * sum_r sums[r] / whole:      dw += sum_t dx * xh     dx = rstd * (dx * w - xh * mean)
//
//   x, dx (T, C) X, with `stride` elements from one token to the next, changed in place     raw (T, C) X     w (C) X     rstd (T) float
//   sum (T) float: of the rank's channels     sums: those of all R ranks, with `of_rank` floats from one rank to the next
//   dw (C) float, accumulated, null if frozen     scratch: rmsnorm_scratch(dev, C) floats
#pragma once
#include "rmsnorm.h"

struct WideNormShape {
    size_t T, C, stride;
    size_t whole, R, of_rank;  // whole: channels of all R ranks
    float eps;

    HOST_DEVICE float mean(const float *sums, size_t t) const {  // of a token's terms
        float sum = 0;
        for (size_t r = 0; r < R; r++) sum += sums[r * of_rank + t];
        return sum / float(whole);
    }
    auto pointers() const { return std::tuple(); }  // ../core/rehearsal.h
};

template <class X> void wide_norm_squares(Cpu<X> dev, float *sum, const X *x, WideNormShape s) {
#pragma omp parallel for num_threads(dev.threads)
    for (size_t t = 0; t < s.T; t++) {
        const X *const row = x + t * s.stride;
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (size_t c = 0; c < s.C; c++) squares += float(row[c]) * float(row[c]);
        sum[t] = squares;
    }
}

template <class X> void wide_norm_forward(Cpu<X> dev, X *x, X *raw, float *rstd, const X *w, const float *sums, WideNormShape s) {
#pragma omp parallel for num_threads(dev.threads)
    for (size_t t = 0; t < s.T; t++) {
        X *const row = x + t * s.stride, *const raw_row = raw + t * s.C;
        const float r = rstd[t] = 1.0f / std::sqrt(s.mean(sums, t) + s.eps);
        std::copy_n(row, s.C, raw_row);
#pragma omp simd
        for (size_t c = 0; c < s.C; c++) row[c] = float(raw_row[c]) * r * float(w[c]);
    }
}

template <class X> void wide_norm_dots(Cpu<X> dev, float *sum, const X *dx, const X *raw, const X *w, WideNormShape s) {
#pragma omp parallel for num_threads(dev.threads)
    for (size_t t = 0; t < s.T; t++) {
        const X *const row = dx + t * s.stride, *const raw_row = raw + t * s.C;
        float dot = 0;
#pragma omp simd reduction(+ : dot)
        for (size_t c = 0; c < s.C; c++) dot += float(row[c]) * float(w[c]) * float(raw_row[c]);
        sum[t] = dot;
    }
}

template <class X>
void wide_norm_backward(Cpu<X> dev, X *dx, float *dw, float *scratch, const X *raw, const X *w, const float *rstd,
                        const float *sums, WideNormShape s) {
    norm_for_runs(dev, scratch, 1, s.T, s.C, [&](size_t t, float *dw_run) {
        X *const row = dx + t * s.stride;
        const X *const raw_row = raw + t * s.C;
        const float r = rstd[t], mean = r * s.mean(sums, t);
#pragma omp simd
        for (size_t c = 0; c < s.C; c++) {
            const float xh = float(raw_row[c]) * r, d = float(row[c]);
            dw_run[c] += d * xh;
            row[c] = r * (d * float(w[c]) - xh * mean);
        }
    });
    if (dw) norm_add_runs(dev, dw, scratch, NormRuns(s.T).count, s.C);
}

REHEARSED(wide_norm_squares);
REHEARSED(wide_norm_forward);
REHEARSED(wide_norm_dots);
REHEARSED(wide_norm_backward);
