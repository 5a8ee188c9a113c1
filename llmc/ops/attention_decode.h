// Attention during generation: each sequence has one new token, and its query sees the keys and values of all tokens up to it. A paged cache holds
// them (Kwon et al., "Efficient memory management for large language model serving with PagedAttention", 2023, arXiv:2309.06180).
//
//   cache_store     (dev, cache, k, v, slots, T, KV, D)                  row slots[t] of the cache = (k[t], v[t]), for all t with slots[t] >= 0
//   attention_decode(dev, out, scratch, q, keys, shape)
//                    out[b, h] = sum_p w_p v_p / sum_p w_p,  w_p = exp(scale * q[b, h] . k_p),  over the positions first_key[b] <= p < length[b]
//
//   keys: cache, table, first_key, length, pages     shape: AttentionShape of B = shape.T queries, one for each sequence
//   cache       (rows, 2*KV*D) X    keys of all KV heads, then their values. A page is cache_page consecutive rows
//   table       (B, pages) int32    position p of sequence b is in page table[b, p / cache_page], in its row p % cache_page
//   first_key, length (B) int32     0 <= first_key < length <= pages * cache_page. Pages before first_key or from length on are not read
//   q           (B, H, D) X         heads as in attention.h; k, v (T, KV, D)          out (B, H*D) X
//   scratch     attention_decode_scratch(dev, B, pages, H, D) floats
//
// Query head h uses KV head h / (H / KV). Sums are float, in an order that depends on first_key and length alone: a sequence's result does not
// depend on other sequences of the batch. Nothing may alias. On a CPU with dev.exact, out has the bits of the same query in attention_forward.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <tuple>
#include <vector>

#include "../core/device.h"
#include "attention.h"
#include "attention_types.h"
#include "settings.h"
#include "simd.h"

// The keys and values that the newest tokens of B sequences see, in a paged cache.
template <class X> struct PagedKeys {
    const X *cache;                     // (rows, 2*KV*D)
    const int32_t *table;               // (B, pages)
    const int32_t *first_key, *length;  // (B) each
    size_t pages;                       // entries of the table for each sequence

    auto pointers() const { return std::tuple(cache, table, first_key, length); }  // ../core/rehearsal.h
    // The row of position p of sequence b; a row has `width` elements.
    HOST_DEVICE const X *row(size_t b, size_t p, size_t width) const {
        return cache + (size_t(table[b * pages + p / cache_page]) * cache_page + p % cache_page) * width;
    }
};

template <class X>
void cache_store(Cpu<X> dev, X *cache, Heads<const X> k, Heads<const X> v, const int32_t *slots, size_t T, size_t KV, size_t D) {
#pragma omp parallel for num_threads(dev.threads)
    for (size_t t = 0; t < T; t++) {
        if (slots[t] < 0) continue;
        X *row = cache + size_t(slots[t]) * 2 * KV * D;
        std::copy_n(k.data + t * k.stride, KV * D, row);
        std::copy_n(v.data + t * v.stride, KV * D, row + KV * D);
    }
}

namespace attention {

// A sequence's keys are split; the splits are summed in parallel and then merged in order, so even few sequences keep many cores busy. The first
// split begins with the first visible page. A long sequence has longer splits, to keep scratch small.
constexpr int split_keys = 4 * cache_page, most_splits = 32;

struct DecodeSplits {
    int begin, end, size;  // size: keys per split, a multiple of split_keys

    HOST_DEVICE DecodeSplits(int first_key, int length)
        : begin(first_key / int(cache_page) * int(cache_page)),
          end(length),
          size((length - begin + most_splits * split_keys - 1) / (most_splits * split_keys) * split_keys) {}
    HOST_DEVICE int count() const { return (end - begin + size - 1) / size; }
};

// The most splits that a sequence can have.
inline size_t decode_splits(size_t pages) { return std::min<size_t>(most_splits, ceil_div(pages * cache_page, split_keys)); }

// The results of the splits in scratch, for each head: the largest score, the sum of w, and the sum of w v.
struct DecodeParts {
    size_t splits, D;
    float *sums, *out;  // (B * H, splits, 2), (B * H, splits, D)

