// gelu_backward: dx = dout * (P(x) + x * P'(x)), here with tanh: P = (1 + tanh(u)) / 2                 Contract: llmc/ops/gelu.h
//     u = sqrt(2 / pi) * (x + 0.044715 x^3)          P' = (1 - tanh(u)^2) / 2 * u'
//
// Timed with n = 8192 * 6400 in bf16. Elementwise: x and dout in and dx out, 3 n elements.
#include "../../llmc/ops/gelu.cuh"
#include "../../test/reference_gelu.h"
#include "common.h"

namespace CUDA_BACKEND::workshop {

// ---- version 1: the formula ----------------------------------------------------------------------------------------------------
//
// tanhf has two branches, a polynomial for small arguments and an exp for others; if the lanes of a warp disagree, the warp runs both.
// For negative x, 1 + tanh cancels: its absolute error is a rounding of 1, even if the result is tiny.

template <class X> __global__ void gelu_backward_kernel1(X *dx, const X *dout, const X *x, size_t n) {
    const size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (i >= n) return;
    const float v = x[i], tanh_u = tanhf(0.797884561f * (v + 0.044715f * v * v * v));
    const float slope = 0.5f * (1.0f - tanh_u * tanh_u) * 0.797884561f * (1.0f + 3 * 0.044715f * v * v);
    dx[i] = float(dout[i]) * (0.5f * (1.0f + tanh_u) + v * slope);
}

template <class X> void gelu_backward1(Cuda<X> dev, X *dx, const X *dout, const X *x, size_t n) {
    launch(dev, gelu_backward_kernel1<X>, Grid{ceil_div(n, 256)}, 256, 0, dx, dout, x, n);
}

// ---- version 2: P as a sigmoid -------------------------------------------------------------------------------------------------
//
// (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)): P costs one exp and one division, and P' = P (1 - P) 2 u' three more products. There is no
// branch, and no cancellation for negative x. Loads still have 2 bytes.

template <class X> __global__ void gelu_backward_kernel2(X *dx, const X *dout, const X *x, size_t n) {
    const size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (i >= n) return;
    const float v = x[i];
    const GeluFactor f = gelu_factor<Gelu::tanh>(v, expf(gelu_exponent<Gelu::tanh>(v)));
    dx[i] = float(dout[i]) * (f.P + v * f.slope);
}

template <class X> void gelu_backward2(Cuda<X> dev, X *dx, const X *dout, const X *x, size_t n) {
    launch(dev, gelu_backward_kernel2<X>, Grid{ceil_div(n, 256)}, 256, 0, dx, dout, x, n);
}

// ---- version 3: llmc/ops/gelu.cuh ----------------------------------------------------------------------------------------------
//
// Loads have 16 bytes. The memory bandwidth is the limit.

template <class X> void gelu_backward3(Cuda<X> dev, X *dx, const X *dout, const X *x, size_t n) {
    gelu_backward(dev, dx, dout, x, n, Gelu::tanh);
}

template <class X> struct GeluBackward {
    size_t n;
    std::vector<X> x, dout;
    DeviceArray<X> d_x, d_dout, dx;

    explicit GeluBackward(const Sizes &s)
        : n(s[0]), x(random_values<X>(n, 1, 2)), dout(random_values<X>(n, 2)), d_x(x), d_dout(dout), dx(n) {}

    static constexpr void (*versions[])(Cuda<X>, X *dx, const X *dout, const X *x, size_t n) = {gelu_backward1, gelu_backward2,
                                                                                                gelu_backward3};

    void run(Cuda<X> dev, size_t version) { versions[version - 1](dev, dx.data(), d_dout.data(), d_x.data(), n); }

    void check(Check &check) const {
        const auto v = widen(x), d = widen(dout);
        const double at = largest(v), cancelled = unit_roundoff<float> * largest(d) * (1 + at * 1.6 * (1 + 0.135 * at * at));
        check("dx", dx.values(), gelu_backward_reference<Gelu::tanh>(d, v),  // version 1: tanh near 1 is off by a rounding or two
              gelu_backward_error<Gelu::tanh, X>(d, v) + 2 * cancelled);
    }

    Work work() const { return {.bytes = 3.0 * double(n) * sizeof(X)}; }
};

static const Ladder<GeluBackward, float, bf16> ladder({.name = "gelu_backward",
                                                       .sizes = {{"n", "elements", 8192 * 6400, 128 * 6400}},
                                                       .checked = {{1}, {8}, {1003}, {2400}},
                                                       .ideas = {"tanhf", "P as a sigmoid, no branch",
                                                                 "shipped: 16 bytes per load"}});
}  // namespace CUDA_BACKEND::workshop
