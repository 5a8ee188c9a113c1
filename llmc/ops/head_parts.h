// The statistics of the head's loss (loss.h) and of a divergence (divergence.h) if the vocabulary is divided among ranks, each of which knows those of its
// own logits.
//
//   pack_head_stats (dev, part, stats, n)        part[..][i] = the fields of stats[i]
//   merge_head_stats(dev, stats, parts, R, n)    stats[i] = the statistics of all R parts, which follow one another in the vocabulary
//
//   stats: (n) each     part (fields, n), parts (R, fields, n) float. Nothing may alias.
//       HeadStats          fields 0 to 4: nll, or -1 if it is infinite, entropy, correct, max, sum
//       DivergenceStats    0 to 4, 5 to 9: those of student and teacher, 10: agreement
//       PartsOfDivergence  0, 1: divergence, mean; added up
//   For a part without the target, stats' nll is infinite, and correct is 0. All packed numbers are finite, so --debug finds nothing in them.
//
//   With m = max_r max[r], s_r = sum[r] exp(max[r] - m), S = sum_r s_r and the part o that has the target:
//       max = m     sum = S     nll = log S - log sum[o] + m - max[o] + nll[o]
//       entropy = log S - sum_r s_r / S (log sum[r] - entropy[r] + max[r] - m)
//       correct = correct[o], unless the maximum is above max[o], or equal and in an earlier part: the first of equal logits counts
//       agreement = agreement[r] if the first maxima of both models are in part r, else 0
#pragma once
#include <cmath>
#include <cstddef>

#include "divergence.h"

struct PartsOfDivergence {
    float *divergence, *mean;  // (n) each

    auto pointers() const { return std::tuple(divergence, mean); }  // ../core/rehearsal.h
};

template <class Stats> constexpr size_t fields_of = 5;
template <> inline constexpr size_t fields_of<DivergenceStats> = 11;
template <> inline constexpr size_t fields_of<PartsOfDivergence> = 2;

// Packs the statistics of row i of a part.
HOST_DEVICE inline void pack_head_stats_row(float *part, const HeadStats &stats, size_t n, size_t i) {
    const float of[] = {stats.nll[i] == INFINITY ? -1 : stats.nll[i], stats.entropy[i], stats.correct[i], stats.max[i],
                        stats.sum[i]};
    for (size_t k = 0; k < 5; k++) part[k * n + i] = of[k];
}
HOST_DEVICE inline void pack_head_stats_row(float *part, const DivergenceStats &stats, size_t n, size_t i) {
    pack_head_stats_row(part, stats.student, n, i), pack_head_stats_row(part + 5 * n, stats.teacher, n, i);
    part[10 * n + i] = stats.agreement[i];
}
HOST_DEVICE inline void pack_head_stats_row(float *part, const PartsOfDivergence &stats, size_t n, size_t i) {
    part[i] = stats.divergence[i], part[n + i] = stats.mean[i];
}

// Merges the statistics of row i of the parts, each of which has `fields` fields, and returns the part with the first maximum.
HOST_DEVICE inline size_t merge_head_stats_row(const HeadStats &stats, const float *parts, size_t R, size_t n, size_t i,
                                               size_t fields = 5) {
    enum { nll, entropy, correct, max, sum };
    const auto of = [=](size_t r, int k) { return double(parts[(fields * r + size_t(k)) * n + i]); };
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
    return first;
}
HOST_DEVICE inline void merge_head_stats_row(const DivergenceStats &stats, const float *parts, size_t R, size_t n, size_t i) {
    const size_t student = merge_head_stats_row(stats.student, parts, R, n, i, 11),
                 teacher = merge_head_stats_row(stats.teacher, parts + 5 * n, R, n, i, 11);
    stats.agreement[i] = student == teacher ? parts[(11 * student + 10) * n + i] : 0;
}
HOST_DEVICE inline void merge_head_stats_row(const PartsOfDivergence &stats, const float *parts, size_t R, size_t n, size_t i) {
    double divergence = 0, mean = 0;
    for (size_t r = 0; r < R; r++) divergence += double(parts[2 * r * n + i]), mean += double(parts[(2 * r + 1) * n + i]);
    stats.divergence[i] = float(divergence), stats.mean[i] = float(mean);
}

template <class X, class Stats> void pack_head_stats(Cpu<X>, float *part, Stats stats, size_t n) {
    for (size_t i = 0; i < n; i++) pack_head_stats_row(part, stats, n, i);
}

template <class X, class Stats> void merge_head_stats(Cpu<X> dev, Stats stats, const float *parts, size_t R, size_t n) {
#pragma omp parallel for num_threads(dev.threads)
    for (size_t i = 0; i < n; i++) merge_head_stats_row(stats, parts, R, n, i);
}

REHEARSED(pack_head_stats);
REHEARSED(merge_head_stats);
