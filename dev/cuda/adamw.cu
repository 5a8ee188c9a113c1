// adamw_update: m, v and params from grads, element by element                                       Contract: llmc/ops/adamw.h
//
// Timed with 2^24 parameters in bf16. The op reads grads, m, v and params, and writes m, v and params: 28 bytes per parameter, also
// in bf16, where a parameter is 2 bytes and the lower half of its float another 2. Elements are independent of each other, so this
// ladder removes redundant memory traffic and redundant arithmetic.
#include "../../llmc/ops/adamw.cuh"
#include "../../test/reference_adamw.h"
#include "common.h"

namespace CUDA_BACKEND::workshop {

// ---- version 1: a kernel for each line of the formula --------------------------------------------------------------------------
//
// A framework that composes elementwise ops runs these kernels: m, then v, then the parameter. They move 12 + 12 + 16 = 40 bytes
// instead of 28.

__global__ void adamw_m_kernel1(float *m, const float *grads, AdamWFactors f, size_t n) {
    const size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (i < n) m[i] = m[i] + f.one_minus_beta1 * (f.scale * grads[i] - m[i]);
}
__global__ void adamw_v_kernel1(float *v, const float *grads, AdamWFactors f, size_t n) {
    const size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (i >= n) return;
    const float g = f.scale * grads[i];
    v[i] = f.beta2 * v[i] + f.one_minus_beta2 * g * g;
}
template <class X>
__global__ void adamw_params_kernel1(Floats<X> params, const float *m, const float *v, AdamWFactors f, size_t n) {
    const size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (i >= n) return;
    params.store(i, params.load(i) * f.decay - f.step_size * m[i] / (sqrtf(v[i]) / f.root_correction2 + f.eps));
}

template <class X> void adamw_update1(Cuda<X> dev, Floats<X> params, float *m, float *v, const float *grads, AdamW a, size_t n) {
    const AdamWFactors f(a);
    const Grid grid{ceil_div(n, 256)};
    launch(dev, adamw_m_kernel1, grid, 256, 0, m, grads, f, n);
    launch(dev, adamw_v_kernel1, grid, 256, 0, v, grads, f, n);
    launch(dev, adamw_params_kernel1<X>, grid, 256, 0, params, m, v, f, n);
}

// ---- version 2: one kernel -----------------------------------------------------------------------------------------------------
//
// This kernel moves 28 bytes. But it copies the formula from the paper: every thread computes the same two powers of the betas, in
// double. Compiled for sm_90 it has 623 instructions, 194 of them in double, for which most GPUs have few units (version 3: 235 and
// none). So arithmetic limits an elementwise op.

template <class X> __global__ void adamw_kernel2(Floats<X> params, float *m, float *v, const float *grads, AdamW a, size_t n) {
    const size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (i >= n) return;
    const double g = a.grad_scale * double(grads[i]);
    const double m_i = a.beta1 * double(m[i]) + (1 - a.beta1) * g, v_i = a.beta2 * double(v[i]) + (1 - a.beta2) * g * g;
    const double m_hat = m_i / (1 - pow(a.beta1, double(a.step))), v_hat = v_i / (1 - pow(a.beta2, double(a.step)));
    const double p = double(params.load(i)) * (1 - a.lr * a.weight_decay) - a.lr * m_hat / (sqrt(v_hat) + a.eps);
    m[i] = float(m_i);
    v[i] = float(v_i);
    params.store(i, float(p));
}

template <class X> void adamw_update2(Cuda<X> dev, Floats<X> params, float *m, float *v, const float *grads, AdamW a, size_t n) {
    launch(dev, adamw_kernel2<X>, Grid{ceil_div(n, 256)}, 256, 0, params, m, v, grads, a, n);
}

// ---- version 3: common factors are computed once -------------------------------------------------------------------------------
//
// The host computes eight float factors from the settings (AdamWFactors), in double because 1 - 0.999f has a relative error of 1e-5.
// A thread computes only a square root and two divisions. Loads have 4 bytes.

template <class X>
__global__ void adamw_kernel3(Floats<X> params, float *m, float *v, const float *grads, AdamWFactors f, size_t n) {
    const size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (i >= n) return;
    float p = params.load(i), m_i = m[i], v_i = v[i];
    f.update(p, m_i, v_i, grads[i]);
    m[i] = m_i;
    v[i] = v_i;
    params.store(i, p);
}

template <class X> void adamw_update3(Cuda<X> dev, Floats<X> params, float *m, float *v, const float *grads, AdamW a, size_t n) {
    launch(dev, adamw_kernel3<X>, Grid{ceil_div(n, 256)}, 256, 0, params, m, v, grads, AdamWFactors(a), n);
}

// ---- version 4: llmc/ops/adamw.cuh ---------------------------------------------------------------------------------------------
//
// Each thread updates four parameters with 16-byte loads. The memory bandwidth is the limit.

template <class X> struct AdamWUpdate {
    static constexpr size_t step = 3;  // the step that runs, on the state after steps 1 and 2
    size_t n;
    std::vector<float> grads;
    AdamWState state;
    DeviceFloats<X> params;
    DeviceArray<float> m, v, d_grads;

    explicit AdamWUpdate(const Sizes &s)
        : n(s[0]),
          grads(random_values<float>(n, step)),
          state(state_before(n)),
          params(rounded(state.master)),
          m(rounded(state.m)),
          v(rounded(state.v)),
          d_grads(grads) {}

    static AdamWState state_before(size_t n) {
        AdamWState out{widen(random_values<X>(n, 20)), std::vector<double>(n), std::vector<double>(n)};
        for (size_t i = 1; i < step; i++) adamw_reference(out, widen(random_values<float>(n, uint32_t(i))), adamw_setting(i));
        return out;
    }
    static std::vector<float> rounded(const std::vector<double> &values) {
        return std::vector<float>(values.begin(), values.end());
    }

    static constexpr void (*versions[])(Cuda<X>, Floats<X> params, float *m, float *v, const float *grads, AdamW, size_t n) = {
        adamw_update1, adamw_update2, adamw_update3, adamw_update};

    void run(Cuda<X> dev, size_t version) {
        versions[version - 1](dev, params.where(), m.data(), v.data(), d_grads.data(), adamw_setting(step), n);
    }

    void check(Check &check) const {
        AdamWState want = state;
        adamw_reference(want, widen(grads), adamw_setting(step));
        const AdamWError allowed = adamw_error(step);
        check("m", m.values(), want.m, allowed.m);
        check("v", v.values(), want.v, allowed.v);
        const std::vector<float> got = params.values();
        check("params", got, want.master, allowed.params);
        check("rounded params", params.rounded.values(), HostFloats<X>(got).rounded, 0);
    }

    Work work() const { return {.bytes = double(n) * 28}; }
};

static const Ladder<AdamWUpdate, float, bf16> ladder(
    {.name = "adamw",
     .sizes = {{"n", "parameters", size_t(1) << 24, size_t(1) << 19}},
     .checked = {{1}, {1003}, {1100}},
     .ideas = {"a kernel for each line of the formula", "one kernel, all in double, powers in every thread",
               "the factors of a step computed once", "shipped: 16 bytes per load"}});
}  // namespace CUDA_BACKEND::workshop
