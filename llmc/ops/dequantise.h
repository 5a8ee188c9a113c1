// Weights in 4 or 8 bits, and the op that writes them out for matrix products. They are frozen: nothing is quantised after loading (quantise.h).
//
//   dequantise(dev, out, q)      out[i] = the value of weight i, rounded to X once      out (q.rows, q.columns) X
//
// 4 bits: NF4 with double quantisation (Dettmers et al., "QLoRA", 2023, arXiv:2305.14314), with the values of bitsandbytes, bit for bit. A block of
// 64 consecutive weights of a tensor shares their largest magnitude m, and a weight is one of 16 values times m. Blocks may cross rows.
// The magnitudes, minus their mean over the tensor, are stored in 8 bits each, as fractions of a scale that 256 blocks share:
//
//   w = nf4_value(code) * m         m = fractions[magnitude] * scales[1 + block / 256] + scales[0]        fractions: ../core/blockwise.h
//
// 8 bits: each row has a scale, its largest magnitude / 127, and w = code * scale.
//
// A part of a tensor may also be stored alone, with the codes and magnitudes of its blocks and the scales of the whole tensor (BlockNumbers).
#pragma once
#include <cstddef>
#include <cstdint>
#include <tuple>

#include "../core/blockwise.h"
#include "../core/common.h"
#include "../core/device.h"

constexpr size_t nf4_block = 64, nf4_group = 256;  // weights per block, blocks per group

// Quantiles of the normal distribution, scaled to [-1, 1], with a 0.
HOST_DEVICE inline float nf4_value(int code) {
    static constexpr float values[16] = {-1.0f,
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

// The numbers that the blocks of a part have in the whole tensor: those of a run of blocks from `first` on or, with `in_row`, of in_row blocks of each
// row, which has `of_row` blocks in the whole.
struct BlockNumbers {
    size_t first = 0, in_row = 0, of_row = 0;

    HOST_DEVICE size_t operator()(size_t block) const {
        return first + (in_row ? block / in_row * of_row + block % in_row : block);
    }
};

// A tensor of quantised weights, in the memory of a device. The arrays begin at multiples of 16 bytes.
struct Quantised {
    int bits;  // 4 or 8
    size_t rows, columns;
    // 4 bits: (ceil(count() / 2)), the earlier weight in the upper half of a byte. 8 bits: (count()) int8_t.
    const uint8_t *codes;
    const uint8_t *magnitudes;  // 4 bits: (blocks)
    const float *scales;        // 4 bits: (1 + groups), the mean first; 8 bits: (rows)
    const float *fractions;     // (256) of both signs
    BlockNumbers number = {};   // 4 bits

    auto pointers() const { return std::tuple(codes, magnitudes, scales, fractions); }  // ../core/rehearsal.h

    HOST_DEVICE size_t count() const { return rows * columns; }
};

// Numbers of elements of its arrays.
struct QuantisedSizes {
    size_t codes, magnitudes, scales;
    QuantisedSizes(int bits, size_t rows, size_t columns)
        : codes(bits == 4 ? ceil_div(rows * columns, 2) : rows * columns),
          magnitudes(bits == 4 ? ceil_div(rows * columns, nf4_block) : 0),
          scales(bits == 4 ? 1 + ceil_div(magnitudes, nf4_group) : rows) {}
};

// Product and sum are rounded separately, as in bitsandbytes, so no compiler may fuse them.
HOST_DEVICE inline float nf4_magnitude(const Quantised &q, size_t block) {
    const float fraction = q.fractions[q.magnitudes[block]], scale = q.scales[1 + q.number(block) / nf4_group];
#ifdef __CUDA_ARCH__
    return __fadd_rn(__fmul_rn(fraction, scale), q.scales[0]);
#else
    volatile float product = fraction * scale;
    return product + q.scales[0];
#endif
}

template <class X> void dequantise(Cpu<X> dev, X *out, Quantised q) {
    if (q.bits == 8) {
#pragma omp parallel for num_threads(dev.threads)
        for (size_t r = 0; r < q.rows; r++) {
            const auto *codes = reinterpret_cast<const int8_t *>(q.codes) + r * q.columns;
            for (size_t c = 0; c < q.columns; c++) out[r * q.columns + c] = float(codes[c]) * q.scales[r];
        }
        return;
    }
    const size_t count = q.count();
#pragma omp parallel for num_threads(dev.threads)
    for (size_t block = 0; block < ceil_div(count, nf4_block); block++) {
        const size_t begin = block * nf4_block, n = std::min(count - begin, nf4_block);
        const float m = nf4_magnitude(q, block);
        X value[16];
        for (int code = 0; code < 16; code++) value[code] = nf4_value(code) * m;
        const uint8_t *codes = q.codes + begin / 2;
        X *to = out + begin;
        for (size_t i = 0; i + 1 < n; i += 2) to[i] = value[codes[i / 2] >> 4], to[i + 1] = value[codes[i / 2] & 15];
        if (n % 2) to[n - 1] = value[codes[n / 2] >> 4];
    }
}

REHEARSED(dequantise);
