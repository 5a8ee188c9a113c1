// Linear attention over the ranks of a ring. A rank computes its pieces of the row, and where a document continues in another rank's piece it passes on
// what that piece needs of the tokens before: three inputs of the convolution, and the state of the delta rule, which is an affine function of the state
// that the piece itself begins with (../ops/delta_pieces.h). All ranks compute these functions at the same time; then the state goes from piece to piece,
// and its gradient back, in the order of the row. So the sums have the same order in every run. A document that ends with a piece passes nothing on.
//
// Bytes sent by all ranks together for one layer, forward and again backward, whatever the length of the row, with b bytes per element of X and B
// borders of pieces inside documents (at most P - 1 in the contiguous layout of P ranks, 2 P - 2 in zigzag):
//
//     B * (Hv * Dk * Dv * 4 + 3 * (2 * Hk * Dk + Hv * Dv) * b)
//
//   ring_conv_forward  (dev, ring, pieces, out, x, w, T, C, is_known)            arguments as in causal_conv.h
//   ring_conv_backward (dev, ring, pieces, dx, dw, scratch, dout, x, w, T, C)    overwrites parts of dout and `columns`
//   ring_delta_forward (dev, ring, pieces, out, states, scratch, qkv, gates, shape)    arguments as in gated_delta.h
//   ring_delta_backward(dev, ring, pieces, dqkv, dgates, scratch, dout, qkv, gates, states, shape)
//
// One rank makes exactly the calls of those files.
#pragma once
#include <span>
#include <utility>
#include <vector>

#include "../ops/causal_conv.h"
#include "../ops/delta_pieces.h"
#include "../ops/layout.h"
#include "../ops/residual.h"
#include "comm.h"
#include "mesh.h"
#include "split.h"

struct DeltaRing {
    Comm &comm;  // the ring's
    const SequenceSplit &split;
    std::span<const PieceBorder> borders;  // of the row, in its order
    Payload &payload;

    size_t rank() const { return size_t(comm.rank); }
    bool sends(const PieceBorder &b) const { return b.from == rank(); }
    bool receives(const PieceBorder &b) const { return b.to == rank(); }
    const Piece &piece(size_t number) const { return split.pieces[rank()].piece[number]; }
    size_t first_row(const PieceBorder &b) const { return piece(b.to_piece).offset; }
    size_t end_row(const PieceBorder &b) const {
        const Piece &p = piece(b.from_piece);
        return p.offset + p.end - p.begin;
    }
    // Passes a slice over a border; each rank calls it for each border, and the slice of another rank's end is ignored.
    Request pass_on(const PieceBorder &b, Slice from, Slice to) {
        if (!sends(b)) from = {};
        if (!receives(b)) to = {};
        payload.kv += from.bytes();
        return comm.exchange(from, int(b.to), to, int(b.from));
    }
    Request pass_back(const PieceBorder &b, Slice from, Slice to) {
        if (!receives(b)) from = {};
        if (!sends(b)) to = {};
        payload.dkv += from.bytes();
        return comm.exchange(from, int(b.from), to, int(b.to));
    }
};

// The arrays of the pieces of a rank, one of each for a piece. In a row of one rank all but `position` may be null.
template <class X> struct DeltaPieceActs {
    const int32_t *position;  // (T) of a token in its document within the piece
    const int32_t *starts,
        *ends;  // (T) at the first token of a piece, the piece's number if its document has begun before; likewise at the last one
    const int32_t *
        seen;  // (pieces, 6) positions in their documents of the three tokens before a piece, at most 0, 1, 2, and of its first three
    X *columns;          // (pieces, 3, C)      the convolution's inputs before each piece
    float *before;       // (pieces, Hv, Dk, Dv)  the states before each piece
    float *transitions;  // (pieces, Hv, Dk, Dk)  M
    float *terms;        // (pieces, Hv, Dk, Dv)  E, or backward F
    float *behind;       // (pieces, Hv, Dk, Dv)  backward: gradients of the states behind each piece
    float *passed;       // (Hv, Dk, Dv)        a state or gradient on its way
    X *rows;  // (2, 6, C), backward (3, 6, C)  the three tokens before a piece and its first three: inputs, outputs, gradients
    X *dcolumns;   // (pieces, 3, C)      backward: gradients of `columns`
    float *zeros;  // (3, C)              backward
};

