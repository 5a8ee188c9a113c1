// attention_decode for tests on the CPU and of kernels: sequences, each a document of attention.h, the queries of their last tokens, and a
// cache with NaN in all rows that these queries must not read.
#pragma once
#include "../llmc/ops/attention_decode.h"
#include "reference_attention.h"

struct DecodeShape {
    std::vector<int32_t> first_key, length;  // (B)
    size_t H, KV, D;

    size_t B() const { return length.size(); }
    size_t row() const { return (H + 2 * KV) * D; }
    size_t pages() const {
        return ceil_div(size_t(*std::ranges::max_element(length)), cache_page) + 1;
    }  // one more than any sequence has
    float scale() const { return float(1 / std::sqrt(double(D))); }
};

// The pages of the cache are in no order. For a page without visible keys the table contains a page of no
// sequence.
template <class X> struct DecodeInputs {
    size_t cache_rows;
    std::vector<X> qkv, last;    // (sum of length, (H+2*KV)*D): all tokens of all sequences; (B, ...): their last ones
    std::vector<int32_t> slots;  // (sum of length), -1 in front of first_key
    std::vector<int32_t> table;  // (B, pages)

    explicit DecodeInputs(const DecodeShape &s) {
        const size_t owned = s.B() * s.pages(), pool = (owned + 1) % 7 ? owned + 1 : owned + 2;  // not a multiple of 7
        const auto page = [&](size_t i) { return int32_t((7 * i + 3) % pool); };
        cache_rows = pool * cache_page;
        for (size_t b = 0; b < s.B(); b++) {
            const size_t first = size_t(s.first_key[b]), length = size_t(s.length[b]);
            for (size_t i = 0; i < s.pages(); i++) {
                const bool seen = (i + 1) * cache_page > first && i * cache_page < length;
                table.push_back(page(seen ? b * s.pages() + i : owned));
            }
            for (size_t p = 0; p < length; p++)
                slots.push_back(
                    p < first ? -1 : table[b * s.pages() + p / cache_page] * int32_t(cache_page) + int32_t(p % cache_page));
        }
        qkv = random_values<X>(slots.size() * s.row(), 1);
        for (size_t b = 0, end = 0; b < s.B(); b++) {
            end += size_t(s.length[b]);
            last.insert(last.end(), qkv.begin() + long((end - 1) * s.row()), qkv.begin() + long(end * s.row()));
        }
    }
};

// The cache after cache_store; it contained NaN before.
template <template <class> class Array, class Dev, class X = typename Dev::X>
std::vector<X> run_cache_store(Dev dev, const DecodeShape &s, const DecodeInputs<X> &in) {
    Array<X> cache(in.cache_rows * 2 * s.KV * s.D), qkv(in.qkv);
    Array<int32_t> slots(in.slots);
    const X *k = qkv.data() + s.H * s.D;
    cache_store(dev, cache.data(), Heads<const X>{k, s.row()}, Heads<const X>{k + s.KV * s.D, s.row()}, slots.data(),
                in.slots.size(), s.KV, s.D);
    return cache.values();
}

// out (sequences, H*D) of a batch of some sequences, with a table of the width that they need.
template <template <class> class Array, class Dev, class X = typename Dev::X>
std::vector<X> run_decode(Dev dev, const DecodeShape &s, const DecodeInputs<X> &in, const std::vector<X> &cache_values,
                          const std::vector<size_t> &sequences) {
    DecodeShape batch{{}, {}, s.H, s.KV, s.D};
    for (size_t b : sequences) batch.first_key.push_back(s.first_key[b]), batch.length.push_back(s.length[b]);
    const size_t B = batch.B(), pages = batch.pages();
    std::vector<X> last;
    std::vector<int32_t> table;
    for (size_t b : sequences) {
        last.insert(last.end(), in.last.begin() + long(b * s.row()), in.last.begin() + long((b + 1) * s.row()));
        table.insert(table.end(), in.table.begin() + long(b * s.pages()), in.table.begin() + long(b * s.pages() + pages));
    }
    Array<X> q(last), cache(cache_values), out(B * s.H * s.D);
    Array<int32_t> d_table(table), first_key(batch.first_key), length(batch.length);
    Array<float> scratch(attention_decode_scratch(dev, B, pages, s.H, s.D));
    attention_decode(dev, out.data(), scratch.data(), Heads<const X>{q.data(), s.row()},
                     {cache.data(), d_table.data(), first_key.data(), length.data(), pages}, {B, s.H, s.KV, s.D, s.scale()});
    return out.values();
}
template <template <class> class Array, class Dev, class X = typename Dev::X>
std::vector<X> run_decode(Dev dev, const DecodeShape &s, const DecodeInputs<X> &in, const std::vector<X> &cache) {
    std::vector<size_t> all(s.B());
    for (size_t b = 0; b < s.B(); b++) all[b] = b;
    return run_decode<Array>(dev, s, in, cache, all);
}

