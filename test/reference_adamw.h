// AdamW as torch computes it and in float64, and how far float may be from them.
#pragma once
#include <bit>

#include "../llmc/ops/adamw.h"
#include "check.h"

// Made with torch 2.15.0: AdamW([1, -0.5, 0.25, 3, 0], betas (0.9, 0.95), eps 1e-8, weight_decay 0.1), learning rate 0.01 /
// step and gradient (0.5, -0.25 step, 0, 2 - step, 1e-9) at step = 1 .. 10. The last parameter feels eps.
constexpr size_t torch_n = 5;
struct TorchState {
    size_t step;
    std::vector<float> params;
};
inline const TorchState torch_states[] = {
    {1, {0.989000022f, -0.489500016f, 0.249750003f, 2.98699999f, -0.000909090915f}},
    {2, {0.983505487f, -0.484465331f, 0.249625117f, 2.98211336f, -0.00136318186f}},
    {10, {0.967820168f, -0.470239878f, 0.249268636f, 2.98611307f, -0.0026595057f}},
};
inline const std::vector<float> torch_m = {0.3256607949733734f, -1.0345264673233032f, 0, -2.835462808609009f,
                                           6.513215522474525e-10f};
inline const std::vector<float> torch_v = {0.100315772f, 1.08349538f, 0, 9.43697262f, 4.01262989e-19f};

// Both round the same formula in float. A step has two roundings of the parameter and a dozen of an update of at most 0.02,
// so ten steps are within 20 * 2^-24 * 3 + 10 * 12 * 2^-24 * 0.02; the moments take at most four roundings a step.
constexpr double torch_error = 20 * 0x1p-24 * 3 + 120 * 0x1p-24 * 0.02;

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

// |p| < 5, an update is at most lr * sqrt(steps) (and m may cancel, which its roundings do not)
struct AdamWError {
    double params, m, v;
};
inline AdamWError adamw_error(size_t steps) {
    const double n = double(steps), u = 0x1p-24;
    return {n * u * (2 * 5 + 16 * 1e-2 * std::sqrt(n)), 4 * n * u * 5, 4 * n * u * 25 * 1e-3 * n};
}

// The model's view of its parameters: the nearest X; of two equally near, the one farther from zero.
template <class X> void expect_nearest(const std::vector<X> &rounded, const std::vector<float> &params) {
    for (size_t i = 0; i < params.size(); i++) {
        const uint32_t u = std::bit_cast<uint32_t>(params[i]);
        const float zeros = std::bit_cast<float>(u & 0xffff0000), other = std::bit_cast<float>((u & 0xffff0000) + 0x10000);
        const float nearest = std::abs(params[i] - zeros) < std::abs(other - params[i]) ? zeros : other;
        ASSERT_EQ(float(rounded[i]), sizeof(X) == sizeof(float) ? params[i] : nearest) << i;
    }
}

inline void expect_adamw(const std::vector<float> &p, const std::vector<float> &m, const std::vector<float> &v,
                         const AdamWState &want, size_t steps) {
    const AdamWError allowed = adamw_error(steps);
    expect_close("params", p, want.master, allowed.params);
    expect_close("m", m, want.m, allowed.m);
    expect_close("v", v, want.v, allowed.v);
}
