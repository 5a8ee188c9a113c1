// swiglu_backward: with s = 1 / (1 + exp(-gate))                                                     Contract: llmc/ops/swiglu.h
//     dgate = dout * up * s * (1 + gate * (1 - s))          dup = dout * gate * s
//
// Timed with T 8192, F 14336 in bf16. The op reads gate, up and dout, and writes dgate and dup: 5 T F elements. It recomputes s instead
// of storing it in the forward pass, because an exp is cheaper than reading 2 more bytes, and activations fill the memory.
#include "../../llmc/ops/swiglu.cuh"
#include "../../test/reference_swiglu.h"
#include "common.h"

namespace CUDA_BACKEND::workshop {

struct SwigluGradient {
    float dgate, dup;
};
__device__ inline SwigluGradient swiglu_gradient(float gate, float up, float dout) {
    const float s = 1.0f / (1.0f + expf(-gate));
    return {dout * up * s * (1.0f + gate * (1.0f - s)), dout * gate * s};
}

// ---- version 1: a kernel for each gradient -------------------------------------------------------------------------------------
//
// Each formula has its own kernel. Both kernels read gate and dout and compute s, so they move 7 T F elements. They cannot work in
// place, with dgate_up equal to gate_up, because the first kernel would overwrite the gates before the second one reads them.

template <class X> __global__ void swiglu_dgate_kernel1(X *dgate_up, const X *dout, const X *gate_up, size_t T, size_t F) {
    const size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x, gate = i / F * 2 * F + i % F;
    if (i < T * F) dgate_up[gate] = swiglu_gradient(gate_up[gate], gate_up[gate + F], dout[i]).dgate;
}
template <class X> __global__ void swiglu_dup_kernel1(X *dgate_up, const X *dout, const X *gate_up, size_t T, size_t F) {
    const size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x, gate = i / F * 2 * F + i % F;
    if (i < T * F) dgate_up[gate + F] = swiglu_gradient(gate_up[gate], 0, dout[i]).dup;
}

template <class X> void swiglu_backward1(Cuda<X> dev, X *dgate_up, const X *dout, const X *gate_up, size_t T, size_t F) {
    launch(dev, swiglu_dgate_kernel1<X>, Grid{ceil_div(T * F, 256)}, 256, 0, dgate_up, dout, gate_up, T, F);
    launch(dev, swiglu_dup_kernel1<X>, Grid{ceil_div(T * F, 256)}, 256, 0, dgate_up, dout, gate_up, T, F);
}

// ---- version 2: both in one ----------------------------------------------------------------------------------------------------
//
// The kernel moves 5 T F elements and works in place: a thread overwrites only elements that it has read. Each thread needs a 64-bit division.

template <class X> __global__ void swiglu_backward_kernel2(X *dgate_up, const X *dout, const X *gate_up, size_t T, size_t F) {
    const size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x, gate = i / F * 2 * F + i % F;
    if (i >= T * F) return;
    const SwigluGradient d = swiglu_gradient(gate_up[gate], gate_up[gate + F], dout[i]);
    dgate_up[gate] = d.dgate;
    dgate_up[gate + F] = d.dup;
}

template <class X> void swiglu_backward2(Cuda<X> dev, X *dgate_up, const X *dout, const X *gate_up, size_t T, size_t F) {
    launch(dev, swiglu_backward_kernel2<X>, Grid{ceil_div(T * F, 256)}, 256, 0, dgate_up, dout, gate_up, T, F);
}

// ---- version 3: a block walks along its row ------------------------------------------------------------------------------------
//
// Each thread of a block processes every 256th element of the block's row: there is no division, T blocks instead of T F / 256, and one
// computation of the row's addresses. Loads have 2 bytes, and each iteration waits for its three loads before the next one starts.

template <class X> __global__ void swiglu_backward_kernel3(X *dgate_up, const X *dout, const X *gate_up, size_t F) {
    const X *gate = gate_up + blockIdx.x * 2 * F, *up = gate + F, *dout_t = dout + blockIdx.x * F;
    X *dgate = dgate_up + blockIdx.x * 2 * F, *dup = dgate + F;
    for (size_t f = threadIdx.x; f < F; f += blockDim.x) {
        const SwigluGradient d = swiglu_gradient(gate[f], up[f], dout_t[f]);
        dgate[f] = d.dgate;
        dup[f] = d.dup;
    }
}

template <class X> void swiglu_backward3(Cuda<X> dev, X *dgate_up, const X *dout, const X *gate_up, size_t T, size_t F) {
    launch(dev, swiglu_backward_kernel3<X>, Grid{T}, 256, 0, dgate_up, dout, gate_up, F);
}

// ---- version 4: llmc/ops/swiglu.cuh --------------------------------------------------------------------------------------------
//
// Loads have 16 bytes, and there is no loop: instead of waiting in a loop, the SM starts the next block. The memory bandwidth is the
// limit.

template <class X> void swiglu_backward4(Cuda<X> dev, X *dgate_up, const X *dout, const X *gate_up, size_t T, size_t F) {
    swiglu_backward(dev, dgate_up, dout, gate_up, T, F, Gate::silu);
}

template <class X> struct SwigluBackward {
    size_t T, F;
    std::vector<X> gate_up, dout;
    DeviceArray<X> d_gate_up, d_dout, dgate_up;

    explicit SwigluBackward(const Sizes &s)
        : T(s[0]),
          F(s[1]),
          gate_up(random_values<X>(T * 2 * F, 1, 2)),
          dout(random_values<X>(T * F, 2)),
          d_gate_up(gate_up),
          d_dout(dout),
          dgate_up(T * 2 * F) {}

    static constexpr void (*versions[])(Cuda<X>, X *dgate_up, const X *dout, const X *gate_up, size_t T, size_t F) = {
        swiglu_backward1, swiglu_backward2, swiglu_backward3, swiglu_backward4};

    void run(Cuda<X> dev, size_t version) { versions[version - 1](dev, dgate_up.data(), d_dout.data(), d_gate_up.data(), T, F); }

    void check(Check &check) const {
        const auto g = widen(gate_up), d = widen(dout), want = swiglu_backward_reference(d, g, T, F);
        check("dgate_up", dgate_up.values(), want, swiglu_backward_error<X>(want, d, g, T, F));
    }

    Work work() const { return {.bytes = 5.0 * double(T * F) * sizeof(X)}; }
};

static const Ladder<SwigluBackward, float, bf16> ladder({.name = "swiglu_backward",
                                                         .sizes = {{"T", "tokens", 8192, 64}, {"F", "channels", 14336, 14336}},
                                                         .checked = {{1, 8}, {11, 83}, {5, 1032}, {3, 131}},
                                                         .ideas = {"a kernel for each gradient", "one kernel for both",
                                                                   "a block per row, no division",
                                                                   "shipped: 16 bytes per load"}});
}  // namespace CUDA_BACKEND::workshop
