// Attention in which every query sees one interval of keys: causal, packed, sliding-window and split over ranks alike.
//
//   The query at global position p of the packed row sees the keys first_key[p] .. p, where first_key[p] is the first
//   position of p's document, or p - window + 1 if that is larger. With s[p,r] = scale * q_p . k_r over those keys:
//       lse[p] = log sum_r exp(s[p,r])        P[p,r] = exp(s[p,r] - lse[p])        out_p = sum_r P[p,r] v_r
//       delta[p] = dout_p . out_p             dS[p,r] = P[p,r] * (dout_p . v_r - delta[p])
//       dv_r = sum_p P[p,r] dout_p            dq_p = scale * sum_r dS[p,r] k_r            dk_r = scale * sum_p dS[p,r] q_p
//
//   A part is the attention of some queries to some keys. A caller calls one part for each block of keys, backward between begin and end:
//
//   attention_forward_part  (dev, out, out32, lse, in, q_pieces, k_pieces, order) merges the part into (out32, lse). The first part of several
//                                                                                 has the queries' own keys, and sets (out32, lse). The last
//                                                                                 one sets out, to rounded out32; (out32, lse) is unused then
//   attention_backward_begin(dev, grads, delta, out, dout, shape)                 sets grads = 0, computes delta
//   attention_backward_part (dev, grads, scratch, in, delta, lse, dout, q_pieces, k_pieces)   adds to grads
//   attention_backward_end  (dev, dqkv, grads, shape)                             rounds them into rows of [dq | dk | dv]
//
//   If a single part is the whole, because the caller has all rows, these functions take fewer steps on GPUs; out32 and grads are then scratch:
//   attention_forward (dev, out, out32, lse, in, pieces)                          = the first and last part; out32 (attention_floats(dev, shape))
//   attention_backward(dev, dqkv, grads, delta, scratch, in, out, dout, lse, pieces)
//
//   shape {T, H, KV, D, scale}, in {q, k, v, first_key, cuts, shape} and grads {dq32, dk32, dv32} are structs (attention_types.h).
//   q, out, dout, out32, dq32 (T, H, D)    k, v, dk32, dv32 (T, KV, D)    dqkv (T, (H+2*KV)*D)    lse, delta (H, T)
//   q, k, v, out, dout and dqkv are X, the others float; q, k and v are views with a row stride. T is the number of local query rows.
//   A part may have more or fewer rows of keys than T. first_key (int32) is indexed by global position and does not decrease. Query
//   head h uses KV head h / (H/KV). D is a multiple of 8, at most 256. scratch: attention_scratch(dev, shape) floats. Nothing may alias.
//   GPU tiles end at the cuts (TileCuts), which may omit some documents. Sums are float, in an order that depends on sizes, pieces and cuts alone,
//   never on threads. The products of tiles multiply floats. For X bf16, on a CPU with instructions for it, they multiply bf16; P and dS are then
//   first rounded to bf16, as on a GPU (attention_products.h).
//
// No (T, T) array exists: tiles of scores live in cache, with a running maximum and sum per query (Milakov and Gimelshein, 2018,
// arXiv:1805.02867; Dao et al., "FlashAttention", 2022, arXiv:2205.14135). Keys that no query of a block sees are skipped.
// A tile of keys, once loaded, is multiplied with several blocks of queries, in all heads that share the KV head. Little more of a tile of scores is
// computed than the mask leaves: strips of 6 queries, each from the first key that any of them sees to the last.
//
// If dev.exact, and one part is the whole, a query's out and lse depend on the keys of its document alone, to the bit; attention_decode has the same
// bits.
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
#include "attention_products.h"
#include "attention_types.h"
#include "layout.h"
#include "simd.h"