namespace ring {

// Copies the three rows before a piece, and its first three.
template <class Dev, class X> void join_rows(Dev dev, X *rows, const X *before, const X *first, size_t C) {
    copy_rows(dev, rows, C, before, C, conv_columns, C);
    copy_rows(dev, rows + conv_columns * C, C, first, C, conv_columns, C);
}

inline void wait_all(DeltaRing &ring, std::vector<Request> &requests) {
    for (Request &request : requests) ring.comm.wait(std::move(request));
    requests.clear();
}

}  // namespace ring

// The first three tokens of a piece are computed again, behind the three tokens before the piece. is_known: `columns` have been received.
template <class Dev, class X = typename Dev::X>
void ring_conv_forward(Dev dev, DeltaRing &ring, const DeltaPieceActs<X> &p, X *out, const X *x, const X *w, size_t T, size_t C,
                       bool is_known) {
    std::vector<Request> requests;
    for (const PieceBorder &b : ring.borders)
        if (!is_known)
            requests.push_back(
                ring.pass_on(b, ring.sends(b) ? Slice(x + (ring.end_row(b) - conv_columns) * C, conv_columns * C) : Slice(),
                             Slice(p.columns + b.to_piece * conv_columns * C, conv_columns * C)));
    causal_conv_forward(dev, out, x, w, p.position, T, C);
    ring::wait_all(ring, requests);
    if constexpr (is_rehearsal<Dev>) dev.note(p.columns, p.rows);  // the ranks that use these arrays depend on the row
    for (const PieceBorder &b : ring.borders) {
        if (!ring.receives(b)) continue;
        X *const rows = p.rows, *const computed = rows + 2 * conv_columns * C;
        ring::join_rows(dev, rows, p.columns + b.to_piece * conv_columns * C, x + ring.first_row(b) * C, C);
        causal_conv_forward(dev, computed, rows, w, p.seen + b.to_piece * 2 * conv_columns, 2 * conv_columns, C);
        copy_rows(dev, out + ring.first_row(b) * C, C, computed + conv_columns * C, C, conv_columns, C);
    }
}

// The gradients through a piece's first three outputs are computed apart from the others, because those outputs see the tokens before the piece.
template <class Dev, class X = typename Dev::X>
void ring_conv_backward(Dev dev, DeltaRing &ring, const DeltaPieceActs<X> &p, X *dx, float *dw, float *scratch, X *dout,
                        const X *x, const X *w, size_t T, size_t C) {
    const size_t part = conv_columns * C;
    X *const rows = p.rows, *const drows = rows + 2 * part, *const dbefore = rows + 4 * part, *const dfirst = dbefore + part;
    if constexpr (is_rehearsal<Dev>) dev.note(p.columns, p.rows, p.dcolumns, p.zeros);
    if (!ring.borders.empty()) clear_floats(dev, p.zeros, part);
    for (const PieceBorder &b : ring.borders) {
        if (!ring.receives(b)) continue;
        copy_rows(dev, p.dcolumns + b.to_piece * part, C, dout + ring.first_row(b) * C, C, conv_columns, C);
        round_floats(dev, dout + ring.first_row(b) * C, p.zeros, part);
    }
    causal_conv_backward(dev, dx, dw, scratch, dout, x, w, p.position, T, C);
    for (const PieceBorder &b : ring.borders) {
        if (!ring.receives(b)) continue;
        X *const first = dx + ring.first_row(b) * C, *const dcolumns = p.dcolumns + b.to_piece * part;
        ring::join_rows(dev, rows, p.columns + b.to_piece * part, x + ring.first_row(b) * C, C);
        round_floats(dev, drows, p.zeros, part);
        copy_rows(dev, drows + part, C, dcolumns, C, conv_columns, C);
        causal_conv_backward(dev, dbefore, dw, scratch, drows, rows, w, p.seen + b.to_piece * 2 * conv_columns, 2 * conv_columns,
                             C);
        copy_rows(dev, dcolumns, C, dbefore, C, conv_columns, C);
        residual_forward(dev, first, first, dfirst, part);
    }
    std::vector<Request> requests;
    for (const PieceBorder &b : ring.borders)
        requests.push_back(
            ring.pass_back(b, Slice(p.dcolumns + b.to_piece * part, part), Slice(p.columns + b.from_piece * part, part)));
    ring::wait_all(ring, requests);
    for (const PieceBorder &b : ring.borders) {
        if (!ring.sends(b)) continue;
        X *const last = dx + (ring.end_row(b) - conv_columns) * C;
        residual_forward(dev, last, last, p.columns + b.from_piece * part, part);
    }
}

