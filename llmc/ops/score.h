// The head of a reward model, which computes one number for each document from its last row of x.
//
//   score_forward (dev, scores, x, w, predictors, C, N)                  scores[n] = sum_c x[predictors[n],c] w[c]
//   score_backward(dev, dx, dw, x, w, predictors, dscores, T, C, N)      dx[predictors[n],c] = dscores[n] w[c], 0 in all other rows
//                                                                  dw[c] += sum_n dscores[n] x[predictors[n],c]
//
//   x, dx (T, C), w (C) X     scores, dscores (N) float     dw (C) float, accumulated     predictors (N) int32, no two of them equal
//   Nothing may alias. N may be 0. Products and sums are float, in an order that depends on the sizes alone, never on threads.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "../core/common.h"
#include "../core/device.h"

template <class X>
void score_forward(Cpu<X> dev, float *scores, const X *x, const X *w, const int32_t *predictors, size_t C, size_t N) {
#pragma omp parallel for num_threads(dev.threads)
    for (size_t n = 0; n < N; n++) {
        const X *row = x + size_t(predictors[n]) * C;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (size_t c = 0; c < C; c++) sum += float(row[c]) * float(w[c]);
        scores[n] = sum;
    }
}

// Threads divide the channels among them, not the documents, because all documents add to the same dw.
template <class X>
void score_backward(Cpu<X> dev, X *dx, float *dw, const X *x, const X *w, const int32_t *predictors, const float *dscores,
                    size_t T, size_t C, size_t N) {
#pragma omp parallel for num_threads(dev.threads)
    for (size_t t = 0; t < T; t++) std::fill_n(dx + t * C, C, X(0.0f));
    constexpr size_t slice = 64;
#pragma omp parallel for num_threads(dev.threads)
    for (size_t s = 0; s < ceil_div(C, slice); s++) {
        const size_t begin = s * slice, end = std::min(C, begin + slice);
        for (size_t n = 0; n < N; n++) {
            const X *row = x + size_t(predictors[n]) * C;
            X *drow = dx + size_t(predictors[n]) * C;
#pragma omp simd
            for (size_t c = begin; c < end; c++) {
                drow[c] = dscores[n] * float(w[c]);
                dw[c] += dscores[n] * float(row[c]);
            }
        }
    }
}

REHEARSED(score_forward);
REHEARSED(score_backward);
