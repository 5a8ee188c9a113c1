// The gated delta rule (Yang, Kautz and Hatamizadeh, 2024, arXiv:2412.06464): linear attention whose state, a matrix for each value head, decays and
// replaces what it stores under a key.
//
//   For each value head, with S = 0 (Dk, Dv) before the first token of each document, and for each token
//       q = q_raw / sqrt(|q_raw|^2 + eps) / sqrt(Dk)            k = k_raw / sqrt(|k_raw|^2 + eps)
//       S' = exp(g) S_{t-1}        d = beta (v - S'^T k)        S_t = S' + k d^T        out = S_t^T q
//   Backward, from the last token of a document, with G = dL/dS_t:
//       G += q dout^T     dq = S_t dout     X = G^T k     dv = beta X     dbeta = X . (v - S'^T k)     dk = G d - beta S' X
//       G' = G - beta k X^T     dg = <G', S'>     dL/dS_{t-1} = exp(g) G'      then through the norms of q and k
//
//   gated_delta_forward (dev, out, states, scratch, qkv, gates, doc_pos, shape, ends, starts)
//   gated_delta_backward(dev, dqkv, dgates, scratch, dout, qkv, gates, states, doc_pos, shape, ends, starts)
//
//   qkv, dqkv (T, 2 Hk Dk + Hv Dv) X: a token's query heads, key heads, value heads; value head h uses query and key head h / (Hv/Hk)
//   out, dout (T, Hv, Dv) X     gates.g <= 0, gates.beta and their gradients (T, Hv) float     Gradients overwrite.
//   doc_pos (T) int32, a token's position in its document; doc_pos[0] is 0
//   states: gated_delta_states(shape) floats, which the forward pass leaves for the backward pass     scratch: gated_delta_scratch(dev, shape) floats
//   ends: where to store the states after documents, for generation (delta_decode.h); in the backward pass, their gradients. By default there are none
//   starts: the states before documents, if those are pieces of longer ones (delta_pieces.h); by default 0
//   shape: T, Hk, Hv, Dk, Dv, eps; Hk divides Hv; Dk and Dv are multiples of 8, at most 128     Nothing may alias.
//
// Tokens are processed in chunks of 64, cut anew in each document, by products of matrices. In a chunk that begins with the state S, let
// P[i,j] = exp(g_{j+1} + ... + g_i) for j <= i, otherwise 0, and c_i = exp(g_0 + ... + g_i). With the rows d_i of D, and o_i of O,
//       e_i = v_i - c_i S^T k_i - sum_{j<i} P[i,j] (k_i . k_j) d_j       d_i = beta_i e_i        (forward substitution)
//       O = diag(c) Q S + (P * Q K^T) D                                  S <- c_last S + K^T diag(P[last,:]) D
// P is a product of decays, row by row, never the exponential of a difference of sums, which cancels if the decay is strong. So are the gradients of g:
// dg_t is the sum of the terms that contain exp(g_t).
//
// States are kept at every eighth chunk of a document; the backward pass computes the others again, and e.
#pragma once
#include <omp.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <tuple>
#include <vector>

#include "../core/common.h"
#include "../core/device.h"
#include "micro_kernel.h"
#include "simd.h"

struct DeltaShape {
    size_t T, Hk, Hv, Dk, Dv;
    float eps;  // of the norms of queries and keys

    HOST_DEVICE size_t group() const { return Hv / Hk; }              // value heads that share a key head
    HOST_DEVICE size_t row() const { return 2 * Hk * Dk + Hv * Dv; }  // elements of a token of qkv
    HOST_DEVICE size_t values_at(size_t h) const { return 2 * Hk * Dk + h * Dv; }
    auto pointers() const { return std::tuple(); }  // ../core/rehearsal.h
};

template <class F> struct DeltaGates {  // of const float; or their gradients, of float
    F *g, *beta;                        // (T, Hv) each: logarithms of decays, and weights of updates

    auto pointers() const { return std::tuple(g, beta); }  // ../core/rehearsal.h
};

