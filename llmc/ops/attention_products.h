// The tiles of attention.h and their three products. With a block of queries against a tile of keys, both of one head:
//
//   scores            S (queries, keys)  = Q K^T        at least where a query sees a key
//   sum_over_keys     O (queries, D)    += P V          P is 0 where a query does not see a key
//   sum_over_queries  G (keys, D)       += P^T dO       add_sums_over_queries adds G, however it is stored, to rows of memory
//
// There are three implementations of these products, with different layouts of tiles:
//   Products<float>    a micro-kernel of 6 rows, which computes little more than the scores that the mask leaves
//   Products<Bf16x2>   the same on pairs of bf16, for CPUs that multiply them faster than floats
//   AmxProducts        blocks of (32, 32), for CPUs with a matrix unit (amx.h)
// The last two round P and dS to bf16 first, as on a GPU. All sums are float.
//
// A tile of scores is computed and turned into P strip by strip, so it is still in cache when it is read again. A strip is a few
// queries; their number is a multiple of Products::multiple, the number of rows that a product computes at once.
#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "../core/common.h"
#include "../core/device.h"
#include "amx.h"
#include "attention_types.h"
#include "micro_kernel.h"

namespace attention {

using simd::Bf16x2, simd::terms, simd::View, simd::block_rows, simd::panel, simd::product;
using simd::lanes, simd::load_vector, simd::store_vector, simd::Vector;

constexpr size_t queries = 96, keys = 192;  // largest tile of scores, 72 KiB of floats; multiples of 6 and 32, keys of 64
constexpr size_t max_row = max_D + 16;

// Row length of a tile (n, D): a multiple of a vector, but not a power of two, which would map all rows to a few sets of the cache.
inline size_t row_length(size_t D) { return round_up(D, 16) + 16; }

inline void add_tile_rows(float *out, size_t stride, const float *tile, size_t n, size_t D, float factor) {
    for (size_t i = 0; i < n; i++)
#pragma omp simd
        for (size_t d = 0; d < D; d++) out[i * stride + d] += factor * tile[i * row_length(D) + d];
}

// Indices [begin, end). A function's `see` holds such a range for each query of a block: the keys of the tile that the query sees,
// counted from the tile's first key; neither end falls from one query to the next. Its `active` is the range of queries, counted from
// the block's first and rounded to Products::multiple, that see at least one key of the tile.
struct Range {
    size_t begin, end;
};

// ---- tiles

// n <= N rows of Q, K, V or dO. Zeros fill the rows up to the next multiple of 32.
template <class Word, size_t N> struct HeadTile {
    static constexpr bool floats = std::is_same_v<Word, float>;
    alignas(64) Word rows[N * max_row];                        // (n, D / terms), for sums over D
    alignas(64) Word row_pairs[floats ? 1 : N / 2 * max_row];  // (n / 2, D), for sums over n

    const Word *stacked() const { return floats ? rows : row_pairs; }

    template <class X> void load(Heads<const X> x, size_t n, size_t D) {
        using E = std::conditional_t<floats, float, bf16>;
        for (size_t i = 0; i < round_up(n, 32); i++) {
            E *to = reinterpret_cast<E *>(rows + i * row_length(D));
            const size_t filled = i < n ? D : 0;
            if constexpr (std::is_same_v<E, X>) std::copy_n(x.data + i * x.stride, filled, to);
            else
#pragma omp simd
                for (size_t d = 0; d < filled; d++) to[d] = float(x.data[i * x.stride + d]);
            std::fill(to + filled, to + round_up(D, 32), E(0.0f));
        }
    }
    void stack(size_t n, size_t D) {  // row_pairs from rows
        if constexpr (!floats)
            for (size_t i = 0; i < n; i += 2) {
                const Word *even = rows + i * row_length(D), *odd = even + row_length(D);
                Word *to = row_pairs + i / 2 * row_length(D);
                for (size_t d = 0; d < round_up(D, 16) / 2; d++) {
                    to[2 * d] = {even[d].first, odd[d].first};
                    to[2 * d + 1] = {even[d].second, odd[d].second};
                }
            }
    }
};

template <class Word> struct KeyTile : HeadTile<Word, keys> {
    alignas(64) Word columns[max_D / terms<Word> * keys];  // (D / terms, n), for sums over D

    void transpose(size_t n, size_t D) {  // columns from rows
        const size_t words = D / terms<Word>, row = row_length(D);
        for (size_t i = 0; i < n; i += lanes)
            for (size_t d = 0; d < words; d += lanes) {
                Vector square[lanes];
                for (size_t l = 0; l < lanes; l++) square[l] = load_vector(this->rows + (i + l) * row + d);
                simd::transpose_square(square);
                for (size_t l = 0; l < std::min(lanes, words - d); l++) store_vector(columns + (d + l) * keys + i, square[l]);
            }
    }
};

// Scores, which a softmax turns in place into P or dS, and copies in the layouts that bf16 products read.
template <class Word> struct ScoreTile {
    static constexpr bool floats = std::is_same_v<Word, float>;
    alignas(64) float scores[queries * keys];
    alignas(64) Word rounded[floats ? 1 : queries * keys / 2];      // (queries, keys / 2), for sums over keys
    alignas(64) Word query_pairs[floats ? 1 : queries / 2 * keys];  // (queries / 2, keys), for sums over queries

    const Word *by_keys() const {
        if constexpr (floats) return scores;
        else return rounded;
    }
    const Word *by_queries() const {
        if constexpr (floats) return scores;
        else return query_pairs;
    }
};

// ---- the products

template <class Word> struct Products {
    using Queries = HeadTile<Word, queries>;
    using Keys = KeyTile<Word>;
    using Scores = ScoreTile<Word>;
    struct Registers {};
    static constexpr size_t multiple = block_rows, strip = queries;
    size_t D, row, width;

    static Vector exp(Vector x) { return terms<Word> == 1 ? fast_exp(x) : rough_exp(x); }

    template <class Dev> Products(Dev, size_t D) : D(D), row(row_length(D)), width(round_up(D, 16)) {}

    void prepare_columns(Keys &k, size_t m) const { k.transpose(m, D); }
    template <class Tile> void prepare_stacked(Tile &x, size_t n) const { x.stack(n, D); }

    void scores(float *out, const Queries &q, const Keys &k, const Range *see, Range active, size_t m) const {
        for (size_t j = 0; j < m; j += panel)
            for (size_t i = active.begin; i < active.end; i += block_rows) {
                const size_t begin = std::max(j, see[i].begin / 16 * 16);
                const size_t end = std::min(j + panel, round_up(see[i + block_rows - 1].end, 16));
                if (begin < end)
                    product<Word>(end - begin, {out + i * keys + begin, keys}, {q.rows + i * row, row}, {k.columns + begin, keys},
                                  D / terms<Word>, false);
            }
    }
    void sum_over_keys(float *out, const ScoreTile<Word> &p, const Keys &v, const Range *see, Range active, size_t) const {
        constexpr size_t p_row = keys / terms<Word>;
        for (size_t d = 0; d < width; d += panel)
            for (size_t i = active.begin; i < active.end; i += block_rows) {
                const size_t begin = see[i].begin / terms<Word>, end = ceil_div(see[i + block_rows - 1].end, terms<Word>);
                if (begin < end)
                    product<Word>(std::min(panel, width - d), {out + i * row + d, row}, {p.by_keys() + i * p_row + begin, p_row},
                                  {v.stacked() + begin * row + d, row}, end - begin, true);
            }
    }
    void sum_over_queries(float *out, const ScoreTile<Word> &p, const Queries &x, const Range *see, Range active,
                          size_t m) const {
        Range of[keys / block_rows];  // for each group of 6 keys the queries that see any of them, in words
        size_t begin = active.begin, end = active.begin;
        for (size_t k = 0; k < m; k += block_rows) {
            while (begin < active.end && see[begin].end <= k) begin++;
            while (end < active.end && see[end].begin < k + block_rows) end++;
            of[k / block_rows] = {begin / terms<Word>, ceil_div(end, terms<Word>)};
        }
        for (size_t d = 0; d < width; d += panel)
            for (size_t k = 0; k < m; k += block_rows) {
                const auto [first, last] = of[k / block_rows];
                if (first < last)
                    product<Word>(std::min(panel, width - d), {out + k * row + d, row},
                                  {p.by_queries() + first * keys + k, 1, keys}, {x.stacked() + first * row + d, row},
                                  last - first, true);
            }
    }
    void add_sums_over_queries(float *out, size_t stride, const float *sums, size_t n, float factor) const {
        add_tile_rows(out, stride, sums, n, D, factor);
    }

    void round_for_keys(ScoreTile<Word> &p, Range active, size_t m) const;
    void round_for_queries(ScoreTile<Word> &p, Range active, size_t m) const;
};

template <> inline void Products<float>::round_for_keys(ScoreTile<float> &, Range, size_t) const {}
template <> inline void Products<float>::round_for_queries(ScoreTile<float> &, Range, size_t) const {}

#ifdef __AVX512BF16__

inline __m512i rounded_to_bf16(const float *low, const float *high) {  // 32 bf16: 16 of low, then 16 of high
    return (__m512i)_mm512_cvtne2ps_pbh(__m512(load_vector(high)), __m512(load_vector(low)));
}
inline void round_rows(ScoreTile<Bf16x2> &p, Range active, size_t m) {
    for (size_t i = active.begin; i < active.end; i++)
        for (size_t j = 0; j < m; j += 32) {
            const float *from = p.scores + i * keys + j;
            _mm512_store_si512(p.rounded + (i * keys + j) / 2, rounded_to_bf16(from, from + 16));
        }
}
template <> inline void Products<Bf16x2>::round_for_keys(ScoreTile<Bf16x2> &p, Range active, size_t m) const {
    round_rows(p, active, m);
}
template <> inline void Products<Bf16x2>::round_for_queries(ScoreTile<Bf16x2> &p, Range active, size_t m) const {
    alignas(64) uint16_t interleaved[32];
    for (uint16_t l = 0; l < 16; l++) interleaved[2 * l] = l, interleaved[2 * l + 1] = uint16_t(16 + l);
    const __m512i order = _mm512_load_si512(interleaved);
    for (size_t i = active.begin; i < active.end; i += 2)
        for (size_t j = 0; j < m; j += 16) {
            const float *from = p.scores + i * keys + j;
            _mm512_store_si512(p.query_pairs + i / 2 * keys + j,
                               _mm512_permutexvar_epi16(order, rounded_to_bf16(from, from + keys)));
        }
}

#endif

#ifdef LLMC_AMX

// Products on the matrix unit. Sums over queries are stored transposed, (D, keys), which makes P, the larger factor, the second one; rounding
// directly produces the layout of a second factor.
class AmxProducts {
  public:
    using Registers = amx::Registers;
    static constexpr size_t multiple = amx::block, strip = multiple;

