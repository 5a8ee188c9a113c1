// The gates of the gated delta rule (gated_delta.h): the decay, as in Mamba 2 (Dao and Gu, 2024, arXiv:2405.21060), and the weight of an update.
//
//   delta_gates_forward (dev, gates, ba, A_log, dt_bias, T, H)
//       g = -exp(A_log[h]) * softplus(a + dt_bias[h])       beta = 1 / (1 + exp(-b))        with softplus(x) = log(1 + exp(x))
//   delta_gates_backward(dev, dba, dA_log, ddt_bias, scratch, dgates, gates, ba, A_log, dt_bias, T, H)
//       da = -dg * exp(A_log[h]) / (1 + exp(-a - dt_bias))  db = dbeta * beta * (1 - beta)
//       dA_log[h] += sum_t dg * g                           ddt_bias[h] += sum_t da
//
//   ba, dba (T, 2 H) X: a row is H values b, then H values a     A_log, dt_bias (H) X
//   gates.g, gates.beta, dgates.g, dgates.beta (T, H) float      dA_log, ddt_bias (H) float, accumulated; both null if frozen
//   scratch: delta_gates_scratch(dev, H) floats                 dba may alias ba
//
// Everything between reading and writing an element is float. Sums are taken in an order that depends on the sizes alone.
#pragma once
#include <cmath>

#include "gated_delta.h"
#include "norm.h"

namespace delta {

HOST_DEVICE inline float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }
HOST_DEVICE inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

}  // namespace delta

template <class X> size_t delta_gates_scratch(Cpu<X>, size_t H) { return norm_runs * 2 * H; }

template <class X>
void delta_gates_forward(Cpu<X> dev, DeltaGates<float> gates, const X *ba, const X *A_log, const X *dt_bias, size_t T, size_t H) {
#pragma omp parallel for num_threads(dev.threads)
    for (size_t t = 0; t < T; t++)
        for (size_t h = 0; h < H; h++) {
            const float b = ba[t * 2 * H + h], a = ba[t * 2 * H + H + h];
            gates.beta[t * H + h] = delta::sigmoid(b);
            gates.g[t * H + h] = -expf(float(A_log[h])) * delta::softplus(a + float(dt_bias[h]));
        }
}

template <class X>
void delta_gates_backward(Cpu<X> dev, X *dba, float *dA_log, float *ddt_bias, float *scratch, DeltaGates<const float> dgates,
                          DeltaGates<const float> gates, const X *ba, const X *A_log, const X *dt_bias, size_t T, size_t H) {
    const size_t runs = NormRuns(T).count;
    norm_for_runs(dev, scratch, 2, T, H, [&](size_t t, float *dA_run) {
        float *const dbias_run = dA_run + runs * H;
        for (size_t h = 0; h < H; h++) {
            const float beta = gates.beta[t * H + h], dg = dgates.g[t * H + h], a = ba[t * 2 * H + H + h];
            const float da = -dg * expf(float(A_log[h])) * delta::sigmoid(a + float(dt_bias[h]));
            dA_run[h] += dg * gates.g[t * H + h];
            dbias_run[h] += da;
            dba[t * 2 * H + h] = dgates.beta[t * H + h] * beta * (1.0f - beta);
            dba[t * 2 * H + H + h] = da;
        }
    });
    if (!dA_log) return;
    norm_add_runs(dev, dA_log, scratch, runs, H);
    norm_add_runs(dev, ddt_bias, scratch + runs * H, runs, H);
}

REHEARSED(delta_gates_forward);
REHEARSED(delta_gates_backward);
ASKED(delta_gates_scratch);