// States before the first tokens or after the last tokens of documents, or their gradients.
template <class F> struct DeltaStates {  // of float, or of const float
    F *states = nullptr;                 // (slots, Hv, Dk, Dv)
    const int32_t *slots = nullptr;      // (T) the slot of a first or last token's document; -1: none, also for all other tokens

    auto pointers() const { return std::tuple(states, slots); }  // ../core/rehearsal.h
    HOST_DEVICE bool has(size_t token) const { return slots && slots[token] >= 0; }
    HOST_DEVICE F *of(size_t token, size_t h, const DeltaShape &s) const {
        return states + (size_t(slots[token]) * s.Hv + h) * s.Dk * s.Dv;
    }
};

namespace delta {

constexpr size_t chunk = 64, interval = 8 * chunk, max_D = 128;  // interval: tokens from one kept state to the next

// The kept state of value head h before the token at `begin`. No two kept states are in the same interval of the row: within a document they are an
// interval apart, and the first token of another document, which has none, is between those of two.
HOST_DEVICE inline size_t state_at(size_t begin, size_t h, const DeltaShape &s) {
    return (begin / interval * s.Hv + h) * s.Dk * s.Dv;
}
HOST_DEVICE inline bool is_kept(int32_t doc_pos) { return doc_pos > 0 && doc_pos % int32_t(interval) == 0; }

// How gated_delta.cuh divides the work, which also limits its speed (../model/prediction.cpp). A block has 64 columns of a value head. Documents are
// independent, so in the forward pass such blocks divide the row, too: part p has the documents that begin in the p-th part of the tokens. Matrices of a
// block take memory, so there are at most 128 if the heads do not need more, about one for each multiprocessor of a large GPU.
constexpr size_t columns_of_block = 64, many_blocks = 128;
inline size_t column_blocks(const DeltaShape &s) { return s.Hv * ceil_div(s.Dv, columns_of_block); }
inline size_t parts_of_row(const DeltaShape &s) {
    return std::max<size_t>(1, std::min(ceil_div(s.T, interval), many_blocks / column_blocks(s)));
}

}  // namespace delta

inline size_t gated_delta_states(const DeltaShape &s) { return ceil_div(s.T, delta::interval) * s.Hv * s.Dk * s.Dv; }

// Floating-point operations of a token and value head: multiplications and additions of the products, without those of masked halves.
inline double gated_delta_flops(const DeltaShape &s) {
    return 2 * (3 * double(s.Dk * s.Dv) + double(delta::chunk) * double(s.Dk + s.Dv));
}
inline double gated_delta_backward_flops(const DeltaShape &s) {
    return 2 * (8 * double(s.Dk * s.Dv) + double(delta::chunk) * (3.5 * double(s.Dk) + 2.5 * double(s.Dv)));
}

// ---- CPU -----------------------------------------------------------------------------------------------------------------------

