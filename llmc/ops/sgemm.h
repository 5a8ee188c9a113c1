// A matrix product of our own, so that a C++ compiler alone is enough, and for bf16 where the library has none: the inputs become
// float while they are packed.
//
//   C = A B + bias  or, if accumulate,  C += A B      C (M, N) row-major Out  A (M, K), B (K, N) X, any strides  bias (N) or null
//
// After Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", TOMS 2008: C is cut into tiles; for a tile, a
// few hundred columns of A and rows of B at a time are packed into panels, which a micro-kernel reads from cache in the order it
// needs them. A tile is the work of one thread, and the cut depends on M, N and K alone: results do not depend on threads.
#pragma once
#include <cstddef>

template <class X> struct Matrix {  // element (i, j) is data[i * row + j * column]
    const X *data;
    size_t row, column;
};

constexpr size_t sgemm_scratch = 256 * 1024;  // floats per thread: packed A and B and the tile, which fit a cache of 1 MiB

// scratch: threads * sgemm_scratch floats, aligned to 64 bytes.
template <class X, class Out>
void sgemm(int threads, float *scratch, Out *C, Matrix<X> A, Matrix<X> B, const X *bias, size_t M, size_t N, size_t K,
           bool accumulate);
