// fp8 on CUDA. Contract: fp8.h.
#pragma once
#include "fp8.h"
#include "layout.cuh"
#include "matmul.cuh"

inline namespace CUDA_BACKEND {
template <class X> constexpr size_t fp8_bytes(Cuda<X>) { return 1; }

// ---- the scale ------------------------------------------------------------------------------------------------------------------

// The bits of magnitudes, as integers, have the order of the magnitudes; infinity follows all numbers, and NaN follows infinity. A maximum of
// integers does not depend on the order of evaluation. A thread has four vectors of 16 bytes in flight. The kernel reads n elements.
template <class X> __global__ void fp8_scale_kernel2(unsigned *largest, const X *x, size_t n) {
    constexpr int N = Vec<X>::size, at_once = 4;
    auto &of_block = shared_mem<unsigned>();
    if (threadIdx.x == 0) of_block = 0;
    __syncthreads();
    const size_t vectors = n / N, threads = gridDim.x * size_t(blockDim.x);
    unsigned bits = 0;
    for (size_t begin = blockIdx.x * size_t(blockDim.x) + threadIdx.x; begin < vectors; begin += at_once * threads) {
        Vec<X> v[at_once];
#pragma unroll
        for (int j = 0; j < at_once; j++)
            if (begin + j * threads < vectors) v[j] = Vec<X>::load(x + (begin + j * threads) * N);
#pragma unroll
        for (int j = 0; j < at_once; j++)
            if (begin + j * threads < vectors)
#pragma unroll
                for (int i = 0; i < N; i++) bits = max(bits, __float_as_uint(fabsf(float(v[j][i]))));
    }
    for (unsigned distance = 16; distance > 0; distance /= 2) bits = max(bits, __shfl_xor_sync(all_lanes, bits, distance));
    if (threadIdx.x % 32 == 0) atomicMax(&of_block, bits);
    __syncthreads();
    if (threadIdx.x == 0) atomicMax(largest, of_block);
}

template <class X> void fp8_scale(Cuda<X> dev, Fp8Matrix q, const X *x, size_t rows, size_t columns) {
    constexpr size_t threads = 256, of_a_block = threads * 4 * Vec<X>::size;
    clear_floats(dev, q.scale + 1, 1);
    launch(dev, fp8_scale_kernel2<X>, Grid{std::min<size_t>(ceil_div(rows * columns, of_a_block), 1024)}, threads,
           sizeof(unsigned), reinterpret_cast<unsigned *>(q.scale + 1), x, rows * columns);
}

// ---- rounding -------------------------------------------------------------------------------------------------------------------

// Returns the bytes of two numbers, with the first in the lower half.
__device__ inline uint16_t fp8_pair(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
    return pair;
#elif defined(__CUDACC__)
    return 0;  // never runs: older GPUs are refused at the start, but clang also compiles device functions for the host
#else
    return uint16_t(fp8_code(fp8_nearest(first)) | fp8_code(fp8_nearest(second)) << 8);
#endif
}

// A block's part of the matrix. A thread has 4 rows of 8 columns.
constexpr unsigned fp8_rows = 128, fp8_columns = 64, fp8_threads = fp8_rows / 4 * (fp8_columns / 8);

struct Fp8Tile {
    uint32_t words[fp8_columns]
                  [fp8_rows / 4 + 1];  // each has 4 rows of a column; one word of padding puts columns into different banks
};

// A transposed tile is stored from shared memory, 16 bytes per thread. Sizes are multiples of 16, so either all rows and columns of a thread exist or
// none. The kernel loads rows * columns elements and stores rows * columns bytes.
template <class X, bool turned>
__global__ void __launch_bounds__(fp8_threads)
    fp8_round_kernel2(uint8_t *out, float *scale, const X *x, size_t rows, size_t columns) {
    auto &tile = shared_mem<Fp8Tile>();
    const unsigned r = threadIdx.x / (fp8_columns / 8) * 4, c = threadIdx.x % (fp8_columns / 8) * 8;
    const size_t r0 = blockIdx.x * size_t(fp8_rows), c0 = blockIdx.y * size_t(fp8_columns);
    const float factor = fp8_factor(scale[1]);
    if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) scale[0] = 1.0f / factor;
    if (r0 + r < rows && c0 + c < columns) {
        Vec<X, 8> v[4];
        uint32_t words[4][2];  // each has 4 columns
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = Vec<X, 8>::load(x + (r0 + r + i) * columns + c0 + c);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const auto pair = [&](int j) { return fp8_pair(factor * float(v[i][j]), factor * float(v[i][j + 1])); };
                words[i][half] = pair(4 * half) | uint32_t(pair(4 * half + 2)) << 16;
            }
#pragma unroll
        for (int i = 0; i < 4; i++)
            if constexpr (turned) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const auto byte = [&](int row) { return words[row][half] >> 8 * i & 0xff; };
                    tile.words[c + 4 * half + i][r / 4] = byte(0) | byte(1) << 8 | byte(2) << 16 | byte(3) << 24;
                }
            } else *reinterpret_cast<uint2 *>(out + (r0 + r + i) * columns + c0 + c) = make_uint2(words[i][0], words[i][1]);
    }
    if (!turned) return;
    __syncthreads();
