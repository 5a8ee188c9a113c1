// noise on CUDA. Contract: noise.h.
#pragma once
#include "noise.h"
#include "warp.cuh"

inline namespace CUDA_BACKEND {
// A thread computes one group of four channels, whose random words are one block of Philox. The kernel moves 2 T C elements.
template <class X> __global__ void noise_kernel1(X *x, TokenNoise noise, size_t C) {
    constexpr size_t group = TokenNoise::group;
    const size_t t = blockIdx.x, c = (blockIdx.y * size_t(blockDim.x) + threadIdx.x) * group;
    if (c >= C) return;
    const Counter words = noise.words(t, c);
    const size_t n = C - c < group ? C - c : group;
    for (size_t i = 0; i < n; i++) {
        X &value = x[t * C + c + i];
        value = float(value) + noise.magnitudes[t] * TokenNoise::uniform(words[int(i)]);
    }
}

template <class X> void noise_forward(Cuda<X> dev, X *x, TokenNoise noise, size_t T, size_t C) {
    constexpr unsigned threads = 128;
    launch(dev, noise_kernel1<X>, Grid{T, ceil_div(C, threads * TokenNoise::group)}, threads, 0, x, noise, C);
}
}  // namespace CUDA_BACKEND
