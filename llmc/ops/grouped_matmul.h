// Products of rows with the matrix of their group, such as an expert's tokens with its weights. A group may be empty.
//
//   grouped_matmul_forward        (dev, out, x, w, groups, IC, OC, ld, accumulate)
//                                 out[r,o] = sum_i x[r,i] w[e,o,i]             for row r of group e
//   grouped_matmul_backward_input (dev, dx, dout, w, groups, IC, OC, ld, accumulate)
//                                 dx[r,i] = sum_o dout[r,o] w[e,o,i]           if accumulate, out or dx += the same, with one more rounding
//   grouped_matmul_backward_weight(dev, dw, dout, x, groups, IC, OC, accumulate, ld)
//                                 dw[e,o,i] += sum_{r of e} dout[r,o] x[r,i]   if not accumulate, dw = the sum, which is 0 for a group without rows
//
//   x, dx (R, IC), w (E, OC, IC), out, dout (R, OC) X     dw (E, OC, IC) float     groups: starts, E, R
//   ld: elements from one row of out, or dout, to the next; elements after the first OC are neither read nor written. 0: OC.
//   No output may alias an input. Sums are float, in an order that does not depend on threads, and rounded once. The bits of a row's results depend
//   on R, but not on other rows. The products use the scratch of matmul.h. With few rows, each group's matrix is read once, if the group has rows.
#pragma once
#include <cstddef>
#include <cstdint>
#include <tuple>

#include "../core/device.h"

// R rows in E groups: the rows of group e are [starts[e], starts[e+1]).
struct RowGroups {
    const int32_t *starts;  // (E + 1) from 0 to R
    size_t E, R;

    auto pointers() const { return std::tuple(starts); }  // ../core/rehearsal.h
};

template <class X>
void grouped_matmul_forward(Cpu<X> dev, X *out, const X *x, const X *w, RowGroups groups, size_t IC, size_t OC, size_t ld = 0,
                            bool accumulate = false);
template <class X>
void grouped_matmul_backward_input(Cpu<X> dev, X *dx, const X *dout, const X *w, RowGroups groups, size_t IC, size_t OC,
                                   size_t ld = 0, bool accumulate = false);
template <class X>
void grouped_matmul_backward_weight(Cpu<X> dev, float *dw, const X *dout, const X *x, RowGroups groups, size_t IC, size_t OC,
                                    bool accumulate, size_t ld = 0);

REHEARSED_PRODUCT(grouped_matmul_forward);
REHEARSED_PRODUCT(grouped_matmul_backward_input);
REHEARSED_PRODUCT(grouped_matmul_backward_weight);
