// A short causal convolution over time, one filter per channel, with SiLU: the op before the delta rule, where each token sees the three before it
// (gated DeltaNet, Yang, Kautz and Hatamizadeh, 2024, arXiv:2412.06464).
//
//   causal_conv_forward (dev, out, x, w, doc_pos, T, C)
//       y[t,c] = sum_j w[c, 3-j] * x[t-j, c]   over j = 0 .. min(3, doc_pos[t])          out = y * s        with s = 1 / (1 + exp(-y))
//   causal_conv_backward(dev, dx, dw, scratch, dout, x, w, doc_pos, T, C)
//       dy = dout * s * (1 + y * (1 - s))             dx[t,c] = sum_j w[c, 3-j] * dy[t+j, c]   over j = 0 .. 3 with doc_pos[t+j] >= j
//                                                    dw[c, 3-j] += sum_t dy[t,c] * x[t-j, c]
//
//   out, x, dx, dout (T, C) X     w (C, 4) X     dw (C, 4) float, accumulated; null if the weight is frozen
//   doc_pos (T) int32, a token's position in its document: the sums never leave the document, nor the row
//   scratch: causal_conv_scratch(dev, C) floats     Nothing may alias.
//
// Sums are float, in an order that depends on the sizes alone. The backward pass computes y again.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "../core/device.h"
#include "norm.h"
#include "simd.h"

constexpr size_t conv_taps = 4, conv_columns = conv_taps - 1;  // conv_columns: earlier tokens that a token sees

// The number of taps of a token's sum.
HOST_DEVICE inline int conv_seen(int32_t doc_pos) { return doc_pos < int32_t(conv_taps) ? doc_pos + 1 : int32_t(conv_taps); }

namespace causal_conv {

constexpr size_t slice = 256;  // channels of a task: the weights and the last rows of x stay in the L1 cache

// Tap j of all channels: row j of (4, C), in float.
template <class X> std::vector<float> taps_of(const X *w, size_t C) {
    std::vector<float> taps(conv_taps * C);
    for (size_t c = 0; c < C; c++)
        for (size_t j = 0; j < conv_taps; j++) taps[j * C + c] = w[c * conv_taps + conv_taps - 1 - j];
    return taps;
}

// y of one channel, or of a vector of channels, of the token at x; taps points at its channel.
template <class V, class X> V sum_of(const X *x, const float *taps, int seen, size_t C) {
    V y = simd::load<V>(x) * simd::load<V>(taps);
    for (int j = 1; j < seen; j++) y = y + simd::load<V>(x - size_t(j) * C) * simd::load<V>(taps + size_t(j) * C);
    return y;
}

// Calls f(begin, end, first, last) for each run of tokens and slice of channels, in parallel.
template <class F> void for_each_part(int threads, size_t T, size_t C, F f) {
    const NormRuns runs(T);
#pragma omp parallel for collapse(2) num_threads(threads)
    for (size_t run = 0; run < runs.count; run++)
        for (size_t s = 0; s < ceil_div(C, slice); s++)
            f(run, runs.begin(run), runs.end(run), s * slice, std::min(C, (s + 1) * slice));
}

}  // namespace causal_conv

template <class X> size_t causal_conv_scratch(Cpu<X>, size_t C) { return norm_runs * conv_taps * C; }

template <class X>
void causal_conv_forward(Cpu<X> dev, X *out, const X *x, const X *w, const int32_t *doc_pos, size_t T, size_t C) {
    using namespace causal_conv;
    const std::vector<float> taps = taps_of(w, C);
    for_each_part(dev.threads, T, C, [&](size_t, size_t begin, size_t end, size_t first, size_t last) {
        for (size_t t = begin; t < end; t++) {
            const int seen = conv_seen(doc_pos[t]);
            simd::for_each(last - first, [&]<class V>(size_t i) {
                const size_t c = first + i;
                const V y = sum_of<V>(x + t * C + c, &taps[c], seen, C);
                simd::store(out + t * C + c, y / (1.0f + fast_exp(-y)));
            });
        }
    });
}

// A run computes dy of its tokens and of the three after it, which also see its tokens.
template <class X>
void causal_conv_backward(Cpu<X> dev, X *dx, float *dw, float *scratch, const X *dout, const X *x, const X *w,
                          const int32_t *doc_pos, size_t T, size_t C) {
    using namespace causal_conv;
    constexpr size_t K = conv_taps;
    const std::vector<float> taps = taps_of(w, C);
    for_each_part(dev.threads, T, C, [&](size_t run, size_t begin, size_t end, size_t first, size_t last) {
        float dy[K][slice];         // of the last four tokens; dy[t % 4]
        float sums[K][slice] = {};  // of dw, by tap
        const size_t n = last - first;
        for (size_t t = begin; t < end + K - 1; t++) {
            if (t < T) {
                const int seen = conv_seen(doc_pos[t]);
                simd::for_each(n, [&]<class V>(size_t i) {
                    const X *x_t = x + t * C + first + i;
                    const V y = sum_of<V>(x_t, &taps[first + i], seen, C), s = 1.0f / (1.0f + fast_exp(-y));
                    const V d = simd::load<V>(dout + t * C + first + i) * s * (1.0f + y * (1.0f - s));
                    simd::store(&dy[t % K][i], d);
                    for (int j = 0; j < seen && t < end; j++)
                        simd::store(&sums[j][i], simd::load<V>(&sums[j][i]) + d * simd::load<V>(x_t - size_t(j) * C));
                });
            }
            if (t < begin + K - 1) continue;
            const size_t done = t - (K - 1);  // the token that no later one sees
            size_t seers = 1;
            while (seers < K && done + seers < T && doc_pos[done + seers] >= int32_t(seers)) seers++;
            simd::for_each(n, [&]<class V>(size_t i) {
                V sum{};
                for (size_t j = 0; j < seers; j++)
                    sum = sum + simd::load<V>(&taps[j * C + first + i]) * simd::load<V>(&dy[(done + j) % K][i]);
                simd::store(dx + done * C + first + i, sum);
            });
        }
        float *part = scratch + run * K * C;  // (C, 4), as dw
        for (size_t i = 0; i < n; i++)
            for (size_t j = 0; j < K; j++) part[(first + i) * K + K - 1 - j] = sums[j][i];
    });
    if (dw) norm_add_runs(dev, dw, scratch, NormRuns(T).count, K * C);
}

REHEARSED(causal_conv_forward);
REHEARSED(causal_conv_backward);
ASKED(causal_conv_scratch);
