// gated_rmsnorm and sigmoid_gate in float64, and error bounds for float.
#pragma once
#include "reference_rmsnorm.h"

inline double silu(double z) { return z / (1 + std::exp(-z)); }

inline std::vector<double> gated_rmsnorm_reference(const std::vector<double> &x, const std::vector<double> &z,
                                                   const std::vector<double> &w, size_t T, size_t C, double eps) {
    std::vector<double> out = rmsnorm_reference(x, w, T, C, eps);
    for (size_t i = 0; i < out.size(); i++) out[i] *= silu(z[i]);
    return out;
}

struct GatedRmsNormGradient {
    RmsNormGradient norm;  // of x and w
    std::vector<double> dz;
    double dz_terms = 0;  // the largest term of dz
};

inline GatedRmsNormGradient gated_rmsnorm_backward_reference(const std::vector<double> &dout, const std::vector<double> &x,
                                                             const std::vector<double> &z, const std::vector<double> &w, size_t T,
                                                             size_t C, double eps) {
    GatedRmsNormGradient g;
    const std::vector<double> normed = rmsnorm_reference(x, w, T, C, eps);
    std::vector<double> gated(dout);
    for (size_t i = 0; i < dout.size(); i++) {
        const double s = 1 / (1 + std::exp(-z[i]));
        gated[i] *= silu(z[i]);
        g.dz.push_back(dout[i] * normed[i] * s * (1 + z[i] * (1 - s)));
        g.dz_terms = std::max(g.dz_terms, std::abs(dout[i] * normed[i]) * (1 + std::abs(z[i])));
    }
    g.norm = rmsnorm_backward_reference(gated, x, w, T, C, eps);
    return g;
}

// The gate adds 8 roundings to those of the norm.
template <class X> double gated_rmsnorm_error(size_t C, const std::vector<double> &want) { return rmsnorm_error<X>(C + 8, want); }
template <class X> double gated_rmsnorm_dz_error(size_t C, const GatedRmsNormGradient &g) {
    return double(C + 16) * unit_roundoff<float> * g.dz_terms + unit_roundoff<X> * largest(g.dz);
}
