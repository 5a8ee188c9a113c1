// delta_gates on CUDA. Contract and formulas: delta_gates.h.
#pragma once
#include "delta_gates.h"
#include "norm.cuh"

inline namespace CUDA_BACKEND {
template <class X> size_t delta_gates_scratch(Cuda<X>, size_t H) { return norm_blocks * 2 * H; }

// A thread computes both gates of a head of a token. The kernel moves 2 T H elements and as many floats.
template <class X>
__global__ void delta_gates_forward_kernel1(DeltaGates<float> gates, const X *ba, const X *A_log, const X *dt_bias, unsigned H) {
    const size_t t = blockIdx.x;
    const unsigned h = blockIdx.y * blockDim.x + threadIdx.x;
    if (h >= H) return;
    const float b = ba[t * 2 * H + h], a = ba[t * 2 * H + H + h];
    gates.beta[t * H + h] = delta::sigmoid(b);
    gates.g[t * H + h] = -expf(float(A_log[h])) * delta::softplus(a + float(dt_bias[h]));
}

template <class X>
void delta_gates_forward(Cuda<X> dev, DeltaGates<float> gates, const X *ba, const X *A_log, const X *dt_bias, size_t T,
                         size_t H) {
    launch(dev, delta_gates_forward_kernel1<X>, Grid{T, ceil_div(H, 64)}, 64, 0, gates, ba, A_log, dt_bias, unsigned(H));
}

// A thread has a head of a run of tokens. The kernel moves 3 T H elements and 4 T H floats.
template <class X>
__global__ void delta_gates_backward_kernel1(X *dba, float *scratch, DeltaGates<const float> dgates,
                                             DeltaGates<const float> gates, const X *ba, const X *A_log, const X *dt_bias,
                                             size_t T, unsigned H) {
    const unsigned h = blockIdx.y * blockDim.x + threadIdx.x;
    if (h >= H) return;
    const size_t begin = T * blockIdx.x / gridDim.x, end = T * (blockIdx.x + 1) / gridDim.x;
    const float rate = expf(float(A_log[h])), bias = dt_bias[h];
    float dA = 0, dbias = 0;
    for (size_t t = begin; t < end; t++) {
        const float beta = gates.beta[t * H + h], dg = dgates.g[t * H + h], a = ba[t * 2 * H + H + h];
        const float da = -dg * rate * delta::sigmoid(a + bias);
        dA += dg * gates.g[t * H + h];
        dbias += da;
        dba[t * 2 * H + h] = dgates.beta[t * H + h] * beta * (1.0f - beta);
        dba[t * 2 * H + H + h] = da;
    }
    scratch[blockIdx.x * H + h] = dA;
    scratch[(gridDim.x + blockIdx.x) * H + h] = dbias;
}

template <class X>
void delta_gates_backward(Cuda<X> dev, X *dba, float *dA_log, float *ddt_bias, float *scratch, DeltaGates<const float> dgates,
                          DeltaGates<const float> gates, const X *ba, const X *A_log, const X *dt_bias, size_t T, size_t H) {
    const size_t blocks = std::min(norm_blocks, T);
    launch(dev, delta_gates_backward_kernel1<X>, Grid{blocks, ceil_div(H, 64)}, 64, 0, dba, scratch, dgates, gates, ba, A_log,
           dt_bias, T, unsigned(H));
    if (dA_log) norm_add_runs(dev, dA_log, ddt_bias, scratch, blocks, H);
}
}  // namespace CUDA_BACKEND
