// The language-model head fused with the loss, so that the (T, V) logits never exist: chunks of rows go through the three
// products of the head and the softmax between them, and at most 64 MiB of logits are alive.
//
//   lm_head(dev, stats, dx, dw, scratch, x, w, rows, targets, weights, T, C, V, N)   for n < N, with t = rows[n], y = targets[n]:
//       logit[v] = sum_c x[t,c] w[v,c]       p = softmax(logit)       lse = log sum_v exp(logit[v])
//       nll[n] = lse - logit[y]              entropy[n] = lse - sum_v p[v] logit[v]     correct[n] = 1 if y is the first maximum
//       dlogit[v] = weights[n] (p[v] - [v == y])                      weights[n] is dL/dnll[n]
//       dx[t,c] = sum_v dlogit[v] w[v,c]     dw[v,c] += sum_n dlogit[v] x[t,c]
//
//   x, dx (T, C), w (V, C) X     dw (V, C) float, accumulated     rows, targets (N) int32, rows increasing     weights (N) float
//   stats: nll, entropy (nats), correct, (N) float each; rows of weight 0 count in them too
//   dx is overwritten and 0 in rows without a target. dx null: forward only, dw and weights are not touched and may be null.
//   scratch: lm_head_scratch(N, C, V) bytes, aligned to 64. Nothing may alias.
//   Logits and softmax are float; dlogit is rounded to X before its products. A NaN among the logits of a row makes its nll NaN.
#pragma once
#include <algorithm>
#include <cmath>

#include "../core/common.h"
#include "../core/mutant.h"
#include "matmul.h"
#include "simd.h"

struct HeadStats {
    float *nll, *entropy, *correct;  // (N) each
};

// Rows of a chunk: as many as 64 MiB of float logits hold, in multiples of 64 where it holds as many, and at least one.
constexpr size_t lm_head_chunk(size_t V) {
    const size_t rows = (size_t(64) << 20) / (V * sizeof(float));
    return rows >= 64 ? rows / 64 * 64 : std::max(rows, size_t(1));
}

// Rows are multiples of 64 in the last chunk too (filled with zeros), so that the products see few different shapes.
constexpr size_t lm_head_rows(size_t n, size_t V) { return std::min(lm_head_chunk(V), round_up(n, 64)); }

constexpr size_t lm_head_scratch(size_t N, size_t C, size_t V) {
    const size_t rows = lm_head_rows(N, V);
    return round_up(V * sizeof(bf16), 64) + round_up(rows * V * sizeof(float), 64) + rows * C * sizeof(float);
}

// The statistics of row n; logits become exp(logit - max), whose sum is returned. Sums: float in a run, double over the runs.
inline double softmax_row(HeadStats stats, size_t n, float *logits, size_t y, size_t V) {
    constexpr size_t run = 1024;
    float max = -INFINITY;
#pragma omp simd reduction(max : max)
    for (size_t v = 0; v < V; v++) max = logits[v] > max ? logits[v] : max;
    const float target = logits[y];
    int earlier = 0;
#pragma omp simd reduction(| : earlier)
    for (size_t v = 0; v < y; v++) earlier |= logits[v] == max;

    double sum = 0, dot = 0;
    for (size_t v0 = 0; v0 < V; v0 += run) {
        float run_sum = 0, run_dot = 0;
#pragma omp simd reduction(+ : run_sum, run_dot)
        for (size_t v = v0; v < std::min(V, v0 + run); v++) {
            const float shifted = logits[v] - max, e = fast_exp(shifted);
            run_sum += e;
            run_dot += e * shifted;
            logits[v] = e;
        }
        sum += run_sum;
        dot += run_dot;
    }
    stats.nll[n] = float(std::log(sum) - (double(target) - max));
    stats.entropy[n] = float(std::log(sum) - dot / sum);
    stats.correct[n] = target == max && !earlier;
    return sum;
}

template <class X>
void lm_head(Cpu<X> dev, HeadStats stats, std::type_identity_t<X> *dx, float *dw, void *scratch, const X *x, const X *w,
             const int32_t *rows, const int32_t *targets, const float *weights, size_t T, size_t C, size_t V, size_t N) {
    // Gradients overwrite the logits. In bf16 row r takes the place of rows (r-1)/2 to r/2 of the logits, half a row being free
    // in front; so once the rows below `first` are done, rows first to 2 first may be worked on at the same time.
    char *front = static_cast<char *>(scratch);
    float *logits = reinterpret_cast<float *>(front + round_up(V * sizeof(bf16), 64));
    X *dlogits = reinterpret_cast<X *>(sizeof(X) == sizeof(float) ? reinterpret_cast<char *>(logits) : front);
    X *xc = reinterpret_cast<X *>(reinterpret_cast<char *>(logits) + round_up(lm_head_rows(N, V) * V * sizeof(float), 64));
    if (dx) std::fill(dx, dx + T * C, X(0.0f));

    for (size_t n0 = 0; n0 < N; n0 += lm_head_chunk(V)) {
        const size_t n = std::min(lm_head_chunk(V), N - n0), padded = lm_head_rows(n, V);
        for (size_t r = 0; r < n; r++) std::copy_n(x + size_t(rows[n0 + r]) * C, C, xc + r * C);
        std::fill(xc + n * C, xc + padded * C, X(0.0f));
        matmul_forward(dev, logits, xc, w, nullptr, padded, C, V);

        for (size_t first = 0, last = 1; first < n; first = last, last *= 2)
#pragma omp parallel for num_threads(dev.threads)
            for (size_t r = first; r < std::min(last, n); r++) {
                const size_t y = size_t(targets[n0 + r]);
                float *e = logits + r * V;
                const double sum = softmax_row(stats, n0 + r, e, y, V);
                if (!dx) continue;
                const float weight = weights[n0 + r], scale = float(weight / sum);
                const float at_target = e[y] * scale - MUTANT(12, 1, weight);  // read before it is overwritten
                X *out = dlogits + r * V;
#pragma omp simd
                for (size_t v = 0; v < V; v++) out[v] = e[v] * scale;
                out[y] = at_target;
            }
        if (!dx) continue;
        std::fill(dlogits + n * V, dlogits + padded * V, X(0.0f));
        matmul_backward_weight(dev, dw, nullptr, dlogits, xc, padded, C, V);
        matmul_backward_input(dev, xc, dlogits, w, padded, C, V);
        for (size_t r = 0; r < n; r++) std::copy_n(xc + r * C, C, dx + size_t(rows[n0 + r]) * C);
    }
}
