// gated_rmsnorm on CUDA. Contract and formulas: gated_rmsnorm.h.
#pragma once
#include "gated_rmsnorm.h"
#include "rmsnorm.cuh"

inline namespace CUDA_BACKEND {
template <class X> size_t gated_rmsnorm_scratch(Cuda<X> dev, size_t C) { return rmsnorm_scratch(dev, C); }

template <class X, int N> __device__ float gated_rmsnorm_warp_rstd(const X *x, size_t C, float eps) {
    float squares = 0;
    for (size_t c = threadIdx.x % 32 * N; c < C; c += 32 * N) {
        const auto v = Vec<X, N>::load(x + c);
        for (int i = 0; i < N; i++) squares += float(v[i]) * float(v[i]);
    }
    return rsqrtf(warp_sum(squares) / float(C) + eps);
}

// A warp computes a row; its second read of x hits the cache. The kernel moves 3 T C elements.
template <class X, int N>
__global__ void gated_rmsnorm_forward_kernel1(X *out, const X *x, const X *z, const X *w, NormShape shape) {
    const size_t C = shape.C, t = blockIdx.x * size_t(blockDim.x / 32) + threadIdx.x / 32, at = t * C;
    if (t >= shape.T) return;
    const float r = gated_rmsnorm_warp_rstd<X, N>(x + at, C, shape.eps);
    for (size_t c = threadIdx.x % 32 * N; c < C; c += 32 * N) {
        auto v = Vec<X, N>::load(x + at + c);
        const auto gate = Vec<X, N>::load(z + at + c), weight = Vec<X, N>::load(w + c);
        for (int i = 0; i < N; i++)
            v[i] = float(v[i]) * r * (shape.w0 + float(weight[i])) * (float(gate[i]) / (1.0f + expf(-float(gate[i]))));
        v.store(out + at + c);
    }
}

template <class X> void gated_rmsnorm_forward(Cuda<X> dev, X *out, const X *x, const X *z, const X *w, NormShape shape) {
    constexpr unsigned warps = 4;
    constexpr int N = Vec<X, 4>::size;
    launch(dev, fit_vectors<N>(shape.C, out, x, z, w) ? gated_rmsnorm_forward_kernel1<X, N> : gated_rmsnorm_forward_kernel1<X, 1>,
           Grid{ceil_div(shape.T, warps)}, warps * 32, 0, out, x, z, w, shape);
}

// A block has a run of rows, and a warp its own rows of them and its own sum of dw in shared memory. The second read of the inputs hits the cache. The
// kernel moves 5 T C elements.
template <class X, int N>
__global__ void gated_rmsnorm_backward_kernel1(X *dx, X *dz, float *scratch, const X *dout, const X *x, const X *z, const X *w,
                                               NormShape shape) {
    const size_t T = shape.T, C = shape.C, warps = blockDim.x / 32, warp = threadIdx.x / 32;
    float *sums = &shared_mem<float>();  // (warps, C)
    const size_t begin = T * blockIdx.x / gridDim.x, end = T * (blockIdx.x + 1) / gridDim.x;
    norm_clear(sums, warps * C);
    for (size_t t = begin + warp; t < end; t += warps) {
        const size_t at = t * C;
        const float r = gated_rmsnorm_warp_rstd<X, N>(x + at, C, shape.eps);
        float dot = 0;
        for (size_t c = threadIdx.x % 32 * N; c < C; c += 32 * N) {
            const auto d = Vec<X, N>::load(dout + at + c), v = Vec<X, N>::load(x + at + c), gate = Vec<X, N>::load(z + at + c),
                       weight = Vec<X, N>::load(w + c);
            for (int i = 0; i < N; i++)
                dot +=
                    float(d[i]) * (float(gate[i]) / (1.0f + expf(-float(gate[i])))) * (shape.w0 + float(weight[i])) * float(v[i]);
        }
        const float mean = warp_sum(dot) * r / float(C);
        for (size_t c = threadIdx.x % 32 * N; c < C; c += 32 * N) {
            auto d = Vec<X, N>::load(dout + at + c), gate = Vec<X, N>::load(z + at + c);
            const auto v = Vec<X, N>::load(x + at + c), weight = Vec<X, N>::load(w + c);
            auto dw = Vec<float, N>::load(sums + warp * C + c);
            for (int i = 0; i < N; i++) {
                const float xh = float(v[i]) * r, full = shape.w0 + float(weight[i]), g = gate[i];
                const float s = 1.0f / (1.0f + expf(-g)), gated = float(d[i]) * g * s;
                dw[i] += gated * xh;
                gate[i] = float(d[i]) * xh * full * s * (1.0f + g * (1.0f - s));
                d[i] = r * (gated * full - xh * mean);
            }
            dw.store(sums + warp * C + c);
            gate.store(dz + at + c);
            d.store(dx + at + c);
        }
    }
    norm_sum_parts(scratch + blockIdx.x * C, sums, warps, C);
}

template <class X>
void gated_rmsnorm_backward(Cuda<X> dev, X *dx, X *dz, float *dw, float *scratch, const X *dout, const X *x, const X *z,
                            const X *w, NormShape shape) {
    constexpr int N = Vec<X, 4>::size;
    const size_t T = shape.T, C = shape.C;
    const size_t warps = norm_warps(48 << 10, C * sizeof(float)), blocks = std::min(norm_blocks, ceil_div(T, warps));
    launch(dev,
           fit_vectors<N>(C, dx, dz, dout, x, z, w) ? gated_rmsnorm_backward_kernel1<X, N> : gated_rmsnorm_backward_kernel1<X, 1>,
           Grid{blocks}, unsigned(warps * 32), warps * C * sizeof(float), dx, dz, scratch, dout, x, z, w, shape);
    if (dw) norm_add_runs(dev, dw, scratch, blocks, C);
}
}  // namespace CUDA_BACKEND
