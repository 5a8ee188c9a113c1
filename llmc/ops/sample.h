// The next tokens of sequences, drawn from their logits.
//
//   sample(dev, tokens, logps, logits, draws, s, vocabulary, rows, V, ld)          for each row, with l its V logits:
//       l[v] of each id that has occurred becomes l[v] / penalty, or l[v] * penalty if it is negative (Keskar et al., "CTRL", 2019, arXiv:1909.05858)
//       temperature 0:  the first id with the largest logit of [0, vocabulary)
//       else:           m[v] = floor(2^30 exp((l[v] - max l) / temperature)). The ids are sorted by logit, the largest first, ties by the lower id. Then
//           top_k   keeps the first top_k ids, and all whose logit equals the last one's, as transformers does (0: all)
//           top_p   keeps the shortest prefix of these whose mass reaches floor(top_p of their mass) (Holtzman et al., 2019, arXiv:1904.09751; 1: all)
//           min_p   keeps the ids of that prefix with m >= min_p 2^30 (Nguyen et al., 2024, arXiv:2407.01082; 0: all), in transformers' order of filters
//                       tokens[i] = the first id, in the order of ids, at which the cumulative mass of kept ids exceeds random[i] / 2^64 of its total
//       logps[i] = log softmax(l / temperature)[tokens[i]] among all V ids. If logps is null, they are not computed
//
//   logits (rows, V) float, ld from one row to the next; they are overwritten
//   draws: the random numbers of each row, and the ids that have occurred in it        tokens (draws) int32        logps (draws) float
//
// Apart from m, an explicit sequence of roundings, all arithmetic is on integers, whose sums do not depend on the order. So the same logits and the
// same numbers give the same tokens on every device. A row with a logit of NaN or infinity, or of -infinity alone, gives the token no_token.
#pragma once
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <span>
#include <tuple>
#include <vector>

#include "../core/common.h"
#include "../core/device.h"
#include "loss.h"
#include "settings.h"

struct Draws {
    const int32_t *first;                      // (rows + 1) row r has the draws [first[r], first[r + 1])
    const uint64_t *random;                    // (draws) uniform numbers
    const int32_t *first_occurred, *occurred;  // (rows + 1); ids, none twice in a row. Null without a penalty

    auto pointers() const { return std::tuple(first, random, first_occurred, occurred); }  // ../core/rehearsal.h
};

namespace sampling {

constexpr float whole = 1 << 30;  // the mass of the most likely token

// Returns `part` / 2^64 of a sum.
HOST_DEVICE inline uint64_t part_of(uint64_t sum, uint64_t part) { return uint64_t((unsigned __int128)sum * part >> 64); }

// A Sampling, converted to the op's integers.
struct Rule {
    float scale, penalty, temperature;
    bool greedy;
    uint32_t top_k;
    uint64_t top_p;  // of 2^64; 0: all
    int32_t least;   // mass, by min_p

    explicit Rule(const Sampling &s)
        : scale(float(std::min(1 / s.temperature, double(std::numeric_limits<float>::max())))),
          penalty(float(s.repetition_penalty)),
          temperature(float(s.temperature)),
          greedy(s.temperature <= 0),
          top_k(uint32_t(std::min<size_t>(s.top_k, UINT32_MAX))),
          top_p(s.top_p < 1 ? std::max<uint64_t>(1, uint64_t(s.top_p * 0x1p64)) : 0),
          least(int32_t(std::ceil(s.min_p * double(whole)))) {}

