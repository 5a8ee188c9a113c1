// Weights of 4 or 8 bits in float64, and error bounds for float.
#pragma once
#include "../llmc/ops/quantise.h"
#include "check.h"

inline std::vector<double> dequantise_reference(int bits, const QuantisedArrays &q, size_t rows, size_t columns) {
    std::vector<double> out(rows * columns);
    for (size_t i = 0; i < out.size(); i++) {
        if (bits == 8) {
            out[i] = double(int8_t(q.codes[i])) * double(q.scales[i / columns]);
            continue;
        }
        const size_t block = i / nf4_block;
        const int code = i % 2 ? q.codes[i / 2] & 15 : q.codes[i / 2] >> 4;
        const double fraction = fractions(true).of[q.magnitudes[block]];
        out[i] = nf4_value(code) * (fraction * double(q.scales[1 + block / nf4_group]) + double(q.scales[0]));
    }
    return out;
}

// With 4 bits a magnitude is rounded twice, as a number below the largest scale plus the mean, and the weight once more. With 8 bits the weight is
// rounded once. Both are then rounded to X.
template <class X> double dequantise_error(int bits, const QuantisedArrays &q, const std::vector<double> &want) {
    double largest_scale = 0;
    for (size_t i = 1; bits == 4 && i < q.scales.size(); i++) largest_scale = std::max(largest_scale, double(q.scales[i]));
    const double magnitude = bits == 4 ? largest_scale + std::abs(double(q.scales[0])) : 0;
    return unit_roundoff<float> * (2 * magnitude + largest(want)) + unit_roundoff<X> * largest(want);
}
