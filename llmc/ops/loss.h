// The language-model head fused with the loss, so that the (T, V) logits never exist: chunks of rows go through the three
// products of the head and the softmax between them, and at most shape.chunk bytes of logits are alive (on CUDA 256 MiB, or 1024 rows).
//
//   lm_head(dev, stats, dx, dw, scratch, x, w, loss, shape, accumulate, known)
//                                       for n < N, with t = loss.predictors[n], y = loss.targets[n], tau = loss.temperature:
//       logit[v] = sum_c x[t,c] w[v,c]       z[v] = logit[v] / tau    p = softmax(z)       lse = log sum_v exp(z[v])
//       nll[n] = lse - z[y]                  entropy[n] = lse - sum_v p[v] z[v]            correct[n] = 1 if y is the first maximum
//       max[n] = max_v z[v]                  sum[n] = sum_v exp(z[v] - max[n])             so that lse = max[n] + log sum[n]
//       dlogit[v] = (weights[n] (p[v] - [v == y]) - entropy_weight p[v] (log p[v] + entropy[n])) / tau
//       dx[t,c] = sum_v dlogit[v] w[v,c]     dw[v,c] += sum_n dlogit[v] x[t,c];   if not accumulate, dw = sum_n ..., and N > 0
//
//   lm_head_weight(dev, dw, scratch, x, w, loss, stats, shape, first, count)   for v in [first, first + count):
//       dw[v - first,c] += sum_n dlogit[v] x[t,c]
//
//   shape: T, C, V, N, chunk     x, dx (T, C), w (V, C) X     dw (V, C), of a range (count, C), float
//   stats: nll, entropy (nats), correct, max, sum, (N) float each; they include rows of weight 0
//   known(n0, n), unless it is empty, is called for each chunk once the stats of its rows [n0, n0 + n) are computed. It may write their loss.weights: so
//   a loss that is a function of each token's nll needs no forward pass of its own. If w is a rank's part of the vocabulary, it replaces the stats by
//   those of the whole (head_parts.h). A target outside [0, V) is another rank's: then nll is infinite and correct is 0.
//   dx is overwritten and 0 in rows without a target. If dx is null, only the forward pass runs; dw and loss.weights may then also be null.
//   scratch: lm_head_scratch(dev, shape) bytes, aligned to array_alignment on GPUs, for both functions. Nothing may alias.
//   Logits and softmax are float; dlogit is rounded to X before its products. A NaN among the logits of a row makes its nll NaN.
//
//   If no (V, C) array of floats may exist, as under ZeRO-2, dw is null in lm_head. Afterwards lm_head_weight computes dw in ranges of v, from the
//   same inputs and the stats of lm_head: it recomputes the logits of the range, and p = exp(z - max) / sum. That takes four products of 2 N C V
//   operations instead of three. Equal logits give equal bits of dlogit; but libraries may sum in another order for other sizes, and so do chunks of
//   other lengths.
//
//   head_sums(dev, sums, stats, N): sums[0..2] += sum_n nll[n], entropy[n], correct[n]     sums (3) double
#pragma once
#include <algorithm>
#include <cmath>
#include <functional>
#include <tuple>

#include "../core/common.h"
#include "matmul.h"
#include "settings.h"
#include "simd.h"

struct HeadShape {
    size_t T, C, V, N;  // tokens, channels, logits of a token, and tokens with a target
    size_t chunk = least_head_chunk;
    size_t most_V = V;  // the most logits that a rank has of a token: it decides the chunks, which are the same on all of them

    auto pointers() const { return std::tuple(); }  // ../core/rehearsal.h
};

struct HeadStats {
    float *nll, *entropy, *correct, *max, *sum;  // (N) each

    auto pointers() const { return std::tuple(nll, entropy, correct, max, sum); }  // ../core/rehearsal.h

    HeadStats from(size_t n) const { return {nll + n, entropy + n, correct + n, max + n, sum + n}; }
};

// The loss of N tokens: its derivatives with respect to each token's nll and entropy.
struct HeadLoss {
    const int32_t *predictors, *targets;  // (N) predictors increasing
    const float *weights;                 // (N) dL/dnll
    float entropy_weight = 0;             // dL/dentropy, the same for all tokens
    float temperature = 1;                // by which logits are divided

    auto pointers() const { return std::tuple(predictors, targets, weights); }  // ../core/rehearsal.h