namespace delta {

using simd::View, simd::Vector, simd::load_vector, simd::store_vector, simd::lanes;

// Matrices have rows of a fixed length, not a power of two, so that the rows of a panel do not compete for the same lines of the cache. Products
// overwrite whole blocks of 6 rows and 16 columns: what is behind the last row is never read into a result, and columns behind the last one are 0.
constexpr size_t stride = max_D + 16, square = chunk + 16;
constexpr size_t rows_of(size_t n) { return round_up(n, simd::block_rows); }
struct Rows {
    alignas(64) float x[rows_of(chunk) * stride];
};
struct State {
    alignas(64) float x[rows_of(max_D) * stride];
};
struct Square {
    alignas(64) float x[rows_of(chunk) * square];
};

enum class Sum { whole, to_row, from_row };  // the terms k of row i: all; k <= i; k >= i

// c (n, columns) = or += a (n, K) b (K, columns)
inline void multiply(float *c, size_t c_row, View<const float> a, const float *b, size_t b_row, size_t n, size_t columns,
                     size_t K, bool add, Sum terms = Sum::whole) {
    columns = round_up(columns, 16);
    for (size_t j = 0; j < columns; j += simd::panel)
        for (size_t i = 0; i < n; i += simd::block_rows) {
            const size_t begin = terms == Sum::from_row ? i : 0;
            const size_t end = terms == Sum::to_row ? std::min(K, i + simd::block_rows) : K;
            simd::product<float>(std::min(simd::panel, columns - j), {c + i * c_row + j, c_row},
                                 {a.data + i * a.row + begin * a.column, a.row, a.column}, {b + begin * b_row + j, b_row},
                                 end - begin, add);
        }
}

inline void transpose(float *out, size_t out_row, const float *in, size_t in_row, size_t rows, size_t columns) {
    for (size_t i = 0; i < rows; i += lanes)
        for (size_t j = 0; j < columns; j += lanes) {
            Vector v[lanes];
            for (size_t l = 0; l < lanes; l++) v[l] = load_vector(in + (i + l) * in_row + j);
            simd::transpose_square(v);
            for (size_t l = 0; l < lanes; l++) store_vector(out + (j + l) * out_row + i, v[l]);
        }
}

// y = a y + b x, for whole vectors of n elements
inline void scale_and_add(float *y, float a, float b, const float *x, size_t n) {
    for (size_t c = 0; c < n; c += lanes) store_vector(y + c, a * load_vector(y + c) + b * load_vector(x + c));
}
inline void scaled(float *y, float a, const float *x, size_t n) {  // y = a x
    for (size_t c = 0; c < n; c += lanes) store_vector(y + c, a * load_vector(x + c));
}
inline float dot(const float *x, const float *y, size_t n) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (size_t c = 0; c < n; c++) sum += x[c] * y[c];
    return sum;
}
template <class X> void load_row(float *out, const X *x, size_t n) {
    for (size_t c = 0; c < n; c++) out[c] = float(x[c]);
    std::fill(out + n, out + round_up(n, 16), 0.0f);
}
template <class X> void store_row(X *out, const float *x, size_t n) {
    for (size_t c = 0; c < n; c++) out[c] = x[c];
}

struct Chunk {  // tokens [begin, begin + n) of a row
    size_t begin, n;
    bool first, last;  // the state before it is 0; no state after it is needed

    HOST_DEVICE size_t end() const { return begin + n - 1; }  // its last token
};

// What the value heads of a key head share: the normed queries and keys of a chunk, and their products.
struct KeyHead {
    Rows q, k;
    Square kk, qk;
    alignas(64) float k_columns[max_D * square];  // K^T
    float q_factor[chunk], k_factor[chunk];       // 1 / sqrt(|x|^2 + eps)

    template <class X>
    static void norm(float *out, float *factor, const X *x, size_t n, size_t row, size_t D, float eps, float scale) {
        for (size_t i = 0; i < n; i++) {
            float *const out_i = out + i * stride;
            load_row(out_i, x + i * row, D);
            factor[i] = 1.0f / std::sqrt(dot(out_i, out_i, D) + eps);
            scaled(out_i, factor[i] * scale, out_i, round_up(D, 16));
        }
    }
    template <class X> void load(const X *qkv, const Chunk &c, size_t head, const DeltaShape &s) {
        const X *x = qkv + c.begin * s.row() + head * s.Dk;
        norm(q.x, q_factor, x, c.n, s.row(), s.Dk, s.eps, 1 / std::sqrt(float(s.Dk)));
        norm(k.x, k_factor, x + s.Hk * s.Dk, c.n, s.row(), s.Dk, s.eps, 1);
        transpose(k_columns, square, k.x, stride, c.n, s.Dk);
        multiply(kk.x, square, {k.x, stride}, k_columns, square, c.n, c.n, s.Dk, false);
    }
    void multiply_queries(size_t n, size_t Dk) { multiply(qk.x, square, {q.x, stride}, k_columns, square, n, n, Dk, false); }

    // Writes the gradients of the raw queries or keys, from those of the normed ones.
    template <class X>
    static void norm_backward(X *dx, const float *d, const float *normed, const float *factor, size_t n, size_t row, size_t D,
                              float scale) {
        for (size_t i = 0; i < n; i++) {
            const float *d_i = d + i * stride, *x_i = normed + i * stride, along = dot(d_i, x_i, D) / scale;
            for (size_t c = 0; c < D; c++) dx[i * row + c] = factor[i] * (scale * d_i[c] - along * x_i[c]);
        }
    }
};

