// gelu_forward: out = x * P(x) with P(x) = (1 + erf(x / sqrt 2)) / 2                                   Contract: llmc/ops/gelu.h
//
// Timed with n = 8192 * 6400 in bf16. Elementwise: 2 n elements moved, 4 bytes for each in bf16. With so few the arithmetic counts: a
// GPU that moves 3 TB/s has 90 FLOP of float for each of these elements, and an SM's unit for exp takes 16 a cycle.
#include "../../llmc/ops/gelu.cuh"
#include "../../test/reference_gelu.h"
#include "common.h"

namespace CUDA_BACKEND::workshop {

// ---- version 1: the formula ----------------------------------------------------------------------------------------------------
//
// erff has two branches, a polynomial for small arguments and one inside an exp for others: a warp whose lanes disagree takes both.
// And where x is negative, 1 + erf cancels: the difference is off by a rounding of 1, however small it is.

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
// gelu_factor (llmc/ops/gelu.h): one exp, one division, 9 multiply-adds and a select. No branch, and the tail keeps its digits. The
// backward pass gets P' from the same exp. Loads are still of 2 bytes.

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
// 16 bytes per load: an eighth of the loads, and 8 independent exps for a thread to overlap.

template <class X> struct GeluForward {
    size_t n;
    std::vector<X> x;
    DeviceArray<X> d_x, out;

    explicit GeluForward(const Sizes &s) : n(s[0]), x(random_values<X>(n, 1, 2)), d_x(x), out(n) {}

    static constexpr void (*versions[])(Cuda<X>, X *out, const X *x, size_t n) = {gelu_forward1, gelu_forward2,
                                                                                  gelu_forward<Gelu::erf>};

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
