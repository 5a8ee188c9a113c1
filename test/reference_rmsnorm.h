// rmsnorm in float64, and error bounds for float.
#pragma once
#include "check.h"

inline std::vector<double> rmsnorm_reference(const std::vector<double> &x, const std::vector<double> &w, size_t T, size_t C,
                                             double eps) {
    std::vector<double> out(T * C);
    for (size_t t = 0; t < T; t++) {
        double sum = 0;
        for (size_t c = 0; c < C; c++) sum += x[t * C + c] * x[t * C + c];
        for (size_t c = 0; c < C; c++) out[t * C + c] = x[t * C + c] / std::sqrt(sum / double(C) + eps) * w[c];
    }
    return out;
}

inline std::vector<float> rmsnorm_rstd(const std::vector<double> &x, size_t T, size_t C, double eps) {  // rounded to float
    std::vector<float> out(T);
    for (size_t t = 0; t < T; t++) {
        double sum = 0;
        for (size_t c = 0; c < C; c++) sum += x[t * C + c] * x[t * C + c];
        out[t] = float(1 / std::sqrt(sum / double(C) + eps));
    }
    return out;
}

struct RmsNormGradient {
    std::vector<double> dx, dw;
    std::vector<double> dw_terms;  // sum of the absolute values of the terms of dw; its rounding errors are relative to this
};

inline RmsNormGradient rmsnorm_backward_reference(const std::vector<double> &dout, const std::vector<double> &x,
                                                  const std::vector<double> &w, size_t T, size_t C, double eps) {
    RmsNormGradient g{std::vector<double>(T * C), std::vector<double>(C), std::vector<double>(C)};
    for (size_t t = 0; t < T; t++) {
        double sum = 0, dot = 0;
        for (size_t c = 0; c < C; c++) sum += x[t * C + c] * x[t * C + c];
        const double rstd = 1 / std::sqrt(sum / double(C) + eps);
        for (size_t c = 0; c < C; c++) dot += dout[t * C + c] * w[c] * x[t * C + c] * rstd;
        for (size_t c = 0; c < C; c++) {
            const double xh = x[t * C + c] * rstd;
            g.dx[t * C + c] = rstd * (dout[t * C + c] * w[c] - xh * dot / double(C));
            g.dw[c] += dout[t * C + c] * xh;
            g.dw_terms[c] += std::abs(dout[t * C + c] * xh);
        }
    }
    return g;
}

// A float sum of C terms is off by at most C roundings, and its few products by 8 more. The result is rounded once to X.
template <class X> double rmsnorm_error(size_t C, const std::vector<double> &want) {
    return (double(C + 8) * unit_roundoff<float> + unit_roundoff<X>)*largest(want);
}
inline double rmsnorm_dw_error(size_t T, size_t C, const RmsNormGradient &g) {
    return double(T + C + 8) * unit_roundoff<float> * largest(g.dw_terms);
}