// The decays of a chunk, and -P[i,j] k_i . k_j for j < i. Both matrices are 0 above the diagonal.
struct Decays {
    Square P, negative;
    float from_start[chunk], beta[chunk];  // c

    void load(const DeltaGates<const float> &gates, const KeyHead &keys, const Chunk &c, size_t h, const DeltaShape &s) {
        const size_t width = round_up(c.n, 16);
        float product = 1;
        for (size_t i = 0; i < c.n; i++) {
            const size_t at = (c.begin + i) * s.Hv + h;
            const float decay = fast_exp(gates.g[at]);
            float *P_i = P.x + i * square, *negative_i = negative.x + i * square;
            from_start[i] = product *= decay, beta[i] = gates.beta[at];
            std::fill_n(P_i, width, 0.0f);
            std::fill_n(negative_i, width, 0.0f);
            for (size_t j = 0; j < i; j++) {
                P_i[j] = decay * P_i[j - square];
                negative_i[j] = -P_i[j] * keys.kk.x[i * square + j];
            }
            P_i[i] = 1;
        }
    }
    const float *to_end(size_t n) const { return P.x + (n - 1) * square; }  // P[last,:]
};

// Computes the rows e of the chunk, and d = beta e, from the state before it. qkv null: all values are 0
template <class X>
void solve(Rows &e, Rows &d, const X *qkv, const KeyHead &keys, const Decays &decays, const State &state, const Chunk &c,
           size_t h, const DeltaShape &s) {
    const size_t width = round_up(s.Dv, 16);
    if (!c.first) multiply(d.x, stride, {keys.k.x, stride}, state.x, stride, c.n, s.Dv, s.Dk, false);
    for (size_t i = 0; i < c.n; i++) {
        float *e_i = e.x + i * stride;
        if (qkv) load_row(e_i, qkv + (c.begin + i) * s.row() + s.values_at(h), s.Dv);
        else std::fill_n(e_i, width, 0.0f);
        if (!c.first) scale_and_add(e_i, 1, -decays.from_start[i], d.x + i * stride, width);
    }
    for (size_t begin = 0; begin < c.n; begin += simd::block_rows) {
        const float *block = decays.negative.x + begin * square;
        if (begin) multiply(e.x + begin * stride, stride, {block, square}, d.x, stride, simd::block_rows, s.Dv, begin, true);
        for (size_t i = begin; i < std::min(c.n, begin + simd::block_rows); i++) {
            float *e_i = e.x + i * stride;
            for (size_t j = begin; j < i; j++) scale_and_add(e_i, 1, decays.negative.x[i * square + j], d.x + j * stride, width);
            scaled(d.x + i * stride, decays.beta[i], e_i, width);
        }
    }
}

// state <- c_last state + K^T diag(P[last,:]) D; scratch is overwritten
inline void advance(State &state, Rows &scratch, const KeyHead &keys, const Decays &decays, const Rows &d, const Chunk &c,
                    const DeltaShape &s) {
    const size_t width = round_up(s.Dv, 16);
    for (size_t i = 0; i < c.n; i++) scaled(scratch.x + i * stride, decays.to_end(c.n)[i], d.x + i * stride, width);
    for (size_t i = 0; i < s.Dk && !c.first; i++)
        scaled(state.x + i * stride, decays.from_start[c.n - 1], state.x + i * stride, width);
    multiply(state.x, stride, {keys.k.x, 1, stride}, scratch.x, stride, s.Dk, s.Dv, c.n, !c.first);
}

inline void keep(float *states, const State &state, const DeltaShape &s) {
    for (size_t i = 0; i < s.Dk; i++) std::copy_n(state.x + i * stride, s.Dv, states + i * s.Dv);
}
inline void restore(State &state, const float *states, const DeltaShape &s) {
    for (size_t i = 0; i < s.Dk; i++) load_row(state.x + i * stride, states + i * s.Dv, s.Dv);
}

