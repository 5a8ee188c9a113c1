// Attention in which every query sees one interval of keys: causal, packed, sliding-window and split over ranks alike.
//
//   The query at global position p of the packed row sees the keys lo[p] .. p, where lo[p] is the first position of p's document,
//   or p - window + 1 if that is larger. With s[p,r] = scale * q_p . k_r over those keys:
//       lse[p] = log sum_r exp(s[p,r])        P[p,r] = exp(s[p,r] - lse[p])        out_p = sum_r P[p,r] v_r
//       delta[p] = dout_p . out_p             dS[p,r] = P[p,r] * (dout_p . v_r - delta[p])
//       dv_r = sum_p P[p,r] dout_p            dq_p = scale * sum_r dS[p,r] k_r            dk_r = scale * sum_p dS[p,r] q_p
//
//   A part is some of the queries against some of the keys. begin, then a part per block of keys that arrives, then end:
//
//   attention_begin         (dev, out32, lse, T, H, D)                          out32 = 0, lse = -inf
//   attention_forward_part  (dev, out32, lse, q, k, v, lo, q_pieces, k_pieces, T, H, KV, D, scale)
//                                                                               merges the part into (out32, lse)
//   attention_end           (dev, out, out32, n)                                out = out32 rounded, n elements
//   attention_backward_begin(dev, dq32, dk32, dv32, delta, out, dout, T, H, KV, D)
//                                                                               dq32 = dk32 = dv32 = 0, and delta
//   attention_backward_part (dev, dq32, dk32, dv32, scratch, q, k, v, delta, lse, dout, lo, q_pieces, k_pieces, T, H, KV, D,
//                            scale)                                             adds to dq32, dk32, dv32
//   attention_backward_end  (dev, dqkv, dq32, dk32, dv32, T, H, KV, D)          rounds them into rows of [dq | dk | dv]
//
//   q, out, dout, out32, dq32 (T, H, D)    k, v, dk32, dv32 (T, KV, D)    dqkv (T, (H+2*KV)*D)    lse, delta (H, T)
//   q, k, v, out, dout, dqkv X, the others float; q, k, v are views with a row stride. T counts the local query rows.
//   lo (int32) is indexed by global position and does not decrease. Query head h uses KV head h / (H/KV). D is a multiple of 8,
//   at most 256. scratch: attention_scratch(dev) floats. No aliasing.
//   Sums are float, in an order that depends on sizes and pieces alone, never on threads. The products of tiles multiply floats or,
//   for bf16 on a CPU with instructions for it, bf16: P and dS are then rounded to bf16 first, as on a GPU.
//
// No (T, T) array exists: tiles of scores live in cache, with a running maximum and sum per query (Milakov and Gimelshein, 2018,
// arXiv:1805.02867; Dao et al., "FlashAttention", 2022, arXiv:2205.14135). Keys that no query of a block sees are skipped.
// A tile of scores is held transposed, (keys, queries): its softmax then runs along vectors of queries and needs no sum across
// lanes, and K and V serve all products as they lie; only Q and dO are also needed transposed, once per block of queries.
#pragma once
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "../core/common.h"
#include "../core/device.h"
#include "../core/mutant.h"
#include "layout.h"
#include "matmul.h"
#include "pieces.h"
#include "simd.h"