    struct Queries {
        Heads<const bf16> x;
        amx::Packed<queries * max_D> rows, columns;  // first factors: X and X^T

        void load(Heads<const bf16> from, size_t n, size_t D) {
            x = from;
            rows.pack<amx::Factor::first>({x.data, x.stride, 1}, n, D);
        }
    };
    struct Keys {
        Heads<const bf16> x;
        amx::Packed<keys * max_D> columns, stacked;  // second factors: X^T and X

        void load(Heads<const bf16> from, size_t, size_t) { x = from; }
    };
    struct Scores {
        alignas(64) float scores[queries * keys];
        alignas(64) bf16 by_keys[queries * keys];     // P as a first factor
        alignas(64) bf16 by_queries[queries * keys];  // and as a second
    };

    static Vector exp(Vector x) { return rough_exp(x); }

    AmxProducts(CpuBf16, size_t D) : D_(D), row_(row_length(D)) {}

    void prepare_columns(Keys &k, size_t m) const { k.columns.pack<amx::Factor::second>({k.x.data, k.x.stride, 1}, m, D_); }
    void prepare_stacked(Keys &v, size_t m) const { v.stacked.pack<amx::Factor::second>({v.x.data, 1, v.x.stride}, D_, m); }
    void prepare_stacked(Queries &q, size_t n) const { q.columns.pack<amx::Factor::first>({q.x.data, 1, q.x.stride}, D_, n); }

