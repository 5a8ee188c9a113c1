// squared_norm(dev, x, n) = sum_i x[i]^2.     x (n) float. Summed in double over blocks of a fixed size, then over the
// blocks in order, so that the result does not depend on threads.
#pragma once
#include <algorithm>
#include <cstddef>
#include <vector>

#include "../core/common.h"
#include "../core/device.h"

template <class X> double squared_norm(Cpu<X> dev, const float *x, size_t n) {
    constexpr size_t block = size_t(1) << 16;
    std::vector<double> sums(ceil_div(n, block));
#pragma omp parallel for num_threads(dev.threads)
    for (size_t b = 0; b < sums.size(); b++) {
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (size_t i = b * block; i < std::min(n, (b + 1) * block); i++) sum += double(x[i]) * double(x[i]);
        sums[b] = sum;
    }
    double sum = 0;
    for (double s : sums) sum += s;
    return sum;
}
