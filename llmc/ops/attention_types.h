// The types of attention's arguments (attention.h).
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <tuple>
#include <vector>

#include "../core/common.h"
#include "../core/dtype.h"

// Global positions [begin, end) of the packed row; a rank stores them in its local rows offset, offset + 1, ...
struct Piece {
    size_t begin, end, offset;
};
struct Pieces {  // the pieces that one rank holds, sorted by begin
    static constexpr size_t capacity = 16;
    Piece piece[capacity];
    size_t count;

    auto pointers() const { return std::tuple(); }  // ../core/rehearsal.h
};

// Cuts divide the packed row where long documents begin. On a GPU a tile of rows ends at a cut: if a tile held the end of one document and the
// beginning of the next, all of its rows would visit the keys of both. Kernels read the cuts from device memory, so a recorded launch serves every
// packed row.
struct TileCuts {
    static constexpr size_t shortest = 256;  // positions; a shorter document has too few tiles to gain by a cut
    static constexpr size_t most(size_t T) { return T ? (T - 1) / shortest : 0; }  // cuts of a row of T positions

    const int32_t *at;  // (capacity) increasing positions, then INT32_MAX; no query after a cut sees a key before it
    size_t capacity;
};

// Returns the cuts of a row of T positions with documents that begin at `doc_offsets`.
inline std::vector<int32_t> tile_cuts(std::span<const size_t> doc_offsets, size_t T) {
    std::vector<int32_t> cuts;
    for (size_t i = 0; i < doc_offsets.size(); i++) {
        const size_t begin = doc_offsets[i], end = i + 1 < doc_offsets.size() ? doc_offsets[i + 1] : T;
        if (begin > 0 && end >= begin + TileCuts::shortest) cuts.push_back(int32_t(begin));
    }
    return cuts;
}

template <class X> struct Heads {  // element (t, h, d) is data[t * stride + h * D + d]
    X *data;
    size_t stride;

    auto pointers() const { return std::tuple(data); }  // ../core/rehearsal.h
};

// Floating-point operations for one score (query, key) and one channel of its head. The forward pass has two products (scores, weighted values) and
// the backward pass five, including the recomputed scores, which is the usual count if the (T, T) matrix is never stored.
constexpr double attention_flops = 4, attention_backward_flops = 10;

// T rows of queries in H heads; keys and values in KV heads; D elements per head. A score is scale * q . k.
struct AttentionShape {
    size_t T, H, KV, D;
    float scale;
    // The number of query heads that share a KV head. It is computed in 32 bits, because a GPU divides those much faster than 64.
    HOST_DEVICE unsigned group() const { return unsigned(H) / unsigned(KV); }
    auto pointers() const { return std::tuple(); }  // ../core/rehearsal.h
};

// Inputs of both passes. The caller knows the number of rows of keys and values; often it is T.
template <class X> struct AttentionInputs {
    Heads<const X> q, k, v;    // (T, H, D), (rows, KV, D) twice
    const int32_t *first_key;  // by global position
    TileCuts cuts;             // of the whole row
    AttentionShape shape;

    auto pointers() const { return std::tuple(q.data, k.data, v.data, first_key, cuts.at); }  // ../core/rehearsal.h
};

// The position of a part among all parts of the same queries: the first part initialises their sums, and the last part rounds them.
struct PartOrder {
    bool first, last;
    auto pointers() const { return std::tuple(); }  // ../core/rehearsal.h
};

// A shared prompt, and documents that lack it (attention_prompts.h).
struct PromptPart {
    Piece prompt, queries;
};
struct PromptParts {
    std::vector<PromptPart> parts;  // in the order of the row
    const int32_t *first_key =
        nullptr;  // (T) the first key of the prompt that each query sees; it does not decrease among the queries of a part
};

// The sums that the parts of a backward pass add to.
struct AttentionGrads {
    float *dq32;  // (T, H, D)
    float *dk32;  // (rows, KV, D)
    float *dv32;  // (rows, KV, D)

    auto pointers() const { return std::tuple(dq32, dk32, dv32); }  // ../core/rehearsal.h
};

namespace attention {

constexpr size_t max_D = 256;

inline void check_head_size(size_t D) {
    if (D % 8 || D > max_D)
        die("head_dim in config.json is %zu, but attention supports multiples of 8 up to %zu\n  fix: use a model with another head size",
            D, max_D);
}

}  // namespace attention

// Attention whose single part is the whole, on any device.
template <class Dev, class X = typename Dev::X>
void attention_forward(Dev dev, X *out, float *out32, float *lse, const AttentionInputs<X> &in, Pieces pieces) {
    attention_forward_part(dev, out, out32, lse, in, pieces, pieces, PartOrder{true, true});
}
