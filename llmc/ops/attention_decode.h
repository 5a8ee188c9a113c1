// Attention while tokens are generated: each sequence has one new token, whose query sees the keys and values of the tokens up to it. They lie in a
// paged cache (Kwon et al., "Efficient memory management for large language model serving with PagedAttention", 2023, arXiv:2309.06180).
//
//   cache_store     (dev, cache, k, v, slots, T, KV, D)                  row slots[t] of the cache = (k[t], v[t]), for all t with slots[t] >= 0
//   attention_decode(dev, out, scratch, q, cache, table, first_key, length, B, pages, H, KV, D, scale)
//                    out[b, h] = sum_p w_p v_p / sum_p w_p,  w_p = exp(scale * q[b, h] . k_p),  over the positions first_key[b] <= p < length[b]
//
//   cache       (rows, 2*KV*D) X    keys of all KV heads, then their values. A page is cache_page rows, one after the other
//   table       (B, pages) int32    position p of sequence b lies in page table[b, p / cache_page], in its row p % cache_page
//   first_key, length (B) int32     0 <= first_key < length <= pages * cache_page. Pages before first_key are not read, nor those behind length
//   q           (B, H, D) X         heads as in attention.h; k, v (T, KV, D)          out (B, H*D) X
//   scratch     attention_decode_scratch(dev, B, pages, H, D) floats
//
// A query head h reads key head h / (H / KV). Sums are float, in an order that depends on first_key and length alone: a sequence's result does not depend on
// the others of the batch. Nothing may alias.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "../core/device.h"
#include "pieces.h"
#include "simd.h"

constexpr size_t cache_page = 64;  // tokens of a page

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

template <class X> size_t attention_decode_scratch(Cpu<X>, size_t, size_t, size_t, size_t) { return 0; }

namespace attention {

// The queries of one key head: running softmax (m, sum) and output, page after page.
template <class X> struct DecodeGroup {
    size_t heads, D;
    std::vector<float> q, out, m, sum;  // (heads, D), (heads, D), (heads), (heads)

    DecodeGroup(const X *queries, size_t heads, size_t D, float scale)
        : heads(heads), D(D), q(heads * D), out(heads * D), m(heads, -INFINITY), sum(heads) {
        for (size_t i = 0; i < heads * D; i++) q[i] = scale * float(queries[i]);
    }

    // Adds n keys and values that lie `stride` apart.
    void add(const X *k, const X *v, size_t stride, size_t n) {
        float s[cache_page];
        for (size_t h = 0; h < heads; h++) {
            const float *q_h = &q[h * D];
            float *out_h = &out[h * D], most = m[h];
            for (size_t p = 0; p < n; p++) most = std::max(most, s[p] = dot(q_h, k + p * stride));
            const float shrink = fast_exp(m[h] - most);  // 0 at first, as m is -inf
            sum[h] *= shrink, m[h] = most;
            for (size_t d = 0; d < D; d++) out_h[d] *= shrink;
            for (size_t p = 0; p < n; p++) {
                const float w = fast_exp(s[p] - most);
                const X *v_p = v + p * stride;
                sum[h] += w;
                simd::for_each(
                    D, [&]<class V>(size_t d) { simd::store(out_h + d, simd::load<V>(out_h + d) + w * simd::load<V>(v_p + d)); });
            }
        }
    }

    float dot(const float *a, const X *b) const {
        simd::Vector sums{};
        float rest = 0;
        simd::for_each(D, [&]<class V>(size_t d) {
            if constexpr (std::is_same_v<V, float>) rest += a[d] * float(b[d]);
            else sums += simd::load<V>(a + d) * simd::load<V>(b + d);
        });
        for (size_t l = 0; l < simd::lanes; l++) rest += sums[l];
        return rest;
    }
};

}  // namespace attention

template <class X>
void attention_decode(Cpu<X> dev, X *out, float *, Heads<const X> q, const X *cache, const int32_t *table,
                      const int32_t *first_key, const int32_t *length, size_t B, size_t pages, size_t H, size_t KV, size_t D,
                      float scale) {
    attention::check_head_size(D);
    const size_t group = H / KV, stride = 2 * KV * D;
#pragma omp parallel for collapse(2) num_threads(dev.threads) schedule(dynamic)
    for (size_t b = 0; b < B; b++)
        for (size_t kv = 0; kv < KV; kv++) {
            attention::DecodeGroup<X> heads(q.data + b * q.stride + kv * group * D, group, D, scale);
            for (size_t p = size_t(first_key[b]), end = size_t(length[b]); p < end;) {
                const size_t n = std::min(end - p, cache_page - p % cache_page);
                const X *row =
                    cache + (size_t(table[b * pages + p / cache_page]) * cache_page + p % cache_page) * stride + kv * D;
                heads.add(row, row + KV * D, stride, n);
                p += n;
            }
            X *out_b = out + b * H * D + kv * group * D;
            for (size_t i = 0; i < group * D; i++) out_b[i] = heads.out[i] / heads.sum[i / D];
        }
}
