// gelu in float64, and error bounds for float.
#pragma once
#include "../llmc/ops/gelu.h"
#include "check.h"

template <Gelu form> constexpr const char *gelu_name = form == Gelu::erf ? "erf" : "tanh";

struct GeluReference {
    double P, slope;  // of P
    double exponent;  // of exp in P
};

template <Gelu form> GeluReference gelu_reference(double x) {
    const double pi = std::acos(-1.0);
    if constexpr (form == Gelu::erf)
        return {std::erfc(-x / std::sqrt(2.0)) / 2, std::exp(-x * x / 2) / std::sqrt(2 * pi), -x * x / 2};
    const double a = std::sqrt(2 / pi), u = a * (x + 0.044715 * x * x * x), P = 1 / (1 + std::exp(-2 * u));
    return {P, P / (1 + std::exp(2 * u)) * 2 * a * (1 + 3 * 0.044715 * x * x), -2 * u};
}

template <Gelu form> std::vector<double> gelu_reference(const std::vector<double> &x) {
    std::vector<double> out;
    for (const double v : x) out.push_back(v * gelu_reference<form>(v).P);
    return out;
}

template <Gelu form> std::vector<double> gelu_backward_reference(const std::vector<double> &dout, const std::vector<double> &x) {
    std::vector<double> dx;
    for (size_t i = 0; i < x.size(); i++) {
        const GeluReference r = gelu_reference<form>(x[i]);
        dx.push_back(dout[i] * (r.P + x[i] * r.slope));
    }
    return dx;
}

// The relative error of P in float. The exponent has 4 roundings, so exp is off by 4 roundings times the exponent, and by 2 of its own. The form
// with erf has 3 roundings in t, 8 in the polynomial, whose alternating terms are up to 3 times the sum, and 1.7e-8, a third of a rounding, in the
// coefficients: fewer than 40 together.
inline double gelu_P_error(const GeluReference &r) { return (40 + 4 * std::abs(r.exponent)) * unit_roundoff<float>; }

template <Gelu form, class X> double gelu_error(const std::vector<double> &x) {
    double error = 0;
    for (const double v : x) {
        const GeluReference r = gelu_reference<form>(v);
        error = std::max(error, std::abs(v) * r.P * (gelu_P_error(r) + unit_roundoff<X>));
    }
    return error;
}

// The slope of P has the error of P. In the form with tanh, 1 - P has a rounding of 1, which in x P' = x P (1 - P) 2 u' is a rounding of
// x P 2 u'.
template <Gelu form, class X> double gelu_backward_error(const std::vector<double> &dout, const std::vector<double> &x) {
    double error = 0;
    for (size_t i = 0; i < x.size(); i++) {
        const GeluReference r = gelu_reference<form>(x[i]);
        const double of_one = form == Gelu::erf ? 0 : std::abs(x[i]) * r.P * 1.6 * (1 + 0.135 * x[i] * x[i]);
        error = std::max(error, std::abs(dout[i]) * ((r.P + std::abs(x[i] * r.slope)) *
                                                     (2 * gelu_P_error(r) + unit_roundoff<X>)+of_one * 4 * unit_roundoff<float>));
    }
    return error;
}

// Far from 0, gelu and silu are 0 or x, and their derivatives 0 or 1; NaN gives NaN.
inline const std::vector<float> extreme_inputs = {-1e30f, -1000, -100, -0.0f, 0, 100, 1000, 1e30f, NAN};

// dx: for dout = 1. error: of a factor of both that is 1
template <class X> void expect_extremes(const std::vector<X> &out, const std::vector<X> &dx, double error = 0) {
    const std::vector<float> want = {0, 0, 0, 0, 0, 100, 1000, 1e30f}, slope = {0, 0, 0, 0.5f, 0.5f, 1, 1, 1};
    for (size_t i = 0; i < want.size(); i++) {
        EXPECT_NEAR(float(out[i]), float(X(want[i])), 1e-30 + error * want[i]) << extreme_inputs[i];
        EXPECT_NEAR(float(dx[i]), slope[i], 1e-30 + error * slope[i]) << extreme_inputs[i];
    }
    EXPECT_TRUE(std::isnan(float(out.back())) && std::isnan(float(dx.back())));
}