    void scores(float *out, const Queries &q, const Keys &k, const Range *see, Range active, size_t) const {
        for (size_t i = active.begin; i < active.end; i += multiple) {
            const auto [begin, end] = seen_by(see, i);
            for (size_t j = begin; j < end; j += multiple)
                amx::multiply(out + i * keys + j, keys, q.rows.at(i, 0), k.columns.at(j, 0), q.rows.steps, false);
        }
    }
    void sum_over_keys(float *out, const Scores &p, const Keys &v, const Range *see, Range active, size_t) const {
        for (size_t i = active.begin; i < active.end; i += multiple) {
            const auto [begin, end] = seen_by(see, i);
            for (size_t d = 0; d < D_ && begin < end; d += multiple)
                amx::multiply(out + i * row_ + d, row_, p.by_keys + by_keys(i, begin), v.stacked.at(d, begin),
                              (end - begin) / multiple, true);
        }
    }
    void sum_over_queries(float *out, const Scores &p, const Queries &x, const Range *see, Range active, size_t m) const {
        size_t begin = active.begin, end = active.begin;  // the queries that see any of 32 keys
        for (size_t k = 0; k < m; k += multiple) {
            while (begin < active.end && seen_by(see, begin).end <= k) begin += multiple;
            while (end < active.end && seen_by(see, end).begin <= k) end += multiple;
            for (size_t d = 0; d < D_ && begin < end; d += multiple)
                amx::multiply(out + d * keys + k, keys, x.columns.at(d, begin), p.by_queries + by_queries(begin, k),
                              (end - begin) / multiple, true);
        }
    }
    void add_sums_over_queries(float *out, size_t stride, const float *sums, size_t n, float factor) const {
        for (size_t k = 0; k < n; k += amx::side)
            for (size_t d = 0; d < D_; d += amx::side) {
                amx::Words square[amx::side];
                for (size_t i = 0; i < amx::side; i++)
                    square[i] = *reinterpret_cast<const amx::StoredWords *>(sums + (d + i) * keys + k);
                amx::transpose(square);
                for (size_t i = 0; i < std::min(amx::side, n - k); i++)
                    for (size_t j = 0; j < std::min(amx::side, D_ - d); j++)
                        out[(k + i) * stride + d + j] += factor * std::bit_cast<float>(square[i][j]);
            }
    }

