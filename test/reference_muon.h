// The ops of Muon in float64, or with the roundings of an op: sums of type Sum, matrices of type X.
#pragma once
#include <utility>

#include "../llmc/ops/muon.h"
#include "check.h"

template <class X, class Sum> std::vector<double> orthogonalise_reference(std::vector<double> x, size_t R, size_t C) {
    const auto rounded = [](Sum value) {
        if constexpr (std::is_same_v<X, double>) return value;
        else return double(float(X(float(value))));
    };
    const auto transposed = [](const std::vector<double> &from, size_t rows, size_t columns) {
        std::vector<double> out(from.size());
        for (size_t i = 0; i < from.size(); i++) out[i % columns * rows + i / columns] = from[i];
        return out;
    };
    if (R > C) return transposed(orthogonalise_reference<X, Sum>(transposed(x, R, C), C, R), C, R);
    const auto product = [&](const std::vector<double> &a, const std::vector<double> &b, size_t k, size_t n, bool b_transposed) {
        std::vector<Sum> out(R * n);  // a (R, k)
        for (size_t r = 0; r < R; r++)
            for (size_t c = 0; c < n; c++)
                for (size_t i = 0; i < k; i++)
                    out[r * n + c] += Sum(a[r * k + i]) * Sum(b_transposed ? b[c * k + i] : b[i * n + c]);
        return out;
    };
    const auto polynomial = [&](const std::vector<Sum> &a, double scale, double shift) {
        std::vector<double> out(R * R);
        for (size_t i = 0; i < out.size(); i++) out[i] = rounded(Sum(scale) * a[i] + Sum(i % (R + 1) ? 0 : shift));
        return out;
    };
    double squares = 0;
    for (double e : x) squares += e * e;
    for (double &e : x) e = rounded(Sum(e / std::max(std::sqrt(squares), 1e-7)));
    for (int i = 0; i < 5; i++) {
        const std::vector<Sum> gram = product(x, x, C, R, true);
        const auto inner = product(polynomial(gram, 2.0315, -4.7750), polynomial(gram, 1, 0), R, R, true);
        const auto next = product(polynomial(inner, 1, 3.4445), x, R, C, false);
        std::transform(next.begin(), next.end(), x.begin(), rounded);
    }
    return x;
}

inline double norm_of(const std::vector<double> &x) {
    double squares = 0;
    for (double e : x) squares += e * e;
    return std::sqrt(squares);
}

inline double distance(const std::vector<double> &a, const std::vector<double> &b) {
    std::vector<double> difference(a.size());
    for (size_t i = 0; i < a.size(); i++) difference[i] = a[i] - b[i];
    return norm_of(difference);
}
