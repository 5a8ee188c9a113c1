// The router of a mixture of experts: selects K of E experts for each token, and their weights.
//
//   router_forward (dev, probs, chosen, weights, logits, shape)
//       p = softmax(logits[t])      chosen[t] = the K experts with the largest p, the largest first; ties go to the lower number
//       weights[t,k] = p[chosen[t,k]], and if `normed` divided by the sum over k
//   router_backward(dev, dlogits, dweights, probs, chosen, weights, balance, copies, shape)
//       dp[chosen[t,k]] = dweights[t,k], or if normed (dweights[t,k] - sum_j dweights[t,j] weights[t,j]) / sum_j p[chosen[t,j]], and 0 elsewhere
//       dp[e] += copies[t] balance[e]      dlogits[t,e] = p[e] (dp[e] - sum_i dp[i] p[i])
//       If normed, and without balance, the last sum is 0. It is then left out, so rounding errors do not reach experts that were not chosen.
//   router_sums    (dev, sums, probs, chosen, copies, shape)        for each token, as often as it has copies:
//       sums[e] += 1 for each chosen e     sums[E + e] += 2^32 p[e]     sums[2E] += 2^32 times the entropy of p in nats
//       sums[2E + 1] += 1
//   gate_forward   (dev, weights, logits, T)                 weights[t] = 1 / (1 + exp(-logits[t])), the weight of the shared expert
//   gate_backward  (dev, dlogits, dweights, weights, T)      dlogits[t] = dweights[t] weights[t] (1 - weights[t])
//
//   shape: T, E, K, normed     logits, probs (T, E), weights, dweights (T, K) float; chosen (T, K) int32; for a gate (T)      dlogits X      balance (E) float or null
//   copies (T) int32: the documents that a token stands for, 0 for padding      sums (2E + 2) int64      probs may alias logits      K <= E <= router_experts
//
// The sums are integers, so their bits depend neither on the order of tokens nor on their division among rows and ranks. They have room for
// 2^28 tokens. balance is the derivative of the auxiliary loss (Fedus, Zoph and Shazeer, "Switch transformers", JMLR 2022) with respect to
// each p[e]; the token counts in that loss have no derivative. A NaN among the logits makes the weights NaN, but `chosen` stays valid.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

#include "../core/device.h"

constexpr size_t router_experts = 1024;
constexpr float router_unit = 0x1p32f;  // of probabilities and entropies in the sums

struct RouterShape {
    size_t T, E, K;  // tokens, experts, and experts of a token
    bool normed;     // a token's weights sum to 1

    auto pointers() const { return std::tuple(); }  // ../core/rehearsal.h
};

// A candidate of the choice. The larger probability wins, then the lower number; a NaN counts as the smallest probability.
struct RouterChoice {
    float p;
    int32_t e;  // INT32_MAX: none
};
HOST_DEVICE inline bool is_better(RouterChoice a, RouterChoice b) {
    return a.e != INT32_MAX && (b.e == INT32_MAX || a.p > b.p || (a.p == b.p && a.e < b.e));
}

template <class X>
void router_forward(Cpu<X> dev, float *probs, int32_t *chosen, float *weights, const float *logits, RouterShape shape) {
    const size_t T = shape.T, E = shape.E, K = shape.K;
#pragma omp parallel for num_threads(dev.threads)
    for (size_t t = 0; t < T; t++) {
        const float *z = logits + t * E, most = *std::max_element(z, z + E);
        float *p = probs + t * E, sum = 0, total = 0;
        for (size_t e = 0; e < E; e++) p[e] = std::exp(z[e] - most), sum += p[e];
        for (size_t e = 0; e < E; e++) p[e] /= sum;
        int32_t *of_token = chosen + t * K;
        for (size_t k = 0; k < K; k++) {
            RouterChoice best{-INFINITY, INT32_MAX};
            for (int32_t e = 0; e < int32_t(E); e++) {
                const RouterChoice next{p[e] >= 0 ? p[e] : -INFINITY, e};
                if (std::find(of_token, of_token + k, e) == of_token + k && is_better(next, best)) best = next;
            }
            of_token[k] = best.e, weights[t * K + k] = p[best.e], total += p[best.e];
        }
        for (size_t k = 0; shape.normed && k < K; k++) weights[t * K + k] /= total;
    }
}

template <class X>
void router_backward(Cpu<X> dev, X *dlogits, const float *dweights, const float *probs, const int32_t *chosen,
                     const float *weights, const float *balance, const int32_t *copies, RouterShape shape) {
    const size_t T = shape.T, E = shape.E, K = shape.K;
    const bool normed = shape.normed;
#pragma omp parallel num_threads(dev.threads)
    {
        std::vector<float> dp(E);
#pragma omp for
        for (size_t t = 0; t < T; t++) {
            const float *p = probs + t * E, *w = weights + t * K, *dw = dweights + t * K;
            const int32_t *of_token = chosen + t * K;
            float along = 0, total = normed ? 0 : 1, mean = 0;
            for (size_t k = 0; normed && k < K; k++) along += dw[k] * w[k], total += p[of_token[k]];
            for (size_t e = 0; e < E; e++) dp[e] = balance ? float(copies[t]) * balance[e] : 0, mean += dp[e] * p[e];
            for (size_t k = 0; k < K; k++) {
                const float d = (dw[k] - along) / total;
                dp[size_t(of_token[k])] += d, mean += normed ? 0 : d * p[of_token[k]];
            }
            for (size_t e = 0; e < E; e++) dlogits[t * E + e] = p[e] * (dp[e] - mean);
        }
    }
}

template <class X>
void router_sums(Cpu<X>, int64_t *sums, const float *probs, const int32_t *chosen, const int32_t *copies, RouterShape shape) {
    const size_t T = shape.T, E = shape.E, K = shape.K;
    for (size_t t = 0; t < T; t++) {
        const int64_t n = copies[t];
        if (n == 0) continue;
        float entropy = 0;
        for (size_t k = 0; k < K; k++) sums[chosen[t * K + k]] += n;
        for (size_t e = 0; e < E; e++) {
            const float p = probs[t * E + e];
            sums[E + e] += n * int64_t(p * router_unit);
            if (p > 0) entropy -= p * std::log(p);
        }
        sums[2 * E] += n * int64_t(entropy * router_unit), sums[2 * E + 1] += n;
    }
}

template <class X> void gate_forward(Cpu<X>, float *weights, const float *logits, size_t T) {
    for (size_t t = 0; t < T; t++) weights[t] = 1 / (1 + std::exp(-logits[t]));
}

template <class X> void gate_backward(Cpu<X>, X *dlogits, const float *dweights, const float *weights, size_t T) {
    for (size_t t = 0; t < T; t++) dlogits[t] = dweights[t] * weights[t] * (1 - weights[t]);
}

REHEARSED(router_forward);
REHEARSED(router_backward);
REHEARSED(router_sums);
REHEARSED(gate_forward);
REHEARSED(gate_backward);