namespace attention {

constexpr size_t queries = 192, keys = 96;  // largest tile of scores: multiples of 64 and 6, see product(); 72 KiB of floats
constexpr size_t max_row = max_D + 16;      // row length of a tile of heads

inline Piece clip(Piece p, size_t begin, size_t end) {
    begin = std::max(begin, p.begin);
    return {begin, std::min(end, p.end), p.offset + begin - p.begin};
}
inline size_t length(Piece p) { return p.end > p.begin ? p.end - p.begin : 0; }

inline std::vector<Piece> cut(const Pieces &pieces, size_t size) {
    std::vector<Piece> blocks;
    for (size_t i = 0; i < pieces.count; i++)
        for (size_t at = pieces.piece[i].begin; at < pieces.piece[i].end; at += size)
            blocks.push_back(clip(pieces.piece[i], at, at + size));
    return blocks;
}

// ---- matrix product of float tiles

#ifdef __AVX512F__
constexpr size_t lanes = 16, panel = 64;  // 6 x 4 accumulators, 4 of b and 1 of a in 32 registers
#else
constexpr size_t lanes = 8, panel = 16;  // 6 x 2 accumulators, 2 of b and 1 of a in 16 registers
#endif
typedef float Vector __attribute__((vector_size(lanes * sizeof(float))));

struct Tile {  // element (i, j) at data[i * row + j * column]; a vector starts at every 16th element of a row
    float *data;
    size_t row, column = 1;
};

template <size_t rows, size_t columns> inline void product_block(Tile c, Tile a, Tile b, size_t K, bool add) {
    constexpr size_t W = columns / lanes;
    Vector sum[rows][W];
#pragma GCC unroll 8
    for (size_t i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (size_t j = 0; j < W; j++) sum[i][j] = add ? reinterpret_cast<Vector *>(c.data + i * c.row)[j] : Vector{};
    for (size_t k = 0; k < K; k++) {
        const Vector *b_row = reinterpret_cast<const Vector *>(b.data + k * b.row);
#pragma GCC unroll 8
        for (size_t i = 0; i < rows; i++)
#pragma GCC unroll 4
            for (size_t j = 0; j < W; j++) sum[i][j] += a.data[i * a.row + k * a.column] * b_row[j];
    }
#pragma GCC unroll 8
    for (size_t i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (size_t j = 0; j < W; j++) reinterpret_cast<Vector *>(c.data + i * c.row)[j] = sum[i][j];
}

template <size_t columns> void product_panel(Tile c, Tile a, Tile b, size_t M, size_t K, bool add) {
    size_t i = 0;
    for (; i + 6 <= M; i += 6)
        product_block<6, columns>({c.data + i * c.row, c.row}, {a.data + i * a.row, a.row, a.column}, b, K, add);
    for (; i < M; i++) product_block<1, columns>({c.data + i * c.row, c.row}, {a.data + i * a.row, a.row, a.column}, b, K, add);
}

// c (M, N) = or += a (M, K) b (K, N), where N is a multiple of 16. a may be a transposed tile, c and b have column 1.
inline void product(Tile c, Tile a, Tile b, size_t M, size_t N, size_t K, bool add) {
    size_t j = 0;
    for (; j + panel <= N; j += panel) product_panel<panel>({c.data + j, c.row}, a, {b.data + j, b.row}, M, K, add);
    for (; j < N; j += 16) product_panel<16>({c.data + j, c.row}, a, {b.data + j, b.row}, M, K, add);
}

// ---- between memory and tiles. E, the type in which products take their inputs: float or bf16

// Row length of a tile of heads: whole vectors, and not a power of two, which would map its rows to few sets of the cache.
inline size_t row_length(size_t D) { return round_up(D, 16) + 16; }

// Tiles are ragged at the ends of documents. Products of bf16 are made for few sizes, so theirs are filled up with zeros.
template <class E> constexpr size_t query_unit = sizeof(E) == sizeof(float) ? 16 : 64;
template <class E> constexpr size_t key_unit = sizeof(E) == sizeof(float) ? 1 : 32;

template <class E, class X> void load(E *tile, Heads<const X> x, size_t n, size_t unit, size_t D) {
    for (size_t i = 0; i < n; i++) {
        const X *from = x.data + i * x.stride;
        E *to = tile + i * row_length(D);
        if constexpr (std::is_same_v<E, X>) std::copy_n(from, D, to);
        else
#pragma omp simd
            for (size_t d = 0; d < D; d++) to[d] = float(from[d]);
        std::fill(to + D, to + round_up(D, 16), E(0.0f));
    }
    std::fill(tile + n * row_length(D), tile + round_up(n, unit) * row_length(D), E(0.0f));
}

template <class X> void load_transposed(float *tile, Heads<const X> x, size_t n, size_t D) {  // tile (D, queries)
    for (size_t i0 = 0; i0 < n; i0 += 16)
        for (size_t d = 0; d < D; d++)
            for (size_t i = i0; i < i0 + 16; i++) tile[d * queries + i] = i < n ? float(x.data[i * x.stride + d]) : 0.0f;
}

inline void add_rows(float *out, size_t stride, const float *tile, size_t n, size_t D, float factor) {
    for (size_t i = 0; i < n; i++)
#pragma omp simd
        for (size_t d = 0; d < D; d++) out[i * stride + d] += factor * tile[i * row_length(D) + d];
}

template <class X> Heads<const X> rows_of(Heads<const X> x, size_t row, size_t head, size_t D) {
    return {x.data + row * x.stride + head * D, x.stride};
}

// The queries of a block that see some key of a tile: both ends of [lo[p], p] grow with p, so they are a range [first, end) of
// the block, rounded to multiples of query_unit: those in excess see nothing of the tile by the mask.
struct Seeing {
    size_t first, end;
};
template <class E> Seeing seeing(Piece q, Piece k, const int32_t *lo) {
    const size_t first = k.begin > q.begin ? (k.begin - q.begin) / query_unit<E> * query_unit<E> : 0;
    const size_t end = size_t(std::lower_bound(lo + q.begin, lo + q.end, int64_t(k.end)) - (lo + q.begin));
    return {first, round_up(end, query_unit<E>)};
}

// ---- the three products, each in float and in bf16

// A block of queries or of dout: rows (n, D) and, for the products of floats, columns (D, n).
template <class E> struct QueryTile {
    alignas(64) E rows[queries * max_row];
    template <class X> void load(Heads<const X> x, size_t n, size_t D) { attention::load(rows, x, n, query_unit<E>, D); }
};
template <> struct QueryTile<float> {
    alignas(64) float rows[queries * max_row], columns[max_D * queries];
    template <class X> void load(Heads<const X> x, size_t n, size_t D) {
        attention::load(rows, x, n, query_unit<float>, D);
        load_transposed(columns, x, n, D);
    }
};

// Scores (keys, queries), which a softmax turns in place into P or dS, and the same as the products take it.
template <class E> struct ScoreTile {
    alignas(64) float scores[keys * queries];
    alignas(64) E rounded[keys * queries];
    E *result() { return rounded; }
    void round_row(size_t r, Seeing s) {
#pragma omp simd
        for (size_t j = s.first; j < s.end; j++) rounded[r * queries + j] = scores[r * queries + j];
    }
    void fill_up(size_t m, Seeing s) {  // rows up to the next multiple of key_unit are part of the product too
        for (size_t r = m; r < round_up(m, key_unit<E>); r++)
            std::fill_n(rounded + r * queries + s.first, s.end - s.first, E(0.0f));
    }
};
template <> struct ScoreTile<float> {
    alignas(64) float scores[keys * queries];
    float *result() { return scores; }
    void round_row(size_t, Seeing) {}
    void fill_up(size_t, Seeing) {}
};

template <class E> struct Products;

template <> struct Products<float> {
    size_t D, row, width;
    template <class Dev> Products(Dev, size_t D) : D(D), row(row_length(D)), width(round_up(D, 16)) {}

    // out (m, n) = k (m, D) q^T            of the queries that see some key, as below
    void scores(float *out, float *k, QueryTile<float> &q, Seeing s, size_t m) const {
        product({out + s.first, queries}, {k, row}, {q.columns + s.first, queries}, m, s.end - s.first, D, false);
    }
    // out (m, D) = p (m, n) q (n, D)
    void sum_over_queries(float *out, float *p, QueryTile<float> &q, Seeing s, size_t m) const {
        product({out, row}, {p + s.first, queries}, {q.rows + s.first * row, row}, m, width, s.end - s.first, false);
    }
    // out (n, D) += p^T (n, m) k (m, D)
    void sum_over_keys(float *out, float *p, float *k, Seeing s, size_t m) const {
        product({out + s.first * row, row}, {p + s.first, 1, queries}, {k, row}, s.end - s.first, width, m, true);
    }
};

template <> struct Products<bf16> {
    static constexpr size_t M = keys / key_unit<bf16>, N = queries / query_unit<bf16>;
    size_t row;
    struct Three {
        TileMatmul scores, sum_over_queries, sum_over_keys;
    } of_size[M][N];

    Products(CpuBf16 dev, size_t D) : row(row_length(D)) {
        const size_t width = round_up(D, 16);
        for (size_t i = 0; i < M; i++)
            for (size_t j = 0; j < N; j++) {
                const size_t m = (i + 1) * key_unit<bf16>, n = (j + 1) * query_unit<bf16>;
                of_size[i][j] = {{dev, queries, {row, 1}, {1, row}, m, n, width, false},
                                 {dev, row, {queries, 1}, {row, 1}, m, width, n, false},
                                 {dev, row, {1, queries}, {row, 1}, n, width, m, true}};
            }
    }
    const Three &of(Seeing s, size_t m) const {
        return of_size[ceil_div(m, key_unit<bf16>) - 1][ceil_div(s.end - s.first, query_unit<bf16>) - 1];
    }
    void scores(float *out, const bf16 *k, const QueryTile<bf16> &q, Seeing s, size_t m) const {
        of(s, m).scores(out + s.first, k, q.rows + s.first * row);
    }
    void sum_over_queries(float *out, const bf16 *p, const QueryTile<bf16> &q, Seeing s, size_t m) const {
        of(s, m).sum_over_queries(out, p + s.first, q.rows + s.first * row);
    }
    void sum_over_keys(float *out, const bf16 *p, const bf16 *k, Seeing s, size_t m) const {
        of(s, m).sum_over_keys(out + s.first * row, p + s.first, k);
    }
};

// f(E()) with the type of the products: float for the few rows of a step of generation, which bf16 would fill up with zeros.
template <class X, class F> void with_product_type(Cpu<X> dev, size_t T, F f) {
    if constexpr (std::is_same_v<X, bf16>)
        if (TileMatmul::available(dev) && T >= query_unit<bf16>) return f(bf16());
    f(float());
}

// ---- forward

template <class E> struct ForwardTiles {
    QueryTile<E> q;
    alignas(64) E k[keys * max_row];
    alignas(64) E v[keys * max_row];
    ScoreTile<E> p;                            // exp(score - max)
    alignas(64) float out[queries * max_row];  // sum of exp(score - max) * v
    float max[queries], base[queries], sum[queries], shrink[queries];
    int32_t lo[queries];
};

// One step of the online softmax: scores become exp(score - max); what was summed under the old maximum shrinks to the new one.
template <class E> void softmax_tile(ForwardTiles<E> &t, Piece q, Piece k, Seeing s, size_t D, float scale) {
    std::copy(t.max + s.first, t.max + s.end, t.shrink + s.first);
    for (size_t r = 0; r < length(k); r++) {
        const int32_t key = int32_t(k.begin + r), own = key - int32_t(q.begin);  // own: the query at the key's position
        float *scores = t.p.scores + r * queries;
#pragma omp simd
        for (size_t j = s.first; j < s.end; j++) {
            scores[j] = t.lo[j] <= MUTANT(4, key - 1, key) && int32_t(j) >= own ? scale * scores[j] : -INFINITY;
            t.max[j] = scores[j] > t.max[j] ? scores[j] : t.max[j];  // leaves a NaN to exp
        }
    }
#pragma omp simd
    for (size_t j = s.first; j < s.end; j++) {
        t.base[j] = t.max[j] == -INFINITY ? 0.0f : t.max[j];  // no key so far: exp(-inf - 0) = 0 instead of NaN
        t.shrink[j] = fast_exp(t.shrink[j] - t.base[j]);
        t.sum[j] *= t.shrink[j];
    }
    for (size_t r = 0; r < length(k); r++) {
        float *p = t.p.scores + r * queries;
#pragma omp simd
        for (size_t j = s.first; j < s.end; j++) {
            p[j] = fast_exp(p[j] - t.base[j]);
            t.sum[j] += p[j];
        }
        t.p.round_row(r, s);
    }
    t.p.fill_up(length(k), s);
    for (size_t j = s.first; j < s.end; j++)
#pragma omp simd
        for (size_t d = 0; d < round_up(D, 16); d++) t.out[j * row_length(D) + d] *= t.shrink[j];
}

inline bool sees(Piece q, const Pieces &k_pieces, const int32_t *lo) {
    return std::any_of(k_pieces.piece, k_pieces.piece + k_pieces.count,
                       [&](Piece k) { return length(clip(k, size_t(lo[q.begin]), q.end)) > 0; });
}

// One block of queries of one head against all keys it sees, merged into out (rows of `stride`) and lse.
template <class E, class X>
void forward_block(ForwardTiles<E> &t, const Products<E> &products, float *out, size_t stride, float *lse, Heads<const X> q,
                   Heads<const X> k, Heads<const X> v, const int32_t *lo, Piece block, const Pieces &k_pieces, size_t D,
                   float scale) {
    const size_t n = length(block), padded = round_up(n, query_unit<E>), row = row_length(D);
    t.q.load(q, n, D);
    std::fill(t.out, t.out + padded * row, 0.0f);
    for (size_t j = 0; j < padded; j++) {
        t.lo[j] = j < n ? lo[block.begin + j] : INT32_MAX;  // rows beyond the block see nothing
        t.max[j] = -INFINITY;
        t.sum[j] = 0;
    }
    for (size_t i = 0; i < k_pieces.count; i++) {
        const Piece seen = clip(k_pieces.piece[i], size_t(lo[block.begin]), block.end);
        for (size_t at = seen.begin; at < seen.end; at += keys) {
            const Piece tile = clip(seen, at, at + keys);
            const Seeing s = seeing<E>(block, tile, lo);
            load(t.k, rows_of(k, tile.offset, 0, D), length(tile), key_unit<E>, D);
            load(t.v, rows_of(v, tile.offset, 0, D), length(tile), key_unit<E>, D);
            products.scores(t.p.scores, t.k, t.q, s, length(tile));
            softmax_tile(t, block, tile, s, D, scale);
            products.sum_over_keys(t.out, t.p.result(), t.v, s, length(tile));
        }
    }
    for (size_t j = 0; j < n; j++) {
        if (t.sum[j] == 0) continue;  // saw no key of this part
        const float part = t.max[j] + std::log(t.sum[j]);
        const float whole = std::max(lse[j], part) + std::log1p(std::exp(-std::abs(lse[j] - part)));
        const float weight = std::exp(MUTANT(72, whole - part, part - whole));
        lse[j] = whole;
#pragma omp simd
        for (size_t d = 0; d < D; d++) out[j * stride + d] += weight * (t.out[j * row + d] / t.sum[j] - out[j * stride + d]);
    }
}

// ---- backward

template <class E> struct BackwardTiles {
    QueryTile<E> q, dout;
    alignas(64) E k[keys * max_row];
    alignas(64) E v[keys * max_row];
    ScoreTile<E> p, ds;
    alignas(64) float dq[queries * max_row];
    alignas(64) float dk[keys * max_row];
    alignas(64) float dv[keys * max_row];
    float lse[queries], delta[queries];
    int32_t lo[queries];
};

// From scores and dP = dout . v to P and dS, in place.
template <class E> void softmax_backward_tile(BackwardTiles<E> &t, Piece q, Piece k, Seeing s, float scale) {
    for (size_t r = 0; r < length(k); r++) {
        const int32_t key = int32_t(k.begin + r), own = key - int32_t(q.begin);
        float *p = t.p.scores + r * queries, *ds = t.ds.scores + r * queries;
#pragma omp simd
        for (size_t j = s.first; j < s.end; j++) {
            p[j] = t.lo[j] <= key && int32_t(j) >= MUTANT(5, own - 1, own) ? fast_exp(scale * p[j] - t.lse[j]) : 0.0f;
            ds[j] = p[j] * (ds[j] - t.delta[j]);
        }
        t.p.round_row(r, s);
        t.ds.round_row(r, s);
    }
    t.p.fill_up(length(k), s);
    t.ds.fill_up(length(k), s);
}

// One block of queries of one head against one block of keys; all pointers stand at the first row of their block, at the head.
template <class E, class X>
void backward_block(BackwardTiles<E> &t, const Products<E> &products, float *dq, size_t q_stride, float *dk, float *dv,
                    size_t k_stride, Heads<const X> q, Heads<const X> k, Heads<const X> v, const float *delta, const float *lse,
                    Heads<const X> dout, const int32_t *lo, Piece q_block, Piece k_block, size_t D, float scale) {
    const size_t n = length(q_block), padded = round_up(n, query_unit<E>);
    t.q.load(q, n, D);
    t.dout.load(dout, n, D);
    std::fill(t.dq, t.dq + padded * row_length(D), 0.0f);
    for (size_t j = 0; j < padded; j++) {
        t.lo[j] = j < n ? lo[q_block.begin + j] : INT32_MAX;
        t.lse[j] = j < n ? lse[j] : 0.0f;
        t.delta[j] = j < n ? delta[j] : 0.0f;
    }
    for (size_t at = k_block.begin; at < k_block.end; at += keys) {
        const Piece tile = clip(k_block, at, at + keys);
        const Seeing s = seeing<E>(q_block, tile, lo);
        const size_t m = length(tile), skip = at - k_block.begin;
        load(t.k, rows_of(k, skip, 0, D), m, key_unit<E>, D);
        load(t.v, rows_of(v, skip, 0, D), m, key_unit<E>, D);
        products.scores(t.p.scores, t.k, t.q, s, m);
        products.scores(t.ds.scores, t.v, t.dout, s, m);
        softmax_backward_tile(t, q_block, tile, s, scale);
        products.sum_over_queries(t.dv, t.p.result(), t.dout, s, m);
        products.sum_over_queries(t.dk, t.ds.result(), t.q, s, m);
        products.sum_over_keys(t.dq, t.ds.result(), t.k, s, m);
        add_rows(dv + skip * k_stride, k_stride, t.dv, m, D, 1.0f);
        add_rows(dk + skip * k_stride, k_stride, t.dk, m, D, MUTANT(6, 1.0f, scale));
    }
    add_rows(dq, q_stride, t.dq, n, D, scale);
}

}  // namespace attention

template <class X> void attention_begin(Cpu<X> dev, float *out32, float *lse, size_t T, size_t H, size_t D) {
    attention::check_head_size(D);
#pragma omp parallel for num_threads(dev.threads)
    for (size_t t = 0; t < T; t++) std::fill(out32 + t * H * D, out32 + (t + 1) * H * D, 0.0f);
    std::fill(lse, lse + H * T, -INFINITY);
}

template <class X>
void attention_forward_part(Cpu<X> dev, float *out32, float *lse, Heads<const X> q, Heads<const X> k, Heads<const X> v,
                            const int32_t *lo, Pieces q_pieces, Pieces k_pieces, size_t T, size_t H, size_t KV, size_t D,
                            float scale) {
    using namespace attention;
    const std::vector<Piece> blocks = cut(q_pieces, queries);
    with_product_type(dev, T, [&]<class E>(E) {
        const Products<E> products(dev, D);
#pragma omp parallel num_threads(dev.threads)
        {
            const auto tiles = std::make_unique_for_overwrite<ForwardTiles<E>>();
#pragma omp for collapse(2) schedule(dynamic)
            for (size_t i = 0; i < blocks.size(); i++)
                for (size_t h = 0; h < H; h++) {
                    const Piece block = blocks[blocks.size() - 1 - i];  // long tasks first: late queries see most
                    if (!sees(block, k_pieces, lo)) continue;           // of another rank's keys many see none
                    forward_block(*tiles, products, out32 + (block.offset * H + h) * D, H * D, lse + h * T + block.offset,
                                  rows_of(q, block.offset, h, D), rows_of(k, 0, h / (H / KV), D), rows_of(v, 0, h / (H / KV), D),
                                  lo, block, k_pieces, D, scale);
                }
        }
    });
}

template <class X> void attention_end(Cpu<X> dev, X *out, const float *out32, size_t n) { round_floats(dev, out, out32, n); }

template <class X> size_t attention_scratch(Cpu<X> dev) {
    using namespace attention;
    return size_t(dev.threads) * std::max(sizeof(BackwardTiles<float>), sizeof(BackwardTiles<bf16>)) / sizeof(float) + 16;
}

template <class X>
void attention_backward_begin(Cpu<X> dev, float *dq32, float *dk32, float *dv32, float *delta, const X *out, const X *dout,
                              size_t T, size_t H, size_t KV, size_t D) {
#pragma omp parallel for num_threads(dev.threads)
    for (size_t t = 0; t < T; t++) {
        std::fill(dq32 + t * H * D, dq32 + (t + 1) * H * D, 0.0f);
        std::fill(dk32 + t * KV * D, dk32 + (t + 1) * KV * D, 0.0f);
        std::fill(dv32 + t * KV * D, dv32 + (t + 1) * KV * D, 0.0f);
        for (size_t h = 0; h < H; h++) {
            const X *out_h = out + (t * H + h) * D, *dout_h = dout + (t * H + h) * D;
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (size_t d = 0; d < D; d++) sum += float(out_h[d]) * float(dout_h[d]);
            delta[h * T + t] = sum;
        }
    }
}

// Step s pairs the key block j with the query block (j + s) mod n. No two pairs of a step share a block of either kind, so they
// run in parallel and add to dq32, dk32 and dv32 in place, without atomics or private copies; one step follows the other, so the
// order of every sum is fixed.
template <class X>
void attention_backward_part(Cpu<X> dev, float *dq32, float *dk32, float *dv32, float *scratch, Heads<const X> q,
                             Heads<const X> k, Heads<const X> v, const float *delta, const float *lse, const X *dout,
                             const int32_t *lo, Pieces q_pieces, Pieces k_pieces, size_t T, size_t H, size_t KV, size_t D,
                             float scale) {
    using namespace attention;
    const std::vector<Piece> q_blocks = cut(q_pieces, queries), k_blocks = cut(k_pieces, queries);
    const size_t n = std::max(q_blocks.size(), k_blocks.size());
    with_product_type(dev, T, [&]<class E>(E) {
        const Products<E> products(dev, D);
        auto *tiles = reinterpret_cast<BackwardTiles<E> *>(round_up(reinterpret_cast<uintptr_t>(scratch), 64));
#pragma omp parallel num_threads(dev.threads)
        for (size_t s = 0; s < n; s++)
#pragma omp for collapse(2) schedule(dynamic)
            for (size_t j = 0; j < k_blocks.size(); j++)
                for (size_t kv = 0; kv < KV; kv++) {
                    if ((j + s) % n >= q_blocks.size()) continue;
                    const Piece q_block = q_blocks[(j + s) % n];
                    const Piece k_block = clip(k_blocks[j], size_t(lo[q_block.begin]), q_block.end);
                    if (length(k_block) == 0) continue;
                    const size_t row = k_block.offset * KV + kv;
                    for (size_t h = kv * (H / KV); h < (kv + 1) * (H / KV); h++)
                        backward_block(
                            tiles[omp_get_thread_num()], products, dq32 + (q_block.offset * H + h) * D, H * D, dk32 + row * D,
                            dv32 + row * D, KV * D, rows_of(q, q_block.offset, h, D), rows_of(k, k_block.offset, kv, D),
                            rows_of(v, k_block.offset, kv, D), delta + h * T + q_block.offset, lse + h * T + q_block.offset,
                            rows_of(Heads<const X>{dout, H * D}, q_block.offset, h, D), lo, q_block, k_block, D, scale);
                }
    });
}

template <class X>
void attention_backward_end(Cpu<X> dev, X *dqkv, const float *dq32, const float *dk32, const float *dv32, size_t T, size_t H,
                            size_t KV, size_t D) {
#pragma omp parallel for num_threads(dev.threads)
    for (size_t t = 0; t < T; t++) {
        X *row = dqkv + t * (H + 2 * KV) * D;
#pragma omp simd
        for (size_t i = 0; i < H * D; i++) row[i] = X(dq32[t * H * D + i]);
#pragma omp simd
        for (size_t i = 0; i < KV * D; i++) {
            row[H * D + i] = X(dk32[t * KV * D + i]);
            row[(H + KV) * D + i] = X(dv32[t * KV * D + i]);
        }
    }
}
