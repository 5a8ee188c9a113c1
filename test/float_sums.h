// How far a sum of n products of floats, or of bf16 with a float sum, may be off, relative to the sum of their sizes.
#pragma once
#include <algorithm>
#include <cmath>

#include "../llmc/core/device.h"

// Where each addition rounds to nearest, errors have both signs, and hardly grow faster than a few sqrt(n) u with u = 2^-24 (Higham and Mary, "A
// new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 2019): four are allowed.
inline double rounded_sum_error(size_t n) { return 4 * std::sqrt(double(n)) * 0x1p-24; }

// Tensor cores cut off (Fasi, Higham, Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ Computer Science 7:e330, 2021). They
// add a block of products to a float at a time: shift all of them to the largest exponent, cut off the bits below a float's last bit,
// add, and cut the sum off to a float. (Some keep a bit or two more; none is relied on.) Each of block + 1 terms loses less than an ulp of
// the largest, 2 u of its size, and so does the sum. All losses go towards 0, so they add up: to (2 (block + 1) + 2) u a block. GPUs with
// bf16 take 8 products or more at a time, and the fewer, the larger the error.
constexpr size_t tensor_core_block = 8;
inline double truncated_sum_error(size_t n) {
    return double((n + tensor_core_block - 1) / tensor_core_block) * (2 * (tensor_core_block + 1) + 2) * 0x1p-24;
}

// Bounds of sums on this test's device: sums of bf16 run on tensor cores where nvcc compiles it.
template <class X> double sum_error_of(size_t n) {
#ifdef __CUDACC__
    if (sizeof(X) == 2) return std::max(rounded_sum_error(n), truncated_sum_error(n));
#endif
    return rounded_sum_error(n);
}
