// The router on CUDA. Contract and formulas: router.h.
#pragma once
#include "router.h"
#include "warp.cuh"

inline namespace CUDA_BACKEND {
constexpr unsigned router_warps = 4;  // per block

// A warp routes a token. Each lane holds every 32nd expert. Each of the K choices is the best of all lanes' candidates. The kernel moves
// T (2 E + 2 K) floats, and reads the probabilities from the cache K times.
template <class X>
__global__ void router_forward_kernel1(float *probs, int32_t *chosen, float *weights, const float *logits, RouterShape shape) {
    const size_t T = shape.T, E = shape.E, K = shape.K;
    const unsigned lane = threadIdx.x % 32;
    const size_t t = blockIdx.x * size_t(router_warps) + threadIdx.x / 32;
    if (t >= T) return;
    const float *z = logits + t * E;
    float *p = probs + t * E, most = -INFINITY, sum = 0, total = 0;
    for (size_t e = lane; e < E; e += 32) most = fmaxf(most, z[e]);
    most = warp_max(most);
    for (size_t e = lane; e < E; e += 32) sum += p[e] = expf(z[e] - most);
    sum = warp_sum(sum);
    for (size_t e = lane; e < E; e += 32) p[e] /= sum;
    uint32_t taken = 0;  // bit i: this lane's expert lane + 32 i
    for (size_t k = 0; k < K; k++) {
        RouterChoice best{-INFINITY, INT32_MAX};
        for (size_t e = lane, i = 0; e < E; e += 32, i++) {
            const RouterChoice next{p[e] >= 0 ? p[e] : -INFINITY, int32_t(e)};
            if (!(taken >> i & 1) && is_better(next, best)) best = next;
        }
        for (unsigned distance = 16; distance > 0; distance /= 2) {
            const RouterChoice other{__shfl_xor_sync(all_lanes, best.p, distance), __shfl_xor_sync(all_lanes, best.e, distance)};
            if (is_better(other, best)) best = other;
        }
        if (unsigned(best.e) % 32 == lane) taken |= 1u << (best.e / 32);
        const float weight = __shfl_sync(all_lanes, unsigned(best.e) % 32 == lane ? p[best.e] : 0.0f, best.e % 32);
        if (lane == 0) chosen[t * K + k] = best.e, weights[t * K + k] = weight;
        total += weight;
    }
    if (lane == 0)
        for (size_t k = 0; shape.normed && k < K; k++) weights[t * K + k] /= total;
}

template <class X>
void router_forward(Cuda<X> dev, float *probs, int32_t *chosen, float *weights, const float *logits, RouterShape shape) {
    launch(dev, router_forward_kernel1<X>, Grid{ceil_div(shape.T, router_warps)}, router_warps * 32, 0, probs, chosen, weights,
           logits, shape);
}

// A warp computes a token's gradient. Each lane holds every 32nd expert, and searches for it among the choices.
template <class X>
__global__ void router_backward_kernel1(X *dlogits, const float *dweights, const float *probs, const int32_t *chosen,
                                        const float *weights, const float *balance, const int32_t *copies, RouterShape shape) {
    const size_t T = shape.T, E = shape.E, K = shape.K;
    const bool normed = shape.normed;
    const unsigned lane = threadIdx.x % 32;
    const size_t t = blockIdx.x * size_t(router_warps) + threadIdx.x / 32;
    if (t >= T) return;
    const float *p = probs + t * E, *w = weights + t * K, *dw = dweights + t * K;
    const int32_t *of_token = chosen + t * K;
    float along = 0, total = normed ? 0 : 1, mean = 0;
    for (size_t k = 0; normed && k < K; k++) along += dw[k] * w[k], total += p[of_token[k]];
    const float copies_of_token = float(copies[t]);
    const auto dp = [&](size_t e) {
        float d = balance ? copies_of_token * balance[e] : 0;
        for (size_t k = 0; k < K; k++)
            if (size_t(of_token[k]) == e) d += (dw[k] - along) / total;
        return d;
    };
    for (size_t e = lane; balance && e < E; e += 32) mean += copies_of_token * balance[e] * p[e];
    mean = warp_sum(mean);
    for (size_t k = 0; !normed && k < K; k++) mean += dw[k] * p[of_token[k]];
    for (size_t e = lane; e < E; e += 32) dlogits[t * E + e] = p[e] * (dp(e) - mean);
}

template <class X>
void router_backward(Cuda<X> dev, X *dlogits, const float *dweights, const float *probs, const int32_t *chosen,
                     const float *weights, const float *balance, const int32_t *copies, RouterShape shape) {
    launch(dev, router_backward_kernel1<X>, Grid{ceil_div(shape.T, router_warps)}, router_warps * 32, 0, dlogits, dweights, probs,
           chosen, weights, balance, copies, shape);
}

// A block sums over its tokens, with one thread per expert at a time, and adds the integers to the sums in any order.
constexpr size_t router_run = 64;  // tokens per block
template <class X>
__global__ void router_sums_kernel1(int64_t *sums, const float *probs, const int32_t *chosen, const int32_t *copies,
                                    RouterShape shape) {
    const size_t T = shape.T, E = shape.E, K = shape.K;
    const size_t begin = blockIdx.x * router_run, end = begin + router_run < T ? begin + router_run : T;
    const auto add = [&](size_t i, int64_t n) {
        atomicAdd(reinterpret_cast<unsigned long long *>(sums + i), (unsigned long long)n);
    };
    for (size_t e = threadIdx.x; e < E; e += blockDim.x) {
        int64_t tokens = 0, p = 0;
        for (size_t t = begin; t < end; t++) {
            for (size_t k = 0; k < K; k++) tokens += size_t(chosen[t * K + k]) == e ? copies[t] : 0;
            p += copies[t] * int64_t(probs[t * E + e] * router_unit);
        }
        add(e, tokens), add(E + e, p);
    }
    for (size_t t = begin + threadIdx.x; t < end; t += blockDim.x) {
        const int64_t n = copies[t];
        float entropy = 0;
        for (size_t e = 0; e < E; e++)
            if (const float p = probs[t * E + e]; p > 0) entropy -= p * logf(p);
        add(2 * E, n * int64_t(entropy * router_unit)), add(2 * E + 1, n);
    }
}

template <class X>
void router_sums(Cuda<X> dev, int64_t *sums, const float *probs, const int32_t *chosen, const int32_t *copies,
                 RouterShape shape) {
    launch(dev, router_sums_kernel1<X>, Grid{ceil_div(shape.T, router_run)}, 128, 0, sums, probs, chosen, copies, shape);
}

// A thread computes one token.
template <class X> __global__ void gate_forward_kernel1(float *weights, const float *logits, size_t T) {
    const size_t t = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (t < T) weights[t] = 1 / (1 + expf(-logits[t]));
}
template <class X> void gate_forward(Cuda<X> dev, float *weights, const float *logits, size_t T) {
    launch(dev, gate_forward_kernel1<X>, Grid{ceil_div(T, 128)}, 128, 0, weights, logits, T);
}

template <class X> __global__ void gate_backward_kernel1(X *dlogits, const float *dweights, const float *weights, size_t T) {
    const size_t t = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (t < T) dlogits[t] = dweights[t] * weights[t] * (1 - weights[t]);
}
template <class X> void gate_backward(Cuda<X> dev, X *dlogits, const float *dweights, const float *weights, size_t T) {
    launch(dev, gate_backward_kernel1<X>, Grid{ceil_div(T, 128)}, 128, 0, dlogits, dweights, weights, T);
}
}  // namespace CUDA_BACKEND
