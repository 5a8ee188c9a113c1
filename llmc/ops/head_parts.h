// The statistics of the head's loss (loss.h) if the vocabulary is divided among ranks, each of which knows those of its own logits.
//
//   pack_head_stats (dev, part, stats, n)        part[0..4][i] = nll[i], or -1 if it is infinite, entropy[i], correct[i], max[i], sum[i]
//   merge_head_stats(dev, stats, parts, R, n)    stats[i] = the statistics of all R parts, which follow one another in the vocabulary
//
//   stats: (n) each     part (5, n), parts (R, 5, n) float. Nothing may alias.
//   For a part without the target, stats' nll is infinite, and correct is 0. All packed numbers are finite, so --debug finds nothing in them.
//
//   With m = max_r max[r], s_r = sum[r] exp(max[r] - m), S = sum_r s_r and the part o that has the target:
//       max = m     sum = S     nll = log S - log sum[o] + m - max[o] + nll[o]
//       entropy = log S - sum_r s_r / S (log sum[r] - entropy[r] + max[r] - m)
//       correct = correct[o], unless the maximum is above max[o], or equal and in an earlier part: the first of equal logits counts
#pragma once
#include <cmath>
#include <cstddef>

#include "loss.h"

// Packs the statistics of row i of a part.
HOST_DEVICE inline void pack_head_stats_row(float *part, const HeadStats &stats, size_t n, size_t i) {
    const float of[] = {stats.nll[i] == INFINITY ? -1 : stats.nll[i], stats.entropy[i], stats.correct[i], stats.max[i],
                        stats.sum[i]};
    for (size_t k = 0; k < 5; k++) part[k * n + i] = of[k];
}

// Merges the statistics of row i of the parts.
HOST_DEVICE inline void merge_head_stats_row(const HeadStats &stats, const float *parts, size_t R, size_t n, size_t i) {
    enum { nll, entropy, correct, max, sum };
    const auto of = [=](size_t r, int k) { return double(parts[(5 * r + size_t(k)) * n + i]); };
    double m = -INFINITY, S = 0, mean = 0;  // mean: of z - m
    size_t owner = 0, first = 0;            // the parts with the target and with the first maximum
    for (size_t r = 0; r < R; r++) {
        if (of(r, max) > m) m = of(r, max), first = r;
        if (of(r, nll) >= 0) owner = r;
    }
    for (size_t r = 0; r < R; r++) {
        const double shift = of(r, max) - m, s = of(r, sum) * std::exp(shift);
        S += s;
        if (s > 0) mean += s * (std::log(of(r, sum)) - of(r, entropy) + shift);
    }
    stats.nll[i] = float(std::log(S) - std::log(of(owner, sum)) + m - of(owner, max) + of(owner, nll));
    stats.entropy[i] = float(std::log(S) - mean / S);
    stats.correct[i] = owner == first ? float(of(owner, correct)) : 0;
    stats.max[i] = float(m);
    stats.sum[i] = float(S);
}

template <class X> void pack_head_stats(Cpu<X>, float *part, HeadStats stats, size_t n) {
    for (size_t i = 0; i < n; i++) pack_head_stats_row(part, stats, n, i);
}

template <class X> void merge_head_stats(Cpu<X> dev, HeadStats stats, const float *parts, size_t R, size_t n) {
#pragma omp parallel for num_threads(dev.threads)
    for (size_t i = 0; i < n; i++) merge_head_stats_row(stats, parts, R, n, i);
}

REHEARSED(pack_head_stats);
REHEARSED(merge_head_stats);
