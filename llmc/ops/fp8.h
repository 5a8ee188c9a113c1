// Matrix products with elements rounded to 8 bits (Micikevicius et al., "FP8 formats for deep learning", 2022, arXiv:2209.05433). Tensor cores
// multiply them twice as fast as 16-bit elements. The scale of a matrix comes from its own largest magnitude at the time of rounding ("current
// scaling").
//
//   fp8_scale  (dev, q, x, rows, columns)                     q.scale[1] = max |x|     q.scale[0] = 2^-e with the largest e for which
//                                                             2^e max |x| is a number of the format
//   fp8_round  (dev, q, x, rows, columns, turned)             q.values = 2^e x, each rounded to the nearest number of the format, ties to even;
//                                                             (rows, columns), or if turned (columns, rows). After fp8_scale of the same x
//   fp8_product(dev, out, a, b, bias, T, IC, OC, accumulate)  out[t,o] = a.scale[0] b.scale[0] sum_i a[t,i] b[o,i] + bias[o], or out += that
//
//   x (rows, columns), aligned to 16 bytes     rows, columns, T, IC, OC: multiples of 16
//   a: values (T, IC)     b: values (OC, IC)     out (T, OC) X or float     bias (OC) X, may be null
//
// The format is e4m3: 4 bits of exponent and 3 of fraction, numbers from 2^-9 to 448. The paper stores gradients in e5m2, which has a wider range and
// twice the rounding error. With their own scale, gradients fit the range of e4m3 (docs/gpus.md): only elements below about 2^-18 of the largest
// become zero.
//
// The scale is a power of two. So 2^-e times a rounded value is a bf16, and a product in FP8 equals the product of matmul.h on such values. The CPU
// computes it that way, with values of type X. If max |x| is not finite, the scale is NaN, and so is the whole product. Each call has its own scale,
// so bits depend on the division of tokens among calls.
#pragma once
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "../core/device.h"
#include "matmul.h"

constexpr int fp8_fraction = 3;     // bits of the fraction
constexpr int fp8_smallest = -6;    // exponent of the smallest normal number
constexpr float fp8_largest = 448;  // 1.75 * 2^8

struct Fp8Matrix {
    std::byte *values;  // fp8_bytes(dev) each
    float *scale;       // (2)

    auto pointers() const { return std::tuple(values, scale); }  // ../core/rehearsal.h
};

// ---- one number -----------------------------------------------------------------------------------------------------------------

// Returns 2^e for a matrix with this largest magnitude.
HOST_DEVICE inline float fp8_factor(float largest) {
    uint32_t bits;
    memcpy(&bits, &largest, sizeof bits);
    if (bits >= 0x7f800000) return NAN;
    if (bits == 0) return 1;
    const int e = 8 - (int(bits >> 23) - 127) - ((bits & 0x7fffff) > 0x600000);
    bits = uint32_t((e < 126 ? e : 126) + 127) << 23;
    float factor;
    memcpy(&factor, &bits, sizeof factor);
    return factor;
}

// Returns the nearest number of the format, at most the largest one; zeros keep their sign, as in the hardware's conversion. Adding and subtracting a
// number whose last bit equals one step of the format rounds to a multiple of that step.
inline float fp8_nearest(float x) {
    constexpr float least = std::bit_cast<float>(uint32_t(fp8_smallest + 127) << 23);
    x = std::min(std::max(x, -fp8_largest), fp8_largest);                                                // a NaN stays one
    const float power = std::max(least, std::bit_cast<float>(std::bit_cast<uint32_t>(x) & 0x7f800000));  // 2^exponent
    const float shift = power * float(3 << (22 - fp8_fraction));
    return std::copysign((x + shift) - shift, x);
}

// Converts a number of the format to its byte, and back.
inline uint8_t fp8_code(float number) {
    const uint8_t sign = std::signbit(number) ? 0x80 : 0;
    const float magnitude = std::abs(number);
    if (number != number) return 0x7f;
    if (magnitude < std::ldexp(1.0f, fp8_smallest))
        return uint8_t(sign | int(std::ldexp(magnitude, fp8_fraction - fp8_smallest)));
    // The significand's leading 1 adds 1 to the exponent.
    const int e = std::ilogb(magnitude), significand = int(std::ldexp(magnitude, fp8_fraction - e));
    return uint8_t(sign | (((e - fp8_smallest) << fp8_fraction) + significand));
}
inline float fp8_number(uint8_t code) {
    const int exponent = (code & 0x7f) >> fp8_fraction, fraction = code & ((1 << fp8_fraction) - 1),
              hidden = exponent ? 1 << fp8_fraction : 0;
    if ((code & 0x7f) == 0x7f) return NAN;
    const float magnitude = std::ldexp(float(hidden + fraction), fp8_smallest - fp8_fraction + (exponent ? exponent - 1 : 0));
    return code & 0x80 ? -magnitude : magnitude;
}

// ---- matrices, on the CPU -------------------------------------------------------------------------------------------------------

template <class X> constexpr size_t fp8_bytes(Cpu<X>) { return sizeof(X); }

template <class X> void fp8_scale(Cpu<X> dev, Fp8Matrix q, const X *x, size_t rows, size_t columns) {
    float largest = 0;
    bool finite = true;
#pragma omp parallel for num_threads(dev.threads) reduction(max : largest) reduction(&& : finite)
    for (size_t r = 0; r < rows; r++) {
        const X *row = x + r * columns;
        float row_largest = 0, poison = 0;
#pragma omp simd reduction(max : row_largest) reduction(+ : poison)
        for (size_t c = 0; c < columns; c++) {
            row_largest = std::max(row_largest, std::abs(float(row[c])));
            poison += float(row[c]) * 0;  // 0, or NaN
        }
        largest = std::max(largest, row_largest);
        finite = finite && poison == 0;
    }
    q.scale[1] = finite ? largest : NAN;
    q.scale[0] = 1 / fp8_factor(q.scale[1]);
}

template <class X> void fp8_round(Cpu<X> dev, Fp8Matrix q, const X *x, size_t rows, size_t columns, bool turned) {
    X *const out = reinterpret_cast<X *>(q.values);
    const float factor = fp8_factor(q.scale[1]), scale = q.scale[0];
#pragma omp parallel for num_threads(dev.threads)
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < columns; c++) {
            const float value = fp8_nearest(factor * float(x[r * columns + c])) * scale;
            out[turned ? c * rows + r : r * columns + c] = value;
        }
}

template <class X, class Out>
void fp8_product(Cpu<X> dev, Out *out, Fp8Matrix a, Fp8Matrix b, const X *bias, size_t T, size_t IC, size_t OC, bool accumulate) {
    matmul_forward(dev, out, reinterpret_cast<const X *>(a.values), reinterpret_cast<const X *>(b.values), bias, T, IC, OC, 0,
                   accumulate);
}

REHEARSED(fp8_scale);
REHEARSED(fp8_round);
REHEARSED_PRODUCT(fp8_product);
ASKED(fp8_bytes);
