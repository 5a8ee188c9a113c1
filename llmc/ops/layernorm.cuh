// layernorm on CUDA. Contract and formulas: layernorm.h.
#pragma once
#include "layernorm.h"
#include "norm.cuh"

inline namespace CUDA_BACKEND {

// ---- one row, by one warp -----------------------------------------------------------------------------------------------------

// Computes the norm of x, or of x + y rounded to X, which is also written to `sum`. y and sum may be null.
template <class X, int N>
__device__ void layernorm_warp(X *out, X *sum, LayerNormStats stats, const X *x, const X *y, LayerNormWeights<const X> weights,
                               X *row, size_t C, float eps) {
    const size_t lane = threadIdx.x % 32;
    const float rough = norm_read<X, N>(row, sum, x, y, C, [](float v) { return v; }) / float(C);
    float rest = 0, squares = 0;
    for (size_t c = lane * N; c < C; c += 32 * N) {
        const auto v = Vec<X, N>::load(row + c);
        for (int i = 0; i < N; i++) {
            const float d = float(v[i]) - rough;
            rest += d;
            squares += d * d;
        }
    }
    const float shift = warp_sum(rest) / float(C), m = rough + shift;
    const float r = rsqrtf(fmaxf(warp_sum(squares) / float(C) - shift * shift, 0.0f) + eps);
    for (size_t c = lane * N; c < C; c += 32 * N) {
        auto v = Vec<X, N>::load(row + c);
        const auto weight = Vec<X, N>::load(weights.w + c), offset = Vec<X, N>::load(weights.bias + c);
        for (int i = 0; i < N; i++) v[i] = (float(v[i]) - m) * r * float(weight[i]) + float(offset[i]);
        v.store(out + c);
    }
    if (lane == 0) *stats.mean = m, *stats.rstd = r;
}

// Computes dx of one row, dw[c] += dout * xh and dbias[c] += dout; dw and dbias are this warp's own, in shared memory. The second read of
// data hits the cache.
template <class X, int N>
__device__ void layernorm_backward_warp(X *dx, float *dw, float *dbias, const X *dresidual, const X *dout, const X *x, const X *w,
                                        float mean, float rstd, size_t C) {
    const size_t lane = threadIdx.x % 32;
    float sum = 0, dot = 0;
    for (size_t c = lane * N; c < C; c += 32 * N) {
        const auto d = Vec<X, N>::load(dout + c), v = Vec<X, N>::load(x + c), weight = Vec<X, N>::load(w + c);
        for (int i = 0; i < N; i++) {
            const float g = float(d[i]) * float(weight[i]);
            sum += g;
            dot += g * (float(v[i]) - mean);
        }
    }
    const float mean_g = warp_sum(sum) / float(C), mean_gx = warp_sum(dot) * rstd / float(C);
    for (size_t c = lane * N; c < C; c += 32 * N) {
        const auto d = Vec<X, N>::load(dout + c), v = Vec<X, N>::load(x + c), weight = Vec<X, N>::load(w + c);
        auto dw_c = Vec<float, N>::load(dw + c), dbias_c = Vec<float, N>::load(dbias + c);
        Vec<float, N> gradient;
        for (int i = 0; i < N; i++) {
            const float xh = (float(v[i]) - mean) * rstd, g = float(d[i]) * float(weight[i]);
            dw_c[i] += float(d[i]) * xh;
            dbias_c[i] += float(d[i]);
            gradient[i] = rstd * (g - mean_g - xh * mean_gx);
        }
        dw_c.store(dw + c);
        dbias_c.store(dbias + c);
        norm_store<X, N>(dx + c, dresidual ? dresidual + c : nullptr, gradient);
    }
}

// ---- the norm of the residual stream ------------------------------------------------------------------------------------------

template <class X> size_t layernorm_scratch(Cuda<X>, size_t C) { return 2 * norm_blocks * C; }

// One warp computes a token. The kernel moves 2 T C elements, or 4 T C with the sum.
template <class X, int N>
__global__ void layernorm_forward_kernel4(X *out, X *sum, LayerNormStats stats, const X *x, const X *y,
                                          LayerNormWeights<const X> weights, NormShape shape) {
    const size_t C = shape.C;
    const size_t warp = threadIdx.x / 32, t = blockIdx.x * size_t(blockDim.x / 32) + warp;
    if (t >= shape.T) return;
    layernorm_warp<X, N>(out + t * C, sum ? sum + t * C : nullptr, stats.from(t), x + t * C, y ? y + t * C : nullptr, weights,
                         &shared_mem<X>() + warp * C, C, shape.eps);
}

template <class X>
void residual_layernorm_forward(Cuda<X> dev, X *sum, X *out, LayerNormStats stats, const X *x, const X *y,
                                LayerNormWeights<const X> weights, NormShape shape) {
    constexpr int N = Vec<X>::size;
    const size_t T = shape.T, C = shape.C;
    const size_t warps = norm_warps(48 << 10, C * sizeof(X));
    const bool wide = fit_vectors<N>(C, sum, out, x, y, weights.w, weights.bias);
    launch(dev, wide ? layernorm_forward_kernel4<X, N> : layernorm_forward_kernel4<X, 1>, Grid{ceil_div(T, warps)},
           unsigned(warps * 32), warps * C * sizeof(X), out, sum, stats, x, y, weights, shape);
}

template <class X>
void layernorm_forward(Cuda<X> dev, X *out, LayerNormStats stats, const X *x, LayerNormWeights<const X> weights,
                       NormShape shape) {
    X *no_sum = nullptr;
    const X *no_y = nullptr;
    residual_layernorm_forward(dev, no_sum, out, stats, x, no_y, weights, shape);
}

// As in rmsnorm_backward, a group of warps has a row, with V vectors of it in each lane's registers, of which ptxas needs up to 127. The kernel moves
// 4 T C elements (x, dout, dresidual, dx).
template <class X, int N, int V>
__global__ void __launch_bounds__(NormGroups::most * 32, 1)
    layernorm_backward_kernel4(X *dx, LayerNormWeights<float> parts, const X *dresidual, const X *dout, const X *x, const X *w,
                               LayerNormStats stats, NormShape shape, unsigned warps) {
    NormGroup group(warps);
    const size_t T = shape.T, C = shape.C;
    const unsigned groups = blockDim.x / group.lanes;
    const size_t begin = T * blockIdx.x / gridDim.x, end = T * (blockIdx.x + 1) / gridDim.x;
    const NormRows<X, N, V> rows{dresidual, dout, x, end, C, group.lane, group.lanes};
    const auto weight = [&](int k) {  // read from the cache each time, because it would take too many registers
        return rows.column(k) < C ? Vec<X, N>::load(w + rows.column(k)) : Vec<X, N>{};
    };
    Vec<float, N> dw[V] = {}, dbias[V] = {};
    for (size_t t0 = begin; t0 < end; t0 += groups) {
        const size_t t = t0 + group.index;
        const auto row = rows.load(t);
        Vec<X, N> residual[V];
#pragma unroll
        for (int k = 0; k < V; k++) residual[k] = rows.residual(t, k);
        const float m = t < end ? stats.mean[t] : 0, r = t < end ? stats.rstd[t] : 0;
        float sums[2] = {};  // of g and of g * (x - mean)
#pragma unroll
        for (int k = 0; k < V; k++) {
            const auto w_k = weight(k);
            for (int i = 0; i < N; i++) {
                const float g = float(row.d[k][i]) * float(w_k[i]);
                sums[0] += g;
                sums[1] += g * (float(row.x[k][i]) - m);
            }
        }
        group.sum(sums);
        if (t >= end) continue;
        const float mean_g = sums[0] / float(C), mean_gx = sums[1] * r / float(C);
#pragma unroll
        for (int k = 0; k < V; k++) {
            if (rows.column(k) >= C) continue;
            const auto w_k = weight(k);
            Vec<X, N> gradient;
            for (int i = 0; i < N; i++) {
                const float d = float(row.d[k][i]), xh = (float(row.x[k][i]) - m) * r, g = d * float(w_k[i]);
                dw[k][i] += d * xh;
                dbias[k][i] += d;
                gradient[i] = r * (g - mean_g - xh * mean_gx) + float(residual[k][i]);
            }
            gradient.store(dx + t * C + rows.column(k));
        }
    }
    float *sums_of_dw = norm_rows<float>(), *sums_of_dbias = sums_of_dw + groups * C;  // (groups, C) each
#pragma unroll
    for (int k = 0; k < V; k++) {
        const size_t at = group.index * C + rows.column(k);
        if (rows.column(k) < C) dw[k].store(sums_of_dw + at), dbias[k].store(sums_of_dbias + at);
    }
    norm_sum_parts(parts.w + blockIdx.x * C, sums_of_dw, groups, C);
    norm_sum_parts(parts.bias + blockIdx.x * C, sums_of_dbias, groups, C);
}

// The same for rows that do not fit the registers, or are not aligned to vectors: each warp has its own rows, and its sums in shared memory.
template <class X, int N>
__global__ void layernorm_backward_kernel3(X *dx, LayerNormWeights<float> parts, const X *dresidual, const X *dout, const X *x,
                                           const X *w, LayerNormStats stats, NormShape shape) {
    const size_t T = shape.T, C = shape.C;
    const size_t warps = blockDim.x / 32, warp = threadIdx.x / 32;
    const size_t begin = T * blockIdx.x / gridDim.x, end = T * (blockIdx.x + 1) / gridDim.x;
    float *dw = &shared_mem<float>(), *dbias = dw + warps * C;  // (warps, C) each
    norm_clear(dw, 2 * warps * C);
    for (size_t t = begin + warp; t < end; t += warps)
        layernorm_backward_warp<X, N>(dx + t * C, dw + warp * C, dbias + warp * C, dresidual ? dresidual + t * C : nullptr,
                                      dout + t * C, x + t * C, w, stats.mean[t], stats.rstd[t], C);
    norm_sum_parts(parts.w + blockIdx.x * C, dw, warps, C);
    norm_sum_parts(parts.bias + blockIdx.x * C, dbias, warps, C);
}

template <class X>
void layernorm_backward_any(Cuda<X> dev, X *dx, LayerNormWeights<float> dweights, float *scratch, const X *dresidual,
                            const X *dout, const X *x, const X *w, LayerNormStats stats, NormShape shape) {
    constexpr int N = Vec<X>::size;
    const size_t T = shape.T, C = shape.C;
    const size_t bytes = 2 * C * sizeof(float), warps = norm_warps(96 << 10, bytes);
    const size_t blocks = std::min(norm_blocks, ceil_div(T, warps));
    const bool wide = fit_vectors<N>(C, dx, dresidual, dout, x, w);
    launch(dev, wide ? layernorm_backward_kernel3<X, N> : layernorm_backward_kernel3<X, 1>, Grid{blocks}, unsigned(warps * 32),
           warps * bytes, dx, LayerNormWeights<float>{scratch, scratch + blocks * C}, dresidual, dout, x, w, stats, shape);
    if (dweights.w) norm_add_runs(dev, dweights.w, dweights.bias, scratch, blocks, C);
}

template <class X>
void layernorm_backward(Cuda<X> dev, X *dx, LayerNormWeights<float> dweights, float *scratch, const X *dresidual, const X *dout,
                        const X *x, const X *w, LayerNormStats stats, NormShape shape) {
    constexpr int N = Vec<X>::size, V = 2;
    const size_t T = shape.T, C = shape.C;
    if (!fit_vectors<N>(C, dx, dresidual, dout, x, w) || C > size_t(NormGroups::most * 32 * N * V))
        return layernorm_backward_any(dev, dx, dweights, scratch, dresidual, dout, x, w, stats, shape);
    const NormGroups groups(C, N, V);
    const size_t blocks = std::min(norm_blocks, ceil_div(T, groups.groups));
    launch(dev, layernorm_backward_kernel4<X, N, V>, Grid{blocks}, groups.threads(),
           sizeof(NormShared) + 2 * groups.groups * C * sizeof(float), dx, LayerNormWeights<float>{scratch, scratch + blocks * C},
           dresidual, dout, x, w, stats, shape, groups.warps);
    if (dweights.w) norm_add_runs(dev, dweights.w, dweights.bias, scratch, blocks, C);
}
}  // namespace CUDA_BACKEND
