// rmsnorm on CUDA. Contract and formulas: rmsnorm.h.
#pragma once
#include "norm.cuh"
#include "rmsnorm.h"

inline namespace CUDA_BACKEND {

// ---- one row, by one warp -----------------------------------------------------------------------------------------------------

// Computes the norm of x, or of x + y rounded to X, which is also written to `sum`. y and sum may be null.
template <class X, int N>
__device__ float rmsnorm_warp(X *out, X *sum, const X *x, const X *y, const X *w, X *row, size_t C, float eps) {  // returns rstd
    const float squares = norm_read<X, N>(row, sum, x, y, C, [](float v) { return v * v; });
    const float rstd = rsqrtf(squares / float(C) + eps);
    for (size_t c = threadIdx.x % 32 * N; c < C; c += 32 * N) {
        auto v = Vec<X, N>::load(row + c);
        const auto weight = Vec<X, N>::load(w + c);
        for (int i = 0; i < N; i++) v[i] = float(v[i]) * rstd * float(weight[i]);
        v.store(out + c);
    }
    return rstd;
}

// Computes dx of one row, and dw[c] += dout * xh, where dw is this warp's own, in shared memory. Data that are read a second time come from
// the cache.
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
            gradient[i] = rstd * (g - xh * mean);
        }
        dw_c.store(dw + c);
        norm_store<X, N>(dx + c, dresidual ? dresidual + c : nullptr, gradient);
    }
}

// ---- the norm of the residual stream ------------------------------------------------------------------------------------------

template <class X> size_t rmsnorm_scratch(Cuda<X>, size_t C) { return norm_blocks * C; }

// One warp computes a token. The kernel moves 2 T C elements, or 4 T C with the sum.
template <class X, int N>
__global__ void rmsnorm_forward_kernel5(X *out, X *sum, float *rstd, const X *x, const X *y, const X *w, size_t T, size_t C,
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
    const size_t warps = norm_warps(48 << 10, C * sizeof(X));
    launch(dev, fit_vectors<N>(C, sum, out, x, y, w) ? rmsnorm_forward_kernel5<X, N> : rmsnorm_forward_kernel5<X, 1>,
           Grid{ceil_div(T, warps)}, unsigned(warps * 32), warps * C * sizeof(X), out, sum, rstd, x, y, w, T, C, eps);
}

template <class X> void rmsnorm_forward(Cuda<X> dev, X *out, float *rstd, const X *x, const X *w, size_t T, size_t C, float eps) {
    X *no_sum = nullptr;
    const X *no_y = nullptr;
    residual_rmsnorm_forward(dev, no_sum, out, rstd, x, no_y, w, T, C, eps);
}

// A block has a run of tokens, of which each warp computes every warps-th. The kernel moves 4 T C elements (x, dout, dresidual, dx).
template <class X, int N>
__global__ void rmsnorm_backward_kernel5(X *dx, float *scratch, const X *dresidual, const X *dout, const X *x, const X *w,
                                         const float *rstd, size_t T, size_t C) {
    float *dw = &shared_mem<float>();  // (warps, C)
    const size_t warps = blockDim.x / 32, warp = threadIdx.x / 32;
    const size_t begin = T * blockIdx.x / gridDim.x, end = T * (blockIdx.x + 1) / gridDim.x;
    norm_clear(dw, warps * C);
    for (size_t t = begin + warp; t < end; t += warps)
        rmsnorm_backward_warp<X, N>(dx + t * C, dw + warp * C, dresidual ? dresidual + t * C : nullptr, dout + t * C, x + t * C,
                                    w, rstd[t], C);
    norm_sum_parts(scratch + blockIdx.x * C, dw, warps, C);
}

template <class X>
void rmsnorm_backward(Cuda<X> dev, X *dx, float *dw, float *scratch, const X *dresidual, const X *dout, const X *x, const X *w,
                      const float *rstd, size_t T, size_t C) {
    constexpr int N = Vec<X>::size;
    const size_t warps = norm_warps(96 << 10, C * sizeof(float)), blocks = std::min(norm_blocks, ceil_div(T, warps));
    launch(dev, fit_vectors<N>(C, dx, dresidual, dout, x, w) ? rmsnorm_backward_kernel5<X, N> : rmsnorm_backward_kernel5<X, 1>,
           Grid{blocks}, unsigned(warps * 32), warps * C * sizeof(float), dx, scratch, dresidual, dout, x, w, rstd, T, C);
    if (dw) norm_add_runs(dev, dw, scratch, blocks, C);
}
}  // namespace CUDA_BACKEND
