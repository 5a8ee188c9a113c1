// adamw_update: m, v, master and params from grads, element by element                               Contract: llmc/ops/adamw.h
//
// Timed with 2^24 parameters in bf16. Elementwise: grads, m, v, master in, m, v, master, params out: 28 bytes a parameter and 2
// more in bf16. No access has anything to do with another one, so this ladder is about not moving, and not computing, what need
// not be.
#include "../../llmc/ops/adamw.cuh"
#include "../../test/reference_adamw.h"
#include "common.h"

namespace CUDA_BACKEND::workshop {

// ---- version 1: a kernel for each line of the formula --------------------------------------------------------------------------
//
// As a framework that composes elementwise ops would do it: m, then v, then the parameter. 12 + 12 + 18 bytes, 42 where 30 would
// do.

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
__global__ void adamw_params_kernel1(X *params, float *master, const float *m, const float *v, AdamWFactors f, size_t n) {
    const size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (i >= n) return;
    const float p = master[i] * f.decay - f.step_size * m[i] / (sqrtf(v[i]) / f.root_correction2 + f.eps);
    master[i] = p;
    params[i] = p;
}

template <class X>
void adamw_update1(Cuda<X> dev, X *params, float *master, float *m, float *v, const float *grads, AdamW a, size_t n) {
    const AdamWFactors f(a);
    const Grid grid{ceil_div(n, 256)};
    launch(dev, adamw_m_kernel1, grid, 256, 0, m, grads, f, n);
    launch(dev, adamw_v_kernel1, grid, 256, 0, v, grads, f, n);
    launch(dev, adamw_params_kernel1<X>, grid, 256, 0, params, master, m, v, f, n);
}

// ---- version 2: one kernel -----------------------------------------------------------------------------------------------------
//
// 30 bytes. But the formula is copied from the paper: each thread raises the betas to the power of the step again, in double, for
// the same two numbers. Compiled for sm_90 it has 621 instructions, 194 of them in double, for which most GPUs have few units
// (version 3: 233 and none): arithmetic limits an op that has none to speak of.

template <class X>
__global__ void adamw_kernel2(X *params, float *master, float *m, float *v, const float *grads, AdamW a, size_t n) {
    const size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (i >= n) return;
    const double g = a.grad_scale * double(grads[i]);
    const double m_i = a.beta1 * double(m[i]) + (1 - a.beta1) * g, v_i = a.beta2 * double(v[i]) + (1 - a.beta2) * g * g;
    const double m_hat = m_i / (1 - pow(a.beta1, double(a.step))), v_hat = v_i / (1 - pow(a.beta2, double(a.step)));
    const double p = double(master[i]) * (1 - a.lr * a.weight_decay) - a.lr * m_hat / (sqrt(v_hat) + a.eps);
    m[i] = float(m_i);
    v[i] = float(v_i);
    master[i] = float(p);
    params[i] = float(p);
}

template <class X>
void adamw_update2(Cuda<X> dev, X *params, float *master, float *m, float *v, const float *grads, AdamW a, size_t n) {
    launch(dev, adamw_kernel2<X>, Grid{ceil_div(n, 256)}, 256, 0, params, master, m, v, grads, a, n);
}

// ---- version 3: what is the same for all is computed once ----------------------------------------------------------------------
//
// The host turns the settings into eight float factors (AdamWFactors), in double where it matters: 1 - 0.999f is off by 1e-5. A
// square root and two divisions are left. Loads are of 4 bytes.

template <class X>
__global__ void adamw_kernel3(X *params, float *master, float *m, float *v, const float *grads, AdamWFactors f, size_t n) {
    const size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (i >= n) return;
    float p = master[i], m_i = m[i], v_i = v[i];
    f.update(p, m_i, v_i, grads[i]);
    m[i] = m_i;
    v[i] = v_i;
    master[i] = p;
    params[i] = p;
}

template <class X>
void adamw_update3(Cuda<X> dev, X *params, float *master, float *m, float *v, const float *grads, AdamW a, size_t n) {
    launch(dev, adamw_kernel3<X>, Grid{ceil_div(n, 256)}, 256, 0, params, master, m, v, grads, AdamWFactors(a), n);
}

// ---- version 4: llmc/ops/adamw.cuh ---------------------------------------------------------------------------------------------
//
// Four parameters a thread, 16 bytes per load. The memory's bandwidth is the limit.

template <class X> struct AdamWUpdate {
    static constexpr size_t step = 3;  // the one that is run, from the state after those before
    size_t n;
    std::vector<float> grads;
    AdamWState state;
    DeviceArray<X> params;
    DeviceArray<float> separate, m, v, d_grads;

    explicit AdamWUpdate(const Sizes &s)
        : n(s[0]),
          grads(random_values<float>(n, step)),
          state(state_before(n)),
          params(rounded<X>(state.master)),
          separate(rounded<float>(state.master)),
          m(rounded<float>(state.m)),
          v(rounded<float>(state.v)),
          d_grads(grads) {}

    static AdamWState state_before(size_t n) {
        AdamWState out{widen(random_values<X>(n, 20)), std::vector<double>(n), std::vector<double>(n)};
        for (size_t i = 1; i < step; i++) adamw_reference(out, widen(random_values<float>(n, uint32_t(i))), adamw_setting(i));
        return out;
    }
    template <class T> static std::vector<T> rounded(const std::vector<double> &values) {
        std::vector<T> out(values.size());
        for (size_t i = 0; i < values.size(); i++) out[i] = float(values[i]);
        return out;
    }

    float *master() {  // where X is float, the parameters themselves
        if constexpr (std::is_same_v<X, float>) return params.data();
        else return separate.data();
    }

    static constexpr void (*versions[4])(Cuda<X>, X *params, float *master, float *m, float *v, const float *grads, AdamW,
                                         size_t n) = {adamw_update1, adamw_update2, adamw_update3, adamw_update};

    void run(Cuda<X> dev, size_t version) {
        versions[version - 1](dev, params.data(), master(), m.data(), v.data(), d_grads.data(), adamw_setting(step), n);
    }

    void check(Check &check) const {
        AdamWState want = state;
        adamw_reference(want, widen(grads), adamw_setting(step));
        const AdamWError allowed = adamw_error(step);
        check("m", m.values(), want.m, allowed.m);
        check("v", v.values(), want.v, allowed.v);
        if constexpr (std::is_same_v<X, float>) check("params", params.values(), want.master, allowed.params);
        else {
            const std::vector<float> master = separate.values();
            check("master", master, want.master, allowed.params);
            check("params", params.values(), rounded<X>(widen(master)), 0);
        }
    }

    Work work() const { return {.bytes = double(n) * (28 + (std::is_same_v<X, float> ? 0 : sizeof(X)))}; }
};

static const Ladder<AdamWUpdate, float, bf16> ladder(
    {.name = "adamw",
     .sizes = {{"n", "parameters", size_t(1) << 24}},
     .checked = {{1}, {1003}, {1100}},
     .ideas = {"a kernel for each line of the formula", "one kernel, all in double, powers in every thread",
               "the factors of a step computed once", "shipped: 16 bytes per load"}});
}  // namespace CUDA_BACKEND::workshop
