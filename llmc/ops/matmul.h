// The linear layer. Weights are stored (OC, IC), as Hugging Face does.
//
//   matmul_forward        (dev, out, x, w, bias, T, IC, OC, ld, accumulate)
//                                                                 out[t,o] = sum_i x[t,i] w[o,i] + bias[o]
//   matmul_backward_input (dev, dx, dout, w, T, IC, OC, ld, accumulate)
//                                                                 dx[t,i] = sum_o dout[t,o] w[o,i]
//                                                                 if accumulate, out or dx += the same, with one more rounding
//   matmul_backward_weight(dev, dw, dbias, dout, x, T, IC, OC, accumulate, ld)
//                                                                 dw[o,i] += sum_t dout[t,o] x[t,i]   dbias[o] += sum_t dout[t,o]
//                                                                 if not accumulate, dw = sum_t ..., and T > 0
//   matmul_bias_backward  (dev, dbias, dout, T, OC, ld)           only dbias
//
//   All products use the same matmul_scratch(dev) bytes of scratch, aligned to array_alignment. The owner of that memory calls
//   matmul_use_scratch(dev, scratch) before its products, because another owner may have used the context in the meantime, and
//   matmul_use_scratch(dev, nullptr) before it frees the memory.
//
//   More than matmul_run(dev) tokens are multiplied one run at a time. So a product has the same bits whether a caller passes all tokens at once, or
//   parts that are multiples of a run in consecutive calls; and the library only sees small sizes.
//
//   x, dx (T, IC), w (OC, IC), bias (OC), dout (T, OC) X     out (T, OC) X or float    dw (OC, IC), dbias (OC) float
//   ld: elements from one row of out, or dout, to the next; elements after the first OC are neither read nor written. 0: OC.
//   bias and dbias may be null. No output may alias an input. Sums are float and rounded once, to the type of the output, in an
//   order that depends on the sizes alone, never on threads. A context works for all shapes, but for one call at a time.
#pragma once
#include <type_traits>

#include "../core/device.h"
#include "../core/memory.h"

const char *matmul_backend();  // the library's name, or "own sgemm", for the run log

template <class X, class Out>  // Out: X, or float for logits
void matmul_forward(Cpu<X> dev, Out *out, const X *x, const X *w, const std::type_identity_t<X> *bias, size_t T, size_t IC,
                    size_t OC, size_t ld = 0, bool accumulate = false);

template <class X>
void matmul_backward_input(Cpu<X> dev, X *dx, const X *dout, const X *w, size_t T, size_t IC, size_t OC, size_t ld = 0,
                           bool accumulate = false);

template <class X>
void matmul_backward_weight(Cpu<X> dev, float *dw, float *dbias, const X *dout, const X *x, size_t T, size_t IC, size_t OC,
                            bool accumulate, size_t ld = 0);

template <class X> void matmul_bias_backward(Cpu<X> dev, float *dbias, const X *dout, size_t T, size_t OC, size_t ld);

template <class X> constexpr size_t matmul_run(Cpu<X>) { return 2048; }

template <class X> size_t matmul_scratch(Cpu<X> dev);
template <class X> void matmul_use_scratch(Cpu<X> dev, void *scratch);

REHEARSED(matmul_bias_backward);
REHEARSED(matmul_use_scratch);
REHEARSED_PRODUCT(matmul_forward);
REHEARSED_PRODUCT(matmul_backward_input);
REHEARSED_PRODUCT(matmul_backward_weight);
ASKED(matmul_scratch);
template <class D> constexpr size_t matmul_run(const Rehearsal<D> &) { return 1; }  // tiles may have any length
