// Copies that change the stride of rows or the type of elements.
//
//   copy_rows   (dev, out, out_stride, x, x_stride, n, C)     out[r, c] = x[r, c]: n rows of C elements of any type, strides in elements
//   add_rows    (dev, out, out_stride, x, x_stride, n, C)     out[r, c] += x[r, c], of floats
//   clear_floats(dev, out, n)                                 out[i] = 0, n floats
//   round_floats(dev, out, x, n)                              out[i] = x[i] rounded to X, n elements
//
//   Nothing may alias.
#pragma once
#include <algorithm>
#include <cstddef>

#include "../core/device.h"

template <class X, class T> void copy_rows(Cpu<X>, T *out, size_t out_stride, const T *x, size_t x_stride, size_t n, size_t C) {
    for (size_t r = 0; r < n; r++) std::copy_n(x + r * x_stride, C, out + r * out_stride);
}

template <class X> void add_rows(Cpu<X> dev, float *out, size_t out_stride, const float *x, size_t x_stride, size_t n, size_t C) {
#pragma omp parallel for num_threads(dev.threads)
    for (size_t r = 0; r < n; r++)
#pragma omp simd
        for (size_t c = 0; c < C; c++) {
            const float sum = out[r * out_stride + c] + x[r * x_stride + c];
            out[r * out_stride + c] = sum;
        }
}

template <class X> void clear_floats(Cpu<X> dev, float *out, size_t n) {
#pragma omp parallel for simd num_threads(dev.threads)
    for (size_t i = 0; i < n; i++) out[i] = 0;
}

template <class X> void round_floats(Cpu<X> dev, X *out, const float *x, size_t n) {
#pragma omp parallel for simd num_threads(dev.threads)
    for (size_t i = 0; i < n; i++) out[i] = x[i];
}

REHEARSED(copy_rows);
REHEARSED(add_rows);
REHEARSED(clear_floats);
REHEARSED(round_floats);
