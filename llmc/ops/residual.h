// residual_forward(dev, out, a, b, n): out = a + b.     out, a, b (n) X; out may alias either. A sum needs no
// backward op: both branches get the same gradient, and rmsnorm_backward adds it as dresidual.
#pragma once
#include <cstddef>

#include "../core/device.h"

template <class X> void residual_forward(Cpu<X> dev, X *out, const X *a, const X *b, size_t n) {
#pragma omp parallel for simd num_threads(dev.threads)
    for (size_t i = 0; i < n; i++) out[i] = float(a[i]) + float(b[i]);
}

REHEARSED(residual_forward);