// product[i,j] *= P[i,j]; both are 0 above the diagonal then
inline void mask(Square &product, const Square &P, size_t n) {
    for (size_t i = 0; i < n; i++) {
        float *const row = product.x + i * square;
        for (size_t j = 0; j <= i; j++) row[j] *= P.x[i * square + j];
        std::fill(row + i + 1, row + round_up(n, simd::block_rows), 0.0f);
    }
}

// The arrays of a thread. A task is a document and a key head with its value heads, which are in step.
struct ForwardArrays {
    KeyHead keys;
    Decays decays;
    Rows e, d, out;
    Square weights;             // P * Q K^T
    std::vector<State> states;  // by value head of the group

    explicit ForwardArrays(size_t group) : states(group) {}

    template <class X>
    void run(X *to, float *kept, const X *qkv, const DeltaGates<const float> &gates, const int32_t *doc_pos, Chunk c, size_t head,
             const DeltaShape &s, const DeltaStates<float> &ends, const DeltaStates<const float> &starts) {
        const size_t width = round_up(s.Dv, 16);
        keys.load(qkv, c, head, s);
        keys.multiply_queries(c.n, s.Dk);
        for (size_t i = 0; i < s.group(); i++) {
            const size_t h = head * s.group() + i;
            State &state = states[i];
            if (starts.has(c.begin)) restore(state, starts.of(c.begin, h, s), s);
            if (is_kept(doc_pos[c.begin])) keep(kept + state_at(c.begin, h, s), state, s);
            decays.load(gates, keys, c, h, s);
            solve(e, d, qkv, keys, decays, state, c, h, s);
            if (!c.first) multiply(out.x, stride, {keys.q.x, stride}, state.x, stride, c.n, s.Dv, s.Dk, false);
            for (size_t t = 0; t < c.n && !c.first; t++)
                scaled(out.x + t * stride, decays.from_start[t], out.x + t * stride, width);
            weights = keys.qk;
            mask(weights, decays.P, c.n);
            multiply(out.x, stride, {weights.x, square}, d.x, stride, c.n, s.Dv, c.n, !c.first, Sum::to_row);
            for (size_t t = 0; t < c.n; t++) store_row(to + ((c.begin + t) * s.Hv + h) * s.Dv, out.x + t * stride, s.Dv);
            if (!c.last) advance(state, e, keys, decays, d, c, s);
            if (ends.has(c.end())) keep(ends.of(c.end(), h, s), state, s);
        }
    }
};

struct BackwardArrays {
    struct Head {                                    // a value head of the group
        State gradient;                              // dL/dS behind the chunk
        std::array<State, interval / chunk> states;  // before each chunk of an interval
        std::array<Rows, interval / chunk> e;
    };
    KeyHead keys;
    Decays decays;
    Rows d, dout, dd, dv, dq, dk, product;        // dd: X
    Square weights, dweights, dnegative;          // P * Q K^T; P times the gradients of Q K^T and of K K^T
    alignas(64) float d_columns[max_D * square];  // D^T
    State transposed;
    std::vector<Head> heads;

    explicit BackwardArrays(size_t group) : heads(group) {}

    // Computes the states before the chunks of an interval, and their e.
    template <class X>
    void recompute(const X *qkv, const float *kept, const DeltaGates<const float> &gates, const std::vector<Chunk> &chunks,
                   size_t head, const DeltaShape &s, const DeltaStates<const float> &starts) {
        for (size_t k = 0; k < chunks.size(); k++) {
            const Chunk &c = chunks[k];
            keys.load(qkv, c, head, s);
            for (size_t i = 0; i < s.group(); i++) {
                const size_t h = head * s.group() + i;
                if (k == 0 && !c.first)
                    restore(heads[i].states[0], starts.has(c.begin) ? starts.of(c.begin, h, s) : kept + state_at(c.begin, h, s),
                            s);
                decays.load(gates, keys, c, h, s);
                solve(heads[i].e[k], d, qkv, keys, decays, heads[i].states[k], c, h, s);
                if (k + 1 == chunks.size()) continue;
                heads[i].states[k + 1] = heads[i].states[k];
                advance(heads[i].states[k + 1], product, keys, decays, d, c, s);
            }
        }
    }

