// A matrix product of our own: for programs built without a library, and for products of any sizes, as those of experts are. It multiplies floats, to which
// bf16 is converted while it is packed, or pairs of bf16 on CPUs that multiply these faster (bf16_dot_is_fast of micro_kernel.h).
//
//   C = A B + bias  or, if accumulate,  C += A B      C (M, N) Out, rows of ld elements  A (M, K), B (K, N) X, any strides  bias (N) or null
//
// of one product or of several at once, whose outputs are apart.
//
// After Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", TOMS 2008: C is divided into tiles; for a tile, a hundred
// columns of A and rows of B at a time are packed, and a micro-kernel reads them from cache in the order it needs them. One thread computes a
// tile. Every sum has its order from K alone, so that results depend neither on tiles nor on threads.
#pragma once
#include <cstddef>
#include <span>

template <class X> struct Matrix {  // element (i, j) is data[i * row + j * column]; one of the strides is 1
    const X *data;
    size_t row, column;
};

template <class X, class Out> struct Product {
    Out *C;
    size_t ld;
    Matrix<X> A, B;
    const X *bias;
    size_t M, N, K;
    bool accumulate;
};

constexpr size_t sgemm_scratch = 256 * 1024;  // floats per thread: packed A and B and the tile, which fit a cache of 1 MiB

// scratch: threads * sgemm_scratch floats, aligned to 64 bytes.
template <class X, class Out> void sgemm(int threads, float *scratch, std::span<const Product<X, Out>> products);
