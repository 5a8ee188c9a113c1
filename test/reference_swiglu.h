// swiglu in float64, and error bounds for float.
#pragma once
#include <numbers>

#include "../llmc/ops/swiglu.h"
#include "check.h"

struct GateFactor {
    double s, slope;  // s, and e'
};
inline GateFactor gate_factor(Gate form, double g) {
    if (form == Gate::silu) return {1 / (1 + std::exp(-g)), 1};
    const double c = std::sqrt(8 / std::numbers::pi);
    return {1 / (1 + std::exp(-c * (g + 0.044715 * g * g * g))), c * (1 + 3 * 0.044715 * g * g)};
}

inline std::vector<double> swiglu_reference(const std::vector<double> &gate_up, size_t T, size_t F, Gate form = Gate::silu) {
    std::vector<double> out(T * F);
    for (size_t t = 0; t < T; t++)
        for (size_t f = 0; f < F; f++) {
            const double g = gate_up[t * 2 * F + f], u = gate_up[t * 2 * F + F + f];
            out[t * F + f] = g * gate_factor(form, g).s * u;
        }
    return out;
}

inline std::vector<double> swiglu_backward_reference(const std::vector<double> &dout, const std::vector<double> &gate_up,
                                                     size_t T, size_t F, Gate form = Gate::silu) {
    std::vector<double> d(T * 2 * F);
    for (size_t t = 0; t < T; t++)
        for (size_t f = 0; f < F; f++) {
            const double g = gate_up[t * 2 * F + f], u = gate_up[t * 2 * F + F + f];
            const auto [s, slope] = gate_factor(form, g);
            d[t * 2 * F + f] = dout[t * F + f] * u * (s + g * s * (1 - s) * slope);
            d[t * 2 * F + F + f] = dout[t * F + f] * g * s;
        }
    return d;
}

// At most 8 roundings of float (exp counts as two) of factors no larger than the result, then one to X. With gelu the exponent e has 5 more, which
// change s by 5 u |e| s (1 - s), less than 2 u.
template <class X>
double swiglu_error(const std::vector<double> &want, const std::vector<double> &gate_up, size_t T, size_t F,
                    Gate form = Gate::silu) {
    double terms = 0;
    for (size_t t = 0; t < T && form == Gate::gelu; t++)
        for (size_t f = 0; f < F; f++) terms = std::max(terms, std::abs(gate_up[t * 2 * F + f] * gate_up[t * 2 * F + F + f]));
    return (8 * unit_roundoff<float> + unit_roundoff<X>)*largest(want) + 2 * unit_roundoff<float> * terms;
}

// The terms of 1 + g (1 - s) e' may cancel, so its error is that of g (1 - s) e', which is at most the largest |g| e'. With gelu the roundings of the
// exponent change s (1 - s) g e' by less than 15 u e^2 s (1 - s), which is less than 7 u.
template <class X>
double swiglu_backward_error(const std::vector<double> &want, const std::vector<double> &dout, const std::vector<double> &gate_up,
                             size_t T, size_t F, Gate form = Gate::silu) {
    double terms = 0;
    for (size_t t = 0; t < T; t++)
        for (size_t f = 0; f < F; f++) {
            const double g = gate_up[t * 2 * F + f], u = gate_up[t * 2 * F + F + f];
            terms = std::max(terms, std::abs(dout[t * F + f] * u) * (1 + std::abs(g) * gate_factor(form, g).slope));
        }
    return 8 * unit_roundoff<float> * terms + unit_roundoff<X> * largest(want);
}
