// Linear attention during generation: each sequence has one new token. A slot holds what linear attention knows of the sequence's tokens: the state
// of the delta rule, and the last inputs of the convolution, its columns.
//
//   conv_store        (dev, columns, x, doc_pos, slots, T, C)
//       columns[slots[t], j] = x[t-j], or 0 if doc_pos[t] < j, for j = 0, 1, 2 and all t with slots[t] >= 0
//   causal_conv_decode(dev, out, columns, x, w, slots, B, C)
//       y = w[:, 3] * x[b] + sum_j w[:, 2-j] * columns[slots[b], j]     out[b] = y / (1 + exp(-y))     then x[b] becomes column 0 of its slot
//   gated_delta_decode(dev, out, states, qkv, gates, slots, shape)
//       a token of the recurrence (gated_delta.h) for each value head, from the state in slots[b], which it replaces
//
//   columns (slots, 3, C) X     states (slots, Hv, Dk, Dv) float, which gated_delta_forward stores after a prompt     slots (B) int32, all distinct
//   x, out (B, C) X     w (C, 4) X     otherwise as in causal_conv.h and gated_delta.h, with B = shape.T tokens     Nothing may alias.
//
// A sequence's result depends neither on the other sequences of the batch nor on its slot.
#pragma once
#include "causal_conv.h"
#include "gated_delta.h"

template <class X>
void conv_store(Cpu<X> dev, X *columns, const X *x, const int32_t *doc_pos, const int32_t *slots, size_t T, size_t C) {
#pragma omp parallel for num_threads(dev.threads)
    for (size_t t = 0; t < T; t++)
        for (size_t j = 0; j < conv_columns && slots[t] >= 0; j++) {
            X *const column = columns + (size_t(slots[t]) * conv_columns + j) * C;
            if (doc_pos[t] < int32_t(j)) std::fill_n(column, C, X(0.0f));
            else std::copy_n(x + (t - j) * C, C, column);
        }
}

template <class X>
void causal_conv_decode(Cpu<X> dev, X *out, X *columns, const X *x, const X *w, const int32_t *slots, size_t B, size_t C) {
    const std::vector<float> taps = causal_conv::taps_of(w, C);
#pragma omp parallel for num_threads(dev.threads)
    for (size_t b = 0; b < B; b++) {
        const X *const x_b = x + b * C;
        X *const column = columns + size_t(slots[b]) * conv_columns * C;
        simd::for_each(C, [&]<class V>(size_t c) {
            V y = simd::load<V>(x_b + c) * simd::load<V>(&taps[c]);
            for (size_t j = 0; j < conv_columns; j++)
                y = y + simd::load<V>(column + j * C + c) * simd::load<V>(&taps[(j + 1) * C + c]);
            simd::store(out + b * C + c, y / (1.0f + fast_exp(-y)));
        });
        std::copy_backward(column, column + (conv_columns - 1) * C, column + conv_columns * C);
        std::copy_n(x_b, C, column);
    }
}

namespace delta {

// Normed queries or keys, times a scale.
template <class X> void normed(float *out, const X *x, size_t D, float eps, float scale) {
    float sum = 0;
    for (size_t i = 0; i < D; i++) out[i] = x[i];
#pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < D; i++) sum += out[i] * out[i];
    const float factor = 1.0f / std::sqrt(sum + eps) * scale;
    for (size_t i = 0; i < D; i++) out[i] *= factor;
}

// One token of a value head. The state is read twice, the second time from the cache, a few rows at a time.
template <class X>
void decode(X *out, float *state, const float *q, const float *k, const X *v, float g, float beta, const DeltaShape &s) {
    constexpr size_t rows = 4;  // they divide Dk
    const size_t Dv = s.Dv;
    const float decay = fast_exp(g);
    float d[max_D] = {}, o[max_D] = {};
    for (size_t r = 0; r < s.Dk; r += rows)
        simd::for_each(Dv, [&]<class V>(size_t j) {
            V sum = simd::load<V>(d + j);
            for (size_t i = r; i < r + rows; i++) sum = sum + k[i] * simd::load<V>(state + i * Dv + j);
            simd::store(d + j, sum);
        });
    for (size_t j = 0; j < Dv; j++) d[j] = beta * (float(v[j]) - decay * d[j]);
    for (size_t r = 0; r < s.Dk; r += rows)
        simd::for_each(Dv, [&]<class V>(size_t j) {
            const V d_j = simd::load<V>(d + j);
            V sum = simd::load<V>(o + j);
            for (size_t i = r; i < r + rows; i++) {
                const V next = decay * simd::load<V>(state + i * Dv + j) + k[i] * d_j;
                simd::store(state + i * Dv + j, next);
                sum = sum + q[i] * next;
            }
            simd::store(o + j, sum);
        });
    store_row(out, o, Dv);
}

}  // namespace delta

template <class X>
void gated_delta_decode(Cpu<X> dev, X *out, float *states, const X *qkv, DeltaGates<const float> gates, const int32_t *slots,
                        DeltaShape shape) {
    using namespace delta;
    const DeltaShape &s = shape;
#pragma omp parallel for collapse(2) num_threads(dev.threads)
    for (size_t b = 0; b < s.T; b++)
        for (size_t h = 0; h < s.Hv; h++) {
            const X *const x = qkv + b * s.row(), *const x_q = x + h / s.group() * s.Dk;
            const size_t at = b * s.Hv + h;
            float q[max_D], k[max_D];
            normed(q, x_q, s.Dk, s.eps, 1 / std::sqrt(float(s.Dk)));
            normed(k, x_q + s.Hk * s.Dk, s.Dk, s.eps, 1);
            decode(out + at * s.Dv, states + (size_t(slots[b]) * s.Hv + h) * s.Dk * s.Dv, q, k, x + s.values_at(h), gates.g[at],
                   gates.beta[at], s);
        }
}

REHEARSED(conv_store);
REHEARSED(causal_conv_decode);
REHEARSED(gated_delta_decode);
