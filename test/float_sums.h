// Bounds for the error of a sum of n products of floats, or of bf16 with a float sum, relative to the sum of absolute values.
#pragma once
#include <algorithm>
#include <cmath>

#include "../llmc/core/device.h"

// If each addition rounds to nearest, errors have both signs and hardly exceed a few sqrt(n) u with u = 2^-24 (Higham and Mary, "A new approach to
// probabilistic rounding error analysis", SIAM J. Sci. Comput. 2019). Four are allowed.
inline double rounded_sum_error(size_t n) { return 4 * std::sqrt(double(n)) * 0x1p-24; }

// Tensor cores truncate (Fasi, Higham, Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ Computer Science 7:e330, 2021).
// They add a block of products to a float at a time: they shift all terms to the largest exponent, truncate the bits below the last bit of a
// float, add, and truncate the sum to a float. (Some GPUs keep one or two more bits; the bound does not rely on that.) Each of block + 1 terms
// loses less than an ulp of the largest term, 2 u of its size, and so does the sum. All losses are towards 0, so they add up to
// (2 (block + 1) + 2) u a block. GPUs with bf16 add 8 or more products at a time; fewer give a larger error.
constexpr size_t tensor_core_block = 8;
inline double truncated_sum_error(size_t n) {
    return double((n + tensor_core_block - 1) / tensor_core_block) * (2 * (tensor_core_block + 1) + 2) * 0x1p-24;
}

// The bound for sums on the device of the test: sums of bf16 run on tensor cores in code compiled by nvcc.
template <class X> double sum_error_of(size_t n) {
#ifdef __CUDACC__
    if (sizeof(X) == 2) return std::max(rounded_sum_error(n), truncated_sum_error(n));
#endif
    return rounded_sum_error(n);
}
