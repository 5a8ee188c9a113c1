// The gated delta rule on pieces of documents on CUDA. Contract: delta_pieces.h.
#pragma once
#include "delta_pieces.h"
#include "gated_delta.cuh"

inline namespace CUDA_BACKEND {
// A block computes a key head with its value heads. E and M are also the states between chunks; the rows of M's e and d are where the backward pass has
// gradients.
template <class X>
__global__ void gated_delta_ends_kernel1(float *E, float *M, float *scratch, const X *qkv, DeltaGates<const float> gates,
                                         const int32_t *doc_pos, const int32_t *slots, DeltaShape s) {
    using namespace delta_block;
    const size_t head = blockIdx.x;
    Block<X> block{shared_mem<BlockShared>(), BlockMatrices(scratch + head * BlockMatrices::of_block(s), s), qkv, gates, s, head};
    const BlockMatrices &m = block.m;
    for (size_t piece = 0, behind; piece < s.T; piece = behind) {
        for (behind = piece + 1; behind < s.T && doc_pos[behind] > 0;) behind++;
        const int32_t slot = slots[behind - 1];
        if (slot < 0) continue;
        for (size_t i = 0; i < s.group(); i++) {
            float *const to = M + (size_t(slot) * s.Hv + head * s.group() + i) * s.Dk * s.Dk;
            each(s.Dk * s.Dk, [&](size_t at) { to[at] = at / s.Dk == at % s.Dk; });
        }
        for (size_t begin = piece; begin < behind; begin += chunk) {
            const Chunk c{begin, behind - begin < chunk ? behind - begin : chunk, begin == piece, false};
            const Chunk later{c.begin, c.n, false, false};
            block.load_keys(c);
            for (size_t i = 0; i < s.group(); i++) {
                const size_t h = head * s.group() + i, at = size_t(slot) * s.Hv + h;
                float *const state = E + at * s.Dk * s.Dv, *const transition = M + at * s.Dk * s.Dk;
                block.load_gates(c, h);
                block.solve(m.dd, m.d, state, c, block.values(c, h), s.Dv);
                block.advance(state, state, m.d, c, s.Dv);
                block.solve(m.dq, m.dk, transition, later, nullptr, s.Dk);
                block.advance(transition, transition, m.dk, later, s.Dk);
            }
        }
    }
}

template <class X>
void gated_delta_ends(Cuda<X> dev, float *E, float *M, float *scratch, const X *qkv, DeltaGates<const float> gates,
                      const int32_t *doc_pos, const int32_t *slots, DeltaShape shape) {
    launch(dev, gated_delta_ends_kernel1<X>, Grid{shape.Hk}, 256, sizeof(delta_block::BlockShared), E, M, scratch, qkv, gates,
           doc_pos, slots, shape);
}

template <class X>
__global__ void gated_delta_starts_kernel1(float *F, float *scratch, const X *dout, const X *qkv, DeltaGates<const float> gates,
                                           const int32_t *doc_pos, const int32_t *slots, DeltaShape s) {
    using namespace delta_block;
    const size_t head = blockIdx.x;
    Block<X> block{shared_mem<BlockShared>(), BlockMatrices(scratch + head * BlockMatrices::of_block(s), s), qkv, gates, s, head};
    const BlockMatrices &m = block.m;
    for (size_t piece = 0, behind; piece < s.T; piece = behind) {
        for (behind = piece + 1; behind < s.T && doc_pos[behind] > 0;) behind++;
        const int32_t slot = slots[piece];
        if (slot < 0) continue;
        for (size_t number = (behind - piece + chunk - 1) / chunk; number-- > 0;) {
            const size_t begin = piece + number * chunk;
            const bool last = behind - begin <= chunk;
            const Chunk c{begin, last ? behind - begin : chunk, false, last};
            block.load_keys(c);
            for (size_t i = 0; i < s.group(); i++) {
                const size_t h = head * s.group() + i;
                float *const gradient = F + (size_t(slot) * s.Hv + h) * s.Dk * s.Dv;
                block.load_gates(c, h);
                each(c.n * s.Dv, [&](size_t at) { m.dout[at] = dout[((c.begin + at / s.Dv) * s.Hv + h) * s.Dv + at % s.Dv]; });
                block.gradients_of_updates(gradient, c);
                block.retreat(gradient, c);
            }
        }
    }
}

template <class X>
void gated_delta_starts(Cuda<X> dev, float *F, float *scratch, const X *dout, const X *qkv, DeltaGates<const float> gates,
                        const int32_t *doc_pos, const int32_t *slots, DeltaShape shape) {
    launch(dev, gated_delta_starts_kernel1<X>, Grid{shape.Hk}, 256, sizeof(delta_block::BlockShared), F, scratch, dout, qkv,
           gates, doc_pos, slots, shape);
}

// A thread computes an element.
template <bool transposed>
__global__ void delta_affine_kernel1(float *out, const float *M, const float *x, const float *b, unsigned Dk, unsigned Dv) {
    const unsigned at = blockIdx.y * blockDim.x + threadIdx.x, i = at / Dv, j = at % Dv;
    if (i >= Dk) return;
    const size_t h = blockIdx.x, element = h * Dk * Dv + at;
    const float *const m = M + h * Dk * Dk;
    float sum = b[element];
    for (unsigned r = 0; r < Dk; r++) sum += m[transposed ? r * Dk + i : i * Dk + r] * x[(h * Dk + r) * Dv + j];
    out[element] = sum;
}

template <class X>
void delta_affine(Cuda<X> dev, float *out, const float *M, const float *x, const float *b, bool transposed, size_t H, size_t Dk,
                  size_t Dv) {
    launch(dev, transposed ? delta_affine_kernel1<true> : delta_affine_kernel1<false>, Grid{H, ceil_div(Dk * Dv, 256)}, 256, 0,
           out, M, x, b, unsigned(Dk), unsigned(Dv));
}
}  // namespace CUDA_BACKEND
