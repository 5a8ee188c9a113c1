// Attention of one layer over the ranks of a ring: calls the parts of attention.h, and sends keys, values and gradients between ranks. Every rank
// holds its rows by SequenceSplit of q, k, v, out and their gradients. Results equal those of one rank. There are three modes:
//
//   ring      KV blocks hop from rank to rank; the next block is in flight while this one is computed with. A piece of a block travels only
//             to the last rank that needs it. Its gradients follow, each rank on the way adding its own in float, then go to the owner
//             (Liu, Zaharia, Abbeel, "Ring attention with blockwise transformers", 2023, arXiv:2310.01889).
//   gather    K and V of head_stride KV heads at a time are gathered from all ranks whose keys this rank sees, while those of the next heads are
//             in flight; their gradients are reduced and scattered in float.
//   ulysses   an all-to-all gives each rank the whole row for H / ranks heads (Jacobs et al., "DeepSpeed Ulysses", 2023,
//             arXiv:2309.14509). A KV head is copied to each rank that has query heads for it. The layout must be contiguous.
//
// Bytes sent by all ranks together for one layer and a row of S tokens, with P ranks, b bytes per element of X, h = H/P query heads per
// rank, which use m KV heads (ulysses). "Dense" means one document as long as the row, without a window.
//
//             forward, and again backward                    gradients, backward
//   ring      2*KV*D*b * R                                   2*KV*D*4 * R
//   gather    2*KV*D*b * S/P * N                             2*KV*D*4 * S*(P-1)
//   ulysses   (2h+2m)*D*b * S*(P-1), backward h*4 * S*(P-1)  (h+2m)*D*4 * S*(P-1)
//             more for delta
//
//   R: row-hops (KeyTravel), dense: S*(P-1)/2 contiguous, S*(P-1)*(1 - 1/(2P)) zigzag
//   N: pairs of a rank and another whose keys it sees, dense: P*(P-1)/2 contiguous, P*(P-1) zigzag
//
//   ring_attention_forward (dev, ring, out, out32, lse, in, buffers)
//   ring_attention_backward(dev, ring, dqkv, grads, delta, scratch, in, out, dout, lse, buffers)
//
//   Arguments are the same as in attention.h, with T = ring.split.local_T() rows of queries, keys and values. dqkv may be the array that q, k
//   and v are views of. first_key and cuts describe the whole row.
//   lse is only for the backward pass (under ulysses it is (h, P*T)). scratch: attention_scratch(dev, in.shape) floats.
//   One rank makes exactly the calls of attention.h, and needs no buffers. If documents share prompts, each part is one of attention_prompts.h.
#pragma once
#include <utility>
#include <vector>

#include "../ops/attention_prompts.h"
#include "../ops/layout.h"
#include "comm.h"
#include "mesh.h"
#include "split.h"

// The parameters of a layer's attention over the ring.
struct RingAttention {
    Comm &comm;  // the ring's
    SpMode mode;
    size_t head_stride;  // gather: the number of KV heads at a time
    const SequenceSplit &split;
    const KeyTravel &travel;     // the travel of this kind of layer's keys and values
    const PromptParts &prompts;  // that documents of the row share
    Payload &payload;

    size_t rank() const { return size_t(comm.rank); }
    size_t ranks() const { return size_t(comm.size); }
    size_t behind(size_t hops) const { return (rank() + ranks() - hops) % ranks(); }
    size_t ahead(size_t hops) const { return (rank() + hops) % ranks(); }

    Request exchange(size_t Payload::*kind, Slice send, size_t to, Slice recv, size_t from) {
        payload.*kind += send.bytes();
        return comm.exchange(send, int(to), recv, int(from));
    }
    void all_to_all(size_t Payload::*kind, Slice send, Slice recv) {
        payload.*kind += send.bytes() / ranks() * (ranks() - 1);
        comm.all_to_all(send, recv);
    }
    void reduce_scatter_sum(size_t Payload::*kind, Slice send, Slice recv) {
        payload.*kind += recv.bytes() * (ranks() - 1);
        comm.reduce_scatter_sum(send, recv);
    }
};

