// The rows of a mixture of experts. Each token has K rows, one for each expert that it chose. Rows are sorted by expert, so the rows of an expert are
// contiguous, and within an expert by token.
//
//   sort_by_expert(dev, starts, counts, row_of, token_of, chosen, T, E, K)
//       counts[e] = rows of expert e     starts[e] = its first row, starts[E] = T K
//       row_of[t,k] = the row of token t for expert chosen[t,k]          token_of[row_of[t,k]] = t
//   combine_rows  (dev, out, base, rows, weights, row_of, T, K, C)
//       out[t,c] = base[t,c] + sum_k weights[t,k] rows[row_of[t,k],c]    summed in this order, and rounded once
//   weigh_rows_backward(dev, dweights, dact, act, weights, row_of, T, K, F)       for r = row_of[t,k]:
//       dweights[t,k] = sum_f dact[r,f] act[r,f]     dact[r,f] *= weights[t,k]     act[r,f] *= weights[t,k]
//   sort_weights  (dev, of_rows, weights, row_of, R)         of_rows[row_of[i]] = weights[i]
//   unsort_weights(dev, weights, of_rows, row_of, R)         weights[i] = of_rows[row_of[i]]
//
//   starts (E+1), counts (E), chosen, row_of (T, K), token_of (T K) int32     weights, dweights (T, K) float     rows (T K, C), out, base (T, C),
//   act, dact (T K, F) X     base may be null, which is 0, and may be out; weights may be null, which is 1; row_of may be null, which is t K + k
//   dweights may be weights     of_rows (R) float
//
// weigh_rows_backward belongs to the last product of an expert, y[r] = act[r] W^T, and the weighted sum of its rows. Given dact[r] = dout[t] W it
// computes the derivative with respect to the weight without the rows y. It then turns dact into the gradient of act, and act into the factor that
// the gradient of W needs.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "../core/device.h"
#include "simd.h"

template <class X>
void sort_by_expert(Cpu<X>, int32_t *starts, int32_t *counts, int32_t *row_of, int32_t *token_of, const int32_t *chosen, size_t T,
                    size_t E, size_t K) {
    std::fill_n(counts, E, 0);
    for (size_t i = 0; i < T * K; i++) counts[chosen[i]]++;
    starts[0] = 0;
    for (size_t e = 0; e < E; e++) starts[e + 1] = starts[e] + counts[e];
    for (size_t i = T * K; i-- > 0;) {
        const int32_t e = chosen[i], row = starts[e] + --counts[e];
        row_of[i] = row, token_of[row] = int32_t(i / K);
    }
    for (size_t e = 0; e < E; e++) counts[e] = starts[e + 1] - starts[e];
}

template <class X>
void combine_rows(Cpu<X> dev, X *out, const X *base, const X *rows, const float *weights, const int32_t *row_of, size_t T,
                  size_t K, size_t C) {
#pragma omp parallel for num_threads(dev.threads)
    for (size_t t = 0; t < T; t++)
        simd::for_each(C, [&]<class V>(size_t c) {
            V sum = base ? simd::load<V>(base + t * C + c) : V{};
            for (size_t i = t * K; i < (t + 1) * K; i++)
                sum += (weights ? weights[i] : 1.0f) * simd::load<V>(rows + (row_of ? size_t(row_of[i]) : i) * C + c);
            simd::store(out + t * C + c, sum);
        });
}

template <class X> void sort_weights(Cpu<X>, float *of_rows, const float *weights, const int32_t *row_of, size_t R) {
    for (size_t i = 0; i < R; i++) of_rows[row_of[i]] = weights[i];
}
template <class X> void unsort_weights(Cpu<X>, float *weights, const float *of_rows, const int32_t *row_of, size_t R) {
    for (size_t i = 0; i < R; i++) weights[i] = of_rows[row_of[i]];
}

template <class X>
void weigh_rows_backward(Cpu<X> dev, float *dweights, X *dact, X *act, const float *weights, const int32_t *row_of, size_t T,
                         size_t K, size_t F) {
#pragma omp parallel for num_threads(dev.threads)
    for (size_t i = 0; i < T * K; i++) {
        const size_t r = row_of ? size_t(row_of[i]) : i;
        const float w = weights[i];
        X *d = dact + r * F, *a = act + r * F;
        simd::Vector sums{};
        float sum = 0;
        simd::for_each(F, [&]<class V>(size_t f) {
            const V df = simd::load<V>(d + f), af = simd::load<V>(a + f);
            if constexpr (std::is_same_v<V, float>) sum += df * af;
            else sums += df * af;
            simd::store(d + f, df * w), simd::store(a + f, af * w);
        });
        for (size_t lane = 0; lane < simd::lanes; lane++) sum += sums[lane];
        dweights[i] = sum;
    }
}

REHEARSED(sort_by_expert);
REHEARSED(combine_rows);
REHEARSED(weigh_rows_backward);
REHEARSED(sort_weights);
REHEARSED(unsort_weights);
