// The gated delta rule on pieces of documents, for ranks that share a row. A piece maps the state before it to the state after it by an affine function,
// because each token does, and maps the gradient of the state after it to that of the state before it by the transposed one:
//       S_after = M S_before + E          dL/dS_before = M^T dL/dS_after + F          M (Dk, Dk) for each value head; E, F (Dk, Dv)
// So all ranks compute M, E and F of their pieces at the same time, and then only these small matrices are applied one after the other.
//
//   gated_delta_ends  (dev, E, M, scratch, qkv, gates, doc_pos, slots, shape)
//       for each piece whose last token t has slots[t] >= 0: E and M in that slot
//   gated_delta_starts(dev, F, scratch, dout, qkv, gates, doc_pos, slots, shape)
//       for each piece whose first token t has slots[t] >= 0: F in that slot, the gradient of the state before it through the piece's outputs
//   delta_affine(dev, out, M, x, b, transposed, H, Dk, Dv)
//       out[h] = M[h] x[h] + b[h], or with M[h]^T, for h < H
//
//   E, F (slots, Hv, Dk, Dv)     M (slots, Hv, Dk, Dk)     out, x, b (H, Dk, Dv)     all float     slots (T) int32, -1: none
//   otherwise as in gated_delta.h, where doc_pos is the position in the piece     Nothing may alias.
#pragma once
#include "gated_delta.h"

namespace delta {

inline DeltaStates<const float> at_slots(const int32_t *slots) { return {nullptr, slots}; }

struct EndArrays {
    KeyHead keys;
    Decays decays;
    Rows e, d;
    std::vector<State> states, transitions;  // by value head of the group

    explicit EndArrays(size_t group) : states(group), transitions(group) {}

    // M is the state that begins with 1 and reads no values.
    template <class X>
    void run(float *E, float *M, const X *qkv, const DeltaGates<const float> &gates, const std::vector<Chunk> &chunks,
             int32_t slot, size_t head, const DeltaShape &s) {
        DeltaShape square = s;
        square.Dv = s.Dk;
        for (State &m : transitions)
            for (size_t i = 0; i < s.Dk; i++) {
                std::fill_n(m.x + i * stride, round_up(s.Dk, 16), 0.0f);
                m.x[i * stride + i] = 1;
            }
        for (const Chunk &c : chunks) {
            Chunk later = c;
            later.first = false;
            keys.load(qkv, c, head, s);
            for (size_t i = 0; i < s.group(); i++) {
                const size_t h = head * s.group() + i;
                decays.load(gates, keys, c, h, s);
                solve(e, d, qkv, keys, decays, states[i], c, h, s);
                advance(states[i], e, keys, decays, d, c, s);
                solve(e, d, (const X *)nullptr, keys, decays, transitions[i], later, h, square);
                advance(transitions[i], e, keys, decays, d, later, square);
            }
        }
        for (size_t i = 0; i < s.group(); i++) {
            const size_t at = size_t(slot) * s.Hv + head * s.group() + i;
            keep(E + at * s.Dk * s.Dv, states[i], s);
            keep(M + at * s.Dk * s.Dk, transitions[i], square);
        }
    }
};

struct StartArrays : BackwardArrays {
    using BackwardArrays::BackwardArrays;

    template <class X>
    void run(float *F, const X *from, const X *qkv, const DeltaGates<const float> &gates, const std::vector<Chunk> &chunks,
             int32_t slot, size_t head, const DeltaShape &s) {
        for (size_t k = chunks.size(); k-- > 0;) {
            const Chunk &c = chunks[k];
            keys.load(qkv, c, head, s);
            keys.multiply_queries(c.n, s.Dk);
            for (size_t i = 0; i < s.group(); i++) {
                const size_t h = head * s.group() + i;
                decays.load(gates, keys, c, h, s);
                for (size_t t = 0; t < c.n; t++) load_row(dout.x + t * stride, from + ((c.begin + t) * s.Hv + h) * s.Dv, s.Dv);
                gradients_of_updates(heads[i].gradient, c, s);
                retreat(heads[i].gradient, c, s);
            }
        }
        for (size_t i = 0; i < s.group(); i++)
            keep(F + (size_t(slot) * s.Hv + head * s.group() + i) * s.Dk * s.Dv, heads[i].gradient, s);
    }
};

}  // namespace delta

template <class X>
void gated_delta_ends(Cpu<X> dev, float *E, float *M, float *, const X *qkv, DeltaGates<const float> gates,
                      const int32_t *doc_pos, const int32_t *slots, DeltaShape shape) {
    using namespace delta;
    for_each_task<EndArrays>(dev.threads, doc_pos, shape, at_slots(slots), at_slots(nullptr),
                             [&](EndArrays &arrays, const std::vector<Chunk> &chunks, size_t head) {
                                 const int32_t slot = slots[chunks.back().end()];
                                 if (slot >= 0) arrays.run(E, M, qkv, gates, chunks, slot, head, shape);
                             });
}

template <class X>
void gated_delta_starts(Cpu<X> dev, float *F, float *, const X *dout, const X *qkv, DeltaGates<const float> gates,
                        const int32_t *doc_pos, const int32_t *slots, DeltaShape shape) {
    using namespace delta;
    for_each_task<StartArrays>(dev.threads, doc_pos, shape, at_slots(nullptr), at_slots(slots),
                               [&](StartArrays &arrays, const std::vector<Chunk> &chunks, size_t head) {
                                   const int32_t slot = slots[chunks[0].begin];
                                   if (slot >= 0) arrays.run(F, dout, qkv, gates, chunks, slot, head, shape);
                               });
}

template <class X>
void delta_affine(Cpu<X> dev, float *out, const float *M, const float *x, const float *b, bool transposed, size_t H, size_t Dk,
                  size_t Dv) {
#pragma omp parallel for collapse(2) num_threads(dev.threads)
    for (size_t h = 0; h < H; h++)
        for (size_t i = 0; i < Dk; i++) {
            float *const out_i = out + (h * Dk + i) * Dv;
            std::copy_n(b + (h * Dk + i) * Dv, Dv, out_i);
            for (size_t r = 0; r < Dk; r++) {
                const float m = M[h * Dk * Dk + (transposed ? r * Dk + i : i * Dk + r)], *const x_r = x + (h * Dk + r) * Dv;
#pragma omp simd
                for (size_t j = 0; j < Dv; j++) out_i[j] += m * x_r[j];
            }
        }
}

REHEARSED(gated_delta_ends);
REHEARSED(gated_delta_starts);
REHEARSED(delta_affine);
