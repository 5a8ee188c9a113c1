// layernorm_backward: with g = dout * w and xh = (x - mean) * rstd                               Contract: llmc/ops/layernorm.h
//     dx = dresidual + rstd * (g - mean_c(g) - xh * mean_c(g * xh))          dw += sum_t dout * xh          dbias += sum_t dout
//
// Timed with T 8192, C 1600 in bf16. Read the ladder of rmsnorm_backward first; this op has two sums over a row instead of one, and
// two over a column. It reads at least x, dout and dresidual and writes dx: 4 T C elements.
#include "../../llmc/ops/layernorm.cuh"
#include "../../test/reference_layernorm.h"
#include "common.h"

namespace CUDA_BACKEND::workshop {

// Computes dx of a row with one warp. Calls also_sum(c, dout, xh) for every element before dx overwrites it.
template <class X, class AlsoSum>
__device__ void layernorm_dx(X *dx, const X *dresidual, const X *dout, const X *x, const X *w, float mean, float rstd, size_t C,
                             AlsoSum also_sum) {
    const size_t lane = threadIdx.x % 32;
    float sum = 0, dot = 0;
    for (size_t c = lane; c < C; c += 32) {
        const float g = float(dout[c]) * float(w[c]);
        sum += g;
        dot += g * (float(x[c]) - mean);
    }
    const float mean_g = warp_sum(sum) / float(C), mean_gx = warp_sum(dot) * rstd / float(C);
    for (size_t c = lane; c < C; c += 32) {
        const float d = dout[c], xh = (float(x[c]) - mean) * rstd;
        also_sum(c, d, xh);
        dx[c] = float(dresidual[c]) + rstd * (d * float(w[c]) - mean_g - xh * mean_gx);
    }
}

// ---- version 1: a warp per row for dx, a thread per column for dw and dbias ----------------------------------------------------
//
// Each direction has its own kernel. C threads are too few to keep the memory busy, and x and dout are read three times: 8 T C elements.

constexpr unsigned row_warps = 4;  // rows per block

template <class X>
__global__ void layernorm_dx_kernel1(X *dx, const X *dresidual, const X *dout, const X *x, const X *w, const float *mean,
                                     const float *rstd, size_t T, size_t C) {
    const size_t t = blockIdx.x * size_t(row_warps) + threadIdx.x / 32;
    if (t >= T) return;
    layernorm_dx(dx + t * C, dresidual + t * C, dout + t * C, x + t * C, w, mean[t], rstd[t], C, [](size_t, float, float) {});
}

template <class X>
__global__ void layernorm_dw_kernel1(float *dw, float *dbias, const X *dout, const X *x, const float *mean, const float *rstd,
                                     size_t T, size_t C) {
    const size_t c = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (c >= C) return;
    float sum = 0, sum_xh = 0;
    for (size_t t = 0; t < T; t++) {
        const float d = dout[t * C + c];
        sum += d;
        sum_xh += d * (float(x[t * C + c]) - mean[t]) * rstd[t];
    }
    dw[c] += sum_xh;
    dbias[c] += sum;
}

template <class X>
void layernorm_backward1(Cuda<X> dev, X *dx, LayerNormWeights<float> dweights, float *, const X *dresidual, const X *dout,
                         const X *x, const X *w, LayerNormStats stats, NormShape shape) {
    const size_t T = shape.T, C = shape.C;
    launch(dev, layernorm_dw_kernel1<X>, Grid{ceil_div(C, 128)}, 128, 0, dweights.w, dweights.bias, dout, x, stats.mean,
           stats.rstd, T,
           C);  // before dx
    launch(dev, layernorm_dx_kernel1<X>, Grid{ceil_div(T, row_warps)}, row_warps * 32, 0, dx, dresidual, dout, x, w, stats.mean,
           stats.rstd, T, C);
}

// ---- version 2: everything in one kernel ---------------------------------------------------------------------------------------
//
// A warp loads a row for dx, and adds the row's terms of dw and dbias to its own sums in shared memory. With 2 C floats per warp, half
// as many warps fit as in rmsnorm_backward. x and dout are read once from memory and once from cache. Loads have 2 bytes.

template <class X>
__global__ void layernorm_backward_kernel2(X *dx, float *dw_parts, float *dbias_parts, const X *dresidual, const X *dout,
                                           const X *x, const X *w, const float *mean, const float *rstd, size_t T, size_t C) {
    const size_t warps = blockDim.x / 32, warp = threadIdx.x / 32;
    const size_t begin = T * blockIdx.x / gridDim.x, end = T * (blockIdx.x + 1) / gridDim.x;
    float *dw = &shared_mem<float>(), *dbias = dw + warps * C;  // (warps, C) each
    norm_clear(dw, 2 * warps * C);
    for (size_t t = begin + warp; t < end; t += warps)
        layernorm_dx(dx + t * C, dresidual + t * C, dout + t * C, x + t * C, w, mean[t], rstd[t], C,
                     [&](size_t c, float d, float xh) {
                         dw[warp * C + c] += d * xh;
                         dbias[warp * C + c] += d;
                     });
    norm_sum_parts(dw_parts + blockIdx.x * C, dw, warps, C);
    norm_sum_parts(dbias_parts + blockIdx.x * C, dbias, warps, C);
}

template <class X>
void layernorm_backward2(Cuda<X> dev, X *dx, LayerNormWeights<float> dweights, float *scratch, const X *dresidual, const X *dout,
                         const X *x, const X *w, LayerNormStats stats, NormShape shape) {
    const size_t T = shape.T, C = shape.C;
    const size_t bytes = 2 * C * sizeof(float), warps = norm_warps(96 << 10, bytes);
    const size_t blocks = std::min(norm_blocks, ceil_div(T, warps));
    launch(dev, layernorm_backward_kernel2<X>, Grid{blocks}, unsigned(warps * 32), warps * bytes, dx, scratch,
           scratch + blocks * C, dresidual, dout, x, w, stats.mean, stats.rstd, T, C);
    norm_add_runs(dev, dweights.w, dweights.bias, scratch, blocks, C);
}

// ---- version 3: 16 bytes per load ----------------------------------------------------------------------------------------------
//
// Version 2 with 16-byte loads and stores, also for the sums in shared memory. With 2 C floats per warp an SM runs 14 warps, too few for the
// memory bandwidth. This version is shipped for rows of more than 8192 elements: layernorm_backward_any in llmc/ops/layernorm.cuh.

template <class X>
void layernorm_backward3(Cuda<X> dev, X *dx, LayerNormWeights<float> dweights, float *scratch, const X *dresidual, const X *dout,
                         const X *x, const X *w, LayerNormStats stats, NormShape shape) {
    layernorm_backward_any(dev, dx, dweights, scratch, dresidual, dout, x, w, stats, shape);
}

// ---- version 4: llmc/ops/layernorm.cuh -----------------------------------------------------------------------------------------
//
// As in rmsnorm_backward 6, several warps share a row. A lane keeps its elements of the row and its sums of dw and dbias in registers. Both sums over
// a row need one barrier. The memory bandwidth is the limit.

template <class X>
void layernorm_backward4(Cuda<X> dev, X *dx, LayerNormWeights<float> dweights, float *scratch, const X *dresidual, const X *dout,
                         const X *x, const X *w, LayerNormStats stats, NormShape shape) {
    layernorm_backward(dev, dx, dweights, scratch, dresidual, dout, x, w, stats, shape);
}

template <class X> struct LayernormBackward {
    static constexpr double eps = 0.125;
    size_t T, C;
    std::vector<X> x, w, dout, dresidual;
    LayerNormRows rows;
    DeviceArray<X> d_x, d_w, d_dout, d_dresidual, dx;
    DeviceArray<float> mean, rstd, dw, dbias, scratch;

    explicit LayernormBackward(const Sizes &s)
        : T(s[0]),
          C(s[1]),
          x(random_values<X>(T * C, 1)),
          w(random_values<X>(C, 2, 0.1, 1)),
          dout(random_values<X>(T * C, 3)),
          dresidual(random_values<X>(T * C, 4)),
          rows(layernorm_reference(widen(x), widen(w), std::vector<double>(C), T, C, eps)),
          d_x(x),
          d_w(w),
          d_dout(dout),
          d_dresidual(dresidual),
          dx(T * C),
          mean(std::vector<float>(rows.mean.begin(), rows.mean.end())),
          rstd(std::vector<float>(rows.rstd.begin(), rows.rstd.end())),
          dw(std::vector<float>(C, 3)),
          dbias(std::vector<float>(C, 3)),
          scratch(layernorm_scratch(Cuda<X>{}, C)) {}

    static constexpr void (*versions[])(Cuda<X>, X *dx, LayerNormWeights<float> dweights, float *scratch, const X *dresidual,
                                        const X *dout, const X *x, const X *w, LayerNormStats stats, NormShape shape) = {
        layernorm_backward1, layernorm_backward2, layernorm_backward3, layernorm_backward4};

    void run(Cuda<X> dev, size_t version) {
        versions[version - 1](dev, dx.data(), {dw.data(), dbias.data()}, scratch.data(), d_dresidual.data(), d_dout.data(),
                              d_x.data(), d_w.data(), {mean.data(), rstd.data()}, {T, C, float(eps)});
    }

    void check(Check &check) const {
        LayerNormGradient want = layernorm_backward_reference(widen(dout), widen(x), widen(w), T, C, eps);
        for (size_t i = 0; i < T * C; i++) want.dx[i] += double(float(dresidual[i]));
        check("dx", dx.values(), want.dx, layernorm_dx_error<X>(C, rows, widen(dout), widen(w), want.dx));
        const double dw_error = layernorm_dw_error(T, rows, want), dbias_error = layernorm_dbias_error(T, want);
        for (double &d : want.dw) d += 3;
        for (double &d : want.dbias) d += 3;
        check("dw", dw.values(), want.dw, dw_error + 2 * unit_roundoff<float> * largest(want.dw));
        check("dbias", dbias.values(), want.dbias, dbias_error + 2 * unit_roundoff<float> * largest(want.dbias));
    }

    Work work() const { return {.bytes = 4.0 * double(T) * double(C) * sizeof(X)}; }
};

static const Ladder<LayernormBackward, float, bf16> ladder(
    {.name = "layernorm_backward",
     .sizes = {{"T", "tokens", 8192, 512}, {"C", "channels", 1600, 1600}},
     .checked = {{1, 8}, {7, 77}, {130, 24}, {5, 768}},
     .ideas = {"a warp per row for dx, a thread per column for dw and dbias", "one kernel, dw and dbias in shared memory",
               "16 bytes per load", "shipped: several warps per row"}});
}  // namespace CUDA_BACKEND::workshop
