// sample on CUDA. Contract and formulas: sample.h.
#pragma once
#include "sample.h"
#include "warp.cuh"

namespace sampling {
inline namespace CUDA_BACKEND {

constexpr unsigned sample_threads = 1024, sample_warps = sample_threads / 32, digits = 16;

struct SampleShared {
    uint64_t of_warp[sample_warps], of_digit[sample_warps][digits - 1], up_to_digit[digits - 1];
    float floats[32];
    uint32_t found;
};

// Returns the first id of [0, n) whose cumulative weight, in the order of ids, exceeds `target`; 0 if there is none. Each warp sums a run of ids, and
// the warp of the run with the result scans it.
template <class Weight> __device__ uint32_t locate(SampleShared &s, uint32_t n, uint64_t target, Weight weight) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, run = (n + sample_warps - 1) / sample_warps;
    const uint32_t begin = min(n, warp * run), end = min(n, begin + run);
    uint64_t sum = 0;
    for (uint32_t v = begin + lane; v < end; v += 32) sum += weight(v);
    sum = warp_sum(sum);
    if (lane == 0) s.of_warp[warp] = sum;
    if (threadIdx.x == 0) s.found = 0;
    __syncthreads();
    uint32_t owner = 0;
    while (owner < sample_warps && target >= s.of_warp[owner]) target -= s.of_warp[owner++];
    for (uint32_t v0 = begin; owner == warp && v0 < end; v0 += 32) {
        uint64_t up_to = v0 + lane < end ? weight(v0 + lane) : 0;
        for (uint32_t distance = 1; distance < 32; distance *= 2) {
            const uint64_t before = __shfl_up_sync(all_lanes, up_to, distance);
            if (lane >= distance) up_to += before;
        }
        if (const unsigned above = __ballot_sync(all_lanes, up_to > target)) {
            if (lane == 0) s.found = v0 + uint32_t(__ffs(int(above))) - 1;
            break;
        }
        target -= __shfl_sync(all_lanes, up_to, 31);
    }
    __syncthreads();
    const uint32_t found = s.found;
    __syncthreads();
    return found;
}

// Row::cut with digits of 4 bits: in each of 8 passes every thread keeps the sums of 15 digits in registers.
template <class Weight>
__device__ void cut(SampleShared &s, Kept &kept, const float *l, uint32_t n, uint64_t target, Weight weight) {
    using Sum = decltype(weight(0u));  // 32 bits if weights count ids
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t prefix = 0, mask = 0;
    for (int shift = 28; shift >= 0; shift -= 4) {
        Sum sums[digits - 1] = {};  // cumulative, by digit
        for (uint32_t v = threadIdx.x; v < n; v += sample_threads) {
            const uint32_t rank = rank_of(l[v]);
            if ((rank & mask) != prefix || !kept.has(rank, v)) continue;
            const Sum w = weight(v);
#pragma unroll
            for (uint32_t d = 0; d < digits - 1; d++) sums[d] += (rank >> shift & (digits - 1)) <= d ? w : 0;
        }
#pragma unroll
        for (uint32_t d = 0; d < digits - 1; d++) {
            const Sum sum = warp_sum(sums[d]);
            if (lane == 0) s.of_digit[warp][d] = sum;
        }
        __syncthreads();
        if (threadIdx.x < digits - 1) {
            uint64_t sum = 0;
            for (uint32_t w = 0; w < sample_warps; w++) sum += s.of_digit[w][threadIdx.x];
            s.up_to_digit[threadIdx.x] = sum;
        }
        __syncthreads();
        uint32_t digit = 0;
        while (digit < digits - 1 && target >= s.up_to_digit[digit]) digit++;
        if (digit > 0) target -= s.up_to_digit[digit - 1];
        prefix |= digit << shift, mask |= (digits - 1) << shift;
        __syncthreads();
    }
    const uint32_t last = locate(s, n, target, [&](uint32_t v) {
        const uint32_t rank = rank_of(l[v]);
        return rank == prefix && kept.has(rank, v) ? weight(v) : 0;
    });
    kept.last_rank = prefix, kept.last_id = last;
}

// Returns the largest of n logits to every thread; infinity if one is NaN.
__device__ inline float largest(SampleShared &s, const float *l, uint32_t n) {
    float max = -INFINITY;
    for (uint32_t v = threadIdx.x; v < n; v += sample_threads) max = fmaxf(max, or_infinity(l[v]));
    return block_max(max, s.floats);
}

// A block samples one row. It reads the row from the L2 cache once per filter, and twice without filters.
template <class X>
__global__ void __launch_bounds__(sample_threads)
    sample_kernel1(int32_t *tokens, float *logps, float *logits, Draws draws, Rule rule, uint32_t n, size_t V, size_t ld) {
    SampleShared &s = shared_mem<SampleShared>();
    const size_t row = blockIdx.x;
    float *const l = logits + row * ld;
    if (draws.occurred)
        for (int32_t i = draws.first_occurred[row] + int32_t(threadIdx.x); i < draws.first_occurred[row + 1];
             i += int32_t(sample_threads))
            l[draws.occurred[i]] = penalised(l[draws.occurred[i]], rule.penalty);
    __syncthreads();
    Kept kept{largest(s, l, n), rule.scale};
    if (threadIdx.x == 0)
        for (int32_t i = draws.first[row]; i < draws.first[row + 1]; i++) tokens[i] = no_token;
    if (!(fabsf(kept.max) < INFINITY)) return;
    const auto mass = [&](uint32_t v) { return uint64_t(kept.mass(l[v], v)); };
    const auto total = [&] {
        uint64_t sum = 0;
        for (uint32_t v = threadIdx.x; v < n; v += sample_threads) sum += mass(v);
        return block_sum(sum, s.of_warp);
    };
    uint64_t all = 0;
    if (!rule.greedy) {
        if (rule.top_k && rule.top_k < n) {
            cut(s, kept, l, n, rule.top_k - 1, [](uint32_t) { return 1u; });
            kept.last_id = n;  // with all equal ones
        }
        all = total();
        if (rule.top_p && all > 0) cut(s, kept, l, n, rule.below_top_p(all), mass);
        kept.least = rule.least;
        if (rule.top_p || rule.least) all = total();
    }
    float max = 0, log_sum = 0;
    if (logps) {
        max = largest(s, l, uint32_t(V)) * (1 / rule.temperature);
        float sum = 0;
        for (size_t v = threadIdx.x; v < V; v += sample_threads) sum += expf(l[v] * (1 / rule.temperature) - max);
        log_sum = logf(block_sum(sum, s.floats));
    }
    for (int32_t i = draws.first[row]; i < draws.first[row + 1]; i++) {
        const uint32_t token = all > 0 ? locate(s, n, part_of(all, draws.random[i]), mass)
                                       : locate(s, n, 0, [&](uint32_t v) { return uint64_t(l[v] == kept.max); });
        if (threadIdx.x > 0) continue;
        tokens[i] = int32_t(token);
        if (logps) logps[i] = l[token] * (1 / rule.temperature) - max - log_sum;
    }
}

}  // namespace CUDA_BACKEND
}  // namespace sampling

inline namespace CUDA_BACKEND {

template <class X>
void sample(Cuda<X> dev, int32_t *tokens, float *logps, float *logits, const Draws &draws, const Sampling &s, size_t vocabulary,
            size_t rows, size_t V, size_t ld) {
    using namespace sampling;
    launch(dev, sample_kernel1<X>, Grid{rows}, sample_threads, sizeof(SampleShared), tokens, logps, logits, draws, Rule(s),
           uint32_t(vocabulary), V, ld);
}

}  // namespace CUDA_BACKEND
