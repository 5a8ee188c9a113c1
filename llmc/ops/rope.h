// Rotary position embedding (Su et al., 2021, arXiv:2104.09864), in Hugging Face's layout: channel i is rotated with channel i + R/2.
//
//   rope_forward (dev, qkv, table, doc_pos, T, heads, D, R, stride)
//       with (cos, sin) = table[doc_pos[t], i], for each of the first `heads` heads of row t and each i < R/2:
//           (x[i], x[i + R/2])  <-  (x[i] * cos - x[i + R/2] * sin,  x[i + R/2] * cos + x[i] * sin)
//   rope_backward(dev, dqkv, table, doc_pos, T, heads, D, R, stride)
//       applies the transposed map, which is the rotation by the negative angle
//
//   qkv, dqkv: T rows of `stride` elements X, changed in place; heads are D elements each, from the start of a row
//   R <= D, even: the first R channels of a head are rotated, and the others do not change
//   table (positions, R/2, 2) float, by rope_table     doc_pos (T), the row of the table, in [0, positions)
#pragma once
#include <cstddef>
#include <cstdint>

#include "../core/device.h"

// Rotates by sign * angle: sign is +1 forward and -1 backward.
template <class X>
void rope_rotate(Cpu<X> dev, X *qkv, const float *table, const int32_t *doc_pos, size_t T, size_t heads, size_t D, size_t R,
                 size_t stride, float sign) {
    const size_t half = R / 2;
#pragma omp parallel for num_threads(dev.threads)
    for (size_t t = 0; t < T; t++) {
        const float *row = table + size_t(doc_pos[t]) * R;
        for (size_t h = 0; h < heads; h++) {
            X *x = qkv + t * stride + h * D;
#pragma omp simd
            for (size_t i = 0; i < half; i++) {
                const float cos = row[2 * i], sin = sign * row[2 * i + 1];
                const float a = x[i], b = x[i + half];
                x[i] = a * cos - b * sin;
                x[i + half] = b * cos + a * sin;
            }
        }
    }
}

template <class X>
void rope_forward(Cpu<X> dev, X *qkv, const float *table, const int32_t *doc_pos, size_t T, size_t heads, size_t D, size_t R,
                  size_t stride) {
    rope_rotate(dev, qkv, table, doc_pos, T, heads, D, R, stride, 1.0f);
}

template <class X>
void rope_backward(Cpu<X> dev, X *dqkv, const float *table, const int32_t *doc_pos, size_t T, size_t heads, size_t D, size_t R,
                   size_t stride) {
    rope_rotate(dev, dqkv, table, doc_pos, T, heads, D, R, stride, -1.0f);
}