    HeadLoss from(size_t n) const {
        return {predictors + n, targets + n, weights ? weights + n : nullptr, entropy_weight, temperature};
    }
};

template <class X> constexpr size_t lm_head_bytes(Cpu<X>, size_t chunk) { return chunk; }

// Returns the elements from one row of V logits to the next. On GPUs, rows are padded to aligned addresses. On CPUs a row, of logits or of gradients,
// is an odd number of cache lines, so that neighbouring rows lie in different sets of the caches: products read columns of the gradients. If rows of
// V = 49152 floats were contiguous, dw would take 1.19 times as long in float, and 1.04 in bf16 (measured, EPYC).
template <class X> constexpr size_t logits_ld(Cpu<X>, size_t V) {
    constexpr size_t line = 64 / sizeof(X);
    return (ceil_div(V, line) | 1) * line;
}

// The smallest number of rows in a chunk, if there are enough predictors: on GPUs it may exceed the bytes above.
template <class X> constexpr size_t lm_head_least_rows(Cpu<X>) { return 1; }

// Returns the elements from one row of gradients to the next, for rows of logits that are ld apart.
template <class X> constexpr size_t dlogits_ld(Cpu<X>, size_t ld) { return ld; }

// Returns the rows of a chunk: the number whose float logits fit its bytes, rounded down to a multiple of 64 if that is not 0.
template <class Dev> constexpr size_t lm_head_chunk(Dev dev, size_t V, size_t chunk = least_head_chunk) {
    const size_t rows = lm_head_bytes(dev, chunk) / (logits_ld(dev, V) * sizeof(float));
    return std::max(rows >= 64 ? rows / 64 * 64 : rows, lm_head_least_rows(dev));
}

// The last chunk is padded with zeros to a multiple of 64 rows, so that the products have few different shapes.
template <class Dev> constexpr size_t lm_head_rows(Dev dev, size_t n, size_t V, size_t chunk = least_head_chunk) {
    return std::min(lm_head_chunk(dev, V, chunk), round_up(n, 64));
}

// What the statistics of a row leave in place of its logits.
enum class Left { logits, shifted, exponentials };  // shifted: z - max      exponentials: exp(z - max)

// Computes the statistics of row n, and returns the logarithm of its sum. Sums are float within a run and double over the runs.
template <Left left> double softmax_row(HeadStats stats, size_t n, float *logits, size_t y, size_t V, float temperature) {
    constexpr size_t run = 1024;
    const float scale = 1 / temperature;
    float max = -INFINITY;
#pragma omp simd reduction(max : max)
    for (size_t v = 0; v < V; v++) max = logits[v] * scale > max ? logits[v] * scale : max;
    const float target = y < V ? logits[y] * scale : -INFINITY;
    int earlier = 0;
#pragma omp simd reduction(| : earlier)
    for (size_t v = 0; v < std::min(y, V); v++) earlier |= logits[v] * scale == max;

    double sum = 0, dot = 0;
    for (size_t v0 = 0; v0 < V; v0 += run) {
        float run_sum = 0, run_dot = 0;
#pragma omp simd reduction(+ : run_sum, run_dot)
        for (size_t v = v0; v < std::min(V, v0 + run); v++) {
            const float shifted = logits[v] * scale - max, e = fast_exp(shifted);
            run_sum += e;
            run_dot += e * shifted;
            if constexpr (left != Left::logits) logits[v] = left == Left::shifted ? shifted : e;
        }
        sum += run_sum;
        dot += run_dot;
    }
    const double log_sum = std::log(sum);
    stats.nll[n] = float(log_sum - (double(target) - max));
    stats.entropy[n] = float(log_sum - dot / sum);
    stats.correct[n] = target == max && !earlier;
    stats.max[n] = max;
    stats.sum[n] = float(sum);
    return log_sum;
}

// Computes the gradients of row r from e = exp(z - max), which they may overwrite. y is V or more if the target is outside this range.
template <class X>
void dlogits_row(X *dlogits, const float *e, const HeadLoss &loss, HeadStats stats, size_t r, size_t y, size_t V) {
    const float weight = loss.weights[r] / loss.temperature, scale = weight / stats.sum[r];
    if (loss.entropy_weight == 0) {
        const float at_target = y < V ? e[y] * scale - weight : 0;  // read before it is overwritten
#pragma omp simd
        for (size_t v = 0; v < V; v++) dlogits[v] = e[v] * scale;
        if (y < V) dlogits[y] = at_target;
        return;
    }
    const float slope = loss.entropy_weight / (loss.temperature * stats.sum[r]),
                offset = stats.entropy[r] - std::log(stats.sum[r]);
    const auto gradient = [=](float e) { return e * (scale - slope * (fast_log(e) + offset)); };
    const float at_target = y < V ? gradient(e[y]) - weight : 0;
#pragma omp simd
    for (size_t v = 0; v < V; v++) dlogits[v] = gradient(e[v]);
    if (y < V) dlogits[y] = at_target;
}

