// Products of the linear layer in float64, and an error bound for float: that of float_sums.h for K + 1 terms, and one rounding to the type of the
// output.
#pragma once
#include "check.h"
#include "float_sums.h"

struct Sums {
    std::vector<double> value;
    double largest = 0, largest_absolute = 0;  // of all elements: |sum a b + c|, sum |a b| + |c|
    double (*sum_error)(size_t terms) = rounded_sum_error;
};

// (M, N): sum_k a(i, k) b(k, j) + c(i, j) with strides as in Matrix; c is empty, one row or (M, N).
template <class X>
Sums product_reference(const std::vector<X> &a, size_t a_row, size_t a_column, const std::vector<X> &b, size_t b_row,
                       size_t b_column, const std::vector<double> &c, size_t M, size_t N, size_t K) {
    Sums out;
    out.sum_error = sum_error_of<X>;
    const auto wa = widen(a), wb = widen(b);
    for (size_t i = 0; i < M; i++)
        for (size_t j = 0; j < N; j++) {
            double sum = c.empty() ? 0 : c[c.size() == N ? j : i * N + j], absolute = std::abs(sum);
            for (size_t k = 0; k < K; k++) {
                const double p = wa[i * a_row + k * a_column] * wb[k * b_row + j * b_column];
                sum += p;
                absolute += std::abs(p);
            }
            out.value.push_back(sum);
            out.largest = std::max(out.largest, std::abs(sum));
            out.largest_absolute = std::max(out.largest_absolute, absolute);
        }
    return out;
}

template <class Out> double allowed(const Sums &s, size_t K) {
    return s.sum_error(K + 1) * s.largest_absolute + unit_roundoff<Out> * s.largest * 1.01;
}
