// The next token from its logits. Temperature 0 is greedy. Else: softmax(logits / temperature), restricted to the top_k likeliest
// tokens, then to the smallest set of likeliest tokens whose probability reaches top_p (Holtzman et al., 2019, arXiv:1904.09751), and to those
// whose probability is at least min_p times the largest (Nguyen et al., 2024, arXiv:2407.01082): the order of transformers.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "../core/common.h"
#include "../ops/simd.h"

struct Sampling {
    double temperature = 0;
    size_t top_k = 0;  // 0: all
    double top_p = 1;
    double min_p = 0;
    double repetition_penalty = 1;  // see penalise()
};

// Makes tokens that occurred less likely: each one's logit, once, is divided by the penalty, or multiplied with it if it is negative (Keskar
// et al., "CTRL", 2019, arXiv:1909.05858).
inline void penalise(std::span<float> logits, std::span<const int32_t> occurred, double penalty) {
    std::vector<int32_t> tokens(occurred.begin(), occurred.end());
    std::sort(tokens.begin(), tokens.end());
    tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
    for (int32_t token : tokens)
        if (float *logit = &logits[size_t(token)]; *logit > 0) *logit = float(*logit / penalty);
        else *logit = float(*logit * penalty);
}

inline float largest_of(std::span<const float> logits) {
    float largest = logits[0];
#pragma omp simd reduction(max : largest)
    for (size_t i = 0; i < logits.size(); i++) largest = std::max(largest, logits[i]);
    return largest;
}

// Samples with neither top_k nor top_p, in the order of the tokens' ids, which takes no sorting. First the mass of each block of tokens is summed up, by
// vectors; then the block is known, and the token in it.
inline int32_t sample_any_token(std::span<const float> logits, float largest, const Sampling &s, double uniform) {
    constexpr size_t block = 512;
    const float scale = float(std::min(1 / s.temperature, double(std::numeric_limits<float>::max()))), least = float(s.min_p);
    const auto p = [&](size_t i) {
        const float of_largest = fast_exp((logits[i] - largest) * scale);
        return of_largest >= least ? of_largest : 0.0f;
    };
    std::vector<double> below(ceil_div(logits.size(), block));  // the mass up to the end of each block
    double mass = 0;
    for (size_t b = 0; b < below.size(); b++) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (size_t i = b * block; i < std::min(logits.size(), (b + 1) * block); i++) sum += p(i);
        below[b] = mass += double(sum);
    }
    const double target = std::min(uniform * mass, std::nextafter(mass, 0.0));
    const size_t b = size_t(std::upper_bound(below.begin(), below.end(), target) - below.begin());
    double left = target - (b > 0 ? below[b - 1] : 0);
    size_t token = b * block;
    for (size_t i = token; left >= 0 && i < std::min(logits.size(), (b + 1) * block); i++)
        if (p(i) > 0) token = i, left -= double(p(i));
    return int32_t(token);
}

// `uniform` in [0, 1) decides; the same logits and the same number give the same token.
inline int32_t sample_token(std::span<const float> logits, const Sampling &s, double uniform) {
    const float largest = largest_of(logits);
    if (s.temperature <= 0) return int32_t(std::find(logits.begin(), logits.end(), largest) - logits.begin());
    if (s.top_k == 0 && s.top_p >= 1) return sample_any_token(logits, largest, s, uniform);
    std::vector<int32_t> order(logits.size());
    std::iota(order.begin(), order.end(), 0);
    const auto likelier = [&](int32_t a, int32_t b) {
        return logits[size_t(a)] != logits[size_t(b)] ? logits[size_t(a)] > logits[size_t(b)] : a < b;
    };
    const size_t k = s.top_k ? std::min(s.top_k, order.size()) : order.size();
    std::partial_sort(order.begin(), order.begin() + ptrdiff_t(k), order.end(), likelier);
    order.resize(k);

    std::vector<double> p(k);
    double sum = 0;
    for (size_t i = 0; i < k; i++)
        sum += p[i] = std::exp((double(logits[size_t(order[i])]) - double(logits[size_t(order[0])])) / s.temperature);
    size_t kept = 0;
    double mass = 0;
    while (kept < k && (kept == 0 || (mass < s.top_p * sum && p[kept] >= s.min_p * p[0]))) mass += p[kept++];

    double left = uniform * mass;
    for (size_t i = 0; i < kept; i++)
        if ((left -= p[i]) < 0) return order[i];
    return order[kept - 1];
}
