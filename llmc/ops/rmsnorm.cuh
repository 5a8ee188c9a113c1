// rmsnorm on CUDA. Contract and formulas: rmsnorm.h.
#pragma once
#include "norm.cuh"
#include "rmsnorm.h"

inline namespace CUDA_BACKEND {

// ---- one row, by one warp -----------------------------------------------------------------------------------------------------

// Computes dx of one row, and dw[c] += dout * xh, where dw is this warp's own, in shared memory. The second read of data hits the cache.
template <class X, int N>
__device__ void rmsnorm_backward_warp(X *dx, float *dw, const X *dresidual, const X *dout, const X *x, const X *w, float rstd,
                                      size_t C, float w0) {
    const size_t lane = threadIdx.x % 32;
    float dot = 0;
    for (size_t c = lane * N; c < C; c += 32 * N) {
        const auto d = Vec<X, N>::load(dout + c), v = Vec<X, N>::load(x + c), weight = Vec<X, N>::load(w + c);
        for (int i = 0; i < N; i++) dot += float(d[i]) * (w0 + float(weight[i])) * float(v[i]);
    }
    const float mean = warp_sum(dot) * rstd / float(C);
    for (size_t c = lane * N; c < C; c += 32 * N) {
        const auto d = Vec<X, N>::load(dout + c), v = Vec<X, N>::load(x + c), weight = Vec<X, N>::load(w + c);
        auto dw_c = Vec<float, N>::load(dw + c);
        Vec<float, N> gradient;
        for (int i = 0; i < N; i++) {
            const float xh = float(v[i]) * rstd, g = float(d[i]) * (w0 + float(weight[i]));
            dw_c[i] += float(d[i]) * xh;
            gradient[i] = rstd * (g - xh * mean);
        }
        dw_c.store(dw + c);
        norm_store<X, N>(dx + c, dresidual ? dresidual + c : nullptr, gradient);
    }
}

// ---- the norm of the residual stream ------------------------------------------------------------------------------------------

template <class X> size_t rmsnorm_scratch(Cuda<X>, size_t C) { return norm_blocks * C; }

// A group of warps computes a token: the norm of x, or of x + y rounded to X, which is also written to `sum`. y and sum may be null. The row waits
// in shared memory for its rstd, where a lane reads only its own stores. The kernel moves 2 T C elements, or 4 T C with the sum.
template <class X, int N>
__global__ void rmsnorm_forward_kernel6(X *out, X *sum, float *rstd, const X *x, const X *y, const X *w, NormShape shape,
                                        unsigned warps) {
    const size_t T = shape.T, C = shape.C;
    NormGroup group(warps);
    const size_t t = blockIdx.x * size_t(blockDim.x / group.lanes) + group.index, at = t * C;
    X *row = norm_rows<X>() + group.index * C;
    float squares = 0;
    for (size_t c = group.lane * N; t < T && c < C; c += group.lanes * N) {
        auto v = Vec<X, N>::load(x + at + c);
        if (y) {
            const auto other = Vec<X, N>::load(y + at + c);
            for (int i = 0; i < N; i++) v[i] = float(v[i]) + float(other[i]);
        }
        if (sum) v.store(sum + at + c);
        v.store(row + c);
        for (int i = 0; i < N; i++) squares += float(v[i]) * float(v[i]);
    }
    const float r = rsqrtf(group.sum(squares) / float(C) + shape.eps);
    if (t >= T) return;
    for (size_t c = group.lane * N; c < C; c += group.lanes * N) {
        auto v = Vec<X, N>::load(row + c);
        const auto weight = Vec<X, N>::load(w + c);
        for (int i = 0; i < N; i++) v[i] = float(v[i]) * r * (shape.w0 + float(weight[i]));
        v.store(out + at + c);
    }
    if (group.lane == 0) rstd[t] = r;
}

template <class X>
void residual_rmsnorm_forward(Cuda<X> dev, X *sum, X *out, float *rstd, const X *x, const X *y, const X *w, NormShape shape) {
    constexpr int N = Vec<X>::size;
    const size_t T = shape.T, C = shape.C;
    const bool wide = fit_vectors<N>(C, sum, out, x, y, w);
    const NormGroups groups(C, wide ? N : 1, 4);
    launch(dev, wide ? rmsnorm_forward_kernel6<X, N> : rmsnorm_forward_kernel6<X, 1>, Grid{ceil_div(T, groups.groups)},
           groups.threads(), sizeof(NormShared) + groups.groups * C * sizeof(X), out, sum, rstd, x, y, w, shape, groups.warps);
}

template <class X> void rmsnorm_forward(Cuda<X> dev, X *out, float *rstd, const X *x, const X *w, NormShape shape) {
    X *no_sum = nullptr;
    const X *no_y = nullptr;
    residual_rmsnorm_forward(dev, no_sum, out, rstd, x, no_y, w, shape);
}

// A block has a run of tokens, and each group of warps computes every groups-th token. A lane keeps its part of a row, at most V vectors, in
// registers, and also its part of dw, because its columns are the same in each row. The kernel moves 4 T C elements (x, dout, dresidual, dx). ptxas may
// use 128 registers, for one block on a multiprocessor, and needs up to 118 for sm_80, sm_90 and sm_100.
template <class X, int N, int V>
__global__ void __launch_bounds__(NormGroups::most * 32, 1)
    rmsnorm_backward_kernel6(X *dx, float *scratch, const X *dresidual, const X *dout, const X *x, const X *w, const float *rstd,
                             NormShape shape, unsigned warps) {
    NormGroup group(warps);
    const size_t T = shape.T, C = shape.C;
    const float w0 = shape.w0;
    const unsigned groups = blockDim.x / group.lanes;
    const size_t begin = T * blockIdx.x / gridDim.x, end = T * (blockIdx.x + 1) / gridDim.x;
    const NormRows<X, N, V> rows{dresidual, dout, x, end, C, group.lane, group.lanes};
    Vec<X, N> weight[V] = {};
    Vec<float, N> dw[V] = {};
#pragma unroll
    for (int k = 0; k < V; k++)
        if (rows.column(k) < C) weight[k] = Vec<X, N>::load(w + rows.column(k));
    for (size_t t0 = begin; t0 < end; t0 += groups) {
        const size_t t = t0 + group.index;
        const auto row = rows.load(t);
        Vec<X, N> residual[V];
        float dot = 0;
#pragma unroll
        for (int k = 0; k < V; k++) residual[k] = rows.residual(t, k);
#pragma unroll
        for (int k = 0; k < V; k++)
            for (int i = 0; i < N; i++) dot += float(row.d[k][i]) * (w0 + float(weight[k][i])) * float(row.x[k][i]);
        dot = group.sum(dot);
        if (t >= end) continue;
        const float r = rstd[t], mean = dot * r / float(C);
#pragma unroll
        for (int k = 0; k < V; k++) {
            if (rows.column(k) >= C) continue;
            Vec<X, N> gradient;
            for (int i = 0; i < N; i++) {
                const float xh = float(row.x[k][i]) * r, g = float(row.d[k][i]) * (w0 + float(weight[k][i]));
                dw[k][i] += float(row.d[k][i]) * xh;
                gradient[i] = r * (g - xh * mean) + float(residual[k][i]);
            }
            gradient.store(dx + t * C + rows.column(k));
        }
    }
    float *sums = norm_rows<float>();  // (groups, C)
#pragma unroll
    for (int k = 0; k < V; k++)
        if (rows.column(k) < C) dw[k].store(sums + group.index * C + rows.column(k));
    norm_sum_parts(scratch + blockIdx.x * C, sums, groups, C);
}

// The same for rows that do not fit the registers, or are not aligned to vectors: each warp has its own rows, and its sums of dw in shared memory.
template <class X, int N>
__global__ void rmsnorm_backward_kernel5(X *dx, float *scratch, const X *dresidual, const X *dout, const X *x, const X *w,
                                         const float *rstd, NormShape shape) {
    const size_t T = shape.T, C = shape.C;
    float *dw = &shared_mem<float>();  // (warps, C)
    const size_t warps = blockDim.x / 32, warp = threadIdx.x / 32;
    const size_t begin = T * blockIdx.x / gridDim.x, end = T * (blockIdx.x + 1) / gridDim.x;
    norm_clear(dw, warps * C);
    for (size_t t = begin + warp; t < end; t += warps)
        rmsnorm_backward_warp<X, N>(dx + t * C, dw + warp * C, dresidual ? dresidual + t * C : nullptr, dout + t * C, x + t * C,
                                    w, rstd[t], C, shape.w0);
    norm_sum_parts(scratch + blockIdx.x * C, dw, warps, C);
}

template <class X>
void rmsnorm_backward_any(Cuda<X> dev, X *dx, float *dw, float *scratch, const X *dresidual, const X *dout, const X *x,
                          const X *w, const float *rstd, NormShape shape) {
    constexpr int N = Vec<X>::size;
    const size_t T = shape.T, C = shape.C;
    const size_t warps = norm_warps(96 << 10, C * sizeof(float)), blocks = std::min(norm_blocks, ceil_div(T, warps));
    launch(dev, fit_vectors<N>(C, dx, dresidual, dout, x, w) ? rmsnorm_backward_kernel5<X, N> : rmsnorm_backward_kernel5<X, 1>,
           Grid{blocks}, unsigned(warps * 32), warps * C * sizeof(float), dx, scratch, dresidual, dout, x, w, rstd, shape);
    if (dw) norm_add_runs(dev, dw, scratch, blocks, C);
}

template <class X>
void rmsnorm_backward(Cuda<X> dev, X *dx, float *dw, float *scratch, const X *dresidual, const X *dout, const X *x, const X *w,
                      const float *rstd, NormShape shape) {
    constexpr int N = Vec<X>::size, V = 2;
    const size_t T = shape.T, C = shape.C;
    if (!fit_vectors<N>(C, dx, dresidual, dout, x, w) || C > size_t(NormGroups::most * 32 * N * V))
        return rmsnorm_backward_any(dev, dx, dw, scratch, dresidual, dout, x, w, rstd, shape);
    const NormGroups groups(C, N, V);
    const size_t blocks = std::min(norm_blocks, ceil_div(T, groups.groups));
    launch(dev, rmsnorm_backward_kernel6<X, N, V>, Grid{blocks}, groups.threads(),
           sizeof(NormShared) + groups.groups * C * sizeof(float), dx, scratch, dresidual, dout, x, w, rstd, shape, groups.warps);
    if (dw) norm_add_runs(dev, dw, scratch, blocks, C);
}
}  // namespace CUDA_BACKEND
