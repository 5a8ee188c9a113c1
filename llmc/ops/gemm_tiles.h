// Shared by our own matrix products (sgemm.cpp, amx_gemm.cpp): the division of C among threads, and the output of its rows.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "../core/common.h"
#include "sgemm.h"
#include "simd.h"

// The size of the tiles of C: at most `longest` on each side, in multiples of `row_step` and `column_step`, and chosen to balance the number of tiles
// per thread. No sum depends on it.
struct TileSize {
    size_t rows, columns;
    TileSize(size_t M, size_t N, size_t threads, size_t longest, size_t row_step, size_t column_step) {
        const auto height = [&](size_t count) { return round_up(ceil_div(M, count), row_step); };
        const auto width = [&](size_t count) { return round_up(ceil_div(N, count), column_step); };
        size_t down = ceil_div(M, longest), across = ceil_div(N, longest);
        while (down * across % threads && down * across < 4 * threads && std::max(height(down), width(across)) > longest / 4)
            height(down) > width(across) ? down *= 2 : across *= 2;
        rows = height(down), columns = width(across);
    }
};

// A tile of one of several products: rows [i, i + rows) and columns [j, j + columns) of C.
template <class X, class Out> struct ProductTile {
    const Product<X, Out> &of;
    size_t i, j, rows, columns;
};

// The tiles of several products, in their order. An empty sum leaves C as it is, or is 0.
template <class X, class Out>
std::vector<ProductTile<X, Out>> tiles_of(std::span<const Product<X, Out>> products, size_t threads, size_t longest,
                                          size_t row_step, size_t column_step) {
    std::vector<ProductTile<X, Out>> tiles;
    for (const Product<X, Out> &p : products) {
        for (size_t i = 0; p.K == 0 && !p.accumulate && i < p.M; i++) std::fill_n(p.C + i * p.ld, p.N, Out(0.0f));
        if (p.K == 0 || p.M == 0) continue;
        const TileSize size(p.M, p.N, threads, longest, row_step, column_step);
        for (size_t j = 0; j < p.N; j += size.columns)
            for (size_t i = 0; i < p.M; i += size.rows)
                tiles.push_back({p, i, j, std::min(size.rows, p.M - i), std::min(size.columns, p.N - j)});
    }
    return tiles;
}

// out (n) = or += sum (n) + bias (n) or nothing. Whole cache lines that are overwritten are written past the caches, which would otherwise load
// them first; so an _mm_sfence must follow before another thread reads.
template <class Out, class X> void write_row(Out *out, const float *sum, const X *bias, size_t n, bool accumulate) {
    size_t done = 0;
#ifdef __AVX512BF16__
    if (!accumulate && reinterpret_cast<uintptr_t>(out) % 64 == 0)
        for (; done + 32 <= n; done += 32) {
            simd::Vector x = simd::load_vector(sum + done), y = simd::load_vector(sum + done + 16);
            if (bias) x += simd::load<simd::Vector>(bias + done), y += simd::load<simd::Vector>(bias + done + 16);
            const __m512 low(x), high(y);
            if constexpr (std::is_same_v<Out, float>) _mm512_stream_ps(out + done, low), _mm512_stream_ps(out + done + 16, high);
            else _mm512_stream_si512(reinterpret_cast<__m512i *>(out + done), __m512i(_mm512_cvtne2ps_pbh(high, low)));
        }
#endif
    simd::for_each(n - done, [&]<class V>(size_t i) {
        V x = simd::load<V>(sum + done + i);
        if (bias) x += simd::load<V>(bias + done + i);
        if (accumulate) x += simd::load<V>(out + done + i);
        simd::store(out + done + i, x);
    });
}
