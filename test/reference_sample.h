// Sampling in float64, by the definition: tokens in the order of their logits, cut where the first of the filters ends.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "../llmc/ops/sample.h"

inline std::vector<double> penalised_reference(std::vector<double> logits, const std::vector<int32_t> &occurred, double penalty) {
    for (int32_t v : occurred)
        logits[size_t(v)] = logits[size_t(v)] > 0 ? logits[size_t(v)] / penalty : logits[size_t(v)] * penalty;
    return logits;
}

// The probability of each token, at a temperature above 0.
inline std::vector<double> sampling_reference(const std::vector<double> &logits, const Sampling &s) {
    const double max = *std::ranges::max_element(logits);
    std::vector<std::pair<double, size_t>> order;  // minus the logit, and the id
    for (size_t v = 0; v < logits.size(); v++) order.emplace_back(-logits[v], v);
    std::ranges::sort(order);
    if (s.top_k) order.resize(std::min(order.size(), s.top_k));
    const auto mass_of = [&](double minus_logit) { return std::exp((-minus_logit - max) / s.temperature); };
    double all = 0, before = 0, sum = 0;
    for (const auto &[l, v] : order) all += mass_of(l);
    std::vector<double> out(logits.size());
    for (const auto &[l, v] : order) {
        const double mass = mass_of(l);
        if (before >= s.top_p * all || mass < s.min_p) break;
        sum += out[v] = mass, before += mass;
    }
    for (double &p : out) p /= sum;
    return out;
}

inline double log_probability_reference(const std::vector<double> &logits, double temperature, size_t token) {
    const double max = *std::ranges::max_element(logits);
    double sum = 0;
    for (double l : logits) sum += std::exp((l - max) / temperature);
    return (logits[token] - max) / temperature - std::log(sum);
}