    // Returns the mass that a prefix must exceed to reach top_p of a sum.
    HOST_DEVICE uint64_t below_top_p(uint64_t sum) const {
        const uint64_t part = part_of(sum, top_p);
        return part > 0 ? part - 1 : 0;
    }
};

HOST_DEVICE inline float penalised(float logit, float penalty) { return logit > 0 ? logit / penalty : logit * penalty; }

// Returns floor(2^30 exp(x)) for x <= 0, within 1 unit in the last place of exp as a float; 0 for NaN. It is fast_exp's polynomial with every
// rounding explicit, so that no compiler chooses them.
HOST_DEVICE inline int32_t mass_of(float x) {
    constexpr float magic = 12582912.0f;
    x = x >= -22.0f ? x : -22.0f;  // at -22 the mass is 0
    const float shifted = fmaf(x, 1.44269504f, magic), n = shifted - magic;
    const float r = fmaf(n, 2.12194440e-4f, fmaf(n, -0.693359375f, x));
    float p = fmaf(r, 1.9875691500e-4f, 1.3981999507e-3f);
    p = fmaf(p, r, 8.3334519073e-3f);
    p = fmaf(p, r, 4.1665795894e-2f);
    p = fmaf(p, r, 1.6666665459e-1f);
    p = fmaf(p, r, 5.0000001201e-1f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    uint32_t bits, exponent;
    memcpy(&bits, &p, sizeof bits);
    memcpy(&exponent, &shifted, sizeof exponent);
    bits += (exponent + 30) << 23;
    float scaled;
    memcpy(&scaled, &bits, sizeof scaled);
    return int32_t(scaled);
}

// Returns a sort key that decreases as the logit increases; NaN has the largest key.
HOST_DEVICE inline uint32_t rank_of(float logit) {
    const float x = logit + 0.0f;  // -0 and 0 are equal
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t rank = bits >> 31 ? bits : 0x7fffffff - bits;
    return !(x == x) ? UINT32_MAX : rank;
}

// Returns a logit for a maximum, which is infinite if any logit is NaN.
HOST_DEVICE inline float or_infinity(float logit) { return logit == logit ? logit : INFINITY; }

// The kept tokens of a row: up to a last token in the order of logits, and with enough mass.
struct Kept {
    float max, scale;
    int32_t least = 0;
    uint32_t last_rank = UINT32_MAX, last_id = UINT32_MAX;

    HOST_DEVICE bool has(uint32_t rank, uint32_t id) const {  // without branches, so loops are vectorised
        return rank < uint64_t(last_rank) + (id <= last_id);
    }
    HOST_DEVICE uint32_t mass(float logit, uint32_t id) const {
        const int32_t m = mass_of((logit - max) * scale);
        return has(rank_of(logit), id) & (m >= least) ? uint32_t(m) : 0;
    }
};

// A row of the CPU's op.
class Row {
    std::span<const float> logits_;  // the logits of ids that may be drawn
    Kept kept_;
    static constexpr size_t block = 512;
    std::vector<uint64_t> below_;  // the mass up to the end of each block of ids

    void add_up() {
        below_.resize(ceil_div(logits_.size(), block));
        const Kept kept = kept_;
        uint64_t mass = 0;
        for (size_t b = 0; b < below_.size(); b++) {
            const uint32_t first = uint32_t(b * block), n = uint32_t(std::min(logits_.size() - first, block));
            const float *logits = &logits_[first];
            uint64_t sum = 0;
#pragma omp simd reduction(+ : sum)
            for (uint32_t i = 0; i < n; i++) sum += kept.mass(logits[i], first + i);
            below_[b] = mass += sum;
        }
    }

    // Finds the first token, in the order of logits, at which the cumulative weight exceeds `target`, and makes it the last kept token. The search is
    // a radix select over the bits of its rank; the first 11 bits leave few candidates.
    template <class Weight> void cut(uint64_t target, Weight weight) {
        struct Candidate {
            uint32_t rank, id;
        };
        std::vector<Candidate> candidates;
        for (uint32_t v = 0; v < logits_.size(); v++)
            if (const uint32_t rank = rank_of(logits_[v]); kept_.has(rank, v)) candidates.push_back({rank, v});
        for (const int shift : {21, 10, 0}) {
            std::array<uint64_t, 2048> sums{};
            const auto digit = [&](const Candidate &c) { return c.rank >> shift & 2047; };
            for (const Candidate &c : candidates) sums[digit(c)] += weight(c.id);
            uint32_t found = 0;
            while (target >= sums[found]) target -= sums[found++];
            std::erase_if(candidates, [&](const Candidate &c) { return digit(c) != found; });
        }
        for (const Candidate &c : candidates) {  // equals, by their ids
            kept_.last_rank = c.rank, kept_.last_id = c.id;
            if (target < weight(c.id)) return;
            target -= weight(c.id);
        }
    }

  public:
    Row(std::span<const float> logits, const Rule &rule) : logits_(logits), kept_{-INFINITY, rule.scale} {
        float max = -INFINITY;
#pragma omp simd reduction(max : max)
        for (size_t v = 0; v < logits.size(); v++) max = std::max(max, or_infinity(logits[v]));
        kept_.max = max;
        if (rule.greedy || !finite()) return;
        if (rule.top_k && rule.top_k < logits.size()) {
            cut(rule.top_k - 1, [](uint32_t) { return uint64_t(1); });
            kept_.last_id = UINT32_MAX;  // with all equal ones
        }
        add_up();
        if (rule.top_p && below_.back() > 0)
            cut(rule.below_top_p(below_.back()), [&](uint32_t v) { return uint64_t(kept_.mass(logits_[v], v)); });
        kept_.least = rule.least;
        if (rule.top_p || rule.least) add_up();
    }

    bool finite() const { return std::abs(kept_.max) < INFINITY; }

    int32_t likeliest() const { return int32_t(std::ranges::find(logits_, kept_.max) - logits_.begin()); }

    int32_t draw(uint64_t random) const {
        const uint64_t target = part_of(below_.back(), random);
        const auto b = std::ranges::upper_bound(below_, target);
        if (b == below_.end()) return likeliest();  // nothing has mass
        uint64_t left = target - (b == below_.begin() ? 0 : *(b - 1));
        size_t v = size_t(b - below_.begin()) * block;
        for (uint64_t mass; v + 1 < logits_.size() && left >= (mass = kept_.mass(logits_[v], uint32_t(v))); v++) left -= mass;
        return int32_t(v);
    }
};

}  // namespace sampling

template <class X>
void sample(Cpu<X> dev, int32_t *tokens, float *logps, float *logits, const Draws &draws, const Sampling &s, size_t vocabulary,
            size_t rows, size_t V, size_t ld) {
    const sampling::Rule rule(s);
#pragma omp parallel for num_threads(dev.threads) schedule(dynamic)
    for (size_t r = 0; r < rows; r++) {
        float *l = logits + r * ld;
        for (int32_t i = draws.occurred ? draws.first_occurred[r] : 0; i < (draws.occurred ? draws.first_occurred[r + 1] : 0);
             i++)
            l[draws.occurred[i]] = sampling::penalised(l[draws.occurred[i]], rule.penalty);
        const int32_t first = draws.first[r], end = draws.first[r + 1];
        const sampling::Row row({l, vocabulary}, rule);
        for (int32_t i = first; i < end; i++)
            tokens[i] = !row.finite() ? no_token : rule.greedy ? row.likeliest() : row.draw(draws.random[i]);
        if (!logps || first == end || !row.finite()) continue;
        for (int32_t i = first; i < end; i++) logps[i] = l[tokens[i]];
        float nll, entropy, correct, max, sum;
        const double log_sum =
            softmax_row<Left::logits>({&nll, &entropy, &correct, &max, &sum}, 0, l, size_t(tokens[first]), V, rule.temperature);
        for (int32_t i = first; i < end; i++)  // as in the loss
            logps[i] = -float(log_sum - (double(logps[i] * (1 / rule.temperature)) - max));
    }
}

REHEARSED(sample);
