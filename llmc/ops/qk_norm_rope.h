// The op on queries and keys before attention: each head is normed over its own channels (Qwen3), and then rotated by its position.
//
//   qk_norm_rope_forward (dev, qkv, qk_raw, rstd, w, table, doc_pos, shape)
//       of each query and key head x, with w = w.q or w.k:     qk_raw = x     qkv = rope_forward(rmsnorm_forward(x, w))
//   qk_norm_rope_backward(dev, dqkv, dw, scratch, qk_raw, w, rstd, table, doc_pos, shape)
//       dqkv, dw = rmsnorm_backward of rope_backward(dqkv)
//
//   qkv, dqkv (T, (H + 2 KV) * D) X, changed in place: query heads, then key heads, then value heads, which do not change
//   w.q, w.k (D) X, null in models without these norms; they only rotate, and qk_raw, rstd, dw and scratch are unused
//   qk_raw (T, (H + KV) * D) X     rstd (T, H + KV) float     dw.q, dw.k (D) float, accumulated, null if frozen
//   shape: D is a multiple of 8, up to 256; R channels of a head are rotated; with norms R is a multiple of 8
//   scratch: rmsnorm_scratch(dev, 2 * D) floats     table, doc_pos: rope.h     formulas: rmsnorm.h, rope.h
//
// Between norm and rotation the values are rounded to X, as in Hugging Face, so the fused op gives the same bits as two ops.
#pragma once
#include "rmsnorm.h"
#include "rope.h"

struct QkShape {
    size_t T, H, KV, D, R;
    float eps, w0 = 0;  // of NormShape

    HOST_DEVICE size_t heads() const { return H + KV; }          // that are normed and rotated
    HOST_DEVICE size_t row() const { return (H + 2 * KV) * D; }  // elements of a token's queries, keys and values
    auto pointers() const { return std::tuple(); }               // ../core/rehearsal.h
};

template <class T> struct QkWeights {  // of const X; or their gradients, of float
    T *q, *k;                          // (D) each

    auto pointers() const { return std::tuple(q, k); }  // ../core/rehearsal.h
};

template <class X>
void qk_norm_rope_forward(Cpu<X> dev, X *qkv, X *qk_raw, float *rstd, QkWeights<const X> w, const float *table,
                          const int32_t *doc_pos, QkShape shape) {
    const size_t T = shape.T, H = shape.H, D = shape.D, heads = shape.heads(), stride = shape.row();
    if (w.q) {
        const std::vector<float> q_weights = rmsnorm_weights(w.q, D, shape.w0), k_weights = rmsnorm_weights(w.k, D, shape.w0);
#pragma omp parallel for num_threads(dev.threads)
        for (size_t t = 0; t < T; t++) {
            X *raw_t = qk_raw + t * heads * D, *qkv_t = qkv + t * stride;
            std::copy_n(qkv_t, heads * D, raw_t);
            for (size_t h = 0; h < heads; h++)
                rstd[t * heads + h] =
                    rmsnorm_row(qkv_t + h * D, raw_t + h * D, (h < H ? q_weights : k_weights).data(), D, shape.eps);
        }
    }
    rope_forward(dev, qkv, table, doc_pos, T, heads, D, shape.R, stride);
}

template <class X>
void qk_norm_rope_backward(Cpu<X> dev, X *dqkv, QkWeights<float> dw, float *scratch, const X *qk_raw, QkWeights<const X> w,
                           const float *rstd, const float *table, const int32_t *doc_pos, QkShape shape) {
    const size_t T = shape.T, H = shape.H, D = shape.D, heads = shape.heads(), stride = shape.row();
    rope_backward(dev, dqkv, table, doc_pos, T, heads, D, shape.R, stride);
    if (!w.q) return;
    const size_t runs = NormRuns(T).count;
    const std::vector<float> q_weights = rmsnorm_weights(w.q, D, shape.w0), k_weights = rmsnorm_weights(w.k, D, shape.w0);
    norm_for_runs(dev, scratch, 2, T, D, [&](size_t t, float *dq_run) {
        for (size_t h = 0; h < heads; h++) {
            X *d = dqkv + t * stride + h * D;
            const X *none = nullptr, *x = qk_raw + (t * heads + h) * D;
            const float *weights = (h < H ? q_weights : k_weights).data();
            rmsnorm_backward_row(d, h < H ? dq_run : dq_run + runs * D, none, d, x, weights, rstd[t * heads + h], D);
        }
    });
    if (!dw.q) return;
    norm_add_runs(dev, dw.q, scratch, runs, D);
    norm_add_runs(dev, dw.k, scratch + runs * D, runs, D);
}

REHEARSED(qk_norm_rope_forward);
REHEARSED(qk_norm_rope_backward);
