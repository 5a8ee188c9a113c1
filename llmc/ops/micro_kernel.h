// The innermost loop of our matrix products on CPUs without a matrix unit: 6 rows of C and a panel of columns are summed in registers. Each
// step along the sum loads a row of B's panel, once for all 6, and multiplies it by one word of each row of A.
//
//   product(columns, c, a, b, K, add)    c (6, columns) = or += a (6, K) b (K, columns)    c float; a, b words, K of them along the sum
//
// columns is a multiple of 16, and `panel` at most. Rows of b and c are aligned to vectors; a has any strides.
#pragma once
#include <bit>
#include <cstddef>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "../core/dtype.h"
#include "simd.h"

namespace simd {

// The operand type of a product, a word: a float, or two bf16 that are neighbours along the sum.
struct Bf16x2 {
    bf16 first, second;
};
template <class Word> constexpr size_t terms = 1;
template <> inline constexpr size_t terms<Bf16x2> = 2;

inline Vector multiply_add(Vector sum, float a, Vector b) { return sum + a * b; }
#ifdef __AVX512BF16__
inline Vector multiply_add(Vector sum, Bf16x2 a, Vector b) {
    const __m128i pair = _mm_cvtsi32_si128(std::bit_cast<int>(a));  // _mm512_set1_epi32, at which clang 16 crashes
    return Vector(_mm512_dpbf16_ps(__m512(sum), __m512bh(_mm512_maskz_broadcastd_epi32(0xffff, pair)), __m512bh(b)));
}
#endif

// True if pairs of bf16 are multiplied faster than floats. AMD's CPUs multiply them twice as fast (measured, Zen 4). Intel's CPUs take 2.4 times as
// long (measured, Emerald Rapids): there bf16 is converted to float, which is exact.
inline bool bf16_dot_is_fast() {
#ifdef __x86_64__
    static const bool fast = __builtin_cpu_supports("avx512bf16") && !__builtin_cpu_is("intel");
    return fast;
#else
    return false;
#endif
}

template <class Word> struct View {  // element (i, j) is data[i * row + j * column]
    Word *data;
    size_t row, column = 1;
};

constexpr size_t block_rows = 6, panel = lanes == 16 ? 64 : 16;  // 6 x 4 sums of 32 registers, or 6 x 2 of 16

template <size_t columns, class Word>
inline void product_block(View<float> c, View<const Word> a, View<const Word> b, size_t K, bool add) {
    constexpr size_t W = columns / lanes;
    Vector sum[block_rows][W];
#pragma GCC unroll 6
    for (size_t i = 0; i < block_rows; i++)
#pragma GCC unroll 4
        for (size_t j = 0; j < W; j++) sum[i][j] = add ? load_vector(c.data + i * c.row + j * lanes) : Vector{};
    for (size_t k = 0; k < K; k++) {
        Vector b_k[W];
#pragma GCC unroll 4
        for (size_t j = 0; j < W; j++) b_k[j] = load_vector(b.data + k * b.row + j * lanes);
#pragma GCC unroll 6
        for (size_t i = 0; i < block_rows; i++)
#pragma GCC unroll 4
            for (size_t j = 0; j < W; j++) sum[i][j] = multiply_add(sum[i][j], a.data[i * a.row + k * a.column], b_k[j]);
    }
#pragma GCC unroll 6
    for (size_t i = 0; i < block_rows; i++)
#pragma GCC unroll 4
        for (size_t j = 0; j < W; j++) store_vector(c.data + i * c.row + j * lanes, sum[i][j]);
}

template <class Word> void product(size_t columns, View<float> c, View<const Word> a, View<const Word> b, size_t K, bool add) {
    if constexpr (panel == 64) {
        if (columns == 64) return product_block<64>(c, a, b, K, add);
        if (columns == 48) return product_block<48>(c, a, b, K, add);
        if (columns == 32) return product_block<32>(c, a, b, K, add);
    }
    product_block<16>(c, a, b, K, add);
}

}  // namespace simd