namespace attention {

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

template <class X> Heads<const X> rows_of(Heads<const X> x, size_t row, size_t head, size_t D) {
    return {x.data + row * x.stride + head * D, x.stride};
}

// Returns the inputs of a task: q begins at a row and a head; k and v begin at a row and at the KV head that this query head uses.
template <class X> AttentionInputs<X> inputs_from(const AttentionInputs<X> &in, size_t q_row, size_t head, size_t k_row) {
    const size_t D = in.shape.D, kv = head / in.shape.group();
    return {
        rows_of(in.q, q_row, head, D), rows_of(in.k, k_row, kv, D), rows_of(in.v, k_row, kv, D), in.first_key, in.cuts, in.shape};
}

// A task multiplies each tile of keys with a span of queries. The span has about this many blocks, where each query head has its own blocks.
constexpr size_t sharing = 6;
inline size_t blocks_in(Piece span) { return ceil_div(length(span), queries); }
inline Piece block_of(Piece span, size_t i) { return clip(span, span.begin + i * queries, span.begin + (i + 1) * queries); }

// Fills see[i] with the keys of the tile that query i of the block sees. Returns the queries that see any of them, which form a range because
// both ends of [first_key[p], p] grow with p.
inline Range intervals(Range *see, Piece q, Piece k, const int32_t *first_key, size_t multiple) {
    const size_t n = length(q), m = length(k);
    for (size_t i = 0; i < round_up(n, multiple); i++) {
        const size_t p = q.begin + i;
        const auto in_tile = [&](size_t at) { return std::min(at - std::min(at, k.begin), m); };
        see[i] = i < n ? Range{in_tile(size_t(first_key[p])), in_tile(p + 1)} : Range{keys + multiple, m};
    }
    const size_t begin = k.begin > q.begin ? k.begin - q.begin : 0;
    const size_t end = size_t(std::lower_bound(first_key + q.begin, first_key + q.end, int64_t(k.end)) - (first_key + q.begin));
    return begin < end ? Range{begin / multiple * multiple, round_up(end, multiple)} : Range{0, 0};
}

// Masks a row of m scores and returns the vectors that hold visible ones. In these vectors the other scores become -infinity, whose exp is 0.
// Beyond them the scores become 0, which is already their P.
inline Range mask(float *scores, Range see, size_t m) {
    const bool none = see.begin >= see.end;
    const Range vectors = none ? Range{0, 0} : Range{see.begin / 16 * 16, round_up(see.end, 16)};
    std::fill(scores, scores + vectors.begin, 0.0f);
    if (!none) {
        std::fill(scores + vectors.begin, scores + see.begin, -INFINITY);
        std::fill(scores + see.end, scores + vectors.end, -INFINITY);
    }
    std::fill(scores + vectors.end, scores + round_up(m, 32), 0.0f);
    return vectors;
}

// ---- forward

// The running state of a block of queries of one head, from one tile of keys to the next.
template <class Products> struct ForwardBlock {
    typename Products::Queries q;
    alignas(64) float out[queries * max_row];  // sum of exp(score - max) * v
    float max[queries];
    alignas(64) Vector sum[queries];  // sums of exp(score - max), one for each lane

    template <class X> void begin(Heads<const X> from, size_t n, size_t D) {
        q.load(from, n, D);
        std::fill_n(out, round_up(n, Products::multiple) * row_length(D), 0.0f);
        std::fill_n(max, n, -INFINITY);
        std::fill_n(sum, n, Vector{});
    }
};

template <class Products> struct ForwardTiles {
    ForwardBlock<Products> block[sharing];
    typename Products::Keys k, v;
    typename Products::Scores p;  // exp(score - max)
    Range see[queries];
};

// One step of the online softmax of a row. Scores become exp(score - max), and the sums under the old maximum are scaled to the new one.
template <class Products>
void online_softmax_row(float *scores, Range vectors, float &max, Vector &sum, float *out, size_t D, float scale) {
    Vector top = load_vector(scores + vectors.begin);
    for (size_t j = vectors.begin + lanes; j < vectors.end; j += lanes) {
        const Vector s = load_vector(scores + j);
        top = s > top ? s : top;  // a NaN never becomes the maximum; exp passes it on
    }
    const float grown = std::max(max, scale * simd::largest(top));
    const float base = grown == -INFINITY ? 0.0f : grown;  // no key so far: exp(-inf - 0) = 0 instead of NaN
    if (grown > max) {
        const float shrink = fast_exp(max - base);
        sum *= shrink;
#pragma omp simd
        for (size_t d = 0; d < round_up(D, 16); d++) out[d] *= shrink;
        max = grown;
    }
    for (size_t j = vectors.begin; j < vectors.end; j += lanes) {
        const Vector p = Products::exp(scale * load_vector(scores + j) - base);
        store_vector(scores + j, p);
        sum += p;
    }
}

// Processes a block of queries and the first m keys of the loaded tile. Attention to cached keys runs the same instructions (attention_decode.h).
template <class Products>
[[gnu::noinline]] void forward_tile(ForwardTiles<Products> &t, ForwardBlock<Products> &block, const Products &products,
                                    Range active, size_t m, size_t D, float scale) {
    for (size_t i = active.begin; i < active.end; i += Products::strip) {
        const Range strip{i, std::min(i + Products::strip, active.end)};
        products.scores(t.p.scores, block.q, t.k, t.see, strip, m);
        for (size_t j = strip.begin; j < strip.end; j++) {
            const Range vectors = mask(t.p.scores + j * keys, t.see[j], m);
            if (vectors.end > 0)
                online_softmax_row<Products>(t.p.scores + j * keys, vectors, block.max[j], block.sum[j],
                                             block.out + j * row_length(D), D, scale);
        }
        products.round_for_keys(t.p, strip, m);
        products.sum_over_keys(block.out, t.p, t.v, t.see, strip, m);
    }
}

// Merges the results of this part, for n queries of a head, into the results of earlier parts. Rows of out are `stride` apart.
template <class Products>
void merge(float *out, size_t stride, float *lse, const ForwardBlock<Products> &block, size_t n, size_t D) {
    for (size_t j = 0; j < n; j++) {
        float sum = 0;
        for (size_t l = 0; l < lanes; l++) sum += block.sum[j][l];
        if (sum == 0) continue;  // the query saw no key of this part
        const float part = block.max[j] + std::log(sum);
        const float whole = std::max(lse[j], part) + std::log1p(std::exp(-std::abs(lse[j] - part)));
        const float weight = std::exp(part - whole);
        const float *from = block.out + j * row_length(D);
        lse[j] = whole;
#pragma omp simd
        for (size_t d = 0; d < D; d++) out[j * stride + d] += weight * (from[d] / sum - out[j * stride + d]);
    }
}

// The tiles of keys in the piece that a span sees begin at its first key. If dev.exact, they begin at multiples of `keys` in each document, which thus is
// summed in one order, wherever it stands in a row and however many of its tokens are known.
class KeyTiles {
    std::unique_ptr<size_t[]> document_;  // (T) the first position of each position's document; null: of no interest

