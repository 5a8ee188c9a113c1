// dropout on CUDA. Contract: dropout.h.
#pragma once
#include "dropout.h"
#include "warp.cuh"

inline namespace CUDA_BACKEND {
// A thread computes one group of four channels, whose random words are one block of Philox. Forward the kernel moves 2 T C elements, and with
// `add`, which is the backward pass, 3 T C.
template <class X, bool add> __global__ void dropout_kernel1(X *out, const X *x, DropoutMask mask, size_t C) {
    constexpr size_t group = DropoutMask::group;
    const size_t t = blockIdx.x, before_first = mask.first % group,
                 begin = (blockIdx.y * size_t(blockDim.x) + threadIdx.x) *
                         group;  // of the group, counted from the group of x's first channel
    if (begin >= before_first + C) return;
    Counter words{};
    if (mask.threshold) words = mask.words(t, mask.first - before_first + begin);
    for (size_t i = 0; i < group; i++) {
        if (begin + i < before_first || begin + i >= before_first + C) continue;
        const size_t at = t * C + begin + i - before_first;
        const bool kept = words[int(i)] >= mask.threshold;
        const float before = add ? float(out[at]) : 0.0f;
        out[at] = kept ? before + mask.scale * float(x[at]) : before;
    }
}

template <bool add, class X> void dropout_launch(Cuda<X> dev, X *out, const X *x, DropoutMask mask, size_t T, size_t C) {
    constexpr unsigned threads = 128;
    launch(dev, dropout_kernel1<X, add>, Grid{T, ceil_div(mask.first % DropoutMask::group + C, threads * DropoutMask::group)},
           threads, 0, out, x, mask, C);
}

template <class X> void dropout_forward(Cuda<X> dev, X *out, const X *x, DropoutMask mask, size_t T, size_t C) {
    dropout_launch<false>(dev, out, x, mask, T, C);
}
template <class X> void dropout_backward(Cuda<X> dev, X *dx, const X *dout, DropoutMask mask, size_t T, size_t C) {
    dropout_launch<true>(dev, dx, dout, mask, T, C);
}
}  // namespace CUDA_BACKEND
