// Weights that are frozen, in 4 or 8 bits, and the op that writes them out as X for a product.
//
//   dequantise(dev, out, q)      out[i] = the value of weight i, rounded to X      out (q.count) X
//
// 4 bits: NF4 with double quantisation (Dettmers et al., "QLoRA", 2023, arXiv:2305.14314), with the values of bitsandbytes, bit for bit. Blocks of 64
// weights of a tensor share the largest magnitude m among them, and a weight is the nearest of 16 values times m. The magnitudes of a tensor are
// stored as 8-bit codes of their difference to a mean of theirs, in groups of 256 that share a scale:
//
//   m = map[scales[block]] * groups[1 + block / 256] + groups[0]            w = nf4[code] * m          first code in the high half of a byte
//
// 8 bits: a row shares a scale, its largest magnitude / 127, and w = code * scale.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "../core/common.h"
#include "../core/device.h"
#include "../core/dtype.h"

constexpr size_t nf4_block = 64, nf4_group = 256;

// The 16 values: quantiles of the normal distribution, scaled to [-1, 1].
HOST_DEVICE inline float nf4_value(int code) {
    constexpr float values[16] = {-1.0f,
                                  -0.6961928009986877f,
                                  -0.5250730514526367f,
                                  -0.39491748809814453f,
                                  -0.28444138169288635f,
                                  -0.18477343022823334f,
                                  -0.09105003625154495f,
                                  0.0f,
                                  0.07958029955625534f,
                                  0.16093020141124725f,
                                  0.24611230194568634f,
                                  0.33791524171829224f,
                                  0.44070982933044434f,
                                  0.5626170039176941f,
                                  0.7229568362236023f,
                                  1.0f};
    return values[code];
}

// The 256 values of a magnitude's code, rising: Dettmers, "8-bit approximations for parallelism in deep learning", 2015, arXiv:1511.04561. Exponents
// from 1e-6 to 1 have 1, 2, 4, ..., 64 fractions each, of either sign; 0 and 1 are added.
inline const std::array<float, 256> &magnitude_map() {
    static const auto map = [] {
        std::array<float, 256> out{};
        size_t n = 0;
        out[n++] = 0, out[n++] = 1;
        for (int e = 0; e < 7; e++) {
            const size_t fractions = size_t(1) << e;
            const float step = (1.0f - 0.1f) / float(fractions), scale = float(std::pow(10.0, e - 6));
            const auto border = [&](size_t k) {  // as torch.linspace computes it: from the nearer end
                return k < (fractions + 1) / 2 ? float(double(0.1f) + double(step) * double(k))
                                               : float(1.0 - double(step) * double(fractions - k));
            };
            for (size_t k = 0; k < fractions; k++) {
                const float mean = (border(k) + border(k + 1)) / 2;
                out[n++] = scale * mean, out[n++] = -(scale * mean);
            }
        }
        std::sort(out.begin(), out.end());
        return out;
    }();
    return map;
}

// A tensor of quantised weights, in the memory of a device.
struct Quantised {
    int bits;               // 4 or 8
    size_t count, columns;  // weights, and those of a row
    const uint8_t *codes;   // 4 bits: (count / 2), two in a byte; 8 bits: (count), of signed numbers
    const uint8_t *scales;  // 4 bits: (blocks)
    const float *groups;    // 4 bits: (1 + groups), the mean first; 8 bits: (rows)
    const float *map;       // magnitude_map
};

// What the arrays of a tensor hold.
struct QuantisedSizes {
    size_t codes, scales, groups;
    QuantisedSizes(int bits, size_t count, size_t columns)
        : codes(bits == 4 ? ceil_div(count, 2) : count),
          scales(bits == 4 ? ceil_div(count, nf4_block) : 0),
          groups(bits == 4 ? 1 + ceil_div(scales, nf4_group) : count / columns) {}
};

struct QuantisedArrays {
    std::vector<uint8_t> codes, scales;
    std::vector<float> groups;
};

// ---- quantising, on the host ----------------------------------------------------------------------------------------------------------