    DecodeParts(float *scratch, size_t B, size_t pages, size_t H, size_t D)
        : splits(decode_splits(pages)), D(D), sums(scratch), out(scratch + B * H * splits * 2) {}
    static size_t floats(size_t B, size_t pages, size_t H, size_t D) { return B * H * decode_splits(pages) * (2 + D); }
    HOST_DEVICE float *sums_of(size_t row, size_t split) const { return sums + (row * splits + split) * 2; }
    HOST_DEVICE float *out_of(size_t row, size_t split) const { return out + (row * splits + split) * D; }
};

static_assert(cache_page % simd::lanes == 0);

// Consecutive rows of a cache page, one per lane of a vector. The query sees rows [begin, end).
template <class X> struct DecodeBlock {
    const X *rows;
    size_t begin, end;

    bool sees(size_t row) const { return begin <= row && row < end; }
    bool sees_all() const { return begin == 0 && end == simd::lanes; }
};

// A split of one sequence on the CPU: the running softmax (max, sum) and output of all heads, block after block, so each row of the cache is
// read in one pass. A block's scores are one vector for each query head.
//
// Keys and values are read as 32-bit words: a float, or two neighbours in bf16; a shift turns the first into a float, and a mask the second. So
// vectors hold every other column of bf16, and scores need half the transpositions.
template <class X> class DecodeSplit {
    static constexpr size_t lanes = simd::lanes, parts = sizeof(float) / sizeof(X);  // elements per word
    using Rows = simd::Vector[lanes];
    size_t H_, KV_, D_, vectors_;           // vectors of words per head, padded with zeros
    std::vector<float> q_, max_, weights_;  // (H, vectors, parts, lanes); (H); (H, lanes)
    // (H, vectors, parts); (H): each lane sums its own keys; (H). Not a std::vector, whose functions nvcc would also compile for the GPU.
    std::unique_ptr<simd::Vector[]> out_, sum_, scores_;

    size_t columns(size_t i) const { return std::min(D_ - i * lanes * parts, lanes * parts); }  // of the i-th vector of words

  public:
    DecodeSplit(const X *q, size_t H, size_t KV, size_t D, float scale)
        : H_(H),
          KV_(KV),
          D_(D),
          vectors_(ceil_div(D, parts * lanes)),
          q_(H * vectors_ * parts * lanes),
          max_(H, -INFINITY),
          weights_(H * lanes),
          out_(std::make_unique<simd::Vector[]>(H * vectors_ * parts)),
          sum_(std::make_unique<simd::Vector[]>(H)),
          scores_(std::make_unique<simd::Vector[]>(H)) {
        for (size_t h = 0; h < H; h++)
            for (size_t i = 0; i < vectors_; i++) {
                simd::Vector words{};
                memcpy(&words, q + h * D + i * lanes * parts, columns(i) * sizeof(X));
                for (size_t part = 0; part < parts; part++)
                    simd::store(&q_[((h * vectors_ + i) * parts + part) * lanes], scale * take(words, part));
            }
    }

    void add(const DecodeBlock<X> &block, const X *next) {  // next: the next block, to prefetch
        for (size_t kv = 0; kv < KV_; kv++) {
            const size_t begin = H_ / KV_ * kv, end = begin + H_ / KV_;
            Rows words, rows;
            for (size_t h = begin; h < end; h++) scores_[h] = simd::Vector{};
            for (size_t i = 0; i < vectors_; i++) {
                load(words, block, next, kv, i);
                simd::transpose_square(words);
                for (size_t part = 0; part < parts; part++) {
                    take(rows, words, part);
                    for (size_t h = begin; h < end; h++)
                        add_weighted(scores_[h], &q_[((h * vectors_ + i) * parts + part) * lanes], rows);
                }
            }
            for (size_t h = begin; h < end; h++) softmax(h, block);
            for (size_t i = 0; i < vectors_; i++) {
                load(words, block, next, KV_ + kv, i);
                for (size_t part = 0; part < parts; part++) {
                    take(rows, words, part);
                    for (size_t h = begin; h < end; h++)
                        add_weighted(out_[(h * vectors_ + i) * parts + part], &weights_[h * lanes], rows);
                }
            }
        }
    }

    void finish(size_t h, float *sums, float *out) const {  // (2), (D)
        sums[0] = max_[h], sums[1] = 0;
        for (size_t l = 0; l < lanes; l++) sums[1] += sum_[h][l];
        for (size_t i = 0; i < vectors_; i++) {
            const simd::Vector *of = &out_[(h * vectors_ + i) * parts];
            simd::Vector in_order[parts] = {of[0]};
            if constexpr (parts == 2) {  // of[0] has the even columns
                in_order[0] = simd::choose(of[0], of[1], [](size_t l) { return l / 2 + l % 2 * lanes; });
                in_order[1] = simd::choose(of[0], of[1], [](size_t l) { return (lanes + l) / 2 + l % 2 * lanes; });
            }
            memcpy(out + i * lanes * parts, in_order, columns(i) * sizeof(float));
        }
    }

  private:
    // Loads the i-th vector of words of every row, for a head of keys or (numbered after these) of values. Rows that the query does not see become 0.
    void load(Rows &words, const DecodeBlock<X> &block, const X *next, size_t head, size_t i) const {
        const size_t d = i * lanes * parts, n = columns(i), row = 2 * KV_ * D_, at = head * D_ + d;
        if (n == lanes * parts && block.sees_all()) {
            // Meanwhile the next block is prefetched to the L2 cache in memory order, which also triggers the CPU's own prefetcher.
            const X *from = block.rows + at, *ahead = next + lanes * at;
#pragma GCC unroll 16
            for (size_t r = 0; r < lanes; r++, from += row, ahead += lanes * parts) {
                words[r] = *reinterpret_cast<const simd::Floats *>(from);
                __builtin_prefetch(ahead, 0, 2);
            }
        } else {
            for (size_t r = 0; r < lanes; r++) {
                words[r] = simd::Vector{};
                if (block.sees(r)) memcpy(&words[r], block.rows + r * row + at, n * sizeof(X));
            }
        }
    }

    static simd::Vector take(simd::Vector words, size_t part) {
        const simd::Bits bits = std::bit_cast<simd::Bits>(words);
        if constexpr (parts == 1) return words;
        else return std::bit_cast<simd::Vector>(part == 0 ? bits << 16 : bits & 0xffff0000);
    }
    static void take(Rows &rows, const Rows &words, size_t part) {
#pragma GCC unroll 16
        for (size_t r = 0; r < lanes; r++) rows[r] = take(words[r], part);
    }

    static void add_weighted(simd::Vector &sum, const float *weights, const Rows &rows) {
        simd::Vector even{}, odd{};  // two independent chains of sums
#pragma GCC unroll 8
        for (size_t r = 0; r < lanes; r += 2) even += weights[r] * rows[r], odd += weights[r + 1] * rows[r + 1];
        sum += even + odd;
    }

    // Turns scores into weights, and rescales the sums to the new maximum.
    void softmax(size_t h, const DecodeBlock<X> &block) {
        simd::Vector &s = scores_[h];
        for (size_t r = 0; r < lanes && !block.sees_all(); r++)
            if (!block.sees(r)) s[r] = -INFINITY;
        if (const float most = simd::largest(s); most > max_[h]) {
            const float shrink = fast_exp(max_[h] - most);  // 0 at first
            max_[h] = most;
            sum_[h] *= shrink;
            for (size_t i = 0; i < vectors_ * parts; i++) out_[h * vectors_ * parts + i] *= shrink;
        }
        const simd::Vector weights = fast_exp(s - max_[h]);
        sum_[h] += weights;
        simd::store(&weights_[h * lanes], weights);
    }
};

// Joins n parts of a head in order.       sums (n, 2)        parts (n, D)        out (D)
template <class X> void join_parts(X *out, const float *sums, const float *parts, size_t n, size_t D) {
    float max = -INFINITY, sum = 0, total[max_D] = {};
    for (size_t i = 0; i < n; i++) max = std::max(max, sums[2 * i]);
    for (size_t i = 0; i < n; i++) {
        const float weight = fast_exp(sums[2 * i] - max);
        sum += weight * sums[2 * i + 1];
        for (size_t d = 0; d < D; d++) total[d] += weight * parts[i * D + d];
    }
    for (size_t d = 0; d < D; d++) out[d] = total[d] / sum;
}

// The query heads of a KV head, as a block of queries that see the same tiles of keys as in a pass over the whole sequence.
template <class Products, class X>
void decode_in_tiles(Cpu<X> dev, const Products &products, X *out, Heads<const X> q, const PagedKeys<X> &paged,
                     const AttentionShape &shape) {
    const size_t H = shape.H, KV = shape.KV, D = shape.D, width = 2 * KV * D;
    const size_t group = shape.group(), tasks = ceil_div(group, queries), heads = ceil_div(group, tasks);
#pragma omp parallel num_threads(dev.threads)
    {
        [[maybe_unused]] const typename Products::Registers registers;
        const auto tiles = std::make_unique_for_overwrite<ForwardTiles<Products>>();
        const auto k = std::make_unique<X[]>(keys * D), v = std::make_unique<X[]>(keys * D);
#pragma omp for collapse(2) schedule(dynamic)
        for (size_t b = 0; b < shape.T; b++)
            for (size_t task = 0; task < KV * tasks; task++) {
                const size_t kv = task / tasks, h = kv * group + task % tasks * heads;
                const size_t first = size_t(paged.first_key[b]), length = size_t(paged.length[b]);
                if (h >= (kv + 1) * group) continue;
                const size_t n = std::min(heads, (kv + 1) * group - h), rows = round_up(n, Products::multiple);
                ForwardTiles<Products> &t = *tiles;
                t.block[0].begin(Heads<const X>{q.data + b * q.stride + h * D, D}, n, D);
                for (size_t at = first / keys * keys; at < length; at += keys) {
                    const size_t m = std::min(keys, length - at), begin = std::max(first, at) - at;
                    std::fill_n(k.get(), begin * D, X(0.0f)), std::fill_n(v.get(), begin * D, X(0.0f));
                    for (size_t r = begin; r < m; r++) {
                        const X *row = paged.row(b, at + r, width);
                        std::copy_n(row + kv * D, D, &k[r * D]), std::copy_n(row + (KV + kv) * D, D, &v[r * D]);
                    }
                    t.k.load(Heads<const X>{k.get(), D}, m, D), t.v.load(Heads<const X>{v.get(), D}, m, D);
                    products.prepare_columns(t.k, m), products.prepare_stacked(t.v, m);
                    for (size_t i = 0; i < rows; i++) t.see[i] = i < n ? Range{begin, m} : Range{keys + Products::multiple, m};
                    forward_tile(t, t.block[0], products, Range{0, rows}, m, D, shape.scale);
                }
                for (size_t i = 0; i < n; i++) {
                    float sum = 0;
                    for (size_t l = 0; l < lanes; l++) sum += t.block[0].sum[i][l];
                    const float *from = t.block[0].out + i * row_length(D);
                    for (size_t d = 0; d < D; d++) out[(b * H + h + i) * D + d] = from[d] / sum;
                }
            }
    }
}

}  // namespace attention