// Buffers from the caller, so they are part of the memory plan. They are unused between calls. ring_attention_buffers returns the
// number of elements that a pass needs.
template <class X> struct RingBuffers {
    X *values;
    float *floats;
};
struct RingBufferSizes {
    size_t values, floats;
};

inline RingBufferSizes ring_attention_buffers(SpMode mode, size_t ranks, size_t head_stride, const AttentionShape &shape,
                                              bool backward) {
    if (ranks == 1) return {0, 0};
    const size_t T = shape.T, H = shape.H, KV = shape.KV, D = shape.D;
    const size_t kv = T * KV * D;
    if (mode == SpMode::ring) return {4 * kv, backward ? 8 * kv : 0};
    if (mode == SpMode::gather) {
        const size_t g = T * head_stride * D, q = shape.group() * g;
        return {4 * ranks * g + (backward ? 3 * q + 2 * g : q), backward ? 2 * (ranks + 1) * g : 0};
    }
    const UlyssesHeads heads(ranks, H, KV);
    const size_t q = T * H * D, m = ranks * T * heads.m * D;
    return {2 * (q + 2 * m) + (backward ? 2 * q : q), backward ? 2 * H * T + 2 * (q + 2 * m) : 0};
}

// Returns the number of elements of out32: the result's size if parts are merged, else the scratch of attention_forward.
template <class Dev>
size_t ring_attention_floats(Dev dev, SpMode mode, size_t ranks, bool share_prompts, const AttentionShape &shape) {
    const bool merges = share_prompts || (ranks > 1 && mode != SpMode::ulysses);
    return merges ? shape.T * shape.H * shape.D : attention_floats(dev, shape);
}

