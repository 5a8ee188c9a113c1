// dequantise on CUDA. Contract: quantised.h.
#pragma once
#include "quantised.h"
#include "warp.cuh"

inline namespace CUDA_BACKEND {
// A thread writes 8 weights, which lie in one block. The kernel reads q.bits / 8 bytes a weight and writes sizeof(X).
template <class X> __global__ void dequantise_kernel1(X *out, Quantised q) {
    const size_t first = (blockIdx.x * size_t(blockDim.x) + threadIdx.x) * 8;
    if (first >= q.count) return;
    const size_t end = first + 8 < q.count ? first + 8 : q.count;
    const float m = q.bits == 4 ? nf4_magnitude(q, first / nf4_block) : 0;
    for (size_t i = first; i < end; i++) {
        if (q.bits == 8) out[i] = float(int8_t(q.codes[i])) * q.groups[i / q.columns];
        else out[i] = nf4_value(i % 2 ? q.codes[i / 2] & 15 : q.codes[i / 2] >> 4) * m;
    }
}

template <class X> void dequantise(Cuda<X> dev, X *out, Quantised q) {
    constexpr unsigned threads = 256;
    launch(dev, dequantise_kernel1<X>, Grid{ceil_div(q.count, size_t(threads) * 8)}, threads, 0, out, q);
}
}  // namespace CUDA_BACKEND