template <class X> size_t attention_decode_scratch(Cpu<X>, size_t B, size_t pages, size_t H, size_t D) {
    return attention::DecodeParts::floats(B, pages, H, D);
}

template <class X>
void attention_decode(Cpu<X> dev, X *out, float *scratch, Heads<const X> q, PagedKeys<X> keys, const AttentionShape &shape) {
    using namespace attention;
    const size_t B = shape.T, H = shape.H, KV = shape.KV, D = shape.D;
    const int32_t *first_key = keys.first_key, *length = keys.length;
    check_head_size(D);
    if (dev.exact)
        return with_products(dev, D, [&](const auto &products) { decode_in_tiles(dev, products, out, q, keys, shape); });
    const DecodeParts parts(scratch, B, keys.pages, H, D);
#pragma omp parallel for collapse(2) num_threads(dev.threads) schedule(dynamic)
    for (size_t b = 0; b < B; b++)
        for (size_t i = 0; i < parts.splits; i++) {
            const DecodeSplits splits(first_key[b], length[b]);
            const size_t begin = size_t(splits.begin + int(i) * splits.size),
                         end = std::min(begin + size_t(splits.size), size_t(length[b]));
            if (begin >= end) continue;
            DecodeSplit<X> split(q.data + b * q.stride, H, KV, D, shape.scale);
            const auto rows = [&](size_t p) { return keys.row(b, p, 2 * KV * D); };
            const size_t first = std::max(begin, size_t(first_key[b]));
            for (size_t p = first / simd::lanes * simd::lanes; p < end; p += simd::lanes) {
                const size_t next = p + simd::lanes;
                split.add({rows(p), std::max(first, p) - p, std::min(end, next) - p}, rows(next < end ? next : p));
            }
            for (size_t h = 0; h < H; h++) split.finish(h, parts.sums_of(b * H + h, i), parts.out_of(b * H + h, i));
        }
#pragma omp parallel for num_threads(dev.threads)
    for (size_t row = 0; row < B * H; row++)
        join_parts(out + row * D, parts.sums_of(row, 0), parts.out_of(row, 0),
                   size_t(DecodeSplits(first_key[row / H], length[row / H]).count()), D);
}

REHEARSED(cache_store);
REHEARSED(attention_decode);
ASKED(attention_decode_scratch);