// Calls row(r) for all rows of a chunk, in an order in which gradients may overwrite the logits. In bf16, where half a row is free in front,
// the gradients of row r overwrite the logits of rows (r-1)/2 to r/2. So once the rows below `first` are done, rows first to 2 first can be
// computed at the same time.
template <class X, class Row> void for_each_row(Cpu<X> dev, size_t n, Row row) {
    for (size_t first = 0, last = 1; first < n; first = last, last *= 2)
#pragma omp parallel for num_threads(dev.threads)
        for (size_t r = first; r < std::min(last, n); r++) row(r);
}

// Computes the statistics of rows 0 to n of a chunk and, unless dlogits is null, the gradients of their logits, which are 0 in rows n to `padded`. If
// dlogits is null the logits stay. Rows of V logits, or of gradients, are ld elements apart; gradients are 0 in the padding.
template <class X>
void fused_classifier(Cpu<X> dev, HeadStats stats, X *dlogits, float *logits, HeadLoss loss, size_t n, size_t padded, size_t V,
                      size_t ld) {
    for_each_row(dev, n, [=](size_t r) {
        const size_t y = size_t(loss.targets[r]);
        float *e = logits + r * ld;
        if (!dlogits) return void(softmax_row<Left::logits>(stats, r, e, y, V, loss.temperature));
        softmax_row<Left::exponentials>(stats, r, e, y, V, loss.temperature);
        dlogits_row(dlogits + r * ld, e, loss, stats, r, y, V);
    });
    if (dlogits) std::fill(dlogits + n * ld, dlogits + padded * ld, X(0.0f));
}

// Computes the gradients of logits [first, first + count) of the vocabulary from known statistics. A row has `count` logits.
template <class X>
void range_classifier(Cpu<X> dev, X *dlogits, float *logits, HeadLoss loss, HeadStats stats, size_t n, size_t padded,
                      size_t first, size_t count, size_t ld) {
    for_each_row(dev, n, [=](size_t r) {
        const float max = stats.max[r], scale = 1 / loss.temperature;
        float *e = logits + r * ld;
#pragma omp simd
        for (size_t v = 0; v < count; v++) e[v] = fast_exp(e[v] * scale - max);
        dlogits_row(dlogits + r * ld, e, loss, stats, r, size_t(loss.targets[r]) - first, count);
    });
    std::fill(dlogits + n * ld, dlogits + padded * ld, X(0.0f));
}