    // The gradients of a chunk, from that of the state behind it; then `gradient` is that of the state before it.
    template <class X>
    void run(X *dqkv, const DeltaGates<float> &dgates, const X *from, const X *qkv, const DeltaGates<const float> &gates, Chunk c,
             size_t k, size_t head, const DeltaShape &s, const DeltaStates<const float> &ends) {
        keys.load(qkv, c, head, s);
        keys.multiply_queries(c.n, s.Dk);
        std::fill_n(dq.x, c.n * stride, 0.0f);
        std::fill_n(dk.x, c.n * stride, 0.0f);
        for (size_t i = 0; i < s.group(); i++) {
            const size_t h = head * s.group() + i;
            decays.load(gates, keys, c, h, s);
            for (size_t t = 0; t < c.n; t++) {
                const size_t at = (c.begin + t) * s.Hv + h;
                load_row(dout.x + t * stride, from + at * s.Dv, s.Dv);
                scaled(d.x + t * stride, decays.beta[t], heads[i].e[k].x + t * stride, round_up(s.Dv, 16));
            }
            if (ends.has(c.end())) restore(heads[i].gradient, ends.of(c.end(), h, s), s);
            gradients_of_updates(heads[i].gradient, c, s);
            for (size_t t = 0; t < c.n; t++)
                dgates.beta[(c.begin + t) * s.Hv + h] = dot(dd.x + t * stride, heads[i].e[k].x + t * stride, s.Dv);
            for (size_t t = 0; t < c.n; t++) store_row(dqkv + (c.begin + t) * s.row() + s.values_at(h), dv.x + t * stride, s.Dv);
            gradients_of_products(dgates, heads[i], c, k, h, s);
        }
        X *const to = dqkv + c.begin * s.row() + head * s.Dk;
        KeyHead::norm_backward(to, dq.x, keys.q.x, keys.q_factor, c.n, s.row(), s.Dk, 1 / std::sqrt(float(s.Dk)));
        KeyHead::norm_backward(to + s.Hk * s.Dk, dk.x, keys.k.x, keys.k_factor, c.n, s.row(), s.Dk, 1);
    }

    // dd = (P * Q K^T)^T dO + diag(P[last,:]) K G, and from it by backward substitution dd_i -= sum_{j>i} P[j,i] (k_j . k_i) dv_j, dv = beta dd
    void gradients_of_updates(const State &gradient, const Chunk &c, const DeltaShape &s) {
        constexpr size_t block = simd::block_rows;
        const size_t n = c.n, width = round_up(s.Dv, 16);
        const float *negative = decays.negative.x;
        weights = keys.qk;
        mask(weights, decays.P, n);
        if (!c.last) multiply(dd.x, stride, {keys.k.x, stride}, gradient.x, stride, n, s.Dv, s.Dk, false);
        for (size_t t = 0; t < n && !c.last; t++) scaled(dd.x + t * stride, decays.to_end(n)[t], dd.x + t * stride, width);
        multiply(dd.x, stride, {weights.x, 1, square}, dout.x, stride, n, s.Dv, n, !c.last, Sum::from_row);
        for (size_t begin = round_up(n, block); begin > 0;) {
            const size_t end = begin;
            begin -= block;
            if (end < n)
                multiply(dd.x + begin * stride, stride, {negative + end * square + begin, 1, square}, dv.x + end * stride, stride,
                         block, s.Dv, n - end, true);
            for (size_t t = std::min(n, end); t-- > begin;) {
                float *dd_t = dd.x + t * stride;
                for (size_t j = t + 1; j < std::min(n, end); j++)
                    scale_and_add(dd_t, 1, negative[j * square + t], dv.x + j * stride, width);
                scaled(dv.x + t * stride, decays.beta[t], dd_t, width);
            }
        }
    }

