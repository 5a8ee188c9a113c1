// layernorm_forward: out[t,c] = (x[t,c] - mean[t]) * rstd[t] * w[c] + bias[c] with rstd[t] = 1 / sqrt(variance_c x[t,c] + eps)
//                                                                                                 Contract: llmc/ops/layernorm.h
// Timed with T 8192, C 1600 in bf16. Read the ladder of rmsnorm_forward first; here the variance also depends on the mean, which is
// known only after a pass over the row. The op reads at least x and writes out: 2 T C elements.
#include "../../llmc/ops/layernorm.cuh"
#include "../../test/reference_layernorm.h"
#include "common.h"

namespace CUDA_BACKEND::workshop {

constexpr unsigned row_warps = 4;  // rows per block, one for each warp

// The last pass over a row: writes out, mean and rstd.
template <class X>
__device__ void layernorm_apply(X *out, float *mean, float *rstd, const X *x, const X *w, const X *bias, float m, float variance,
                                size_t C, float eps) {
    const size_t lane = threadIdx.x % 32;
    const float r = rsqrtf(variance + eps);
    for (size_t c = lane; c < C; c += 32) out[c] = (float(x[c]) - m) * r * float(w[c]) + float(bias[c]);
    if (lane == 0) *mean = m, *rstd = r;
}

// ---- version 1: the formula, read three times ----------------------------------------------------------------------------------
//
// A warp reads its row for the mean, for the variance and for the output. The second and third read hit L1 or L2 if the row is still
// there. 4 T C elements pass through the SM, and the warp waits for the shuffles at the end of each sum.

template <class X>
__global__ void layernorm_forward_kernel1(X *out, float *mean, float *rstd, const X *x, const X *w, const X *bias, size_t T,
                                          size_t C, float eps) {
    const size_t t = blockIdx.x * size_t(row_warps) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (t >= T) return;
    float sum = 0, squares = 0;
    for (size_t c = lane; c < C; c += 32) sum += float(x[t * C + c]);
    const float m = warp_sum(sum) / float(C);
    for (size_t c = lane; c < C; c += 32) squares += (float(x[t * C + c]) - m) * (float(x[t * C + c]) - m);
    layernorm_apply(out + t * C, mean + t, rstd + t, x + t * C, w, bias, m, warp_sum(squares) / float(C), C, eps);
}

template <class X>
void layernorm_forward1(Cuda<X> dev, X *out, LayerNormStats stats, const X *x, LayerNormWeights<const X> weights,
                        NormShape shape) {
    launch(dev, layernorm_forward_kernel1<X>, Grid{ceil_div(shape.T, row_warps)}, row_warps * 32, 0, out, stats.mean, stats.rstd,
           x, weights.w, weights.bias, shape.T, shape.C, shape.eps);
}

// ---- version 2: both sums in one reading ---------------------------------------------------------------------------------------
//
// variance = mean(x^2) - mean(x)^2 does not need the mean first, so two reads suffice. But if the mean is far from zero, this is the
// difference of two large numbers: at a mean of 100 standard deviations, x^2 has a rounding error of 2^-24 * 10^4, a thousandth of
// the variance. Rows around zero do not show the error; the residual stream of a real model has channels that do.

template <class X>
__global__ void layernorm_forward_kernel2(X *out, float *mean, float *rstd, const X *x, const X *w, const X *bias, size_t T,
                                          size_t C, float eps) {
    const size_t t = blockIdx.x * size_t(row_warps) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (t >= T) return;
    float sum = 0, squares = 0;
    for (size_t c = lane; c < C; c += 32) {
        const float v = x[t * C + c];
        sum += v;
        squares += v * v;
    }
    const float m = warp_sum(sum) / float(C), variance = fmaxf(warp_sum(squares) / float(C) - m * m, 0.0f);
    layernorm_apply(out + t * C, mean + t, rstd + t, x + t * C, w, bias, m, variance, C, eps);
}

template <class X>
void layernorm_forward2(Cuda<X> dev, X *out, LayerNormStats stats, const X *x, LayerNormWeights<const X> weights,
                        NormShape shape) {
    launch(dev, layernorm_forward_kernel2<X>, Grid{ceil_div(shape.T, row_warps)}, row_warps * 32, 0, out, stats.mean, stats.rstd,
           x, weights.w, weights.bias, shape.T, shape.C, shape.eps);
}

// ---- version 3: Welford's running mean -----------------------------------------------------------------------------------------
//
// This version needs one read without the cancellation. Each lane keeps the count, the mean and the sum of squared differences of its
// elements, and the formula of Chan, Golub and LeVeque (1983) merges the lanes. The price is a division per element that depends on
// the previous one, so latency is the limit, not bandwidth. With the read for the output there are still two reads.

struct Moments {
    float n = 0, mean = 0, squares = 0;  // sum of (v - mean)^2

