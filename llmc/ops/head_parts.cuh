// head_parts on CUDA. Contract and formulas: head_parts.h.
#pragma once
#include "head_parts.h"
#include "warp.cuh"

inline namespace CUDA_BACKEND {
// A thread packs or merges one row.
template <class X, class Stats>
__global__ void __launch_bounds__(128) pack_head_stats_kernel1(float *part, Stats stats, size_t n) {
    const size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (i < n) pack_head_stats_row(part, stats, n, i);
}

template <class X, class Stats> void pack_head_stats(Cuda<X> dev, float *part, Stats stats, size_t n) {
    launch(dev, pack_head_stats_kernel1<X, Stats>, Grid{ceil_div(n, size_t(128))}, 128, 0, part, stats, n);
}

template <class X, class Stats>
__global__ void __launch_bounds__(128) merge_head_stats_kernel1(Stats stats, const float *parts, size_t R, size_t n) {
    const size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (i < n) merge_head_stats_row(stats, parts, R, n, i);
}

template <class X, class Stats> void merge_head_stats(Cuda<X> dev, Stats stats, const float *parts, size_t R, size_t n) {
    launch(dev, merge_head_stats_kernel1<X, Stats>, Grid{ceil_div(n, size_t(128))}, 128, 0, stats, parts, R, n);
}
}  // namespace CUDA_BACKEND
