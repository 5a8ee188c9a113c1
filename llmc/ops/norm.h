// The shape that rmsnorm and layernorm share, and the order in which they and the norm of queries and keys sum the gradients of their weights over
// tokens: first within runs of tokens, one run per thread, then over the runs. It depends on the sizes alone, never on threads.
#pragma once
#include <algorithm>
#include <cstddef>
#include <tuple>

#include "../core/common.h"
#include "../core/device.h"

// T rows of C elements; eps is added to the mean of squares or the variance.
struct NormShape {
    size_t T, C;
    float eps;
    float w0 = 0;  // rmsnorm: added to the weights; 1 in models that store their difference from 1 (Gemma)

    auto pointers() const { return std::tuple(); }  // ../core/rehearsal.h
};

constexpr size_t norm_runs = 64;  // the largest number of runs

struct NormRuns {
    size_t T, length, count;
    explicit NormRuns(size_t T) : T(T), length(std::max<size_t>(ceil_div(T, norm_runs), 1)), count(ceil_div(T, length)) {}
    size_t begin(size_t run) const { return run * length; }
    size_t end(size_t run) const { return std::min(T, begin(run) + length); }
};

// dw[c] += sum_run parts[run, c]
template <class X> void norm_add_runs(Cpu<X> dev, float *dw, const float *parts, size_t runs, size_t C) {
    constexpr size_t slice = 64;
#pragma omp parallel for num_threads(dev.threads)
    for (size_t s = 0; s < ceil_div(C, slice); s++) {
        const size_t begin = s * slice, end = std::min(C, begin + slice);
        for (size_t run = 0; run < runs; run++)
#pragma omp simd
            for (size_t c = begin; c < end; c++) dw[c] += parts[run * C + c];
    }
}

// Calls row(t, sums) for T tokens, where sums is the token's run in the first of `number` parts of sums (number, runs, C), which begin as 0.
template <class X, class Row> void norm_for_runs(Cpu<X> dev, float *parts, size_t number, size_t T, size_t C, Row row) {
    const NormRuns runs(T);
#pragma omp parallel for num_threads(dev.threads)
    for (size_t run = 0; run < runs.count; run++) {
        float *const sums = parts + run * C;
        for (size_t part = 0; part < number; part++) std::fill_n(sums + part * runs.count * C, C, 0.0f);
        for (size_t t = runs.begin(run); t < runs.end(run); t++) row(t, sums);
    }
}

// out = x + y, for one row
template <class X> void norm_add_row(X *out, const X *x, const X *y, size_t C) {
#pragma omp simd
    for (size_t c = 0; c < C; c++) out[c] = float(x[c]) + float(y[c]);
}
