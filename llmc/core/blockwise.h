// Blockwise 8-bit numbers, the format of bitsandbytes for AdamW's moments (Dettmers et al., "8-bit optimizers via block-wise quantization",
// 2021, arXiv:2110.02861). A block is 256 consecutive numbers with one float scale, the largest magnitude among them. A code stands for one of 256
// fractions of the scale, which are densest near 0.
#pragma once
#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

#include "memory.h"

// of[code], ascending. Both maps contain 0 and 1. For i = 0 to 6 they contain the centres of equal intervals between 10^(i-7) and 10^(i-6): 2^i for
// each sign, or 2^(i+1) without negative fractions.
struct Fractions {
    static constexpr int count = 256;
    float of[count];

    explicit Fractions(bool negative) {
        std::vector<double> all = {0, 1};
        for (int i = 0; i < 7; i++) {
            const int n = 1 << (negative ? i : i + 1);
            const auto border = [&](int k) {  // computed from both ends, as torch.linspace(0.1, 1, n + 1) does
                const float step = (1.0f - 0.1f) / float(n);
                return k < (n + 1) / 2 ? std::fma(step, float(k), 0.1f) : std::fma(-step, float(n - k), 1.0f);
            };
            for (int k = 0; k < n; k++) {
                const float middle = (border(k) + border(k + 1)) / 2, x = float(std::pow(10.0, i - 6)) * middle;
                all.push_back(x);
                if (negative) all.push_back(-x);
            }
        }
        std::sort(all.begin(), all.end());
        std::copy(all.begin(), all.end(), of);
    }
};
inline const Fractions &fractions(bool negative) {
    static const Fractions of_both(true), positive(false);
    return negative ? of_both : positive;
}

// Returns the code of the nearest fraction; ties go to the smaller one. It never changes the sign: a negative number does not become 0.
HOST_DEVICE inline uint8_t nearest_fraction(const float *fractions, float x) {
    int low = 0, high = Fractions::count - 1;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (fractions[middle] <= x) low = middle;
        else high = middle;
    }
    int code = fractions[high] - x < x - fractions[low] ? high : low;
    if (std::signbit(fractions[code]) != std::signbit(x)) code += x > 0 ? 1 : -1;
    return uint8_t(code);
}
HOST_DEVICE inline uint8_t code_of(const float *fractions, float scale, float x) {
    return nearest_fraction(fractions, scale > 0 ? x / scale : 0.0f);
}

// A blockwise array on a device. Element i is in block (skip + i) / size: the array may begin and end inside a block.
struct Blockwise {
    static constexpr size_t size = 256;
    uint8_t *codes;  // (count)
    float *scales;   // (blocks())
    size_t skip, count;
    bool negative;     // true if numbers may be negative
    size_t first = 0;  // first element of a part of the array, see operator+ below

    auto pointers() const { return std::tuple(codes, scales); }  // rehearsal.h

    HOST_DEVICE size_t blocks() const { return (skip + count + size - 1) / size; }
    Blockwise operator+(size_t n) const {
        Blockwise part = *this;
        part.first += n;
        return part;
    }
};

// Returns the scale of n numbers, and writes their codes. Encoding numbers that were decoded from a block reproduces them exactly: either the largest
// is the scale itself, or the least is the scale times the first fraction.
inline float encode_block(uint8_t *codes, const float *x, size_t n, bool negative) {
    const float *const of = fractions(negative).of;
    const float most = std::max(0.0f, *std::max_element(x, x + n)), least = -std::min(0.0f, *std::min_element(x, x + n));
    const auto stands_for_them = [&](float scale) {
        return std::all_of(x, x + n, [&](float value) { return of[code_of(of, scale, value)] * scale == value; });
    };
    float scale = std::max(most, least);
    if (least > 0 && least >= most)
        for (const float near = least / -of[0];
             float candidate : {near, std::nextafter(near, 0.0f), std::nextafter(near, INFINITY)})
            if (stands_for_them(candidate)) {
                scale = candidate;
                break;
            }
    for (size_t i = 0; i < n; i++) codes[i] = code_of(of, scale, x[i]);
    return scale;
}

inline std::vector<float> read_floats(Memory &memory, const Blockwise &from, size_t n) {
    if (n == 0) return {};
    const size_t begin = from.skip + from.first, block = begin / Blockwise::size;
    const auto codes = read(memory, from.codes + from.first, n);
    const auto scales = read(memory, from.scales + block, (begin + n - 1) / Blockwise::size + 1 - block);
    std::vector<float> out(n);
    for (size_t i = 0; i < n; i++) out[i] = fractions(from.negative).of[codes[i]] * scales[(begin + i) / Blockwise::size - block];
    return out;
}

// If only a part of a block is written, its other numbers are kept, except for rounding.
inline void write(Memory &memory, const Blockwise &to, const std::vector<float> &host) {
    if (host.empty()) return;
    constexpr size_t size = Blockwise::size;
    const size_t block = (to.skip + to.first) / size, blocks = (to.skip + to.first + host.size() - 1) / size + 1 - block;
    const auto border = [&](size_t b) { return std::clamp(b * size, to.skip, to.skip + to.count) - to.skip; };  // in elements
    Blockwise whole = to;
    whole.first = border(block);
    auto values = read_floats(memory, whole, border(block + blocks) - whole.first);
    std::copy(host.begin(), host.end(), values.begin() + ptrdiff_t(to.first - whole.first));
    std::vector<uint8_t> codes(values.size());
    std::vector<float> scales(blocks);
#pragma omp parallel for
    for (size_t b = 0; b < blocks; b++) {
        const size_t first = border(block + b) - whole.first, n = border(block + b + 1) - whole.first - first;
        scales[b] = encode_block(&codes[first], &values[first], n, to.negative);
    }
    write(memory, to.codes + whole.first, codes), write(memory, to.scales + block, scales);
}