  public:
    KeyTiles(bool exact, const int32_t *first_key, size_t T) {
        if (!exact) return;
        document_ = std::make_unique_for_overwrite<size_t[]>(T);
        for (size_t p = 0; p < T; p++)  // a window does not hide the first token of a document from itself
            document_[p] = size_t(first_key[p]) == p ? p : document_[p - 1];
    }
    size_t begin(size_t at) const { return document_ ? at - (at - document_[at]) % keys : at; }
    size_t end(size_t at, size_t last) const {
        last = std::min(last, at + keys);
        size_t end = document_ ? at : last;
        while (end < last && document_[end] == document_[at]) end++;
        return end;
    }
};

// Computes the attention of a span of queries, in `heads` heads, to all keys of their KV head that the span sees, and merges the result into out and
// lse. Pointers point at the span's first row and first head, except k and v, which point at row 0.
template <class Products, class X>
void forward_span(ForwardTiles<Products> &t, const Products &products, float *out, float *lse, const AttentionInputs<X> &in,
                  Piece span, const Pieces &k_pieces, size_t heads, const KeyTiles &tiles) {
    const size_t D = in.shape.D, stride = in.shape.H * D;
    const size_t blocks = blocks_in(span) * heads;  // the i-th is of head i % heads
    for (size_t i = 0; i < blocks; i++)
        t.block[i].begin(rows_of(in.q, i / heads * queries, i % heads, D), length(block_of(span, i / heads)), D);
    for (size_t piece = 0; piece < k_pieces.count; piece++) {
        const Piece seen = clip(k_pieces.piece[piece], size_t(in.first_key[span.begin]), span.end);
        for (size_t at = tiles.begin(seen.begin), end; at < seen.end; at = end) {
            end = tiles.end(at, seen.end);
            const Piece tile = clip(k_pieces.piece[piece], at, end);
            t.k.load(rows_of(in.k, tile.offset, 0, D), length(tile), D);
            t.v.load(rows_of(in.v, tile.offset, 0, D), length(tile), D);
            products.prepare_columns(t.k, length(tile));
            products.prepare_stacked(t.v, length(tile));
            for (size_t i = 0; i < blocks; i += heads) {
                const Piece block = block_of(span, i / heads);
                const Range active = intervals(t.see, block, tile, in.first_key, Products::multiple);
                const size_t m = length(clip(tile, tile.begin, block.end));
                if (active.begin == active.end) continue;
                for (size_t h = 0; h < heads; h++) forward_tile(t, t.block[i + h], products, active, m, D, in.shape.scale);
            }
        }
    }
    for (size_t i = 0; i < blocks; i++) {
        const size_t h = i % heads, row = i / heads * queries;
        merge(out + row * stride + h * D, stride, lse + h * in.shape.T + row, t.block[i], length(block_of(span, i / heads)), D);
    }
}

inline bool sees(Piece q, const Pieces &k_pieces, const int32_t *first_key) {
    return std::any_of(k_pieces.piece, k_pieces.piece + k_pieces.count,
                       [&](Piece k) { return length(clip(k, size_t(first_key[q.begin]), q.end)) > 0; });
}

// attention_forward_part with the given products.
template <class X, class Products>
void forward_part(Cpu<X> dev, const Products &products, float *out32, float *lse, const AttentionInputs<X> &in, Pieces q_pieces,
                  Pieces k_pieces) {
    const size_t T = in.shape.T, H = in.shape.H, KV = in.shape.KV, D = in.shape.D;
    // A task is a span of queries, in `heads` of the query heads that share a KV head.
    const size_t group = in.shape.group(), tasks = ceil_div(group, sharing), heads = ceil_div(group, tasks);
    const std::vector<Piece> spans = cut(q_pieces, sharing / heads * queries);
    const KeyTiles key_tiles(dev.exact, in.first_key, T);
#pragma omp parallel num_threads(dev.threads)
    {
        [[maybe_unused]] const typename Products::Registers registers;
        const auto tiles = std::make_unique_for_overwrite<ForwardTiles<Products>>();
#pragma omp for collapse(2) schedule(dynamic)
        for (size_t i = 0; i < spans.size(); i++)
            for (size_t task = 0; task < KV * tasks; task++) {
                const Piece span = spans[spans.size() - 1 - i];  // long tasks go first: late queries see most keys
                const size_t kv = task / tasks, first = task % tasks * heads, h = kv * group + first;
                if (first >= group || !sees(span, k_pieces, in.first_key)) continue;  // many queries see no key of another rank
                forward_span(*tiles, products, out32 + (span.offset * H + h) * D, lse + h * T + span.offset,
                             inputs_from(in, span.offset, h, 0), span, k_pieces, std::min(heads, group - first), key_tiles);
            }
    }
}

// ---- backward

template <class Products> struct BackwardTiles {
    typename Products::Queries q, dout;
    typename Products::Keys k, v;
    typename Products::Scores p, ds;
    alignas(64) float dq[queries * max_row];
    alignas(64) float dk[keys * max_row];
    alignas(64) float dv[keys * max_row];
    Range see[queries];
};

// Turns scores into P, and dP = dout . v into dS, in place.
template <class Products>
void softmax_backward_row(float *p, float *ds, Range see, size_t m, float lse, float delta, float scale) {
    const Range vectors = mask(p, see, m);
    for (size_t j = vectors.begin; j < vectors.end; j += lanes) {
        const Vector probability = Products::exp(scale * load_vector(p + j) - lse);
        store_vector(p + j, probability);
        store_vector(ds + j, probability * (load_vector(ds + j) - delta));
    }
    std::fill(ds, ds + vectors.begin, 0.0f);
    std::fill(ds + vectors.end, ds + round_up(m, 32), 0.0f);
}

// Processes a block of queries of one head and the first m keys of the loaded tile.
template <class Products, class X>
void backward_tile(BackwardTiles<Products> &t, const Products &products, float *dq, Heads<const X> q, Heads<const X> dout,
                   const float *delta, const float *lse, Range active, size_t n, size_t m, const AttentionShape &shape) {
    const size_t D = shape.D;
    t.q.load(q, n, D);
    t.dout.load(dout, n, D);
    products.prepare_stacked(t.q, n);
    products.prepare_stacked(t.dout, n);
    std::fill_n(t.dq, round_up(n, Products::multiple) * row_length(D), 0.0f);
    for (size_t i = active.begin; i < active.end; i += Products::strip) {
        const Range strip{i, std::min(i + Products::strip, active.end)};
        products.scores(t.p.scores, t.q, t.k, t.see, strip, m);
        products.scores(t.ds.scores, t.dout, t.v, t.see, strip, m);
        for (size_t j = strip.begin; j < strip.end; j++)
            softmax_backward_row<Products>(t.p.scores + j * keys, t.ds.scores + j * keys, t.see[j], m, j < n ? lse[j] : 0.0f,
                                           j < n ? delta[j] : 0.0f, shape.scale);
        products.round_for_queries(t.p, strip, m);
        products.round_for_queries(t.ds, strip, m);
        products.round_for_keys(t.ds, strip, m);
    }
    products.sum_over_queries(t.dv, t.p, t.dout, t.see, active, m);
    products.sum_over_queries(t.dk, t.ds, t.q, t.see, active, m);
    products.sum_over_keys(t.dq, t.ds, t.k, t.see, active, m);
    add_tile_rows(dq, shape.H * D, t.dq, n, D, shape.scale);
}

// Adds the gradients of a span of queries, in all heads that share a KV head, and one tile of that head's keys. All pointers point at the
// first head and at the first row of the span or the tile.
template <class Products, class X>
void backward_span(BackwardTiles<Products> &t, const Products &products, AttentionGrads grads, const AttentionInputs<X> &in,
                   const float *delta, const float *lse, Heads<const X> dout, Piece span, Piece tile) {
    const AttentionShape &shape = in.shape;
    const size_t T = shape.T, D = shape.D, row = row_length(D);
    t.k.load(in.k, length(tile), D);
    t.v.load(in.v, length(tile), D);
    products.prepare_columns(t.k, length(tile));
    products.prepare_columns(t.v, length(tile));
    products.prepare_stacked(t.k, length(tile));
    std::fill_n(t.dk, keys * row, 0.0f);
    std::fill_n(t.dv, keys * row, 0.0f);
    for (size_t i = 0; i < blocks_in(span); i++) {
        const Piece block = block_of(span, i);
        const Range active = intervals(t.see, block, tile, in.first_key, Products::multiple);
        // Products sum groups of keys, of which some may lie behind the block's last key; their P and dS are 0.
        const size_t m = std::min(length(tile), round_up(length(clip(tile, tile.begin, block.end)), queries));
        if (active.begin == active.end) continue;
        for (size_t h = 0, at = i * queries; h < shape.group(); h++)
            backward_tile(t, products, grads.dq32 + (at * shape.H + h) * D, rows_of(in.q, at, h, D), rows_of(dout, at, h, D),
                          delta + h * T + at, lse + h * T + at, active, length(block), m, shape);
    }
    products.add_sums_over_queries(grads.dv32, shape.KV * D, t.dv, length(tile), 1.0f);
    products.add_sums_over_queries(grads.dk32, shape.KV * D, t.dk, length(tile), shape.scale);
}

// attention_backward_part with the given products. Step s pairs the tile of keys j with the span of queries (j + s) mod n. No two pairs of
// a step share a tile or a span, so they run in parallel and add to the gradients in place, without atomics or private copies;
// steps follow one another, so the order of every sum is fixed.
template <class X, class Products>
void backward_part(Cpu<X> dev, const Products &products, AttentionGrads grads, float *scratch, const AttentionInputs<X> &in,
                   const float *delta, const float *lse, const X *dout, Pieces q_pieces, Pieces k_pieces) {
    const size_t T = in.shape.T, H = in.shape.H, KV = in.shape.KV, D = in.shape.D, group = in.shape.group();
    const std::vector<Piece> spans = cut(q_pieces, ceil_div(sharing, group) * queries), tiles_of_keys = cut(k_pieces, keys);
    const size_t n = std::max(spans.size(), tiles_of_keys.size());
    auto *tiles = reinterpret_cast<BackwardTiles<Products> *>(round_up(reinterpret_cast<uintptr_t>(scratch), 64));
#pragma omp parallel num_threads(dev.threads)
    {
        [[maybe_unused]] const typename Products::Registers registers;
        for (size_t s = 0; s < n; s++)
#pragma omp for collapse(2) schedule(dynamic)
            for (size_t j = 0; j < tiles_of_keys.size(); j++)
                for (size_t kv = 0; kv < KV; kv++) {
                    if ((j + s) % n >= spans.size()) continue;
                    const Piece span = spans[(j + s) % n];
                    const Piece tile = clip(tiles_of_keys[j], size_t(in.first_key[span.begin]), span.end);
                    if (length(tile) == 0) continue;
                    const size_t h = kv * group, q_row = span.offset * H + h, k_row = tile.offset * KV + kv;
                    const AttentionGrads at{grads.dq32 + q_row * D, grads.dk32 + k_row * D, grads.dv32 + k_row * D};
                    backward_span(tiles[omp_get_thread_num()], products, at, inputs_from(in, span.offset, h, tile.offset),
                                  delta + h * T + span.offset, lse + h * T + span.offset, Heads<const X>{dout + q_row * D, H * D},
                                  span, tile);
                }
    }
}

}  // namespace attention