    __device__ void merge(Moments other) {
        if (other.n == 0) return;
        const float both = n + other.n, d = other.mean - mean;
        mean += d * other.n / both;
        squares += other.squares + d * d * n * other.n / both;
        n = both;
    }
};

template <class X>
__global__ void layernorm_forward_kernel3(X *out, float *mean, float *rstd, const X *x, const X *w, const X *bias, size_t T,
                                          size_t C, float eps) {
    const size_t t = blockIdx.x * size_t(row_warps) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (t >= T) return;
    Moments row;
    for (size_t c = lane; c < C; c += 32) row.merge({1, x[t * C + c], 0});
    for (unsigned distance = 16; distance > 0; distance /= 2)  // lane 0 gets the total
        row.merge({__shfl_down_sync(all_lanes, row.n, distance), __shfl_down_sync(all_lanes, row.mean, distance),
                   __shfl_down_sync(all_lanes, row.squares, distance)});
    const float m = __shfl_sync(all_lanes, row.mean, 0), variance = __shfl_sync(all_lanes, row.squares, 0) / float(C);
    layernorm_apply(out + t * C, mean + t, rstd + t, x + t * C, w, bias, m, variance, C, eps);
}

template <class X>
void layernorm_forward3(Cuda<X> dev, X *out, LayerNormStats stats, const X *x, LayerNormWeights<const X> weights,
                        NormShape shape) {
    launch(dev, layernorm_forward_kernel3<X>, Grid{ceil_div(shape.T, row_warps)}, row_warps * 32, 0, out, stats.mean, stats.rstd,
           x, weights.w, weights.bias, shape.T, shape.C, shape.eps);
}

// ---- version 4: llmc/ops/layernorm.cuh -----------------------------------------------------------------------------------------
//
// Version 1 with the row in shared memory: one pass over device memory with 16-byte loads, and two over shared memory, where a lane reads
// only its own stores. Two passes there cost less than Welford's divisions, and the second one also measures the rounding error of the
// first one's mean. The same kernel adds the residual. The memory bandwidth is the limit.

template <class X> struct LayernormForward {
    static constexpr double eps = 0.125;  // large enough to reveal a kernel that omits it
    size_t T, C;
    std::vector<X> x, w, bias;
    DeviceArray<X> d_x, d_w, d_bias, out;
    DeviceArray<float> mean, rstd;

    explicit LayernormForward(const Sizes &s)
        : T(s[0]),
          C(s[1]),
          x(random_values<X>(T * C, 1)),
          w(random_values<X>(C, 2, 0.1, 1)),
          bias(random_values<X>(C, 3)),
          d_x(x),
          d_w(w),
          d_bias(bias),
          out(T * C),
          mean(T),
          rstd(T) {}

    static constexpr void (*versions[])(Cuda<X>, X *out, LayerNormStats stats, const X *x, LayerNormWeights<const X> weights,
                                        NormShape shape) = {layernorm_forward1, layernorm_forward2, layernorm_forward3,
                                                            layernorm_forward};

    void run(Cuda<X> dev, size_t version) {
        versions[version - 1](dev, out.data(), {mean.data(), rstd.data()}, d_x.data(), {d_w.data(), d_bias.data()},
                              {T, C, float(eps)});
    }

    void check(Check &check) const {
        const LayerNormRows want = layernorm_reference(widen(x), widen(w), widen(bias), T, C, eps);
        check("out", out.values(), want.out, layernorm_error<X>(want));
        check("mean", mean.values(), want.mean, layernorm_mean_error(want));
        check("rstd", rstd.values(), want.rstd, layernorm_rstd_error(want));
    }

    Work work() const { return {.bytes = 2.0 * double(T) * double(C) * sizeof(X)}; }
};

static const Ladder<LayernormForward, float, bf16> ladder(
    {.name = "layernorm_forward",
     .sizes = {{"T", "tokens", 8192, 512}, {"C", "channels", 1600, 1600}},
     .checked = {{1, 8}, {7, 77}, {130, 24}, {5, 768}},
     .ideas = {"a warp per row, read three times", "the variance as a difference of means: x is read twice; cancellation",
               "Welford's running mean, merged by shuffles", "shipped: the row is kept in shared memory, x is read once"}});
}  // namespace CUDA_BACKEND::workshop