    // dL/dS before the chunk, from that behind it: c_last G + Q^T diag(c) dO - K^T diag(c) dV. Scales dout and dv by c.
    void retreat(State &gradient, const Chunk &c, const DeltaShape &s) {
        const size_t width = round_up(s.Dv, 16);
        for (size_t i = 0; i < s.Dk && !c.last; i++)
            scaled(gradient.x + i * stride, decays.from_start[c.n - 1], gradient.x + i * stride, width);
        for (size_t t = 0; t < c.n; t++) {
            scaled(dout.x + t * stride, decays.from_start[t], dout.x + t * stride, width);
            scaled(dv.x + t * stride, -decays.from_start[t], dv.x + t * stride, width);
        }
        multiply(gradient.x, stride, {keys.q.x, 1, stride}, dout.x, stride, s.Dk, s.Dv, c.n, !c.last);
        multiply(gradient.x, stride, {keys.k.x, 1, stride}, dv.x, stride, s.Dk, s.Dv, c.n, true);
    }

    // The gradients of q, k and g, and of the state before the chunk.
    void gradients_of_products(const DeltaGates<float> &dgates, Head &head, const Chunk &c, size_t k, size_t h,
                               const DeltaShape &s) {
        const size_t n = c.n, wide = round_up(s.Dk, 16);
        const State &before = head.states[k];
        float of_start[chunk] = {}, of_end[chunk] = {};  // the terms of dL/dlog c_t and of dL/dlog P[last,t] from states
        float of_state = 0;                              // and the term of c_last <G, S>

        transpose(d_columns, square, d.x, stride, n, s.Dv);
        multiply(dweights.x, square, {dout.x, stride}, d_columns, square, n, n, s.Dv, false);
        multiply(dnegative.x, square, {dv.x, stride}, d_columns, square, n, n, s.Dv, false);
        mask(dweights, decays.P, n);
        mask(dnegative, decays.P, n);
        for (size_t t = 0; t < n; t++)
            for (size_t j = 0; j <= t; j++) dnegative.x[t * square + j] = j < t ? -dnegative.x[t * square + j] : 0;

        if (!c.first) {
            transpose(transposed.x, stride, before.x, stride, s.Dk, s.Dv);
            multiply(product.x, stride, {dout.x, stride}, transposed.x, stride, n, s.Dk, s.Dv, false);
            for (size_t t = 0; t < n; t++) {
                of_start[t] = dot(product.x + t * stride, keys.q.x + t * stride, s.Dk);
                scale_and_add(dq.x + t * stride, 1, decays.from_start[t], product.x + t * stride, wide);
            }
            multiply(product.x, stride, {dv.x, stride}, transposed.x, stride, n, s.Dk, s.Dv, false);
            for (size_t t = 0; t < n; t++) {
                of_start[t] -= dot(product.x + t * stride, keys.k.x + t * stride, s.Dk);
                of_start[t] *= decays.from_start[t];
                scale_and_add(dk.x + t * stride, 1, -decays.from_start[t], product.x + t * stride, wide);
            }
        }
        if (!c.last) {
            transpose(transposed.x, stride, head.gradient.x, stride, s.Dk, s.Dv);
            multiply(product.x, stride, {d.x, stride}, transposed.x, stride, n, s.Dk, s.Dv, false);
            for (size_t t = 0; t < n; t++) {
                of_end[t] = decays.to_end(n)[t] * dot(product.x + t * stride, keys.k.x + t * stride, s.Dk);
                scale_and_add(dk.x + t * stride, 1, decays.to_end(n)[t], product.x + t * stride, wide);
            }
        }
        multiply(dq.x, stride, {dweights.x, square}, keys.k.x, stride, n, s.Dk, n, true, Sum::to_row);
        multiply(dk.x, stride, {dweights.x, 1, square}, keys.q.x, stride, n, s.Dk, n, true, Sum::from_row);
        multiply(dk.x, stride, {dnegative.x, square}, keys.k.x, stride, n, s.Dk, n, true, Sum::to_row);
        multiply(dk.x, stride, {dnegative.x, 1, square}, keys.k.x, stride, n, s.Dk, n, true, Sum::from_row);

        if (!c.first) {
            for (size_t i = 0; i < s.Dk && !c.last; i++)
                of_state += dot(head.gradient.x + i * stride, before.x + i * stride, s.Dv);
            of_state *= decays.from_start[n - 1];
            retreat(head.gradient, c, s);
        }

        // dg_t: the terms of P[i,j] with j < t <= i, of c_i with t <= i, of P[last,j] with j < t, and of the state
        float column[chunk] = {}, earlier[chunk], sum = 0, after = 0;  // column[j]: the terms of P[i,j] with i >= t
        for (size_t t = 0; t < n; t++) earlier[t] = sum, sum += of_end[t];
        for (size_t t = n; t-- > 0;) {
            float pairs = 0;
            const size_t row = t * square;
#pragma omp simd reduction(+ : pairs)
            for (size_t j = 0; j < t; j++) {
                column[j] += dweights.x[row + j] * keys.qk.x[row + j] + dnegative.x[row + j] * keys.kk.x[row + j];
                pairs += column[j];
            }
            after += of_start[t];
            dgates.g[(c.begin + t) * s.Hv + h] = pairs + after + earlier[t] + of_state;
        }
    }
};

