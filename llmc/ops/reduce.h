//   squared_norm(dev, scratch, x, n) = sum_i x[i]^2               x (n) float or bf16     scratch (squared_norm_scratch(n)) double
//   add_squared_norm(dev, sum, scratch, x, n): *sum += sum_i x[i]^2, in the device's memory, so the host does not wait for it
//
// Sums are double, over parts of a fixed size and then over the parts in order, so the result does not depend on threads.
#pragma once
#include <algorithm>
#include <cstddef>

#include "../core/common.h"
#include "../core/device.h"

constexpr size_t squared_norm_part = size_t(1) << 16;
constexpr size_t squared_norm_scratch(size_t n) { return ceil_div(n, squared_norm_part); }

template <class X, class G> double squared_norm(Cpu<X> dev, double *scratch, const G *x, size_t n) {
    const size_t parts = squared_norm_scratch(n);
#pragma omp parallel for num_threads(dev.threads)
    for (size_t p = 0; p < parts; p++) {
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (size_t i = p * squared_norm_part; i < std::min(n, (p + 1) * squared_norm_part); i++)
            sum += double(float(x[i])) * double(float(x[i]));
        scratch[p] = sum;
    }
    double sum = 0;
    for (size_t p = 0; p < parts; p++) sum += scratch[p];
    return sum;
}

template <class X, class G> void add_squared_norm(Cpu<X> dev, double *sum, double *scratch, const G *x, size_t n) {
    *sum += squared_norm(dev, scratch, x, n);
}

REHEARSED(add_squared_norm);
template <class D, class G> double squared_norm(const Rehearsal<D> &dev, double *scratch, const G *x, size_t) {
    return dev.note(scratch, x), 0;
}
