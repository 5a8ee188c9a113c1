// rmsnorm on CUDA. Contract and formulas: rmsnorm.h.
#pragma once
#include "rmsnorm.h"
#include "warp.cuh"

inline namespace CUDA_BACKEND {

// ---- one row, by one warp -----------------------------------------------------------------------------------------------------

// The norm of x, or of x + y rounded to X, which also goes to `sum`; y and sum may be null. The row stays in shared memory from the
// sum of its squares to the products, so every byte is read once. A lane meets only what it wrote there itself: no barrier.
template <class X, int N>
__device__ float rmsnorm_warp(X *out, X *sum, const X *x, const X *y, const X *w, X *row, size_t C, float eps) {  // returns rstd
    const size_t lane = threadIdx.x % 32;
    float squares = 0;
    for (size_t c = lane * N; c < C; c += 32 * N) {
        auto v = Vec<X, N>::load(x + c);
        if (y) {
            const auto other = Vec<X, N>::load(y + c);
            for (int i = 0; i < N; i++) v[i] = float(v[i]) + float(other[i]);
        }
        if (sum) v.store(sum + c);
        v.store(row + c);
        for (int i = 0; i < N; i++) squares += float(v[i]) * float(v[i]);
    }
    const float rstd = rsqrtf(warp_sum(squares) / float(C) + eps);
    for (size_t c = lane * N; c < C; c += 32 * N) {
        auto v = Vec<X, N>::load(row + c);
        const auto weight = Vec<X, N>::load(w + c);
        for (int i = 0; i < N; i++) v[i] = float(v[i]) * rstd * float(weight[i]);
        v.store(out + c);
    }
    return rstd;
}

// dx of one row, and dw[c] += dout * xh, where dw is this warp's own in shared memory. The second reading comes from cache.
template <class X, int N>
__device__ void rmsnorm_backward_warp(X *dx, float *dw, const X *dresidual, const X *dout, const X *x, const X *w, float rstd,
                                      size_t C) {
    const size_t lane = threadIdx.x % 32;
    float dot = 0;
    for (size_t c = lane * N; c < C; c += 32 * N) {
        const auto d = Vec<X, N>::load(dout + c), v = Vec<X, N>::load(x + c), weight = Vec<X, N>::load(w + c);
        for (int i = 0; i < N; i++) dot += float(d[i]) * float(weight[i]) * float(v[i]);
    }
    const float mean = warp_sum(dot) * rstd / float(C);
    for (size_t c = lane * N; c < C; c += 32 * N) {
        const auto d = Vec<X, N>::load(dout + c), v = Vec<X, N>::load(x + c), weight = Vec<X, N>::load(w + c);
        auto dw_c = Vec<float, N>::load(dw + c);
        Vec<float, N> gradient;
        for (int i = 0; i < N; i++) {
            const float xh = float(v[i]) * rstd, g = float(d[i]) * float(weight[i]);
            dw_c[i] += float(d[i]) * xh;
            gradient[i] = rstd * (g - MUTANT(31, 0, xh * mean));
        }
        dw_c.store(dw + c);
        if (dresidual) {
            const auto residual = Vec<X, N>::load(dresidual + c);
            for (int i = 0; i < N; i++) gradient[i] += float(residual[i]);
        }
        Vec<X, N> rounded;
        for (int i = 0; i < N; i++) rounded[i] = gradient[i];
        rounded.store(dx + c);
    }
}

// Warps of a block that needs so much shared memory for each: a longer row has a block of its own.
inline size_t rmsnorm_warps(size_t shared_bytes, size_t bytes_per_warp) {
    return std::clamp<size_t>(shared_bytes / bytes_per_warp, 1, 8);
}

// ---- gradients of the weights: summed over the rows of a warp, the warps of a block, the blocks -------------------------------

constexpr size_t rmsnorm_blocks = 256;  // at most: two for every SM, and little to sum
template <class X> size_t rmsnorm_scratch(Cuda<X>, size_t C) { return rmsnorm_blocks * C; }

__device__ inline void rmsnorm_clear_dw(float *dw, size_t n) {
    for (size_t i = threadIdx.x; i < n; i += blockDim.x) dw[i] = 0;
    __syncthreads();
}

// out[c] = sum_part dw[part, c]
__device__ inline void rmsnorm_sum_parts(float *out, const float *dw, size_t parts, size_t C) {
    __syncthreads();
    for (size_t c = threadIdx.x; c < C; c += blockDim.x) {
        float sum = 0;
        for (size_t part = 0; part < MUTANT(30, 1, parts); part++) sum += dw[part * C + c];
        out[c] = sum;
    }
}

template <int warps> struct RmsnormColumns { float sum[warps][32]; };

// dw[c] += sum_run parts[run, c]. A block has 32 columns; each of its warps sums every warps-th run.
template <int warps> __global__ void rmsnorm_add_runs_kernel2(float *dw, const float *parts, size_t runs, size_t C) {
    auto &columns = shared_mem<RmsnormColumns<warps>>();
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const size_t c = blockIdx.x * size_t(32) + lane;
    float sum = 0;
    if (c < C)
        for (size_t run = warp; run < runs; run += warps) sum += parts[run * C + c];
    columns.sum[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || c >= C) return;
    for (int i = 1; i < warps; i++) sum += columns.sum[i][lane];
    dw[c] = MUTANT(32, 0, dw[c]) + sum;
}

template <class X> void rmsnorm_add_runs(Cuda<X> dev, float *dw, const float *parts, size_t runs, size_t C) {
    constexpr int warps = 8;
    launch(dev, rmsnorm_add_runs_kernel2<warps>, Grid{ceil_div(C, 32)}, warps * 32, sizeof(RmsnormColumns<warps>), dw, parts,
           runs, C);
}

// ---- the norm of the residual stream ------------------------------------------------------------------------------------------

// One warp per token. Moves 2 T C elements, with the sum 4 T C.
template <class X, int N>
__global__ void rmsnorm_forward_kernel2(X *out, X *sum, float *rstd, const X *x, const X *y, const X *w, size_t T, size_t C,
                                        float eps) {
    const size_t warp = threadIdx.x / 32, t = blockIdx.x * size_t(blockDim.x / 32) + warp;
    if (t >= T) return;
    X *row = &shared_mem<X>() + warp * C;
    const float r =
        rmsnorm_warp<X, N>(out + t * C, sum ? sum + t * C : nullptr, x + t * C, y ? y + t * C : nullptr, w, row, C, eps);
    if (threadIdx.x % 32 == 0) rstd[t] = r;
}

template <class X>
void residual_rmsnorm_forward(Cuda<X> dev, X *sum, X *out, float *rstd, const X *x, const X *y, const X *w, size_t T, size_t C,
                              float eps) {
    constexpr int N = Vec<X>::size;
    const size_t warps = rmsnorm_warps(48 << 10, C * sizeof(X));
    launch(dev, fit_vectors<N>(C, sum, out, x, y, w) ? rmsnorm_forward_kernel2<X, N> : rmsnorm_forward_kernel2<X, 1>,
           Grid{ceil_div(T, warps)}, unsigned(warps * 32), warps * C * sizeof(X), out, sum, rstd, x, y, w, T, C, eps);
}

template <class X> void rmsnorm_forward(Cuda<X> dev, X *out, float *rstd, const X *x, const X *w, size_t T, size_t C, float eps) {
    X *no_sum = nullptr;
    const X *no_y = nullptr;
    residual_rmsnorm_forward(dev, no_sum, out, rstd, x, no_y, w, T, C, eps);
}

// A block has a run of tokens, each warp every warps-th of them. Moves 4 T C elements (x, dout, dresidual, dx).
template <class X, int N>
__global__ void rmsnorm_backward_kernel2(X *dx, float *scratch, const X *dresidual, const X *dout, const X *x, const X *w,
                                         const float *rstd, size_t T, size_t C) {
    float *dw = &shared_mem<float>();  // (warps, C)
    const size_t warps = blockDim.x / 32, warp = threadIdx.x / 32;
    const size_t begin = T * blockIdx.x / gridDim.x, end = T * (blockIdx.x + 1) / gridDim.x;
    rmsnorm_clear_dw(dw, warps * C);
    for (size_t t = begin + warp; t < end; t += warps)
        rmsnorm_backward_warp<X, N>(dx + t * C, dw + warp * C, dresidual ? dresidual + t * C : nullptr, dout + t * C, x + t * C,
                                    w, rstd[t], C);
    rmsnorm_sum_parts(scratch + blockIdx.x * C, dw, warps, C);
}

template <class X>
void rmsnorm_backward(Cuda<X> dev, X *dx, float *dw, float *scratch, const X *dresidual, const X *dout, const X *x, const X *w,
                      const float *rstd, size_t T, size_t C) {
    constexpr int N = Vec<X>::size;
    const size_t warps = rmsnorm_warps(96 << 10, C * sizeof(float)), blocks = std::min(rmsnorm_blocks, ceil_div(T, warps));
    launch(dev, fit_vectors<N>(C, dx, dresidual, dout, x, w) ? rmsnorm_backward_kernel2<X, N> : rmsnorm_backward_kernel2<X, 1>,
           Grid{blocks}, unsigned(warps * 32), warps * C * sizeof(float), dx, scratch, dresidual, dout, x, w, rstd, T, C);
    rmsnorm_add_runs(dev, dw, scratch, blocks, C);
}
}  // namespace CUDA_BACKEND