template <class X>
void attention_forward_part(Cpu<X> dev, X *out, float *out32, float *lse, const AttentionInputs<X> &in, Pieces q_pieces,
                            Pieces k_pieces, PartOrder order) {
    const auto &[T, H, KV, D, scale] = in.shape;
    attention::check_head_size(D);
    if (order.first) clear_floats(dev, out32, T * H * D), std::fill(lse, lse + H * T, -INFINITY);
    attention::with_products(
        dev, D, [&](const auto &products) { attention::forward_part(dev, products, out32, lse, in, q_pieces, k_pieces); });
    if (order.last) round_floats(dev, out, out32, T * H * D);
}

template <class X> size_t attention_scratch(Cpu<X> dev, const AttentionShape &) {
    using namespace attention;
    size_t bytes = std::max(sizeof(BackwardTiles<Products<float>>), sizeof(BackwardTiles<Products<Bf16x2>>));
#ifdef LLMC_AMX
    bytes = std::max(bytes, sizeof(BackwardTiles<AmxProducts>));
#endif
    return size_t(dev.threads) * bytes / sizeof(float) + 16;
}

template <class X>
void attention_backward_begin(Cpu<X> dev, AttentionGrads grads, float *delta, const X *out, const X *dout,
                              const AttentionShape &shape) {
    const size_t T = shape.T, H = shape.H, KV = shape.KV, D = shape.D;
#pragma omp parallel for num_threads(dev.threads)
    for (size_t t = 0; t < T; t++) {
        std::fill_n(grads.dq32 + t * H * D, H * D, 0.0f);
        std::fill_n(grads.dk32 + t * KV * D, KV * D, 0.0f);
        std::fill_n(grads.dv32 + t * KV * D, KV * D, 0.0f);
        for (size_t h = 0; h < H; h++) {
            const X *out_h = out + (t * H + h) * D, *dout_h = dout + (t * H + h) * D;
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (size_t d = 0; d < D; d++) sum += float(out_h[d]) * float(dout_h[d]);
            delta[h * T + t] = sum;
        }
    }
}