// Calls f(arrays, chunks, head) for each document and key head, in parallel.
template <class Arrays, class Ends, class Starts, class F>
void for_each_task(int threads, const int32_t *doc_pos, const DeltaShape &s, const Ends &ends, const Starts &starts, F f) {
    std::vector<std::vector<Chunk>> documents;
    for (size_t t = 0; t < s.T; t++) {
        if (doc_pos[t] == 0) documents.emplace_back();
        std::vector<Chunk> &chunks = documents.back();
        if (doc_pos[t] % int32_t(chunk) == 0) chunks.push_back({t, 0, chunks.empty() && !starts.has(t), false});
        chunks.back().n++;
    }
    for (std::vector<Chunk> &chunks : documents) chunks.back().last = !ends.has(chunks.back().end());
#pragma omp parallel num_threads(threads)
    {
        const auto arrays = std::make_unique<Arrays>(s.group());
#pragma omp for collapse(2) schedule(dynamic)
        for (size_t i = 0; i < documents.size(); i++)
            for (size_t head = 0; head < s.Hk; head++) f(*arrays, documents[i], head);
    }
}

}  // namespace delta

template <class X> size_t gated_delta_scratch(Cpu<X>, const DeltaShape &) { return 0; }

template <class X>
void gated_delta_forward(Cpu<X> dev, X *out, float *states, float *, const X *qkv, DeltaGates<const float> gates,
                         const int32_t *doc_pos, DeltaShape shape, DeltaStates<float> ends = {},
                         DeltaStates<const float> starts = {}) {
    using namespace delta;
    for_each_task<ForwardArrays>(dev.threads, doc_pos, shape, ends, starts,
                                 [&](ForwardArrays &arrays, const std::vector<Chunk> &chunks, size_t head) {
                                     for (const Chunk &c : chunks)
                                         arrays.run(out, states, qkv, gates, doc_pos, c, head, shape, ends, starts);
                                 });
}

template <class X>
void gated_delta_backward(Cpu<X> dev, X *dqkv, DeltaGates<float> dgates, float *, const X *dout, const X *qkv,
                          DeltaGates<const float> gates, const float *states, const int32_t *doc_pos, DeltaShape shape,
                          DeltaStates<const float> ends = {}, DeltaStates<const float> starts = {}) {
    using namespace delta;
    constexpr size_t many = interval / chunk;
    for_each_task<BackwardArrays>(dev.threads, doc_pos, shape, ends, starts,
                                  [&](BackwardArrays &arrays, const std::vector<Chunk> &all, size_t head) {
                                      for (size_t begin = round_up(all.size(), many); begin > 0;) {
                                          begin -= many;
                                          const std::vector<Chunk> chunks(all.begin() + long(begin),
                                                                          all.begin() + long(std::min(all.size(), begin + many)));
                                          arrays.recompute(qkv, states, gates, chunks, head, shape, starts);
                                          for (size_t k = chunks.size(); k-- > 0;)
                                              arrays.run(dqkv, dgates, dout, qkv, gates, chunks[k], k, head, shape, ends);
                                      }
                                  });
}

REHEARSED(gated_delta_forward);
REHEARSED(gated_delta_backward);
ASKED(gated_delta_scratch);
