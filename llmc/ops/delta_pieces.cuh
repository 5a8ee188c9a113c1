// The gated delta rule on pieces of documents on CUDA. Contract: delta_pieces.h.
#pragma once
#include "delta_pieces.h"
#include "gated_delta.cuh"

inline namespace CUDA_BACKEND {
// Calls f(piece, end, slot) for each piece with a slot, in slots[] of its last token, or of its first.
template <bool of_last, class F> __device__ void each_piece(const int32_t *doc_pos, const int32_t *slots, size_t T, F f) {
    using namespace delta_block;
    for (size_t piece = 0, end; piece < T; piece = end) {
        end = next_document(doc_pos, piece + 1, T);
        const int32_t slot = slots[of_last ? end - 1 : piece];
        if (slot >= 0) f(piece, end, size_t(slot));
    }
}

// A block computes 64 columns of E or M, which are also the states between chunks.
template <class X>
__global__ void __launch_bounds__(delta_block::threads, 1)
    gated_delta_ends_kernel2(float *E, float *M, float *scratch, const X *qkv, DeltaGates<const float> gates,
                             const int32_t *doc_pos, const int32_t *slots, DeltaShape s) {
    using namespace delta_block;
    const unsigned parts_of_E = tiles_of(s.Dv), parts = parts_of_E + tiles_of(s.Dk);
    const unsigned h = blockIdx.x / parts, part = blockIdx.x % parts;
    const bool is_M = part >= parts_of_E;
    const BlockMatrices m(scratch, s);
    Block<X> block{shared_mem<BlockShared<X>>(), m, qkv, gates, s, h / s.group()};
    const unsigned row = is_M ? m.Dk : m.Dv, from = (is_M ? part - parts_of_E : part) * tile, columns = min(tile, row - from);
    each_piece<true>(doc_pos, slots, s.T, [&](size_t piece, size_t behind, size_t slot) {
        float *const e = is_M ? m.dk : m.dv, *const d = is_M ? m.dq : m.d;  // of Dk or Dv columns
        float *const state = (is_M ? M : E) + (slot * s.Hv + h) * m.Dk * row + from;
        if (is_M)
            each(m.Dk * columns,
                 [&](unsigned at) { state[at / columns * row + at % columns] = at / columns == from + at % columns; });
        for (size_t begin = piece; begin < behind; begin += chunk) {
            const Chunk c{begin, behind - begin < chunk ? behind - begin : chunk, begin == piece && !is_M, false};
            block.load_keys(c);
            block.load_gates(c, h);
            block.solve(e, d, state, row, c, is_M ? nullptr : block.values(c, h) + from, columns);
            block.advance(state, state, row, d, c, columns);
        }
    });
}

template <class X>
void gated_delta_ends(Cuda<X> dev, float *E, float *M, float *scratch, const X *qkv, DeltaGates<const float> gates,
                      const int32_t *doc_pos, const int32_t *slots, DeltaShape shape) {
    using namespace delta_block;
    launch(dev, gated_delta_ends_kernel2<X>, ends_grid(shape), threads, sizeof(BlockShared<X>), E, M, scratch, qkv, gates,
           doc_pos, slots, shape);
}

// A block computes 64 columns of F.
template <class X>
__global__ void __launch_bounds__(delta_block::threads, 1)
    gated_delta_starts_kernel2(float *F, float *scratch, const X *dout, const X *qkv, DeltaGates<const float> gates,
                               const int32_t *doc_pos, const int32_t *slots, DeltaShape s) {
    using namespace delta_block;
    const unsigned parts = tiles_of(s.Dv), h = blockIdx.x / parts, from = blockIdx.x % parts * tile;
    const BlockMatrices m(scratch, s);
    Block<X> block{shared_mem<BlockShared<X>>(), m, qkv, gates, s, h / s.group()};
    const unsigned columns = min(tile, m.Dv - from);
    each_piece<false>(doc_pos, slots, s.T, [&](size_t piece, size_t behind, size_t slot) {
        float *const gradient = F + (slot * s.Hv + h) * m.Dk * m.Dv + from;
        for (size_t number = (behind - piece + chunk - 1) / chunk; number-- > 0;) {
            const size_t begin = piece + number * chunk;
            const bool last = behind - begin <= chunk;
            const Chunk c{begin, last ? behind - begin : chunk, false, last};
            block.load_keys(c);
            block.load_gates(c, h);
            block.load_gradients(dout, c, h, from, columns);
            block.gradients_of_updates(gradient, m.Dv, c, columns);
            block.retreat(gradient, m.Dv, c, columns);
        }
    });
}

template <class X>
void gated_delta_starts(Cuda<X> dev, float *F, float *scratch, const X *dout, const X *qkv, DeltaGates<const float> gates,
                        const int32_t *doc_pos, const int32_t *slots, DeltaShape shape) {
    using namespace delta_block;
    launch(dev, gated_delta_starts_kernel2<X>, Grid{shape.Hv * tiles_of(shape.Dv)}, threads, sizeof(BlockShared<X>), F, scratch,
           dout, qkv, gates, doc_pos, slots, shape);
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
