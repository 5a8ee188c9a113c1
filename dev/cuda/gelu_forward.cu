// gelu_forward: out = x * P(x) with P(x) = (1 + erf(x / sqrt 2)) / 2                                   Contract: llmc/ops/gelu.h
//
// Timed with n = 8192 * 6400 in bf16. The op moves 2 n elements, in bf16 4 bytes per output. With so few bytes arithmetic matters: a GPU
// that moves 3 TB/s can do 90 float FLOP per output in this time, and an SM computes 16 exponentials per cycle.
#include "../../llmc/ops/gelu.cuh"
#include "../../test/reference_gelu.h"
#include "common.h"

namespace CUDA_BACKEND::workshop {

// ---- version 1: the formula ----------------------------------------------------------------------------------------------------
//
// erff has two branches, a polynomial for small arguments and one inside an exp for others; if the lanes of a warp disagree, the warp
// runs both. For negative x, 1 + erf cancels: its absolute error is a rounding of 1, even if the result is tiny.

template <class X> __global__ void gelu_forward_kernel1(X *out, const X *x, size_t n) {
    const size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (i >= n) return;
    const float v = x[i];
    out[i] = v * 0.5f * (1.0f + erff(v * 0.707106781f));
}

template <class X> void gelu_forward1(Cuda<X> dev, X *out, const X *x, size_t n) {
    launch(dev, gelu_forward_kernel1<X>, Grid{ceil_div(n, 256)}, 256, 0, out, x, n);
}

// ---- version 2: a polynomial times exp, for all x ------------------------------------------------------------------------------
//
// gelu_factor (llmc/ops/gelu.h) has one exp, one division, 9 multiply-adds and a select. It has no branch, and the tail stays accurate.
// The backward pass computes P' from the same exp. Loads still have 2 bytes.

template <class X> __global__ void gelu_forward_kernel2(X *out, const X *x, size_t n) {
    const size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (i >= n) return;
    const float v = x[i];
    out[i] = v * gelu_factor<Gelu::erf>(v, expf(gelu_exponent<Gelu::erf>(v))).P;
}

template <class X> void gelu_forward2(Cuda<X> dev, X *out, const X *x, size_t n) {
    launch(dev, gelu_forward_kernel2<X>, Grid{ceil_div(n, 256)}, 256, 0, out, x, n);
}

// ---- version 3: llmc/ops/gelu.cuh ----------------------------------------------------------------------------------------------
//
// Loads have 16 bytes, so there are an eighth as many, and a thread overlaps 8 independent exponentials.

template <class X> void gelu_forward3(Cuda<X> dev, X *out, const X *x, size_t n) { gelu_forward(dev, out, x, n, Gelu::erf); }

template <class X> struct GeluForward {
    size_t n;
    std::vector<X> x;
    DeviceArray<X> d_x, out;

    explicit GeluForward(const Sizes &s) : n(s[0]), x(random_values<X>(n, 1, 2)), d_x(x), out(n) {}

    static constexpr void (*versions[])(Cuda<X>, X *out, const X *x, size_t n) = {gelu_forward1, gelu_forward2, gelu_forward3};

    void run(Cuda<X> dev, size_t version) { versions[version - 1](dev, out.data(), d_x.data(), n); }

    void check(Check &check) const {
        const auto v = widen(x);
        const double cancelled = unit_roundoff<float> * largest(v);  // version 1: (1 + erf) / 2 is off by a rounding of 1
        check("out", out.values(), gelu_reference<Gelu::erf>(v), gelu_error<Gelu::erf, X>(v) + cancelled);
    }

    Work work() const { return {.bytes = 2.0 * double(n) * sizeof(X)}; }
};

static const Ladder<GeluForward, float, bf16> ladder({.name = "gelu_forward",
                                                      .sizes = {{"n", "elements", 8192 * 6400, 128 * 6400}},
                                                      .checked = {{1}, {8}, {1003}, {2400}},
                                                      .ideas = {"erff", "a polynomial times exp, no branch",
                                                                "shipped: 16 bytes per load"}});
}  // namespace CUDA_BACKEND::workshop
