#include "sgemm.h"

#include <omp.h>

#include <algorithm>

#include "../core/dtype.h"
#include "gemm_tiles.h"
#include "micro_kernel.h"

namespace {

using simd::lanes, simd::panel, simd::block_rows;

// The longest side of a tile of C, and the terms packed at a time: a panel of B fits the L1 cache.
constexpr size_t sgemm_side = 384, sgemm_depth = 128;
static_assert(sgemm_side % block_rows == 0 && sgemm_side % panel == 0);
static_assert(2 * sgemm_side * sgemm_depth + sgemm_side * sgemm_side <= sgemm_scratch);

// out[i * stride + j] = m(i, j) for i < rows, j < columns, whose rows are contiguous; zeros for i from rows to padded_rows and for j from columns
// to the next multiple of 16.
template <class X> void copy_rows(float *out, size_t stride, Matrix<X> m, size_t rows, size_t columns, size_t padded_rows) {
    for (size_t i = 0; i < rows; i++) {
        simd::for_each(columns,
                       [&]<class V>(size_t j) { simd::store(out + i * stride + j, simd::load<V>(m.data + i * m.row + j)); });
        std::fill(out + i * stride + columns, out + i * stride + round_up(columns, 16), 0.0f);
    }
    for (size_t i = rows; i < padded_rows; i++) std::fill_n(out + i * stride, round_up(columns, 16), 0.0f);
}

// The same for a matrix whose columns are contiguous, by squares that are transposed in registers.
template <class X> void copy_columns(float *out, size_t stride, Matrix<X> m, size_t rows, size_t columns) {
    for (size_t j = 0; j < columns; j += lanes)
        for (size_t i = 0; i < rows; i += lanes) {
            if (i + lanes <= rows && j + lanes <= columns) {
                simd::Vector square[lanes];
                for (size_t l = 0; l < lanes; l++) square[l] = simd::load<simd::Vector>(m.data + i + (j + l) * m.column);
                simd::transpose_square(square);
                for (size_t l = 0; l < lanes; l++) simd::store_vector(out + (i + l) * stride + j, square[l]);
            } else {
                for (size_t r = i; r < std::min(rows, i + lanes); r++)
                    for (size_t c = j; c < j + lanes; c++)
                        out[r * stride + c] = c < columns ? float(m.data[r + c * m.column]) : 0.0f;
            }
        }
    if (const size_t end = round_up(columns, lanes); end < round_up(columns, 16))
        for (size_t i = 0; i < rows; i++) std::fill(out + i * stride + end, out + i * stride + round_up(columns, 16), 0.0f);
}

// Packs A (m, k) as it lies, by rows or by columns: the micro-kernel reads single words of it.
template <class X> simd::View<const float> pack_a(float *out, Matrix<X> a, size_t m, size_t k) {
    const size_t rows = round_up(m, block_rows);
    if (a.column == 1) {
        copy_rows(out, sgemm_depth, a, m, k, rows);
        return {out, sgemm_depth, 1};
    }
    copy_rows<X>(out, sgemm_side, {a.data, a.column, 1}, k, m, k);
    return {out, 1, sgemm_side};
}

// Packs B (k, n) into panels of `panel` columns, each (k, panel).
template <class X> void pack_b(float *out, Matrix<X> b, size_t k, size_t n) {
    for (size_t j = 0; j < n; j += panel, out += k * panel) {
        const Matrix<X> columns{b.data + j * b.column, b.row, b.column};
        if (b.column == 1) copy_rows(out, panel, columns, k, std::min(panel, n - j), k);
        else copy_columns(out, panel, columns, k, std::min(panel, n - j));
    }
}

}  // namespace

template <class X, class Out> void sgemm(int threads, float *scratch, std::span<const Product<X, Out>> products) {
    const auto tiles = tiles_of(products, size_t(threads), sgemm_side, block_rows, panel);
#pragma omp parallel num_threads(threads)
    {
        float *a = scratch + size_t(omp_get_thread_num()) * sgemm_scratch, *b = a + sgemm_side * sgemm_depth,
              *sums = b + sgemm_side * sgemm_depth;
#pragma omp for schedule(dynamic)
        for (size_t tile = 0; tile < tiles.size(); tile++) {
            const auto &[of, i0, j0, m, n] = tiles[tile];
            const Matrix<X> &A = of.A, &B = of.B;
            for (size_t k0 = 0; k0 < of.K; k0 += sgemm_depth) {
                const size_t k = std::min(sgemm_depth, of.K - k0);
                const auto rows = pack_a<X>(a, {A.data + i0 * A.row + k0 * A.column, A.row, A.column}, m, k);
                pack_b<X>(b, {B.data + k0 * B.row + j0 * B.column, B.row, B.column}, k, n);
                for (size_t j = 0; j < n; j += panel)
                    for (size_t i = 0; i < m; i += block_rows)
                        simd::product<float>(std::min(panel, round_up(n - j, 16)), {sums + i * sgemm_side + j, sgemm_side},
                                             {rows.data + i * rows.row, rows.row, rows.column}, {b + j * k, panel}, k, k0 > 0);
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

template void sgemm(int, float *, std::span<const Product<float, float>>);
template void sgemm(int, float *, std::span<const Product<bf16, float>>);
template void sgemm(int, float *, std::span<const Product<bf16, bf16>>);