namespace ring {

// The pieces of a rank that has the whole row.
inline Pieces whole_row(const RingAttention &a) {
    if (a.ranks() > 1 && a.split.layout != Layout::contiguous) die("ulysses needs the contiguous layout");
    return {{{0, a.split.T, 0}}, 1};
}

template <class Dev, class X>
void whole_forward(Dev dev, RingAttention &a, X *out, float *out32, float *lse, const AttentionInputs<X> &in) {
    const Pieces all = whole_row(a);
    if (a.prompts.parts.empty()) attention_forward(dev, out, out32, lse, in, all);
    else prompts_forward_part(dev, out, out32, lse, in, all, all, PartOrder{true, true}, a.prompts);
}

// ---- ring

// Calls f(hop, in, pieces) with the rank's own keys (hop 0), and then with each block that arrives, while the next block is in flight.
template <class Dev, class X, class F> void each_block(Dev dev, RingAttention &a, X *buffer, const AttentionInputs<X> &in, F f) {
    const KeyTravel &travel = a.travel;
    const Heads<const X> k = in.k, v = in.v;
    const size_t width = in.shape.KV * in.shape.D, row = 2 * width;
    const auto block = [&](size_t hop) { return buffer + hop % 2 * in.shape.T * row; };  // rows of [k | v]
    const auto arrived = [&](size_t hop) -> AttentionInputs<X> {
        return {in.q, {block(hop), row}, {block(hop) + width, row}, in.first_key, in.cuts, in.shape};
    };
    const auto rows = [&](size_t at, size_t hop) { return Slice(block(at), travel.rows(a.behind(at), hop) * row); };
    for (const KeyTravel::Stop &stop : travel.block(a.rank())) {
        if (stop.hops == 0) break;
        const size_t from = stop.piece.offset, n = stop.piece.end - stop.piece.begin;
        X *to = block(0) + stop.packed * row;
        copy_rows(dev, to, row, k.data + from * k.stride, k.stride, n, width);
        copy_rows(dev, to + width, row, v.data + from * v.stride, v.stride, n, width);
    }
    const size_t hops = travel.max_hops();
    for (size_t hop = 0; hop <= hops; hop++) {
        Request next = hop == hops
                           ? Request()
                           : a.exchange(&Payload::kv, rows(hop, hop + 1), a.ahead(1), rows(hop + 1, hop + 1), a.behind(1));
        if (hop == 0) f(hop, in, a.split.pieces[a.rank()]);
        else f(hop, arrived(hop), travel.keys(a.behind(hop), hop));
        if (hop < hops) a.comm.wait(std::move(next));
    }
}

template <class Dev, class X = typename Dev::X>
void ring_forward(Dev dev, RingAttention &a, X *out, float *out32, float *lse, const AttentionInputs<X> &in,
                  RingBuffers<X> buffers) {
    if (a.ranks() == 1) return whole_forward(dev, a, out, out32, lse, in);
    const size_t last = a.travel.last_hop(a.rank());
    each_block(dev, a, buffers.values, in, [&](size_t hop, const AttentionInputs<X> &block, const Pieces &keys) {
        if (a.travel.sees(a.rank(), a.behind(hop)))
            prompts_forward_part(dev, out, out32, lse, block, a.split.pieces[a.rank()], keys, PartOrder{hop == 0, hop == last},
                                 a.prompts);
    });
}

// dk and dv of the KV blocks that visit this rank. A block's sum so far arrives from the rank behind while this rank computes its own part, and then
// the two are added. Rows that travel on take their sums along; the sums of the other rows go to the rank that owns the block.
template <class Dev> class VisitingGradients {
  public:
    VisitingGradients(Dev dev, RingAttention &a, float *floats, size_t width)
        : dev_(dev), a_(a), width_(width), size_(a.split.local_T() * width), floats_(floats) {}

    float *dk(size_t hop) { return floats_ + hop % 2 * 2 * size_; }
    float *dv(size_t hop) { return dk(hop) + size_; }

    void clear(size_t hop) {
        const size_t n = a_.travel.rows(a_.behind(hop), hop) * width_;
        clear_floats(dev_, dk(hop), n);
        clear_floats(dev_, dv(hop), n);
    }

    // Sends the sums of the block on, or home. This rank's part has been computed.
    void pass_on(size_t hop) {
        const size_t source = a_.behind(hop), next = a_.behind(hop + 1);
        const size_t rows = a_.travel.rows(source, hop), on = a_.travel.rows(source, hop + 1);
        wait();
        for (size_t i = 0; i < 2; i++) {  // dk, dv
            float *sum = i ? dv(hop) : dk(hop), *arriving = floats_ + (4 + i) * size_, *home = floats_ + (6 + i) * size_;
            if (hop > 1) add_rows(dev_, sum, width_, arriving, width_, rows, width_);
            const size_t own = a_.travel.rows(a_.rank(), hop + 1), own_end = a_.travel.rows(a_.rank(), hop);
            send(slice(sum, 0, on), a_.ahead(1), slice(arriving, 0, a_.travel.rows(next, hop + 1)), a_.behind(1));
            send(slice(sum, on, rows), source, slice(home, own, own_end), a_.ahead(hop));
        }
    }

    // Waits for all messages, and adds the sums that the other ranks have sent home for this rank's own keys.
    void add_to(AttentionGrads grads) {
        wait();
        for (const KeyTravel::Stop &stop : a_.travel.block(a_.rank())) {
            if (stop.hops == 0) break;
            const size_t to = stop.piece.offset * width_, from = stop.packed * width_, n = stop.piece.end - stop.piece.begin;
            add_rows(dev_, grads.dk32 + to, width_, floats_ + 6 * size_ + from, width_, n, width_);
            add_rows(dev_, grads.dv32 + to, width_, floats_ + 7 * size_ + from, width_, n, width_);
        }
    }

  private:
    Slice slice(float *x, size_t begin, size_t end) { return {x + begin * width_, (end - begin) * width_}; }
    void send(Slice send, size_t to, Slice recv, size_t from) {
        under_way_.push_back(a_.exchange(&Payload::dkv, send, to, recv, from));
    }
    void wait() {
        for (Request &request : under_way_) a_.comm.wait(std::move(request));
        under_way_.clear();
    }

    Dev dev_;
    RingAttention &a_;
    size_t width_, size_;
    float *floats_;  // dk, dv: of this hop | of the previous hop, being sent | arriving | arriving home
    std::vector<Request> under_way_;
};

template <class Dev, class X = typename Dev::X>
void ring_backward(Dev dev, RingAttention &a, X *dqkv, AttentionGrads grads, float *delta, float *scratch,
                   const AttentionInputs<X> &in, const X *out, const X *dout, const float *lse, RingBuffers<X> buffers) {
    if (a.ranks() == 1 && a.prompts.parts.empty())
        return attention_backward(dev, dqkv, grads, delta, scratch, in, out, dout, lse, whole_row(a));
    attention_backward_begin(dev, grads, delta, out, dout, in.shape);
    VisitingGradients visiting(dev, a, buffers.floats, in.shape.KV * in.shape.D);
    each_block(dev, a, buffers.values, in, [&](size_t hop, const AttentionInputs<X> &block, const Pieces &keys) {
        if (hop) visiting.clear(hop);
        if (a.travel.sees(a.rank(), a.behind(hop)))
            prompts_backward_part(dev, hop ? AttentionGrads{grads.dq32, visiting.dk(hop), visiting.dv(hop)} : grads, scratch,
                                  block, delta, lse, dout, a.split.pieces[a.rank()], keys, a.prompts);
        if (hop) visiting.pass_on(hop);
    });
    visiting.add_to(grads);
    attention_backward_end(dev, dqkv, grads, in.shape);
}

// ---- gather

// Calls f(first KV head, blocks) for each group of g KV heads. blocks (ranks, T, 2*g*D) holds rows of [k | v] from every rank whose keys this
// rank sees. Meanwhile the next group's rows are in flight.
template <class Dev, class X, class F> void each_group(Dev dev, RingAttention &a, X *buffer, const AttentionInputs<X> &in, F f) {
    const size_t T = in.shape.T, D = in.shape.D, g = a.head_stride, groups = in.shape.KV / g, block = T * 2 * g * D;
    const auto start = [&](size_t group) {
        X *blocks = buffer + group % 2 * a.ranks() * block, *own = blocks + a.rank() * block;
        copy_rows(dev, own, 2 * g * D, in.k.data + group * g * D, in.k.stride, T, g * D);
        copy_rows(dev, own + g * D, 2 * g * D, in.v.data + group * g * D, in.v.stride, T, g * D);
        std::vector<Request> requests;
        for (size_t hop = 1; hop < a.ranks(); hop++) {
            const size_t to = a.ahead(hop), from = a.behind(hop);
            requests.push_back(a.exchange(&Payload::kv, a.travel.sees(to, a.rank()) ? Slice(own, block) : Slice(), to,
                                          a.travel.sees(a.rank(), from) ? Slice(blocks + from * block, block) : Slice(), from));
        }
        return requests;
    };
    std::vector<Request> requests = start(0);
    for (size_t group = 0; group < groups; group++) {
        for (Request &request : requests) a.comm.wait(std::move(request));
        requests.clear();
        if (group + 1 < groups) requests = start(group + 1);
        f(group * g, buffer + group % 2 * a.ranks() * block);
    }
}

// The shape of the attention of g KV heads and of the query heads that use them.
inline AttentionShape group_shape(const AttentionShape &all, size_t g) { return {all.T, all.group() * g, g, all.D, all.scale}; }

// Attention of the query heads of g KV heads, from kv0 on, to a rank's block [k | v].
template <class X> AttentionInputs<X> group_inputs(const AttentionInputs<X> &in, const X *block, size_t kv0, size_t g) {
    const AttentionShape &all = in.shape;
    const size_t width = g * all.D;
    return {{in.q.data + kv0 * all.group() * all.D, in.q.stride},
            {block, 2 * width},
            {block + width, 2 * width},
            in.first_key,
            in.cuts,
            group_shape(all, g)};
}

// Computes each group of g KV heads and their query heads as a separate attention, with arrays that are copied from and to the layer's.
template <class Dev, class X = typename Dev::X>
void gather_forward(Dev dev, RingAttention &a, X *out, float *out32, float *lse, const AttentionInputs<X> &in,
                    RingBuffers<X> buffers) {
    const size_t g = a.head_stride, row = in.shape.H * in.shape.D;
    const AttentionShape shape = group_shape(in.shape, g);
    const size_t T = shape.T, h = shape.H, D = shape.D, block = T * 2 * g * D, last = a.travel.last_hop(a.rank());
    X *l_out = buffers.values + 2 * a.ranks() * block;
    each_group(dev, a, buffers.values, in, [&](size_t kv0, const X *blocks) {
        const size_t h0 = kv0 * shape.group();
        for (size_t hop = 0; hop < a.ranks(); hop++) {
            const size_t from = a.behind(hop);
            if (a.travel.sees(a.rank(), from))
                prompts_forward_part(dev, l_out, out32, lse + h0 * T, group_inputs(in, blocks + from * block, kv0, g),
                                     a.split.pieces[a.rank()], a.split.pieces[from], PartOrder{hop == 0, hop == last}, a.prompts);
        }
        copy_rows(dev, out + h0 * D, row, l_out, h * D, T, h * D);
    });
}

template <class Dev, class X = typename Dev::X>
void gather_backward(Dev dev, RingAttention &a, X *dqkv, float *dq32, float *delta, float *scratch, const AttentionInputs<X> &in,
                     const X *out, const X *dout, const float *lse, RingBuffers<X> buffers) {
    const size_t g = a.head_stride, H = in.shape.H, KV = in.shape.KV;
    const AttentionShape shape = group_shape(in.shape, g);
    const size_t T = shape.T, h = shape.H, D = shape.D, block = T * 2 * g * D, row = (H + 2 * KV) * D;
    X *l_out = buffers.values + 2 * a.ranks() * block, *l_dout = l_out + T * h * D, *l_dqkv = l_dout + T * h * D;
    float *gradients = buffers.floats;                                      // (ranks, 2, T, g, D): dk and dv of each rank's rows
    float *l_dk = gradients + a.ranks() * block, *l_dv = l_dk + block / 2;  // this rank's rows, summed over ranks
    const AttentionGrads l_grads{dq32, l_dk, l_dv};
    each_group(dev, a, buffers.values, in, [&](size_t kv0, const X *blocks) {
        const size_t h0 = kv0 * shape.group();
        copy_rows(dev, l_out, h * D, out + h0 * D, H * D, T, h * D);
        copy_rows(dev, l_dout, h * D, dout + h0 * D, H * D, T, h * D);
        attention_backward_begin(dev, l_grads, delta + h0 * T, l_out, l_dout, shape);
        clear_floats(dev, gradients, a.ranks() * block);
        for (size_t hop = 0; hop < a.ranks(); hop++) {
            const size_t from = a.behind(hop);
            float *dk = gradients + from * block;
            if (a.travel.sees(a.rank(), from))
                prompts_backward_part(dev, AttentionGrads{dq32, dk, dk + block / 2}, scratch,
                                      group_inputs(in, blocks + from * block, kv0, g), delta + h0 * T, lse + h0 * T, l_dout,
                                      a.split.pieces[a.rank()], a.split.pieces[from], a.prompts);
        }
        a.reduce_scatter_sum(&Payload::dkv, Slice(gradients, a.ranks() * block), Slice(l_dk, block));
        attention_backward_end(dev, l_dqkv, l_grads, shape);
        const size_t l_row = (h + 2 * g) * D;
        copy_rows(dev, dqkv + h0 * D, row, l_dqkv, l_row, T, h * D);
        copy_rows(dev, dqkv + (H + kv0) * D, row, l_dqkv + h * D, l_row, T, g * D);
        copy_rows(dev, dqkv + (H + KV + kv0) * D, row, l_dqkv + (h + g) * D, l_row, T, g * D);
    });
}

// ---- ulysses

// recv (ranks * T, (h+2m)*D) = rows of [q | k | v] of the whole row, for this rank's heads.
template <class Dev, class X>
void heads_of_all(Dev dev, RingAttention &a, X *recv, X *send, const AttentionInputs<X> &in, const UlyssesHeads &heads) {
    const size_t T = in.shape.T, D = in.shape.D, row = (heads.h + 2 * heads.m) * D;
    for (size_t r = 0; r < a.ranks(); r++) {
        X *to = send + r * T * row;
        copy_rows(dev, to, row, in.q.data + r * heads.h * D, in.q.stride, T, heads.h * D);
        for (size_t i = 0; i < heads.m; i++) {
            const size_t head = heads.kv_head(r, i) * D;
            copy_rows(dev, to + (heads.h + i) * D, row, in.k.data + head, in.k.stride, T, D);
            copy_rows(dev, to + (heads.h + heads.m + i) * D, row, in.v.data + head, in.v.stride, T, D);
        }
    }
    a.all_to_all(&Payload::kv, Slice(send, a.ranks() * T * row), Slice(recv, a.ranks() * T * row));
}

// Returns this rank's attention: its heads on the whole row; `qkv` has rows of [q | k | v].
template <class X>
AttentionInputs<X> ulysses_inputs(const RingAttention &a, const X *qkv, const AttentionInputs<X> &in, const UlyssesHeads &heads) {
    const size_t D = in.shape.D, row = (heads.h + 2 * heads.m) * D;
    return {{qkv, row},
            {qkv + heads.h * D, row},
            {qkv + (heads.h + heads.m) * D, row},
            in.first_key,
            in.cuts,
            {a.split.T, heads.h, heads.m, D, in.shape.scale}};
}

template <class Dev, class X = typename Dev::X>
void ulysses_forward(Dev dev, RingAttention &a, X *out, float *out32, float *lse, const AttentionInputs<X> &in,
                     RingBuffers<X> buffers) {
    const auto &[T, H, KV, D, scale] = in.shape;
    const UlyssesHeads heads(a.ranks(), H, KV);
    const size_t all_T = a.split.T, h = heads.h, row = (h + 2 * heads.m) * D;
    X *own = buffers.values, *send = own + all_T * row, *l_out = send + all_T * row;
    heads_of_all(dev, a, own, send, in, heads);
    const AttentionInputs<X> l_in = ulysses_inputs<X>(a, own, in, heads);
    whole_forward(dev, a, l_out, out32, lse, l_in);
    X *came = send;  // (ranks, T, h, D): every rank's heads for this rank's rows
    a.all_to_all(&Payload::kv, Slice(l_out, all_T * h * D), Slice(came, all_T * h * D));
    for (size_t r = 0; r < a.ranks(); r++) copy_rows(dev, out + r * h * D, H * D, came + r * T * h * D, h * D, T, h * D);
}

template <class Dev, class X = typename Dev::X>
void ulysses_backward(Dev dev, RingAttention &a, X *dqkv, AttentionGrads grads, float *delta, float *scratch,
                      const AttentionInputs<X> &in, const X *out, const X *dout, const float *lse, RingBuffers<X> buffers) {
    const size_t T = in.shape.T, H = in.shape.H, KV = in.shape.KV, D = in.shape.D;
    const UlyssesHeads heads(a.ranks(), H, KV);
    const size_t all_T = a.split.T, h = heads.h, m = heads.m, row = (h + 2 * m) * D;
    const Pieces all = whole_row(a);
    X *own = buffers.values, *send = own + all_T * row, *l_dout = send + all_T * row, *send_dout = l_dout + all_T * h * D;
    heads_of_all(dev, a, own, send, in, heads);
    for (size_t r = 0; r < a.ranks(); r++) copy_rows(dev, send_dout + r * T * h * D, h * D, dout + r * h * D, H * D, T, h * D);
    a.all_to_all(&Payload::kv, Slice(send_dout, all_T * h * D), Slice(l_dout, all_T * h * D));

    float *came_delta = buffers.floats, *l_delta = came_delta + H * T;  // (ranks, h, T), (h, ranks * T)
    attention_backward_begin(dev, grads, delta, out, dout, in.shape);
    a.all_to_all(&Payload::kv, Slice(delta, H * T), Slice(came_delta, H * T));
    clear_floats(dev, l_delta, H * T);
    for (size_t r = 0; r < a.ranks(); r++) add_rows(dev, l_delta + r * T, all_T, came_delta + r * h * T, T, h, T);

    float *l_dq = l_delta + H * T, *l_dk = l_dq + all_T * h * D, *l_dv = l_dk + all_T * m * D, *came = l_dv + all_T * m * D;
    clear_floats(dev, l_dq, all_T * row);
    prompts_backward_part(dev, AttentionGrads{l_dq, l_dk, l_dv}, scratch, ulysses_inputs<X>(a, own, in, heads), l_delta, lse,
                          l_dout, all, all, a.prompts);

    // The way home: rows of rank r are contiguous, so no packing is needed. A KV head's gradients come from each rank that had a copy of it.
    const auto home = [&](float *sum, size_t width, const float *part, size_t n, auto head_of) {
        a.all_to_all(&Payload::dkv, Slice(part, all_T * n * D), Slice(came, all_T * n * D));
        for (size_t r = 0; r < a.ranks(); r++)
            for (size_t i = 0; i < n; i++) add_rows(dev, sum + head_of(r, i) * D, width, came + (r * T * n + i) * D, n * D, T, D);
    };
    const auto kv_head = [&](size_t r, size_t i) { return heads.kv_head(r, i); };
    home(grads.dq32, H * D, l_dq, h, [&](size_t r, size_t i) { return r * h + i; });
    home(grads.dk32, KV * D, l_dk, m, kv_head);
    home(grads.dv32, KV * D, l_dv, m, kv_head);
    attention_backward_end(dev, dqkv, grads, in.shape);
}

}  // namespace ring