template <class X>
void attention_backward_part(Cpu<X> dev, AttentionGrads grads, float *scratch, const AttentionInputs<X> &in, const float *delta,
                             const float *lse, const X *dout, Pieces q_pieces, Pieces k_pieces) {
    attention::with_products(dev, in.shape.D, [&](const auto &products) {
        attention::backward_part(dev, products, grads, scratch, in, delta, lse, dout, q_pieces, k_pieces);
    });
}

template <class X> void attention_backward_end(Cpu<X> dev, X *dqkv, AttentionGrads grads, const AttentionShape &shape) {
    const size_t T = shape.T, H = shape.H, KV = shape.KV, D = shape.D;
#pragma omp parallel for num_threads(dev.threads)
    for (size_t t = 0; t < T; t++) {
        X *row = dqkv + t * (H + 2 * KV) * D;
        const auto round = [&](X *out, const float *x, size_t n) {
            simd::for_each(n, [=]<class V>(size_t i) { simd::store(out + i, simd::load<V>(x + i)); });
        };
        round(row, grads.dq32 + t * H * D, H * D);
        round(row + H * D, grads.dk32 + t * KV * D, KV * D);
        round(row + (H + KV) * D, grads.dv32 + t * KV * D, KV * D);
    }
}

// ---- all rows at once, on any device --------------------------------------------------------------------------------------------------

template <class X> size_t attention_floats(Cpu<X>, const AttentionShape &shape) { return shape.T * shape.H * shape.D; }

template <class Dev, class X = typename Dev::X>
void attention_backward(Dev dev, X *dqkv, AttentionGrads grads, float *delta, float *scratch, const AttentionInputs<X> &in,
                        const X *out, const X *dout, const float *lse, Pieces pieces) {
    attention_backward_begin(dev, grads, delta, out, dout, in.shape);
    attention_backward_part(dev, grads, scratch, in, delta, lse, dout, pieces, pieces);
    attention_backward_end(dev, dqkv, grads, in.shape);
}

REHEARSED(attention_forward_part);
REHEARSED(attention_backward_begin);
REHEARSED(attention_backward_part);
REHEARSED(attention_backward_end);
ASKED(attention_scratch);
ASKED(attention_floats);