#pragma unroll
    for (unsigned i = threadIdx.x; i < fp8_columns * fp8_rows / 16; i += fp8_threads) {
        const unsigned column = i / (fp8_rows / 16), row = i % (fp8_rows / 16) * 16;
        if (c0 + column >= columns || r0 + row >= rows) continue;
        const uint32_t *words = &tile.words[column][row / 4];
        *reinterpret_cast<uint4 *>(out + (c0 + column) * rows + r0 + row) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

template <class X> void fp8_round(Cuda<X> dev, Fp8Matrix q, const X *x, size_t rows, size_t columns, bool turned) {
    const auto kernel = turned ? fp8_round_kernel2<X, true> : fp8_round_kernel2<X, false>;
    launch(dev, kernel, Grid{ceil_div(rows, fp8_rows), ceil_div(columns, fp8_columns)}, fp8_threads, sizeof(Fp8Tile),
           reinterpret_cast<uint8_t *>(q.values), q.scale, x, rows, columns);
}

// ---- the product ----------------------------------------------------------------------------------------------------------------

#ifdef LLMC_EMULATE
template <class X, class Out>
void fp8_product(Cuda<X> dev, Out *out, Fp8Matrix a, Fp8Matrix b, const X *bias, size_t T, size_t IC, size_t OC,
                 bool accumulate) {
    simt::enqueue(dev.stream, [=] {
        const auto numbers = [](Fp8Matrix q, size_t n) {
            std::vector<X> out(n);
            for (size_t i = 0; i < n; i++) out[i] = fp8_number(uint8_t(q.values[i])) * q.scale[0];
            return out;
        };
        const std::vector<X> x = numbers(a, T * IC), w = numbers(b, OC * IC);
        matmul_forward(emulating(dev), out, x.data(), w.data(), bias, T, IC, OC, 0, accumulate);
    });
}
#else
// cuBLASLt multiplies FP8 matrices only along their rows: op(A) is transposed, and op(B) is not.
template <class X, class Out>
void fp8_product(Cuda<X> dev, Out *out, Fp8Matrix a, Fp8Matrix b, const X *bias, size_t T, size_t IC, size_t OC,
                 bool accumulate) {
    cublas_product(dev, out, OC, {b.values, CUDA_R_8F_E4M3, CUBLAS_OP_T, IC, b.scale},
                   {a.values, CUDA_R_8F_E4M3, CUBLAS_OP_N, IC, a.scale}, bias, OC, T, IC, accumulate);
}
#endif
}  // namespace CUDA_BACKEND