// Returns the number of bytes by which the gradients begin before the logits; 0: they overwrite the logits.
template <class X> size_t dlogits_room(Cpu<X>, size_t, size_t ld) {
    return sizeof(X) == sizeof(float) ? 0 : round_up(ld * sizeof(X), 64);
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

// ---- the head, on any device -------------------------------------------------------------------------------------------------

template <class Dev> size_t lm_head_chunk_bytes(Dev dev, size_t rows, size_t C, size_t V) {
    const size_t ld = logits_ld(dev, V);
    return dlogits_room(dev, rows, ld) + round_up(rows * ld * sizeof(float), array_alignment) +
           rows * C * sizeof(typename Dev::X);
}

template <class Dev> size_t lm_head_scratch(Dev dev, HeadShape shape) {
    return lm_head_chunk_bytes(dev, lm_head_rows(dev, shape.N, shape.V, shape.chunk), shape.C, shape.V);
}

// Returns the number of rows of `count` logits that fit the scratch of a chunk with V logits.
template <class Dev> size_t lm_head_range_rows(Dev dev, HeadShape shape, size_t count) {
    const size_t bytes = lm_head_scratch(dev, shape);
    size_t rows = lm_head_rows(dev, shape.N, shape.V, shape.chunk), more = round_up(rows + 1, 64);
    for (; rows < shape.N && lm_head_chunk_bytes(dev, more, shape.C, count) <= bytes; more += 64) rows = more;
    return rows;
}

// The arrays in the scratch, for chunks of `most` rows.
template <class X> struct HeadChunk {
    X *dlogits;     // (most, dld)
    float *logits;  // (most, ld)
    X *x;           // (most, C)
    size_t most, ld, dld;

    template <class Dev>
    HeadChunk(Dev dev, void *scratch, size_t most, size_t V) : most(most), ld(logits_ld(dev, V)), dld(dlogits_ld(dev, ld)) {
        char *at = static_cast<char *>(scratch);
        dlogits = reinterpret_cast<X *>(at);
        at += dlogits_room(dev, most, ld);
        logits = reinterpret_cast<float *>(at);
        at += round_up(most * ld * sizeof(float), array_alignment);
        x = reinterpret_cast<X *>(at);
    }
};

// For each chunk (predictors n0 to n0 + n): gathers their rows of x, multiplies them by the V rows of w, and calls body(n0, n, padded).
template <class Dev, class X, class Body>
void for_each_chunk(Dev dev, const HeadChunk<X> &chunk, const X *x, const X *w, const int32_t *predictors, size_t C, size_t V,
                    size_t N, Body body) {
    for (size_t n0 = 0; n0 < N; n0 += chunk.most) {
        const size_t n = std::min(chunk.most, N - n0), padded = std::min(chunk.most, round_up(n, 64));
        gather_rows(dev, chunk.x, x, predictors + n0, n, padded, C);
        matmul_forward(dev, chunk.logits, chunk.x, w, nullptr, padded, C, V, chunk.ld);
        body(n0, n, padded);
    }
}

template <class Dev, class X = typename Dev::X>
void lm_head(Dev dev, HeadStats stats, std::type_identity_t<X> *dx, float *dw, void *scratch, const X *x, const X *w,
             HeadLoss loss, HeadShape shape, bool accumulate, const std::function<void(size_t n0, size_t n)> &known = {}) {
    const size_t T = shape.T, C = shape.C, V = shape.V, N = shape.N;
    const HeadChunk<X> chunk(dev, scratch, lm_head_rows(dev, N, shape.most_V, shape.chunk), V);
    if (dx) gather_rows(dev, dx, x, loss.predictors, 0, T, C);  // n = 0: sets all rows to 0
    for_each_chunk(dev, chunk, x, w, loss.predictors, C, V, N, [&](size_t n0, size_t n, size_t padded) {
        X *const dlogits = dx && !known ? chunk.dlogits : nullptr;
        fused_classifier(dev, stats.from(n0), dlogits, chunk.logits, loss.from(n0), n, padded, V, chunk.ld);
        if (known) known(n0, n);
        if (!dx) return;
        if (known) range_classifier(dev, chunk.dlogits, chunk.logits, loss.from(n0), stats.from(n0), n, padded, 0, V, chunk.ld);
        if (dw) matmul_backward_weight(dev, dw, nullptr, chunk.dlogits, chunk.x, padded, C, V, accumulate || n0 > 0, chunk.dld);
        matmul_backward_input(dev, chunk.x, chunk.dlogits, w, padded, C, V, chunk.dld);
        scatter_rows(dev, dx, chunk.x, loss.predictors + n0, n, C);
    });
}

template <class Dev, class X = typename Dev::X>
void lm_head_weight(Dev dev, float *dw, void *scratch, const X *x, const X *w, HeadLoss loss, HeadStats stats, HeadShape shape,
                    size_t first, size_t count) {
    const size_t C = shape.C, N = shape.N;
    const HeadChunk<X> chunk(dev, scratch, lm_head_range_rows(dev, shape, count), count);
    for_each_chunk(dev, chunk, x, w + first * C, loss.predictors, C, count, N, [&](size_t n0, size_t n, size_t padded) {
        range_classifier(dev, chunk.dlogits, chunk.logits, loss.from(n0), stats.from(n0), n, padded, first, count, chunk.ld);
        matmul_backward_weight(dev, dw, nullptr, chunk.dlogits, chunk.x, padded, C, count, true, chunk.dld);
    });
}

REHEARSED(gather_rows);
REHEARSED(scatter_rows);
REHEARSED(fused_classifier);
REHEARSED(range_classifier);
REHEARSED(head_sums);
ASKED(logits_ld);
ASKED(dlogits_ld);
ASKED(lm_head_bytes);
ASKED(lm_head_least_rows);
ASKED(dlogits_room);
