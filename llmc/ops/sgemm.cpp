#include "sgemm.h"

#include <omp.h>

#include <algorithm>

#include "../core/dtype.h"
#include "gemm_tiles.h"
#include "micro_kernel.h"

namespace {

using simd::Bf16x2, simd::lanes, simd::panel, simd::block_rows, simd::terms;

// The longest side of a tile of C, and the words along the sum that are packed at a time: a panel of B fits the L1 cache.
constexpr size_t sgemm_side = 384, sgemm_depth = 128;
static_assert(sgemm_side % block_rows == 0 && sgemm_side % panel == 0);
static_assert(2 * sgemm_side * sgemm_depth + sgemm_side * sgemm_side <= sgemm_scratch);

// There are three ways to pack a factor with n rows or columns and sums of k terms. `stride` is the stride of rows of `out`.
//   pack_along        out[i * stride + word]    rows run along the sum, and stay rows. Rows from n to padded_n are zeros
//   pack_across       out[word * stride + i]    rows run across the sum. Columns from n to the next multiple of 16 are zeros
//   pack_transposed   out[word * stride + i]    the same of a matrix whose rows run along the sum: squares are transposed in registers
// Element (i, term) of the matrix is data[i * m.row + term] along the sum, and data[term * m.row + i] across it.

template <class X> void pack_along(float *out, size_t stride, Matrix<X> m, size_t n, size_t k, size_t padded_n) {
    for (size_t i = 0; i < n; i++)
        simd::for_each(k, [&]<class V>(size_t j) { simd::store(out + i * stride + j, simd::load<V>(m.data + i * m.row + j)); });
    for (size_t i = n; i < padded_n; i++) std::fill_n(out + i * stride, k, 0.0f);
}

template <class X> void pack_across(float *out, size_t stride, Matrix<X> m, size_t n, size_t k) {
    pack_along(out, stride, m, k, n, k);
    for (size_t i = 0; i < k; i++) std::fill(out + i * stride + n, out + i * stride + round_up(n, 16), 0.0f);
}

template <class X> void pack_transposed(float *out, size_t stride, Matrix<X> m, size_t n, size_t k) {
    for (size_t j = 0; j < n; j += lanes)
        for (size_t i = 0; i < k; i += lanes) {
            if (i + lanes <= k && j + lanes <= n) {
                simd::Vector square[lanes];
                for (size_t l = 0; l < lanes; l++) square[l] = simd::load<simd::Vector>(m.data + i + (j + l) * m.row);
                simd::transpose_square(square);
                for (size_t l = 0; l < lanes; l++) simd::store_vector(out + (i + l) * stride + j, square[l]);
            } else {
                for (size_t r = i; r < std::min(k, i + lanes); r++)
                    for (size_t c = j; c < j + lanes; c++) out[r * stride + c] = c < n ? float(m.data[r + c * m.row]) : 0.0f;
            }
        }
    if (const size_t end = round_up(n, lanes); end < round_up(n, 16))
        for (size_t i = 0; i < k; i++) std::fill(out + i * stride + end, out + i * stride + round_up(n, 16), 0.0f);
}

#ifdef __AVX512BF16__
// Packs pairs without conversion. A zero completes the last pair.

// Loads the first n of 32 elements; the others are zeros.
__m512i first_elements(const bf16 *x, size_t n) { return _mm512_maskz_loadu_epi16(n < 32 ? (1u << n) - 1 : ~0u, x); }

void pack_along(Bf16x2 *out, size_t stride, Matrix<bf16> m, size_t n, size_t k, size_t padded_n) {
    for (size_t i = 0; i < padded_n; i++)
        for (size_t j = 0; j < k; j += 32)
            _mm512_store_si512(out + i * stride + j / 2, first_elements(m.data + i * m.row + j, i < n ? k - j : 0));
}

void pack_across(Bf16x2 *out, size_t stride, Matrix<bf16> m, size_t n, size_t k) {
    alignas(64) uint16_t pairs[2][32];  // element l of both rows, adjacent
    for (uint16_t l = 0; l < 32; l++) pairs[0][l] = uint16_t(l / 2 + l % 2 * 32), pairs[1][l] = uint16_t(pairs[0][l] + 16);
    const __m512i low = _mm512_load_si512(pairs[0]), high = _mm512_load_si512(pairs[1]);
    for (size_t t = 0; t < k; t += 2)
        for (size_t i = 0; i < n; i += 32) {
            const bf16 *from = m.data + t * m.row + i;
            const __m512i first = first_elements(from, n - i), second = first_elements(from + m.row, t + 1 < k ? n - i : 0);
            Bf16x2 *to = out + t / 2 * stride + i;
            _mm512_store_si512(to, _mm512_permutex2var_epi16(first, low, second));
            _mm512_store_si512(to + 16, _mm512_permutex2var_epi16(first, high, second));
        }
}

void pack_transposed(Bf16x2 *out, size_t stride, Matrix<bf16> m, size_t n, size_t k) {
    for (size_t i = 0; i < n; i += lanes)
        for (size_t t = 0; t < k; t += 2 * lanes) {
            simd::Vector square[lanes];
            for (size_t l = 0; l < lanes; l++)
                square[l] = simd::Vector(first_elements(m.data + (i + l) * m.row + t, i + l < n ? k - t : 0));
            simd::transpose_square(square);
            for (size_t l = 0; l < std::min(lanes, ceil_div(k - t, 2)); l++)
                simd::store_vector(out + (t / 2 + l) * stride + i, square[l]);
        }
}
#endif

// Packs A (m, k) in its memory order, by rows or by columns: the micro-kernel reads single words of it.
template <class Word, class X> simd::View<const Word> pack_a(Word *out, Matrix<X> a, size_t m, size_t k) {
    if (a.column == 1) {
        pack_along(out, sgemm_depth, a, m, k, round_up(m, block_rows));
        return {out, sgemm_depth, 1};
    }
    pack_across(out, sgemm_side, Matrix<X>{a.data, a.column, 1}, m, k);
    return {out, 1, sgemm_side};
}

// Packs B (k, n) into panels of `panel` columns, each (words, panel).
template <class Word, class X> void pack_b(Word *out, Matrix<X> b, size_t k, size_t n) {
    for (size_t j = 0; j < n; j += panel, out += ceil_div(k, terms<Word>) * panel) {
        const X *const columns = b.data + j * b.column;
        if (b.column == 1) pack_across(out, panel, Matrix<X>{columns, b.row, 1}, std::min(panel, n - j), k);
        else pack_transposed(out, panel, Matrix<X>{columns, b.column, 1}, std::min(panel, n - j), k);
    }
}

template <class Word, class X, class Out> void multiply(int threads, float *scratch, std::span<const Product<X, Out>> products) {
    static_assert(sizeof(Word) == sizeof(float));
    const auto tiles = tiles_of(products, size_t(threads), sgemm_side, block_rows, panel);
#pragma omp parallel num_threads(threads)
    {
        float *const sums = scratch + size_t(omp_get_thread_num()) * sgemm_scratch;
        Word *const a = reinterpret_cast<Word *>(sums + sgemm_side * sgemm_side), *const b = a + sgemm_side * sgemm_depth;
#pragma omp for schedule(dynamic)
        for (size_t tile = 0; tile < tiles.size(); tile++) {
            const auto &[of, i0, j0, m, n] = tiles[tile];
            const Matrix<X> &A = of.A, &B = of.B;
            constexpr size_t depth = sgemm_depth * terms<Word>;
            for (size_t k0 = 0; k0 < of.K; k0 += depth) {
                const size_t k = std::min(depth, of.K - k0), words = ceil_div(k, terms<Word>);
                const auto rows = pack_a(a, Matrix<X>{A.data + i0 * A.row + k0 * A.column, A.row, A.column}, m, k);
                pack_b(b, Matrix<X>{B.data + k0 * B.row + j0 * B.column, B.row, B.column}, k, n);
                for (size_t j = 0; j < n; j += panel)
                    for (size_t i = 0; i < m; i += block_rows)
                        simd::product<Word>(std::min(panel, round_up(n - j, 16)), {sums + i * sgemm_side + j, sgemm_side},
                                            {rows.data + i * rows.row, rows.row, rows.column}, {b + j * words, panel}, words,
                                            k0 > 0);
            }
            for (size_t i = 0; i < m; i++)
                write_row(of.C + (i0 + i) * of.ld + j0, sums + i * sgemm_side, of.bias ? of.bias + j0 : nullptr, n,
                          of.accumulate);
        }
#ifdef __AVX512BF16__
        _mm_sfence();  // makes the stores visible to later readers
#endif
    }
}

}  // namespace

template <class X, class Out> void sgemm(int threads, float *scratch, std::span<const Product<X, Out>> products) {
#ifdef __AVX512BF16__
    if constexpr (sizeof(X) == 2)
        if (simd::bf16_dot_is_fast()) return multiply<Bf16x2>(threads, scratch, products);
#endif
    multiply<float>(threads, scratch, products);
}

template void sgemm(int, float *, std::span<const Product<float, float>>);
template void sgemm(int, float *, std::span<const Product<bf16, float>>);
template void sgemm(int, float *, std::span<const Product<bf16, bf16>>);