// Expects the bits of the tokens in their rows, and NaN in all other rows.
template <class X> void check_cache(const DecodeShape &s, const DecodeInputs<X> &in, const std::vector<X> &cache) {
    const size_t row = 2 * s.KV * s.D;
    std::vector<X> want(cache.size(), X(NAN));
    for (size_t t = 0; t < in.slots.size(); t++)
        if (in.slots[t] >= 0) std::copy_n(&in.qkv[t * s.row() + s.H * s.D], row, &want[size_t(in.slots[t]) * row]);
    size_t wrong = 0;
    for (size_t i = 0; i < want.size(); i++)
        wrong += std::isnan(float(want[i])) ? !std::isnan(float(cache[i])) : float(cache[i]) != float(want[i]);
    EXPECT_EQ(wrong, 0u) << "elements of the cache";
}

struct DecodeReference {
    std::vector<double> out, size;  // (B, H*D); the same sum over absolute values
    double error = 0;               // of float, relative to size
};

template <class X> DecodeReference decode_reference(const DecodeShape &s, const DecodeInputs<X> &in) {
    DecodeReference result;
    for (size_t b = 0, begin = 0; b < s.B(); begin += size_t(s.length[b++])) {
        const size_t length = size_t(s.length[b]), first = size_t(s.first_key[b]), at = begin * s.row();
        const AttentionCase document{{length}, 0, s.H, s.KV, s.D};
        const auto qkv = widen(std::vector<X>(in.qkv.begin() + long(at), in.qkv.begin() + long(at + length * s.row())));
        AttentionReference ref;
        ref.lse.resize(s.H * length);
        std::vector<size_t> keys(length - first);
        std::iota(keys.begin(), keys.end(), first);
        for (size_t h = 0; h < s.H; h++) {
            const auto p = probabilities(ref, document, qkv, length - 1, h, keys);
            for (size_t d = 0; d < s.D; d++) {
                double sum = 0, size = 0;
                for (size_t r = first; r < length; r++) {
                    const double v = qkv[r * s.row() + (s.H + s.KV + h / (s.H / s.KV)) * s.D + d];
                    sum += p[r - first] * v, size += p[r - first] * std::abs(v);
                }
                result.out.push_back(sum), result.size.push_back(size);
            }
        }
        result.error = std::max(result.error, 2 * lse_error<float>(document, ref) + rounded_sum_error(length));
    }
    return result;
}

template <class X>
void check_decode(const char *what, const DecodeShape &s, const DecodeInputs<X> &in, const std::vector<X> &out) {
    const DecodeReference want = decode_reference(s, in);
    expect_close(what, relative(widen(out), want.size), relative(want.out, want.size), want.error + unit_roundoff<X>);
}

// Lengths around the ends of pages (64 keys) and splits (256 keys), windows that begin there, groups of 1 to 9 heads, and head sizes that are
// multiples of a vector or not.
inline const std::vector<std::pair<const char *, DecodeShape>> decode_shapes = {
    {"one key, D 8", {{0}, {1}, 1, 1, 8}},
    {"2:2, D 8", {{0, 0, 3}, {5, 70, 140}, 2, 2, 8}},
    {"3:1, D 64", {{0, 0, 0, 0, 0, 0, 0, 0, 0}, {1, 2, 63, 64, 65, 255, 256, 257, 600}, 9, 3, 64}},
    {"windows, 4:1, D 64", {{1, 63, 64, 65, 250, 255, 256, 257, 511}, {2, 65, 65, 200, 258, 256, 513, 300, 514}, 4, 1, 64}},
    {"windows, 9:1, D 80", {{0, 290, 64}, {1, 310, 129}, 9, 1, 80}},
    {"7:1, D 128", {{0, 0, 100}, {130, 3, 300}, 14, 2, 128}},
    {"splits of more than 256 keys, D 8", {{0, 70, 0}, {8193, 8300, 300}, 1, 1, 8}},
    {"2:1, D 256", {{0, 7, 0}, {66, 8, 260}, 2, 1, 256}},
};
