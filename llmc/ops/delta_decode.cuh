// Linear attention during generation on CUDA. Contract: delta_decode.h.
#pragma once
#include "delta_decode.h"
#include "gated_delta.cuh"

inline namespace CUDA_BACKEND {
template <class X>
__global__ void conv_store_kernel1(X *columns, const X *x, const int32_t *doc_pos, const int32_t *slots, size_t C) {
    const size_t t = blockIdx.x, c = blockIdx.y * size_t(blockDim.x) + threadIdx.x;
    if (c >= C || slots[t] < 0) return;
    for (size_t j = 0; j < conv_columns; j++)
        columns[(size_t(slots[t]) * conv_columns + j) * C + c] = doc_pos[t] < int32_t(j) ? X(0.0f) : x[(t - j) * C + c];
}

template <class X>
void conv_store(Cuda<X> dev, X *columns, const X *x, const int32_t *doc_pos, const int32_t *slots, size_t T, size_t C) {
    launch(dev, conv_store_kernel1<X>, Grid{T, ceil_div(C, 256)}, 256, 0, columns, x, doc_pos, slots, C);
}

// A thread has one channel of a sequence. The kernel moves 8 B C elements, and the filters.
template <class X>
__global__ void causal_conv_decode_kernel1(X *out, X *columns, const X *x, const X *w, const int32_t *slots, size_t C) {
    const size_t b = blockIdx.x, c = blockIdx.y * size_t(blockDim.x) + threadIdx.x;
    if (c >= C) return;
    X *const column = columns + size_t(slots[b]) * conv_columns * C + c;
    const X newest = x[b * C + c];
    float y = float(newest) * float(w[c * conv_taps + conv_columns]);
    X next = newest;
#pragma unroll
    for (size_t j = 0; j < conv_columns; j++) {
        const X value = column[j * C];
        y += float(value) * float(w[c * conv_taps + conv_columns - 1 - j]);
        column[j * C] = next, next = value;
    }
    out[b * C + c] = divide<X>(y, 1.0f + expf(-y));
}

template <class X>
void causal_conv_decode(Cuda<X> dev, X *out, X *columns, const X *x, const X *w, const int32_t *slots, size_t B, size_t C) {
    launch(dev, causal_conv_decode_kernel1<X>, Grid{B, ceil_div(C, 256)}, 256, 0, out, columns, x, w, slots, C);
}

namespace delta_block {

constexpr unsigned decode_warps = 8, decode_rows = max_D / decode_warps;  // rows of the state in a thread's registers, at most

struct DecodeShared {
    float q[max_D], k[max_D];
    float partial[decode_warps][32];  // of a column, by warp
};

// Norms D values by one warp.
template <class X> __device__ void norm_by_warp(float *out, const X *x, size_t D, float eps, float scale) {
    const unsigned lane = threadIdx.x % 32;
    float sum = 0;
    for (size_t i = lane; i < D; i += 32) sum += float(x[i]) * float(x[i]);
    const float factor = scale / sqrtf(warp_sum(sum) + eps);
    for (size_t i = lane; i < D; i += 32) out[i] = float(x[i]) * factor;
}

// The sum over the warps of a value of each lane's column.
__device__ inline float column_sum(DecodeShared &shared, float value) {
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    shared.partial[warp][lane] = value;
    __syncthreads();
    float sum = 0;
    for (unsigned i = 0; i < decode_warps; i++) sum += shared.partial[i][lane];
    __syncthreads();
    return sum;
}

}  // namespace delta_block

// A block has 32 columns of the state of one value head of a sequence, a lane one column, and each warp every eighth row. Threads keep their rows in
// registers, so the kernel reads and writes each state once: 2 B Hv Dk Dv floats.
template <class X>
__global__ void __launch_bounds__(32 * delta_block::decode_warps)
    gated_delta_decode_kernel1(X *out, float *states, const X *qkv, DeltaGates<const float> gates, const int32_t *slots,
                               DeltaShape s) {
    using namespace delta_block;
    DecodeShared &shared = shared_mem<DecodeShared>();
    const unsigned warp = threadIdx.x / 32;
    const size_t at = blockIdx.x, b = at / s.Hv, h = at % s.Hv, j = blockIdx.y * size_t(32) + threadIdx.x % 32;
    const X *const x = qkv + b * s.row(), *const x_q = x + h / s.group() * s.Dk;
    if (warp == 0) norm_by_warp(shared.q, x_q, s.Dk, s.eps, rsqrtf(float(s.Dk)));
    if (warp == 1) norm_by_warp(shared.k, x_q + s.Hk * s.Dk, s.Dk, s.eps, 1.0f);
    __syncthreads();

    float *const state = states + (size_t(slots[b]) * s.Hv + h) * s.Dk * s.Dv + j;
    const bool exists = j < s.Dv;
    const float decay = expf(gates.g[at]);
    float rows[decode_rows], sum = 0;
#pragma unroll
    for (size_t i = 0; i < decode_rows; i++) {
        const size_t r = i * decode_warps + warp;
        rows[i] = exists && r < s.Dk ? decay * state[r * s.Dv] : 0.0f;
        sum += r < s.Dk ? shared.k[r] * rows[i] : 0.0f;
    }
    sum = column_sum(shared, sum);
    const float d = exists ? gates.beta[at] * (float(x[s.values_at(h) + j]) - sum) : 0.0f;
    sum = 0;
#pragma unroll
    for (size_t i = 0; i < decode_rows; i++) {
        const size_t r = i * decode_warps + warp;
        if (r >= s.Dk) continue;
        rows[i] += shared.k[r] * d;
        sum += shared.q[r] * rows[i];
        if (exists) state[r * s.Dv] = rows[i];
    }
    sum = column_sum(shared, sum);
    if (exists && warp == 0) out[at * s.Dv + j] = sum;
}

template <class X>
void gated_delta_decode(Cuda<X> dev, X *out, float *states, const X *qkv, DeltaGates<const float> gates, const int32_t *slots,
                        DeltaShape shape) {
    launch(dev, gated_delta_decode_kernel1<X>, Grid{shape.T * shape.Hv, ceil_div(shape.Dv, 32)}, 32 * delta_block::decode_warps,
           sizeof(delta_block::DecodeShared), out, states, qkv, gates, slots, shape);
}
}  // namespace CUDA_BACKEND
