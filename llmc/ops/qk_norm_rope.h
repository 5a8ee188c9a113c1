// The op on queries and keys before attention: each head is normed over its own channels (Qwen3), and then rotated by its position.
//
//   qk_norm_rope_forward (dev, qkv, qk_raw, rstd, wq, wk, table, doc_pos, T, H, KV, D, R, eps, w0)
//       of each query and key head x, with w = wq or wk:     qk_raw = x     qkv = rope_forward(rmsnorm_forward(x, w, w0))
//   qk_norm_rope_backward(dev, dqkv, dwq, dwk, scratch, qk_raw, wq, wk, rstd, table, doc_pos, T, H, KV, D, R, w0)
//       dqkv, dwq, dwk = rmsnorm_backward of rope_backward(dqkv)
//
//   qkv, dqkv (T, (H + 2 KV) * D) X, changed in place: query heads, then key heads, then value heads, which do not change
//   wq, wk (D) X, null in models without these norms; they only rotate, and qk_raw, rstd, dwq, dwk and scratch are unused
//   qk_raw (T, (H + KV) * D) X     rstd (T, H + KV) float     dwq, dwk (D) float, accumulated, null if frozen     D a multiple of 8, up to 256
//   R channels of a head are rotated; with norms R = D
//   scratch: rmsnorm_scratch(dev, 2 * D) floats     table, doc_pos: rope.h     formulas: rmsnorm.h, rope.h
//
// Between norm and rotation the values are rounded to X, as in Hugging Face, so the fused op gives the same bits as two ops.
#pragma once
#include "rmsnorm.h"
#include "rope.h"

template <class X>
void qk_norm_rope_forward(Cpu<X> dev, X *qkv, X *qk_raw, float *rstd, const X *wq, const X *wk, const float *table,
                          const int32_t *doc_pos, size_t T, size_t H, size_t KV, size_t D, size_t R, float eps, float w0 = 0) {
    const size_t heads = H + KV, stride = (H + 2 * KV) * D;
    if (wq) {
        const std::vector<float> q_weights = rmsnorm_weights(wq, D, w0), k_weights = rmsnorm_weights(wk, D, w0);
#pragma omp parallel for num_threads(dev.threads)
        for (size_t t = 0; t < T; t++) {
            X *raw_t = qk_raw + t * heads * D, *qkv_t = qkv + t * stride;
            std::copy_n(qkv_t, heads * D, raw_t);
            for (size_t h = 0; h < heads; h++)
                rstd[t * heads + h] = rmsnorm_row(qkv_t + h * D, raw_t + h * D, (h < H ? q_weights : k_weights).data(), D, eps);
        }
    }
    rope_forward(dev, qkv, table, doc_pos, T, heads, D, R, stride);
}

template <class X>
void qk_norm_rope_backward(Cpu<X> dev, X *dqkv, float *dwq, float *dwk, float *scratch, const X *qk_raw, const X *wq, const X *wk,
                           const float *rstd, const float *table, const int32_t *doc_pos, size_t T, size_t H, size_t KV, size_t D,
                           size_t R, float w0 = 0) {
    const size_t heads = H + KV, stride = (H + 2 * KV) * D;
    rope_backward(dev, dqkv, table, doc_pos, T, heads, D, R, stride);
    if (!wq) return;
    const NormRuns runs(T);
    const std::vector<float> q_weights = rmsnorm_weights(wq, D, w0), k_weights = rmsnorm_weights(wk, D, w0);
#pragma omp parallel for num_threads(dev.threads)
    for (size_t run = 0; run < runs.count; run++) {
        float *dwq_run = scratch + run * D, *dwk_run = dwq_run + runs.count * D;
        std::fill_n(dwq_run, D, 0.0f);
        std::fill_n(dwk_run, D, 0.0f);
        for (size_t t = runs.begin(run); t < runs.end(run); t++)
            for (size_t h = 0; h < heads; h++) {
                X *d = dqkv + t * stride + h * D;
                const X *none = nullptr, *x = qk_raw + (t * heads + h) * D;
                const float *w = (h < H ? q_weights : k_weights).data();
                rmsnorm_backward_row(d, h < H ? dwq_run : dwk_run, none, d, x, w, rstd[t * heads + h], D);
            }
    }
    if (!dwq) return;
    norm_add_runs(dev, dwq, scratch, runs.count, D);
    norm_add_runs(dev, dwk, scratch + runs.count * D, runs.count, D);
}

REHEARSED(qk_norm_rope_forward);
REHEARSED(qk_norm_rope_backward);
