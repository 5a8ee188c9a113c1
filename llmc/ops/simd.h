// Elementary functions that GCC vectorises inside `#pragma omp simd` loops, which it cannot do with calls to libm: no branches,
// no calls, only arithmetic and selects.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

// exp(x) to 1 unit in the last place. Results below 2^-126 are 0 (so exp(-inf) = 0), above the largest float +inf; NaN stays NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2; exp(r) by the polynomial of Cephes' expf (Moshier), then n is added to its exponent.
inline float fast_exp(float x) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it leaves round(x / ln 2) in the low bits of the sum
    const float shifted = x * 1.44269504f + magic, n = shifted - magic;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts: n times the first is exact
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * r) * r + r + 1.0f;
    const float scaled = std::bit_cast<float>(std::bit_cast<uint32_t>(p) + (std::bit_cast<uint32_t>(shifted) << 23));
    const float positive = x >= -87.33654f ? scaled : 0.0f;
    return x <= 88.72283f ? positive : x + INFINITY;  // a NaN takes the second arm, whose sum keeps it
}
