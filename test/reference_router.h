// The router in float64, and how far float may be from it.
#pragma once
#include <numeric>

#include "check.h"

struct RouterReference {
    std::vector<double> probs, weights;
    std::vector<int32_t> chosen;
};

inline RouterReference router_reference(const std::vector<double> &logits, size_t T, size_t E, size_t K, bool normed) {
    RouterReference r;
    for (size_t t = 0; t < T; t++) {
        const double *z = logits.data() + t * E, most = *std::max_element(z, z + E);
        std::vector<double> p(E);
        double sum = 0, total = 0;
        for (size_t e = 0; e < E; e++) sum += p[e] = std::exp(z[e] - most);
        for (double &v : p) v /= sum;
        std::vector<int32_t> order(E);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return p[size_t(a)] > p[size_t(b)]; });
        for (size_t k = 0; k < K; k++) total += p[size_t(order[k])];
        for (size_t k = 0; k < K; k++) r.weights.push_back(p[size_t(order[k])] / (normed ? total : 1));
        r.chosen.insert(r.chosen.end(), order.begin(), order.begin() + ptrdiff_t(K));
        r.probs.insert(r.probs.end(), p.begin(), p.end());
    }
    return r;
}

inline std::vector<double> router_backward_reference(const std::vector<double> &dweights, const RouterReference &r,
                                                     const std::vector<double> &balance, const std::vector<int32_t> &documents,
                                                     size_t T, size_t E, size_t K, bool normed) {
    std::vector<double> dlogits(T * E);
    for (size_t t = 0; t < T; t++) {
        std::vector<double> dp(E);
        const double *p = r.probs.data() + t * E;
        double along = 0, total = 0, mean = 0;
        for (size_t k = t * K; k < (t + 1) * K; k++) along += dweights[k] * r.weights[k], total += p[r.chosen[k]];
        for (size_t k = t * K; k < (t + 1) * K; k++)
            dp[size_t(r.chosen[k])] = normed ? (dweights[k] - along) / total : dweights[k];
        for (size_t e = 0; e < E; e++) dp[e] += documents[t] < 0 ? 0 : balance[e];
        for (size_t e = 0; e < E; e++) mean += dp[e] * p[e];
        for (size_t e = 0; e < E; e++) dlogits[t * E + e] = p[e] * (dp[e] - mean);
    }
    return dlogits;
}

// exp of a difference of at most 2 max|z|, whose rounding is relative to it; a sum of E terms; a division; and with `normed` K terms and one more.
inline double router_error(const std::vector<double> &logits, size_t E, size_t K) {
    return (4 * largest(logits) + double(E + K) + 8) * unit_roundoff<float>;
}
