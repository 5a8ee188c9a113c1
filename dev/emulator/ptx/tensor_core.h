// Sums of products with the rounding of tensor cores.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace ptx {

// d[n] += sum over k of a[k] b[k][n]. Tensor cores do not round each term. They align all products and the addend to the largest exponent, truncate
// bits more than `spare` places below a float's last bit, add, and truncate the sum to a float. This was observed (Fasi, Higham, Mikaitis, Pranesh:
// "Numerical behavior of NVIDIA tensor cores", 2021); the manual promises no more.
template <int K, int N> void add_products(const double (&a)[K], const double (&b)[K][N], double (&d)[N], int spare = 2) {
    double largest[N], sum[N], unit[N];
    for (int n = 0; n < N; n++) largest[n] = std::fabs(d[n]);
    for (int k = 0; k < K; k++)
        for (int n = 0; n < N; n++) largest[n] = std::max(largest[n], std::fabs(a[k] * b[k][n]));
    // Adding and subtracting 1.5 * 2^52 units would round to a unit; dividing by the unit and trunc() truncate.
    const uint64_t bits = uint64_t(23 + spare);
    for (int n = 0; n < N; n++) {
        const uint64_t exponent = std::bit_cast<uint64_t>(largest[n]) >> 52;
        unit[n] = exponent > bits ? std::bit_cast<double>((exponent - bits) << 52) : 0x1p-1022;
        sum[n] = std::trunc(d[n] / unit[n]);
    }
    for (int k = 0; k < K; k++)
        for (int n = 0; n < N; n++) sum[n] += std::trunc(a[k] * b[k][n] / unit[n]);
    for (int n = 0; n < N; n++) {
        const double exact = sum[n] * unit[n];
        const float near = float(exact);
        d[n] = double(std::fabs(double(near)) > std::fabs(exact) && std::isfinite(near) ? std::nextafterf(near, 0.0f) : near);
    }
}
}  // namespace ptx