// Divides the blocks of x by their largest magnitudes, and calls code(i, scaled x[i]). Returns the magnitudes. As in bitsandbytes a whole block is
// multiplied by the reciprocal, and a shorter last one is divided.
template <class F> std::vector<float> scale_blocks(const float *x, size_t n, size_t block, F code) {
    std::vector<float> magnitudes(ceil_div(n, block));
#pragma omp parallel for
    for (size_t b = 0; b < magnitudes.size(); b++) {
        const size_t begin = b * block, end = std::min(n, begin + block);
        const bool whole = end - begin == block;
        float m = 0;
        for (size_t i = begin; i < end; i++) m = std::max(m, std::abs(x[i]));
        const float divisor = std::max(m, 1e-38f), factor = 1.0f / divisor;
        for (size_t i = begin; i < end; i++) code(i, std::clamp(whole ? x[i] * factor : x[i] / divisor, -1.0f, 1.0f));
        magnitudes[b] = whole ? m : divisor;
    }
    return magnitudes;
}

// Returns how many midpoints between the neighbours of n rising values are below x: the code of the nearest value, of two equally near ones the lower.
template <class Value> uint8_t nearest_code(Value value, int n, float x) {
    int low = 0, high = n - 1;
    while (low < high) {
        const int middle = (low + high) / 2;
        if ((value(middle) + value(middle + 1)) / 2 < x) low = middle + 1;
        else high = middle;
    }
    return uint8_t(low);
}

// The mean of the magnitudes is summed in double. bitsandbytes sums floats, in an order that depends on the CPU, so that its mean may differ in the
// last bit.
inline QuantisedArrays quantise_nf4(const std::vector<float> &w) {
    QuantisedArrays q;
    std::vector<uint8_t> codes(round_up(w.size(), 2), 7);  // an odd end is padded with 0
    std::vector<float> magnitudes =
        scale_blocks(w.data(), w.size(), nf4_block, [&](size_t i, float x) { codes[i] = nearest_code(nf4_value, 16, x); });
    for (size_t i = 0; i < codes.size(); i += 2) q.codes.push_back(uint8_t(codes[i] << 4 | codes[i + 1]));
    double sum = 0;
    for (float m : magnitudes) sum += m;
    const float mean = float(sum / double(magnitudes.size()));
    for (float &m : magnitudes) m -= mean;
    q.scales.resize(magnitudes.size());
    const auto value = [&map = magnitude_map()](int code) { return map[size_t(code)]; };
    q.groups = scale_blocks(magnitudes.data(), magnitudes.size(), nf4_group,
                            [&](size_t i, float x) { q.scales[i] = nearest_code(value, 256, x); });
    q.groups.insert(q.groups.begin(), mean);
    return q;
}

inline QuantisedArrays quantise_int8(const std::vector<float> &w, size_t columns) {
    QuantisedArrays q;
    q.codes.resize(w.size()), q.groups.resize(w.size() / columns);
#pragma omp parallel for
    for (size_t r = 0; r < q.groups.size(); r++) {
        for (size_t i = r * columns; i < (r + 1) * columns; i++) q.groups[r] = std::max(q.groups[r], std::abs(w[i]) / 127);
        for (size_t i = r * columns; i < (r + 1) * columns; i++)
            q.codes[i] = uint8_t(int8_t(q.groups[r] > 0 ? std::nearbyint(w[i] / q.groups[r]) : 0));
    }
    return q;
}

inline QuantisedArrays quantise(int bits, const std::vector<float> &w, size_t columns) {
    return bits == 4 ? quantise_nf4(w) : quantise_int8(w, columns);
}

// ---- the op ---------------------------------------------------------------------------------------------------------------------------

// The magnitude of a block of 4-bit weights. `volatile` keeps a compiler from fusing product and sum, which have a rounding each.
HOST_DEVICE inline float nf4_magnitude(const Quantised &q, size_t block) {
    volatile float product = q.map[q.scales[block]] * q.groups[1 + block / nf4_group];
    return product + q.groups[0];
}

template <class X> void dequantise(Cpu<X> dev, X *out, Quantised q) {
    if (q.bits == 8) {
#pragma omp parallel for num_threads(dev.threads)
        for (size_t r = 0; r < q.count / q.columns; r++)
            for (size_t i = r * q.columns; i < (r + 1) * q.columns; i++) out[i] = float(int8_t(q.codes[i])) * q.groups[r];
        return;
    }
#pragma omp parallel for num_threads(dev.threads)
    for (size_t b = 0; b < ceil_div(q.count, nf4_block); b++) {
        const float m = nf4_magnitude(q, b);
        for (size_t i = b * nf4_block; i < std::min(q.count, (b + 1) * nf4_block); i++)
            out[i] = nf4_value(i % 2 ? q.codes[i / 2] & 15 : q.codes[i / 2] >> 4) * m;
    }
}
