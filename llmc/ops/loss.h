// The language-model head fused with the loss, so that the (T, V) logits never exist: chunks of rows go through the three
// products of the head and the softmax between them, and at most 64 MiB of logits are alive (256 on CUDA).
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
//   scratch: lm_head_scratch(dev, N, C, V) bytes, aligned to 64. Nothing may alias.
//   Logits and softmax are float; dlogit is rounded to X before its products. A NaN among the logits of a row makes its nll NaN.
//
//   head_sums(dev, sums, stats, N): sums[0..2] += sum_n nll[n], entropy[n], correct[n]     sums (3) double
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

template <class X> constexpr size_t lm_head_bytes(Cpu<X>) { return size_t(64) << 20; }

// Rows of a chunk: as many as its bytes of float logits hold, in multiples of 64 where it holds as many, and at least one.
template <class Dev> constexpr size_t lm_head_chunk(Dev dev, size_t V) {
    const size_t rows = lm_head_bytes(dev) / (V * sizeof(float));
    return rows >= 64 ? rows / 64 * 64 : std::max(rows, size_t(1));
}

// Rows are multiples of 64 in the last chunk too (filled with zeros), so that the products see few different shapes.
template <class Dev> constexpr size_t lm_head_rows(Dev dev, size_t n, size_t V) {
    return std::min(lm_head_chunk(dev, V), round_up(n, 64));
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

// Statistics of rows 0 to n of a chunk and, unless dlogits is null, the gradients of their logits; 0 in rows n to `padded`.
// Gradients overwrite the logits. In bf16 row r takes the place of rows (r-1)/2 to r/2 of the logits, half a row being free
// in front; so once the rows below `first` are done, rows first to 2 first may be worked on at the same time.
template <class X>
void fused_classifier(Cpu<X> dev, HeadStats stats, X *dlogits, float *logits, const int32_t *targets, const float *weights,
                      size_t n, size_t padded, size_t V) {
    for (size_t first = 0, last = 1; first < n; first = last, last *= 2)
#pragma omp parallel for num_threads(dev.threads)
        for (size_t r = first; r < std::min(last, n); r++) {
            const size_t y = size_t(targets[r]);
            float *e = logits + r * V;
            const double sum = softmax_row(stats, r, e, y, V);
            if (!dlogits) continue;
            const float weight = weights[r], scale = float(weight / sum);
            const float at_target = e[y] * scale - MUTANT(12, 1, weight);  // read before it is overwritten
            X *out = dlogits + r * V;
#pragma omp simd
            for (size_t v = 0; v < V; v++) out[v] = e[v] * scale;
            out[y] = at_target;
        }
    if (dlogits) std::fill(dlogits + n * V, dlogits + padded * V, X(0.0f));
}

// Bytes in front of the logits at which their gradients begin: 0 where they take the place of the logits.
template <class X> size_t dlogits_room(Cpu<X>, size_t, size_t V) {
    return sizeof(X) == sizeof(float) ? 0 : round_up(V * sizeof(X), 64);
}

// out[r] = x[rows[r]] for r < n, 0 for r from n to `padded`
template <class X> void gather_rows(Cpu<X>, X *out, const X *x, const int32_t *rows, size_t n, size_t padded, size_t C) {
    for (size_t r = 0; r < n; r++) std::copy_n(x + size_t(rows[r]) * C, C, out + r * C);
    std::fill(out + n * C, out + padded * C, X(0.0f));
}

// out[rows[r]] = x[r] for r < n
template <class X> void scatter_rows(Cpu<X>, X *out, const X *x, const int32_t *rows, size_t n, size_t C) {
    for (size_t r = 0; r < n; r++) std::copy_n(x + r * C, C, out + size_t(rows[r]) * C);
}

template <class X> void head_sums(Cpu<X>, double *sums, HeadStats stats, size_t N) {
    double nll = 0, entropy = 0, correct = 0;
    for (size_t n = 0; n < N; n++) nll += stats.nll[n], entropy += stats.entropy[n], correct += stats.correct[n];
    sums[0] += nll, sums[1] += entropy, sums[2] += correct;
}

// ---- the head, of any device -------------------------------------------------------------------------------------------------

template <class Dev> size_t lm_head_scratch(Dev dev, size_t N, size_t C, size_t V) {
    const size_t rows = lm_head_rows(dev, N, V);
    return dlogits_room(dev, rows, V) + round_up(rows * V * sizeof(float), 64) + rows * C * sizeof(typename Dev::X);
}

template <class Dev, class X = typename Dev::X>
void lm_head(Dev dev, HeadStats stats, std::type_identity_t<X> *dx, float *dw, void *scratch, const X *x, const X *w,
             const int32_t *rows, const int32_t *targets, const float *weights, size_t T, size_t C, size_t V, size_t N) {
    const size_t most = lm_head_rows(dev, N, V);
    char *at = static_cast<char *>(scratch);
    X *dlogits = reinterpret_cast<X *>(at);
    at += dlogits_room(dev, most, V);
    float *logits = reinterpret_cast<float *>(at);
    at += round_up(most * V * sizeof(float), 64);
    X *xc = reinterpret_cast<X *>(at);
    if (dx) gather_rows(dev, dx, x, rows, 0, T, C);  // all rows 0

    for (size_t n0 = 0; n0 < N; n0 += most) {
        const size_t n = std::min(most, N - n0), padded = lm_head_rows(dev, n, V);
        const HeadStats at_n0 = {stats.nll + n0, stats.entropy + n0, stats.correct + n0};
        gather_rows(dev, xc, x, rows + n0, n, padded, C);
        matmul_forward(dev, logits, xc, w, nullptr, padded, C, V);
        fused_classifier(dev, at_n0, dx ? dlogits : nullptr, logits, targets + n0, weights + (dx ? n0 : 0), n, padded, V);
        if (!dx) continue;
        matmul_backward_weight(dev, dw, nullptr, dlogits, xc, padded, C, V);
        matmul_backward_input(dev, xc, dlogits, w, padded, C, V);
        scatter_rows(dev, dx, xc, rows + n0, n, C);
    }
}