template <class Dev, class X = typename Dev::X>
void ring_delta_forward(Dev dev, DeltaRing &ring, const DeltaPieceActs<X> &p, X *out, float *states, float *scratch, const X *qkv,
                        DeltaGates<const float> gates, DeltaShape shape) {
    const size_t state = shape.Hv * shape.Dk * shape.Dv, transition = shape.Hv * shape.Dk * shape.Dk;
    if constexpr (is_rehearsal<Dev>) dev.note(p.before, p.transitions, p.terms, p.passed);
    if (!ring.borders.empty()) gated_delta_ends(dev, p.terms, p.transitions, scratch, qkv, gates, p.position, p.ends, shape);
    for (const PieceBorder &b : ring.borders) {
        float *after = p.terms + b.from_piece * state;
        if (ring.sends(b) && b.from_continues)
            delta_affine(dev, p.passed, p.transitions + b.from_piece * transition, p.before + b.from_piece * state,
                         std::exchange(after, p.passed), false, shape.Hv, shape.Dk, shape.Dv);
        ring.comm.wait(ring.pass_on(b, Slice(after, state), Slice(p.before + b.to_piece * state, state)));
    }
    gated_delta_forward(dev, out, states, scratch, qkv, gates, p.position, shape, DeltaStates<float>{},
                        DeltaStates<const float>{p.before, p.starts});
}

template <class Dev, class X = typename Dev::X>
void ring_delta_backward(Dev dev, DeltaRing &ring, const DeltaPieceActs<X> &p, X *dqkv, DeltaGates<float> dgates, float *scratch,
                         const X *dout, const X *qkv, DeltaGates<const float> gates, const float *states, DeltaShape shape) {
    const size_t state = shape.Hv * shape.Dk * shape.Dv, transition = shape.Hv * shape.Dk * shape.Dk;
    if constexpr (is_rehearsal<Dev>) dev.note(p.before, p.transitions, p.terms, p.behind, p.passed);
    if (!ring.borders.empty()) gated_delta_starts(dev, p.terms, scratch, dout, qkv, gates, p.position, p.starts, shape);
    for (size_t i = ring.borders.size(); i-- > 0;) {
        const PieceBorder &b = ring.borders[i];
        float *before = p.terms + b.to_piece * state;
        if (ring.receives(b) && b.to_continues)
            delta_affine(dev, p.passed, p.transitions + b.to_piece * transition, p.behind + b.to_piece * state,
                         std::exchange(before, p.passed), true, shape.Hv, shape.Dk, shape.Dv);
        ring.comm.wait(ring.pass_back(b, Slice(before, state), Slice(p.behind + b.from_piece * state, state)));
    }
    gated_delta_backward(dev, dqkv, dgates, scratch, dout, qkv, gates, states, p.position, shape,
                         DeltaStates<const float>{p.behind, p.ends}, DeltaStates<const float>{p.before, p.starts});
}
