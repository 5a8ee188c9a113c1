// rope in float64, and error bounds for float.
#pragma once
#include "check.h"

inline std::vector<double> rope_reference(std::vector<double> x, const std::vector<float> &table,
                                          const std::vector<int32_t> &doc_pos, size_t heads, size_t D, size_t R, size_t stride,
                                          double sign) {
    for (size_t t = 0; t < doc_pos.size(); t++)
        for (size_t h = 0; h < heads; h++)
            for (size_t i = 0; i < R / 2; i++) {
                const double cos = table[size_t(doc_pos[t]) * R + 2 * i], sin = sign * table[size_t(doc_pos[t]) * R + 2 * i + 1];
                double &a = x[t * stride + h * D + i], &b = x[t * stride + h * D + i + R / 2];
                const double turned = a * cos - b * sin;
                b = b * cos + a * sin;
                a = turned;
            }
    return x;
}

template <class X> constexpr double rope_error = (3 * unit_roundoff<float> + unit_roundoff<X>)*2 * 5;  // two products of |x| < 5
