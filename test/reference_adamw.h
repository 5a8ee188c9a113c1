// AdamW in float64, and error bounds for float.
#pragma once
#include <bit>

#include "../llmc/ops/adamw.h"
#include "check.h"

struct AdamWState {
    std::vector<double> master, m, v;
};

inline void adamw_reference(AdamWState &r, const std::vector<double> &grads, AdamW a) {
    for (size_t i = 0; i < grads.size(); i++) {
        const double g = a.grad_scale * grads[i];
        r.m[i] = a.beta1 * r.m[i] + (1 - a.beta1) * g;
        r.v[i] = a.beta2 * r.v[i] + (1 - a.beta2) * g * g;
        const double m_hat = r.m[i] / (1 - std::pow(a.beta1, double(a.step))),
                     v_hat = r.v[i] / (1 - std::pow(a.beta2, double(a.step)));
        r.master[i] -= a.lr * a.weight_decay * r.master[i] + a.lr * m_hat / (std::sqrt(v_hat) + a.eps);
    }
}

inline AdamW adamw_setting(size_t step) { return {1e-2, 0.9, 0.999, 1e-8, 0.1, 0.37, step}; }

// For |p| < 5 and updates of at most lr * sqrt(steps). The terms of m may cancel; their roundings do not.
struct AdamWError {
    double params, m, v;
};
inline AdamWError adamw_error(size_t steps) {
    const double n = double(steps), u = 0x1p-24;
    return {n * u * (2 * 5 + 16 * 1e-2 * std::sqrt(n)), 4 * n * u * 5, 4 * n * u * 25 * 1e-3 * n};
}

// Expects the nearest X of each parameter; of two equally near values, the one farther from zero.
template <class X> void expect_nearest(const std::vector<X> &rounded, const std::vector<float> &params) {
    for (size_t i = 0; i < params.size(); i++) {
        const uint32_t u = std::bit_cast<uint32_t>(params[i]);
        const float zeros = std::bit_cast<float>(u & 0xffff0000), other = std::bit_cast<float>((u & 0xffff0000) + 0x10000);
        const float nearest = std::abs(params[i] - zeros) < std::abs(other - params[i]) ? zeros : other;
        ASSERT_EQ(float(rounded[i]), sizeof(X) == sizeof(float) ? params[i] : nearest) << i;
    }
}