template <class Dev, class X = typename Dev::X>
void ring_attention_forward(Dev dev, RingAttention &a, X *out, float *out32, float *lse, const AttentionInputs<X> &in,
                            RingBuffers<X> buffers) {
    if (a.mode == SpMode::ring || a.ranks() == 1) ring::ring_forward(dev, a, out, out32, lse, in, buffers);
    else if (a.mode == SpMode::gather) ring::gather_forward(dev, a, out, out32, lse, in, buffers);
    else ring::ulysses_forward(dev, a, out, out32, lse, in, buffers);
}

template <class Dev, class X = typename Dev::X>
void ring_attention_backward(Dev dev, RingAttention &a, X *dqkv, AttentionGrads grads, float *delta, float *scratch,
                             const AttentionInputs<X> &in, const X *out, const X *dout, const float *lse,
                             RingBuffers<X> buffers) {
    if (a.mode == SpMode::ring || a.ranks() == 1)
        ring::ring_backward(dev, a, dqkv, grads, delta, scratch, in, out, dout, lse, buffers);
    else if (a.mode == SpMode::gather)
        ring::gather_backward(dev, a, dqkv, grads.dq32, delta, scratch, in, out, dout, lse, buffers);
    else ring::ulysses_backward(dev, a, dqkv, grads, delta, scratch, in, out, dout, lse, buffers);
}
