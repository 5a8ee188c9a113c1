// The next token from its logits. Temperature 0 is greedy. Else: softmax(logits / temperature), restricted to the top_k likeliest
// tokens, then to the smallest set of likeliest tokens whose probability reaches top_p (Holtzman et al., 2019, arXiv:1904.09751), and to those
// whose probability is at least min_p times the largest (Nguyen et al., 2024, arXiv:2407.01082): the order of transformers.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

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

// Samples with neither top_k nor top_p, in the order of the tokens' ids, which takes no sorting.
inline int32_t sample_any_token(std::span<const float> logits, float largest, const Sampling &s, double uniform) {
    std::vector<double> below(logits.size());  // the mass of the tokens up to each
    double mass = 0;
    for (size_t i = 0; i < logits.size(); i++) {
        const double p = std::exp((double(logits[i]) - largest) / s.temperature);
        below[i] = mass += p >= s.min_p ? p : 0;
    }
    return int32_t(std::upper_bound(below.begin(), below.end() - 1, uniform * mass) - below.begin());
}

// `uniform` in [0, 1) decides; the same logits and the same number give the same token.
inline int32_t sample_token(std::span<const float> logits, const Sampling &s, double uniform) {
    const auto largest = std::max_element(logits.begin(), logits.end());
    if (s.temperature <= 0) return int32_t(largest - logits.begin());
    if (s.top_k == 0 && s.top_p >= 1) return sample_any_token(logits, *largest, s, uniform);
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