    void round_for_keys(Scores &p, Range active, size_t m) const {
        for (size_t i = active.begin; i < active.end; i++)
            for (size_t j = 0; j < m; j += multiple)
                amx::store_words(p.by_keys + by_keys(i, j), amx::rounded(p.scores + i * keys + j));
    }
    void round_for_queries(Scores &p, Range active, size_t m) const {
        for (size_t i = active.begin; i < active.end; i += 2)
            for (size_t j = 0; j < round_up(m, multiple); j += amx::side)
                amx::store_words(p.by_queries + by_queries(i, j),
                                 amx::rounded_pairs(p.scores + i * keys + j, p.scores + (i + 1) * keys + j));
    }

  private:
    size_t D_, row_;
    // The offset of element (i, j) of P in its two packed forms.
    static size_t by_keys(size_t i, size_t j) { return (i / multiple * keys + j) * multiple + i % multiple * multiple; }
    static size_t by_queries(size_t i, size_t j) {
        return (j / multiple * queries + i / multiple * multiple) * multiple + j % multiple / amx::side * amx::tile +
               i % multiple / 2 * multiple;
    }
    // The keys that any of the queries i to i + 31 sees, in whole blocks.
    static Range seen_by(const Range *see, size_t i) {
        return {see[i].begin / multiple * multiple, round_up(see[i + multiple - 1].end, multiple)};
    }
};

#endif

// Calls f(products) with the products that are fastest on this CPU.
template <class X, class F> void with_products(Cpu<X> dev, size_t D, F f) {
#ifdef LLMC_AMX
    if constexpr (std::is_same_v<X, bf16>)
        if (amx::available()) return f(AmxProducts(dev, D));
#endif
#ifdef __AVX512BF16__
    if constexpr (std::is_same_v<X, bf16>)
        if (simd::bf16_dot_is_fast()) return f(Products<Bf16x2>(dev, D));
#endif
    f(Products<float>(dev, D));
}

}  // namespace attention
