// swiglu_forward: out[t,f] = gate * s * up with s = 1 / (1 + exp(-gate)), gate = gate_up[t,f], up = gate_up[t,F+f]
//                                                                                                    Contract: llmc/ops/swiglu.h
// Timed with T 8192, F 14336 in bf16. The op moves 3 T F elements, and computes an exp and a division for each output.
#include "../../llmc/ops/swiglu.cuh"
#include "../../test/reference_swiglu.h"
#include "common.h"

namespace CUDA_BACKEND::workshop {

__device__ inline float silu(float gate) { return gate / (1.0f + expf(-gate)); }

// ---- version 1: two elementwise ops --------------------------------------------------------------------------------------------
//
// A composition of elementwise ops: silu(gate) is stored in memory, then multiplied by up. It is stored in float to avoid a second
// rounding. In bf16 the kernels move 14 bytes per element instead of 6, and these bytes determine the time.

template <class X> __global__ void swiglu_silu_kernel1(float *act, const X *gate_up, size_t T, size_t F) {
    const size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (i < T * F) act[i] = silu(gate_up[i / F * 2 * F + i % F]);
}
template <class X> __global__ void swiglu_times_up_kernel1(X *out, const float *act, const X *gate_up, size_t T, size_t F) {
    const size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (i < T * F) out[i] = act[i] * float(gate_up[i / F * 2 * F + F + i % F]);
}

template <class X> void swiglu_forward1(Cuda<X> dev, X *out, float *scratch, const X *gate_up, size_t T, size_t F) {
    launch(dev, swiglu_silu_kernel1<X>, Grid{ceil_div(T * F, 256)}, 256, 0, scratch, gate_up, T, F);
    launch(dev, swiglu_times_up_kernel1<X>, Grid{ceil_div(T * F, 256)}, 256, 0, out, scratch, gate_up, T, F);
}

// ---- version 2: one kernel -----------------------------------------------------------------------------------------------------
//
// The fused kernel stores no intermediate result and moves 3 T F elements. But each thread finds its row with a 64-bit division, which
// takes dozens of instructions for an element of 2 bytes.

template <class X> __global__ void swiglu_forward_kernel2(X *out, const X *gate_up, size_t T, size_t F) {
    const size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (i >= T * F) return;
    const X *gate = gate_up + i / F * 2 * F + i % F;
    out[i] = silu(gate[0]) * float(gate[F]);
}

template <class X> void swiglu_forward2(Cuda<X> dev, X *out, float *, const X *gate_up, size_t T, size_t F) {
    launch(dev, swiglu_forward_kernel2<X>, Grid{ceil_div(T * F, 256)}, 256, 0, out, gate_up, T, F);
}

// ---- version 3: the grid has rows ----------------------------------------------------------------------------------------------
//
// The block's number is the row, so there is no division. A load has 2 bytes, 64 per warp, and an SM limits its loads in flight.

template <class X> __global__ void swiglu_forward_kernel3(X *out, const X *gate_up, size_t F) {
    const size_t t = blockIdx.x, f = blockIdx.y * size_t(blockDim.x) + threadIdx.x;
    if (f >= F) return;
    out[t * F + f] = silu(gate_up[t * 2 * F + f]) * float(gate_up[t * 2 * F + F + f]);
}

template <class X> void swiglu_forward3(Cuda<X> dev, X *out, float *, const X *gate_up, size_t T, size_t F) {
    launch(dev, swiglu_forward_kernel3<X>, Grid{T, ceil_div(F, 256)}, 256, 0, out, gate_up, F);
}

// ---- version 4: llmc/ops/swiglu.cuh --------------------------------------------------------------------------------------------
//
// Each thread loads 16 bytes of gates and 16 of ups: an eighth of the loads. The memory bandwidth is the limit.

template <class X> void swiglu_forward4(Cuda<X> dev, X *out, float *, const X *gate_up, size_t T, size_t F) {
    swiglu_forward(dev, out, gate_up, T, F, Gate::silu);
}

template <class X> struct SwigluForward {
    size_t T, F;
    std::vector<X> gate_up;
    DeviceArray<X> d_gate_up, out;
    DeviceArray<float> scratch;

    explicit SwigluForward(const Sizes &s)
        : T(s[0]), F(s[1]), gate_up(random_values<X>(T * 2 * F, 1, 2)), d_gate_up(gate_up), out(T * F), scratch(T * F) {}

    static constexpr void (*versions[])(Cuda<X>, X *out, float *scratch, const X *gate_up, size_t T, size_t F) = {
        swiglu_forward1, swiglu_forward2, swiglu_forward3, swiglu_forward4};

    void run(Cuda<X> dev, size_t version) { versions[version - 1](dev, out.data(), scratch.data(), d_gate_up.data(), T, F); }

    void check(Check &check) const {
        const std::vector<double> want = swiglu_reference(widen(gate_up), T, F);
        check("out", out.values(), want, swiglu_error<X>(want, widen(gate_up), T, F));
    }

    Work work() const { return {.bytes = 3.0 * double(T * F) * sizeof(X)}; }
};

static const Ladder<SwigluForward, float, bf16> ladder({.name = "swiglu_forward",
                                                        .sizes = {{"T", "tokens", 8192, 64}, {"F", "channels", 14336, 14336}},
                                                        .checked = {{1, 8}, {11, 83}, {5, 1032}, {3, 131}},
                                                        .ideas = {"two elementwise ops", "one kernel",
                                                                  "a grid of rows, no division", "shipped: 16 bytes per load"}});
}  // namespace CUDA_BACKEND::workshop
