// qk_norm_rope on CUDA: norm and rotation in one kernel, so each head is read once. Contract and formulas: qk_norm_rope.h.
//
// The registers of `lanes` neighbouring lanes, a power of two, hold a head. Each lane has four channels c, c + 1, ... of the head's first half, and
// the four of the second half that rotate with them. If D / 8 is not a power of two, the last lanes have none. A block has either query heads or key
// heads, so its threads need only one weight, which also stays in registers. Arrays of heads begin at multiples of 16 bytes.
#pragma once
#include <bit>

#include "qk_norm_rope.h"
#include "rmsnorm.cuh"
#include "rope.cuh"

inline namespace CUDA_BACKEND {
template <class X> struct HeadPart {
    X v[8];  // four of the first half, then four of the second

    __device__ static HeadPart load(const X *x, unsigned half) {
        const auto first = Vec<X, 4>::load(x), second = Vec<X, 4>::load(x + half);
        HeadPart out;
        for (int i = 0; i < 4; i++) out.v[i] = first[i], out.v[4 + i] = second[i];
        return out;
    }
    __device__ void store(X *x, unsigned half) const {
        Vec<X, 4> first, second;
        for (int i = 0; i < 4; i++) first[i] = v[i], second[i] = v[4 + i];
        first.store(x);
        second.store(x + half);
    }
    __device__ void turn(const float *angles, float sign) { rope_turn<4>(v, v + 4, angles, sign); }
};

template <class X> __device__ HeadPart<float> qk_norm_weight(const X *w, unsigned half, float w0) {  // w need not be aligned
    HeadPart<float> out;
    for (int i = 0; i < 4; i++) out.v[i] = w0 + float(w[i]), out.v[4 + i] = w0 + float(w[half + i]);
    return out;
}

inline unsigned qk_norm_lanes(size_t D) { return unsigned(std::bit_ceil(D / 8)); }

// A token has two blocks, for its query heads and its key heads. The kernel moves 3 T (H + KV) D elements.
template <class X>
__global__ void qk_norm_rope_forward_kernel1(X *qkv, X *qk_raw, float *rstd, QkWeights<const X> weights, const float *table,
                                             const int32_t *doc_pos, QkShape shape, unsigned lanes) {
    const unsigned H = unsigned(shape.H), KV = unsigned(shape.KV), D = unsigned(shape.D);
    const size_t t = blockIdx.x;
    const bool keys = blockIdx.y;
    const unsigned c = threadIdx.x % lanes * 4, half = D / 2, end = keys ? H + KV : H;
    HeadPart<float> w{};
    if (c < half) w = qk_norm_weight((keys ? weights.k : weights.q) + c, half, shape.w0);
    for (unsigned first = keys ? H : 0; first < end; first += blockDim.x / lanes) {  // every lane takes part in the sum
        const unsigned h = first + threadIdx.x / lanes;
        const bool mine = h < end && c < half;
        X *head = qkv + (t * (H + 2 * KV) + h) * D + c;
        HeadPart<X> x{};
        if (mine) x = HeadPart<X>::load(head, half);
        float squares = 0;
        for (int i = 0; i < 8; i++) squares += float(x.v[i]) * float(x.v[i]);
        const float r = rsqrtf(warp_sum(squares, lanes) / float(D) + shape.eps);
        if (!mine) continue;
        const size_t row = t * (H + KV) + h;
        x.store(qk_raw + row * D + c, half);
        if (c == 0) rstd[row] = r;
        for (int i = 0; i < 8; i++) x.v[i] = float(x.v[i]) * r * w.v[i];
        x.turn(table + size_t(doc_pos[t]) * D + 2 * c, 1.0f);
        x.store(head, half);
    }
}

template <class X>
void qk_norm_rope_forward(Cuda<X> dev, X *qkv, X *qk_raw, float *rstd, QkWeights<const X> w, const float *table,
                          const int32_t *doc_pos, QkShape shape) {
    const size_t T = shape.T, D = shape.D;
    if (!w.q) return rope_forward(dev, qkv, table, doc_pos, T, shape.heads(), D, shape.R, shape.row());
    launch(dev, qk_norm_rope_forward_kernel1<X>, Grid{T, 2}, 128, 0, qkv, qk_raw, rstd, w, table, doc_pos, shape,
           qk_norm_lanes(D));
}

// A run of tokens has two blocks, for query heads and key heads. A lane sums dw over its heads, and a block over its lanes. The kernel moves
// 3 T (H + KV) D elements.
template <class X>
__global__ void qk_norm_rope_backward_kernel1(X *dqkv, float *scratch, const X *qk_raw, QkWeights<const X> weights,
                                              const float *rstd, const float *table, const int32_t *doc_pos, QkShape shape,
                                              unsigned lanes) {
    const size_t T = shape.T;
    const unsigned H = unsigned(shape.H), KV = unsigned(shape.KV), D = unsigned(shape.D);
    const size_t begin = T * blockIdx.x / gridDim.x, end = T * (blockIdx.x + 1) / gridDim.x;
    const bool keys = blockIdx.y;
    const unsigned heads = keys ? KV : H, n = unsigned(end - begin) * heads, groups = blockDim.x / lanes;
    const unsigned c = threadIdx.x % lanes * 4, half = D / 2, group = threadIdx.x / lanes;
    HeadPart<float> w{}, dw{};
    if (c < half) w = qk_norm_weight((keys ? weights.k : weights.q) + c, half, shape.w0);
    for (unsigned first = 0; first < n; first += groups) {
        const unsigned k = first + group;
        const bool mine = k < n && c < half;
        const size_t t = begin + k / heads, h = (keys ? H : 0) + k % heads, row = t * (H + KV) + h;
        X *head = dqkv + (t * (H + 2 * KV) + h) * D + c;
        HeadPart<X> d{}, x{};
        float r = 0;
        if (mine) {
            d = HeadPart<X>::load(head, half), x = HeadPart<X>::load(qk_raw + row * D + c, half), r = rstd[row];
            d.turn(table + size_t(doc_pos[t]) * D + 2 * c, -1.0f);
        }
        float dot = 0;
        for (int i = 0; i < 8; i++) dot += float(d.v[i]) * w.v[i] * float(x.v[i]);
        const float mean = warp_sum(dot, lanes) * r / float(D);
        for (int i = 0; i < 8; i++) {
            const float xh = float(x.v[i]) * r, g = float(d.v[i]) * w.v[i];
            dw.v[i] += float(d.v[i]) * xh;
            d.v[i] = r * (g - xh * mean);
        }
        if (mine) d.store(head, half);
    }
    float *parts = &shared_mem<float>();  // (groups, D)
    if (c < half) dw.store(parts + group * D + c, half);
    norm_sum_parts(scratch + (blockIdx.y * gridDim.x + blockIdx.x) * D, parts, groups, D);
}

template <class X>
void qk_norm_rope_backward(Cuda<X> dev, X *dqkv, QkWeights<float> dw, float *scratch, const X *qk_raw, QkWeights<const X> w,
                           const float *rstd, const float *table, const int32_t *doc_pos, QkShape shape) {
    const size_t T = shape.T, D = shape.D;
    if (!w.q) return rope_backward(dev, dqkv, table, doc_pos, T, shape.heads(), D, shape.R, shape.row());
    const unsigned threads = 256, lanes = qk_norm_lanes(D);
    const size_t blocks = std::min(norm_blocks, T);
    launch(dev, qk_norm_rope_backward_kernel1<X>, Grid{blocks, 2}, threads, threads / lanes * D * sizeof(float), dqkv, scratch,
           qk_raw, w, rstd, table, doc_pos, shape, lanes);
    if (dw.q) norm_add_runs(dev, dw.q, dw.k, scratch, blocks, D);
}
}  // namespace CUDA_BACKEND
