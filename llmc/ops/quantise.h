// Quantises weights on the host while they are loaded. dequantise.h defines the formats.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "dequantise.h"

struct QuantisedArrays {  // of Quantised
    std::vector<uint8_t> codes, magnitudes;
    std::vector<float> scales;
};

// Divides each block of n numbers by its largest magnitude, calls code(i, quotient), and returns these magnitudes. As in bitsandbytes, a whole block
// is multiplied by the reciprocal, and a shorter last block is divided.
template <class X, class F> std::vector<float> scale_blocks(const X *x, size_t n, size_t block, F code) {
    std::vector<float> magnitudes(ceil_div(n, block));
#pragma omp parallel for
    for (size_t b = 0; b < magnitudes.size(); b++) {
        const size_t begin = b * block, end = std::min(n, begin + block);
        const bool whole = end - begin == block;
        float m = 0;
        for (size_t i = begin; i < end; i++) m = std::max(m, std::abs(float(x[i])));
        const float divisor = std::max(m, 1e-38f), reciprocal = 1.0f / divisor;
        for (size_t i = begin; i < end; i++)
            code(i, std::clamp(whole ? float(x[i]) * reciprocal : float(x[i]) / divisor, -1.0f, 1.0f));
        magnitudes[b] = whole ? m : divisor;
    }
    return magnitudes;
}

// Returns the code of the nearest of n values, which increase with their code; ties go to the lower code.
template <class Value> uint8_t nearest_code(Value value, int n, float x) {
    int low = 0, high = n - 1;
    while (low < high) {
        const int middle = (low + high) / 2;
        if ((value(middle) + value(middle + 1)) / 2 < x) low = middle + 1;
        else high = middle;
    }
    return uint8_t(low);
}

// Returns the largest magnitudes of the blocks.
template <class X> std::vector<float> quantise_nf4(QuantisedArrays &q, const std::vector<X> &w) {
    std::vector<uint8_t> codes(round_up(w.size(), 2), 7);  // an odd end is padded with the code of 0
    const auto magnitudes =
        scale_blocks(w.data(), w.size(), nf4_block, [&](size_t i, float x) { codes[i] = nearest_code(nf4_value, 16, x); });
    q.codes.resize(codes.size() / 2);
    for (size_t i = 0; i < q.codes.size(); i++) q.codes[i] = uint8_t(codes[2 * i] << 4 | codes[2 * i + 1]);
    return magnitudes;
}

// bitsandbytes sums the mean in floats, in an order that depends on the CPU. We sum in double, so that in rare tensors our mean differs in its last
// bit.
inline float mean_of(const std::vector<float> &magnitudes) {
    double sum = 0;
    for (float m : magnitudes) sum += m;
    return float(sum / double(magnitudes.size()));
}

inline void quantise_magnitudes(QuantisedArrays &q, std::vector<float> magnitudes, float mean) {
    for (float &m : magnitudes) m -= mean;
    q.magnitudes.resize(magnitudes.size());
    const auto fraction = [of = fractions(true).of](int code) { return of[code]; };
    q.scales = scale_blocks(magnitudes.data(), magnitudes.size(), nf4_group,
                            [&](size_t i, float x) { q.magnitudes[i] = nearest_code(fraction, Fractions::count, x); });
    q.scales.insert(q.scales.begin(), mean);
}

template <class X> void quantise_rows(QuantisedArrays &q, const std::vector<X> &w, size_t columns) {
    q.codes.resize(w.size()), q.scales.assign(w.size() / columns, 0);
#pragma omp parallel for
    for (size_t r = 0; r < q.scales.size(); r++) {
        float &scale = q.scales[r];
        for (size_t i = r * columns; i < (r + 1) * columns; i++) scale = std::max(scale, std::abs(float(w[i])) / 127);
        for (size_t i = r * columns; i < (r + 1) * columns; i++) {
            const float code = scale > 0 ? std::nearbyint(float(w[i]) / scale) : 0;
            q.codes[i] = uint8_t(int8_t(std::clamp(code, -127.0f, 127.0f)));  // the scale of denormal weights is inexact
        }
    }
}

// Returns a tensor whose rows have `columns` weights, in 4 or 8 bits.
template <class X> QuantisedArrays quantise(int bits, const std::vector<X> &w, size_t columns) {
    QuantisedArrays q;
    if (bits == 8) {
        quantise_rows(q, w, columns);
        return q;
    }
    const auto magnitudes = quantise_nf4(q, w);
    quantise_magnitudes(q, magnitudes, mean_of(magnitudes));
    return q;
}

// Returns the weights as floats.
inline std::vector<float> values_of(int bits, const QuantisedArrays &q, size_t rows, size_t columns) {
    std::vector<float> out(rows * columns);
    dequantise(CpuF32{1}, out.data(),
               {bits, rows, columns, q.codes.data(), q.magnitudes.data(), q.scales.data(), fractions(true).of});
    return out;
}
