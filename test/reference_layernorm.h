// layernorm in float64, and error bounds for float.
#pragma once
#include "check.h"

struct LayerNormRows {
    std::vector<double> out, mean, rstd;
    double xh_roundings = 0, out_roundings = 0;  // of float in xh and out (layernorm_error)
};

// The maximum number of float roundings in xh = (x - mean) * rstd. The mean is rounded once. The shift of the mean and the variance are sums of C
// terms of the size of |x - mean|, on average 1 / rstd, and so have C roundings of these.
inline double layernorm_xh_roundings(size_t C, double xh, double mean, double rstd) {
    return double(C + 8) * (1 + std::abs(xh)) + 2 * std::abs(mean) * rstd;
}

inline LayerNormRows layernorm_reference(const std::vector<double> &x, const std::vector<double> &w,
                                         const std::vector<double> &bias, size_t T, size_t C, double eps) {
    LayerNormRows rows{std::vector<double>(T * C), std::vector<double>(T), std::vector<double>(T)};
    for (size_t t = 0; t < T; t++) {
        double sum = 0, squares = 0;
        for (size_t c = 0; c < C; c++) sum += x[t * C + c];
        const double mean = rows.mean[t] = sum / double(C);
        for (size_t c = 0; c < C; c++) squares += (x[t * C + c] - mean) * (x[t * C + c] - mean);
        const double rstd = rows.rstd[t] = 1 / std::sqrt(squares / double(C) + eps);
        for (size_t c = 0; c < C; c++) {
            const double xh = (x[t * C + c] - mean) * rstd, roundings = layernorm_xh_roundings(C, xh, mean, rstd);
            rows.out[t * C + c] = xh * w[c] + bias[c];
            rows.xh_roundings = std::max(rows.xh_roundings, roundings);
            rows.out_roundings = std::max(rows.out_roundings, roundings * std::abs(w[c]) + std::abs(bias[c]));
        }
    }
    return rows;
}

// With one rounding to X.
template <class X> double layernorm_error(const LayerNormRows &want) {
    return want.out_roundings * unit_roundoff<float> + unit_roundoff<X> * largest(want.out);
}
// The mean of the rounded sums is also rounded. The effect of the shift is a part of xh, in units of 1 / rstd. rstd has the error of xh.
inline double layernorm_mean_error(const LayerNormRows &want) {
    double error = 0;
    for (const double rstd : want.rstd) error = std::max(error, want.xh_roundings / rstd * unit_roundoff<float>);
    return error;
}
inline double layernorm_rstd_error(const LayerNormRows &want) {
    return want.xh_roundings * unit_roundoff<float> * largest(want.rstd);
}

struct LayerNormGradient {
    std::vector<double> dx, dw, dbias;
    std::vector<double> dw_terms, dbias_terms;  // sums of absolute values of the terms of dw and dbias
};

inline LayerNormGradient layernorm_backward_reference(const std::vector<double> &dout, const std::vector<double> &x,
                                                      const std::vector<double> &w, size_t T, size_t C, double eps) {
    const LayerNormRows rows = layernorm_reference(x, w, std::vector<double>(C), T, C, eps);
    const std::vector<double> none(C);
    LayerNormGradient gradient{std::vector<double>(T * C), none, none, none, none};
    for (size_t t = 0; t < T; t++) {
        const auto xh = [&](size_t c) { return (x[t * C + c] - rows.mean[t]) * rows.rstd[t]; };
        const auto g = [&](size_t c) { return dout[t * C + c] * w[c]; };
        double sum = 0, dot = 0;
        for (size_t c = 0; c < C; c++) sum += g(c), dot += g(c) * xh(c);
        for (size_t c = 0; c < C; c++) {
            const double d = dout[t * C + c];
            gradient.dx[t * C + c] = rows.rstd[t] * (g(c) - sum / double(C) - xh(c) * dot / double(C));
            gradient.dw[c] += d * xh(c), gradient.dw_terms[c] += std::abs(d * xh(c));
            gradient.dbias[c] += d, gradient.dbias_terms[c] += std::abs(d);
        }
    }
    return gradient;
}

// G is the largest |g|, E the error of xh, whose mean square is at most 1. g and its mean are each off by C + 8 roundings of G, mean(g * xh) by as
// many and by G E; its product with xh is off by E again. E is at least (C + 8) (1 + |xh|) roundings, so all these are at most E (3 + |xh|). The
// sum with the gradient of the residual is rounded twice.
template <class X>
double layernorm_dx_error(size_t C, const LayerNormRows &rows, const std::vector<double> &dout, const std::vector<double> &w,
                          const std::vector<double> &want) {
    const double xh = rows.xh_roundings / double(C + 8), E = rows.xh_roundings * unit_roundoff<float>;
    return largest(rows.rstd) * largest(dout) * largest(w) * E * (3 + xh) +
           (unit_roundoff<X> + unit_roundoff<float>)*largest(want);
}
inline double layernorm_dw_error(size_t T, const LayerNormRows &rows, const LayerNormGradient &g) {
    return unit_roundoff<float> * (double(T + 8) * largest(g.dw_terms) + rows.xh_roundings * largest(g.dbias_terms));
}
inline double layernorm_dbias_error(size_t T, const LayerNormGradient &g) {
    return unit_roundoff<float> * double(T) * largest(g.dbias_terms);
}
