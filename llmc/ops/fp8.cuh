// fp8 on CUDA. Contract: fp8.h.
#pragma once
#include "fp8.h"
#include "layout.cuh"
#include "matmul.cuh"

inline namespace CUDA_BACKEND {
template <class X> constexpr size_t fp8_bytes(Cuda<X>) { return 1; }

// ---- the scale ------------------------------------------------------------------------------------------------------------------

// The bits of a magnitude, as an integer, are in the order of magnitudes, with infinity and then NaN behind all numbers; and the largest of integers does not
// depend on the order in which they come. A block has every gridDim.x-th row. The kernel reads rows * columns elements.
template <class X> __global__ void fp8_scale_kernel1(unsigned *largest, const X *x, size_t rows, size_t columns, size_t ld) {
    constexpr int N = Vec<X>::size;
    unsigned bits = 0;
    for (size_t r = blockIdx.x; r < rows; r += gridDim.x)
        for (size_t c = threadIdx.x * N; c < columns; c += blockDim.x * N) {
            const auto v = Vec<X, N>::load(x + r * ld + c);
            for (int i = 0; i < N; i++) bits = max(bits, __float_as_uint(fabsf(float(v[i]))));
        }
    for (unsigned distance = 16; distance > 0; distance /= 2) bits = max(bits, __shfl_xor_sync(all_lanes, bits, distance));
    if (threadIdx.x % 32 == 0) atomicMax(largest, bits);
}

template <class X> void fp8_scale(Cuda<X> dev, Fp8Matrix q, const X *x, size_t rows, size_t columns, size_t ld = 0) {
    clear_floats(dev, q.scale + 1, 1);
    launch(dev, fp8_scale_kernel1<X>, Grid{std::min<size_t>(rows, 1024)}, 256, 0, reinterpret_cast<unsigned *>(q.scale + 1), x,
           rows, columns, ld ? ld : columns);
}

// ---- rounding -------------------------------------------------------------------------------------------------------------------

// The bytes of two numbers, the first one's in the lower half.
__device__ inline uint16_t fp8_pair(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
    return pair;
#elif defined(__CUDACC__)
    return 0;  // an older GPU is refused when a run begins; and clang also compiles a kernel's functions for the host
#else
    return uint16_t(fp8_code(fp8_nearest(first)) | fp8_code(fp8_nearest(second)) << 8);
#endif
}

constexpr unsigned fp8_tile = 64;  // rows and columns of a block's part

struct Fp8Tile {
    uint16_t pairs[fp8_tile][fp8_tile / 2 + 2];  // of columns; two more, so that the rows of a column are in different banks
};

// A warp loads rows of the tile, each lane two neighbouring columns. The rounded tile is stored from shared memory, so that neighbouring lanes store neighbouring
// bytes whether or not it is transposed. The kernel loads rows * columns elements and stores rows * columns bytes.
template <class X, bool turned>
__global__ void fp8_round_kernel1(uint8_t *out, float *scale, const X *x, size_t rows, size_t columns, size_t ld) {
    auto &tile = shared_mem<Fp8Tile>();
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const size_t r0 = blockIdx.x * size_t(fp8_tile), c0 = blockIdx.y * size_t(fp8_tile);
    const float factor = fp8_factor(scale[1]);
    if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) scale[0] = 1.0f / factor;
    for (unsigned r = warp; r < fp8_tile && r0 + r < rows; r += warps) {
        if (c0 + 2 * lane >= columns) continue;
        const auto v = Vec<X, 2>::load(x + (r0 + r) * ld + c0 + 2 * lane);
        const uint16_t pair = fp8_pair(factor * float(v[0]), factor * float(v[1]));
        if (turned) tile.pairs[r][lane] = pair;
        else *reinterpret_cast<uint16_t *>(out + (r0 + r) * columns + c0 + 2 * lane) = pair;
    }
    if (!turned) return;
    __syncthreads();
    for (unsigned c = warp; c < fp8_tile && c0 + c < columns; c += warps) {
        if (r0 + 2 * lane >= rows) continue;
        const unsigned shift = c % 2 * 8, above = tile.pairs[2 * lane][c / 2] >> shift & 0xff,
                       below = tile.pairs[2 * lane + 1][c / 2] >> shift & 0xff;
        *reinterpret_cast<uint16_t *>(out + (c0 + c) * rows + r0 + 2 * lane) = uint16_t(above | below << 8);
    }
}

template <class X> void fp8_round(Cuda<X> dev, Fp8Matrix q, const X *x, size_t rows, size_t columns, size_t ld, bool turned) {
    const auto kernel = turned ? fp8_round_kernel1<X, true> : fp8_round_kernel1<X, false>;
    launch(dev, kernel, Grid{ceil_div(rows, fp8_tile), ceil_div(columns, fp8_tile)}, 256, sizeof(Fp8Tile),
           reinterpret_cast<uint8_t *>(q.values), q.scale, x, rows, columns, ld ? ld : columns);
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
// cuBLASLt multiplies such matrices along their rows alone: op(A) is transposed, and op(B) is not.
template <class X, class Out>
void fp8_product(Cuda<X> dev, Out *out, Fp8Matrix a, Fp8Matrix b, const X *bias, size_t T, size_t IC, size_t OC,
                 bool accumulate) {
    cublas_product(dev, out, {b.values, CUDA_R_8F_E4M3, b.scale}, {a.values, CUDA_R_8F_E4M3, a.scale}, bias, CUBLAS_OP_T,
                   CUBLAS_OP_N, OC, T, IC, IC, IC, OC, accumulate);
}
#endif
}  // namespace CUDA_BACKEND
