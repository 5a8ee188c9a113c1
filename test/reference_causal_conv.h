// causal_conv in float64, and error bounds for float.
#pragma once
#include "../llmc/ops/causal_conv.h"
#include "check.h"

struct ConvReference {
    std::vector<double> out, dx, dw;
    double out_error = 0, dx_error = 0, dw_error = 0;  // of float, without the last rounding to X
};

// y has at most 4 products and sums, so its error is 4 roundings of the sum of their sizes. The slope of silu is at most 1.1 and changes by at most 0.5
// per unit of y; its own roundings are 8, of terms up to 1 + |y|.
inline ConvReference conv_reference(const std::vector<double> &dout, const std::vector<double> &x, const std::vector<double> &w,
                                    const std::vector<int32_t> &doc_pos, size_t C) {
    const size_t T = doc_pos.size(), K = conv_taps;
    const double u = unit_roundoff<float>;
    ConvReference r{std::vector<double>(T * C), std::vector<double>(T * C), std::vector<double>(C * K)};
    std::vector<double> dx_errors(T * C), dw_errors(C * K);
    for (size_t t = 0; t < T; t++)
        for (size_t c = 0; c < C; c++) {
            const size_t seen = std::min(K, size_t(doc_pos[t]) + 1);
            double y = 0, size = 0;
            for (size_t j = 0; j < seen; j++) {
                const double term = w[c * K + K - 1 - j] * x[(t - j) * C + c];
                y += term, size += std::abs(term);
            }
            const double s = 1 / (1 + std::exp(-y)), slope = s * (1 + y * (1 - s)), d = dout[t * C + c];
            r.out[t * C + c] = y * s;
            r.out_error = std::max(r.out_error, (1.1 * 4 * size + 8 * std::abs(y * s)) * u);
            const double dy_error = std::abs(d) * (0.5 * 4 * size + 8 * (1 + std::abs(y))) * u;
            for (size_t j = 0; j < seen; j++) {
                const double weight = w[c * K + K - 1 - j], value = x[(t - j) * C + c];
                r.dx[(t - j) * C + c] += weight * d * slope;
                r.dw[c * K + K - 1 - j] += value * d * slope;
                dx_errors[(t - j) * C + c] += std::abs(weight) * (dy_error + 4 * u * std::abs(d * slope));
                dw_errors[c * K + K - 1 - j] += std::abs(value) * (dy_error + double(T + 4) * u * std::abs(d * slope));
            }
        }
    r.dx_error = largest(dx_errors), r.dw_error = largest(dw_errors);
    return r;
}
