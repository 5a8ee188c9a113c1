// Our own matrix product, for programs built without a library and for groups of products with arbitrary sizes, such as the experts'. It multiplies
// floats, and converts bf16 to float during packing; on CPUs that multiply pairs of bf16 faster, it multiplies those (bf16_dot_is_fast in
// micro_kernel.h).
//
//   C = A B + bias  or, if accumulate,  C += A B      C (M, N) Out, rows of ld elements  A (M, K), B (K, N) X, any strides  bias (N) or null
//
// for one product or several at once with separate outputs.
//
// The structure follows Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", TOMS 2008: C is divided into tiles. For a tile, a
// hundred columns of A and rows of B at a time are packed, and a micro-kernel reads them from cache in the order of use. One thread computes a tile.
// The order of every sum depends on K alone, so results depend neither on tiles nor on threads.
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
