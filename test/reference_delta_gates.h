// delta_gates in float64, and error bounds for float.
#pragma once
#include "check.h"

struct DeltaGatesReference {
    std::vector<double> g, beta;
};

// ba (T, 2 H): a row is b, then a
inline DeltaGatesReference delta_gates_reference(const std::vector<double> &ba, const std::vector<double> &A_log,
                                                 const std::vector<double> &dt_bias, size_t T, size_t H) {
    DeltaGatesReference out;
    for (size_t t = 0; t < T; t++)
        for (size_t h = 0; h < H; h++) {
            const double x = ba[t * 2 * H + H + h] + dt_bias[h];
            out.g.push_back(-std::exp(A_log[h]) * (std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x)))));
            out.beta.push_back(1 / (1 + std::exp(-ba[t * 2 * H + h])));
        }
    return out;
}

struct DeltaGatesGradient {
    std::vector<double> dba, dA_log, ddt_bias;
    std::vector<double> A_terms,
        bias_terms;  // sums of the absolute values of the terms, to which their rounding errors are relative
};

inline DeltaGatesGradient delta_gates_backward_reference(const std::vector<double> &dg, const std::vector<double> &dbeta,
                                                         const std::vector<double> &ba, const std::vector<double> &A_log,
                                                         const std::vector<double> &dt_bias, size_t T, size_t H) {
    const DeltaGatesReference gates = delta_gates_reference(ba, A_log, dt_bias, T, H);
    const std::vector<double> zeros(H);
    DeltaGatesGradient d{std::vector<double>(ba.size()), zeros, zeros, zeros, zeros};
    for (size_t t = 0; t < T; t++)
        for (size_t h = 0; h < H; h++) {
            const size_t i = t * H + h;
            const double da = -dg[i] * std::exp(A_log[h]) / (1 + std::exp(-ba[t * 2 * H + H + h] - dt_bias[h]));
            d.dba[t * 2 * H + h] = dbeta[i] * gates.beta[i] * (1 - gates.beta[i]);
            d.dba[t * 2 * H + H + h] = da;
            d.dA_log[h] += dg[i] * gates.g[i], d.A_terms[h] += std::abs(dg[i] * gates.g[i]);
            d.ddt_bias[h] += da, d.bias_terms[h] += std::abs(da);
        }
    return d;
}

// Exponentials count as two roundings, and log1p as two: softplus has at most 8, with that of a + dt_bias, which exp multiplies by its argument, at
// most 10 here; g, beta and the gradients have at most 8 more. 1 - beta is off by a rounding of 1.
constexpr double delta_gates_roundings = 24;

template <class X> double delta_gates_error(const std::vector<double> &want) {
    return (delta_gates_roundings * unit_roundoff<float> + unit_roundoff<X>)*largest(want);
}
inline double delta_gates_sum_error(size_t T, const std::vector<double> &terms) {
    return (double(T) + delta_gates_roundings) * unit_roundoff<float> * largest(terms);
}
