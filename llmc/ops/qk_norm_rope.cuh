// qk_norm_rope on CUDA: norm and rotation in one kernel, so each head is read once. Contract and formulas: qk_norm_rope.h.
//
// The registers of `lanes` neighbouring lanes, a power of two, hold a head. Each lane has four channels of the first half of those that rotate, and the
// four of the second half that rotate with them; or eight channels that do not rotate (HeadChannels). If D / 8 is not a power of two, the last lanes have
// none. A block has either query heads or key heads, so its threads need only one weight, which also stays in registers. Arrays of heads begin at
// multiples of 16 bytes.
#pragma once
#include <bit>

#include "qk_norm_rope.h"
#include "rmsnorm.cuh"
#include "rope.cuh"

inline namespace CUDA_BACKEND {
// The channels of a lane: first, first + 1, ... and first + step, first + step + 1, ...
struct HeadChannels {
    unsigned pair, first, step;  // pair: the first pair of channels in the table of angles
    bool exist, rotate;

    __device__ HeadChannels(unsigned lane, unsigned D, unsigned R)
        : pair(lane * 4),
          first(pair < R / 2 ? pair : 2 * pair),
          step(pair < R / 2 ? R / 2 : 4),
          exist(pair < D / 2),
          rotate(pair < R / 2) {}
};

template <class X> struct HeadPart {
    X v[8];  // four channels, then the four that rotate with them

    __device__ static HeadPart load(const X *x, unsigned step) {
        const auto first = Vec<X, 4>::load(x), second = Vec<X, 4>::load(x + step);
        HeadPart out;
        for (int i = 0; i < 4; i++) out.v[i] = first[i], out.v[4 + i] = second[i];
        return out;
    }
    __device__ void store(X *x, unsigned step) const {
        Vec<X, 4> first, second;
        for (int i = 0; i < 4; i++) first[i] = v[i], second[i] = v[4 + i];
        first.store(x);
        second.store(x + step);
    }
    __device__ void turn(const float *angles, float sign) { rope_turn<4>(v, v + 4, angles, sign); }
};

template <class X> __device__ HeadPart<float> qk_norm_weight(const X *w, HeadChannels c, float w0) {  // w need not be aligned
    HeadPart<float> out{};
    if (!c.exist) return out;
    for (int i = 0; i < 4; i++) out.v[i] = w0 + float(w[c.first + i]), out.v[4 + i] = w0 + float(w[c.first + c.step + i]);
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
    const unsigned R = unsigned(shape.R), end = keys ? H + KV : H;
    const HeadChannels c(threadIdx.x % lanes, D, R);
    const HeadPart<float> w = qk_norm_weight(keys ? weights.k : weights.q, c, shape.w0);
    for (unsigned first = keys ? H : 0; first < end; first += blockDim.x / lanes) {  // every lane takes part in the sum
        const unsigned h = first + threadIdx.x / lanes;
        const bool mine = h < end && c.exist;
        X *head = qkv + (t * (H + 2 * KV) + h) * D + c.first;
        HeadPart<X> x{};
        if (mine) x = HeadPart<X>::load(head, c.step);
        float squares = 0;
        for (int i = 0; i < 8; i++) squares += float(x.v[i]) * float(x.v[i]);
        const float r = rsqrtf(warp_sum(squares, lanes) / float(D) + shape.eps);
        if (!mine) continue;
        const size_t row = t * (H + KV) + h;
        x.store(qk_raw + row * D + c.first, c.step);
        if (c.pair == 0) rstd[row] = r;
        for (int i = 0; i < 8; i++) x.v[i] = float(x.v[i]) * r * w.v[i];
        if (c.rotate) x.turn(table + size_t(doc_pos[t]) * R + 2 * c.pair, 1.0f);
        x.store(head, c.step);
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
    const unsigned R = unsigned(shape.R), group = threadIdx.x / lanes;
    const HeadChannels c(threadIdx.x % lanes, D, R);
    const HeadPart<float> w = qk_norm_weight(keys ? weights.k : weights.q, c, shape.w0);
    HeadPart<float> dw{};
    for (unsigned first = 0; first < n; first += groups) {
        const unsigned k = first + group;
        const bool mine = k < n && c.exist;
        const size_t t = begin + k / heads, h = (keys ? H : 0) + k % heads, row = t * (H + KV) + h;
        X *head = dqkv + (t * (H + 2 * KV) + h) * D + c.first;
        HeadPart<X> d{}, x{};
        float r = 0;
        if (mine) {
            d = HeadPart<X>::load(head, c.step), x = HeadPart<X>::load(qk_raw + row * D + c.first, c.step), r = rstd[row];
            if (c.rotate) d.turn(table + size_t(doc_pos[t]) * R + 2 * c.pair, -1.0f);
        }
        float dot = 0;
        for (int i = 0; i < 8; i++) dot += float(d.v[i]) * w.v[i] * float(x.v[i]);
        const float mean = warp_sum(dot, lanes) * r / float(D);
        for (int i = 0; i < 8; i++) {
            const float xh = float(x.v[i]) * r, g = float(d.v[i]) * w.v[i];
            dw.v[i] += float(d.v[i]) * xh;
            d.v[i] = r * (g - xh * mean);
        }
        if (mine) d.store(head, c.step);
    }
    float *parts = &shared_mem<float>();  // (groups, D)
    if (c.exist) dw.store(parts + group * D + c.first, c.step);
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
