// The forward pass of the linear layer in bf16: out[t,o] = sum_i x[t,i] w[o,i], contract in llmc/ops/matmul.h (here without bias).
//
// Timed with T = IC = OC = 4096: 2 T IC OC = 137 GFLOP, and 2 (T IC + OC IC + T OC) = 101 MB to read and write once, so 1365 FLOP per
// byte. Arithmetic is the limit for a kernel that reads each value about once. Versions 2 and 3 read each value fewer times, version 4
// multiplies faster, version 5 overlaps loads and products.
//
// A tile of R x C outputs reads (R + C) IC values for 2 R C IC FLOP. All tiles together read 2 T IC OC (1/R + 1/C) bytes from L2:
//
//   version                        outputs of a    FLOP per      shared memory per FLOP    limited by
//                                  block           byte of L2
//   1 a thread per output          16 x 16         0.5 (L1)      none                      two loads for each multiply and add
//   2 tiles in shared memory       32 x 32         16            4 bytes                   loads from shared memory
//   3 an 8 x 8 tile per thread     128 x 128       64            1/2 byte                  the float units, without tensor cores
//   4 mma.sync                     128 x 128       64            1/32 byte                 waiting: no products while slabs arrive
//   5 mma.sync and cp.async        128 x 128       64            1/32 byte                 shared memory, and mma.sync itself
//   6 cuBLAS, 7 shipped: cuBLASLt  the library's choice
//
// A library is faster than version 5 because of wgmma and TMA, larger tiles, and an order of blocks in which concurrent blocks share
// rows of x and w in L2. T and OC are arbitrary; versions 3 to 5 read 16 bytes at a time, so IC must be a multiple of 8.
#include "../../llmc/ops/attention_tile.cuh"
#include "../../test/cuda/matmul_context.cuh"
#include "../../test/reference_matmul.h"
#include "common.h"
#ifndef LLMC_EMULATE
#include <cublas_v2.h>
#endif

namespace CUDA_BACKEND::workshop {

// ---- version 1: a thread per output --------------------------------------------------------------------------------------------
//
// A thread reads 4 bytes for every 2 FLOP. The threads of a row of the block read the same x, and 16 different rows of w.

__global__ void matmul_forward_kernel1(bf16 *out, const bf16 *x, const bf16 *w, size_t T, size_t IC, size_t OC) {
    const size_t t = blockIdx.x * size_t(16) + threadIdx.x / 16, o = blockIdx.y * size_t(16) + threadIdx.x % 16;
    if (t >= T || o >= OC) return;
    float sum = 0;
    for (size_t i = 0; i < IC; i++) sum += float(x[t * IC + i]) * float(w[o * IC + i]);
    out[t * OC + o] = sum;
}

void matmul_forward1(CudaBf16 dev, bf16 *out, const bf16 *x, const bf16 *w, size_t T, size_t IC, size_t OC) {
    launch(dev, matmul_forward_kernel1, Grid{ceil_div(T, 16), ceil_div(OC, 16)}, 256, 0, out, x, w, T, IC, OC);
}

// ---- version 2: tiles in shared memory -----------------------------------------------------------------------------------------
//
// A thread still computes one output, but the 1024 threads of a block load 32 x 32 values of x and of w together, a warp 32 neighbours
// of one row, and then use each value 32 times. Every multiply and add still waits for two loads, now from shared memory: one value of
// x for the whole warp (a broadcast), and a column of w. Rows of w are 33 floats apart, so the 32 values are in 32 banks.

struct SquareTiles {
    float x[32][33], w[32][33];
};

__global__ void __launch_bounds__(1024)
    matmul_forward_kernel2(bf16 *out, const bf16 *x, const bf16 *w, size_t T, size_t IC, size_t OC) {
    auto &s = shared_mem<SquareTiles>();
    const unsigned r = threadIdx.x / 32, c = threadIdx.x % 32;
    const size_t t0 = blockIdx.x * size_t(32), o0 = blockIdx.y * size_t(32);
    float sum = 0;
    for (size_t k0 = 0; k0 < IC; k0 += 32) {
        s.x[r][c] = t0 + r < T && k0 + c < IC ? float(x[(t0 + r) * IC + k0 + c]) : 0.0f;
        s.w[r][c] = o0 + r < OC && k0 + c < IC ? float(w[(o0 + r) * IC + k0 + c]) : 0.0f;
        __syncthreads();
        for (int k = 0; k < 32; k++) sum += s.x[r][k] * s.w[c][k];
        __syncthreads();  // all threads are done with the tiles
    }
    if (t0 + r < T && o0 + c < OC) out[(t0 + r) * OC + o0 + c] = sum;
}

void matmul_forward2(CudaBf16 dev, bf16 *out, const bf16 *x, const bf16 *w, size_t T, size_t IC, size_t OC) {
    launch(dev, matmul_forward_kernel2, Grid{ceil_div(T, 32), ceil_div(OC, 32)}, 1024, sizeof(SquareTiles), out, x, w, T, IC, OC);
}

// ---- version 3: an 8 x 8 tile per thread ---------------------------------------------------------------------------------------
//
// 16 values in registers give 64 products, so each load from shared memory is used 8 times. The slabs are stored transposed: a 16-byte
// load reads four adjacent values, and 8 threads read 128 consecutive bytes, so each bank is used once. In a store a warp writes 32
// adjacent values.

constexpr int block_rows = 128;  // of x and of w: in versions 3 to 5 a block computes 128 x 128 outputs

// Returns 8 values of a row of a matrix (rows, IC), or zeros outside of the matrix.
__device__ Vec<bf16> read_8(const bf16 *from, size_t row, size_t rows, size_t k, size_t IC) {
    return row < rows && k < IC ? Vec<bf16>::load(from + row * IC + k) : Vec<bf16>{};
}

constexpr int depth3 = 16;  // values of each row in shared memory at a time

struct TransposedSlab {
    float x[depth3][block_rows];

    __device__ void load(const bf16 *from, size_t row0, size_t rows, size_t k0, size_t IC) {
        const int row = int(threadIdx.x) % block_rows, k = int(threadIdx.x) / block_rows * 8;
        const Vec<bf16> values = read_8(from, row0 + row, rows, k0 + k, IC);
        for (int j = 0; j < 8; j++) x[k + j][row] = float(values[j]);
    }
    // A thread owns four of the 128 rows, and four more at a distance of 64.
    __device__ static int row(int i, int e) { return e / 4 * 64 + 4 * i + e % 4; }
    __device__ void read(float (&values)[8], int k, int i) const {
        for (int half = 0; half < 2; half++) {
            const Vec<float> four = Vec<float>::load(&x[k][row(i, 4 * half)]);
            for (int e = 0; e < 4; e++) values[4 * half + e] = four[e];
        }
    }
};
struct TransposedSlabs {
    TransposedSlab x, w;
};

__global__ void __launch_bounds__(256)
    matmul_forward_kernel3(bf16 *out, const bf16 *x, const bf16 *w, size_t T, size_t IC, size_t OC) {
    auto &s = shared_mem<TransposedSlabs>();
    const int r = int(threadIdx.x) / 16, c = int(threadIdx.x) % 16;
    const size_t t0 = blockIdx.x * size_t(block_rows), o0 = blockIdx.y * size_t(block_rows);
    float sum[8][8] = {};
    for (size_t k0 = 0; k0 < IC; k0 += depth3) {
        s.x.load(x, t0, T, k0, IC);
        s.w.load(w, o0, OC, k0, IC);
        __syncthreads();
        for (int k = 0; k < depth3; k++) {
            float a[8], b[8];
            s.x.read(a, k, r);
            s.w.read(b, k, c);
            for (int i = 0; i < 8; i++)
                for (int j = 0; j < 8; j++) sum[i][j] += a[i] * b[j];
        }
        __syncthreads();
    }
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 8; j++) {
            const size_t t = t0 + size_t(s.x.row(r, i)), o = o0 + size_t(s.w.row(c, j));
            if (t < T && o < OC) out[t * OC + o] = sum[i][j];
        }
}

void matmul_forward3(CudaBf16 dev, bf16 *out, const bf16 *x, const bf16 *w, size_t T, size_t IC, size_t OC) {
    launch(dev, matmul_forward_kernel3, Grid{ceil_div(T, block_rows), ceil_div(OC, block_rows)}, 256, sizeof(TransposedSlabs),
           out, x, w, T, IC, OC);
}

// ---- version 4: mma.sync -------------------------------------------------------------------------------------------------------
//
// Each of four warps owns 64 x 64 outputs, with 128 accumulators per lane. For 16 values of depth a warp reads 4 KiB with 8 ldmatrix
// and computes 32 products of 16 x 8 x 16. ldmatrix reads eight chunks of 16 bytes at once, one from each of eight rows. With rows of
// 64 bytes in plain order, four of the eight chunks would be in the same banks. A Tile swaps the chunks of row r by r / 2 % 4
// (llmc/ops/attention_tile.cuh), which puts the eight chunks into different groups of four banks without extra memory. The same holds
// for the 16-byte writes.

constexpr int depth = 32, tensor_threads = 128;
using Slab = attention::Tile<block_rows, depth>;

struct WarpTile {
    float c[4][8][4] = {};  // accumulators of mma, for 16 rows by 8 columns each
    int lane, row0, column0;

    __device__ WarpTile() {
        const int warp = int(threadIdx.x) / 32;
        lane = int(threadIdx.x) % 32, row0 = warp / 2 * 64, column0 = warp % 2 * 64;
    }
    // Computes c += x w^T for the warp's rows of x and w.
    __device__ void multiply(Slab &x, Slab &w) {
#pragma unroll
        for (int k = 0; k < depth / 8; k += 2) {  // in chunks
            uint32_t a[4][4], b[4][4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                ldmatrix_x4(a[i], x.chunk(row0 + 16 * i + lane % 16, k + lane / 16));
                ldmatrix_x4(b[i], w.chunk(column0 + 16 * i + lane / 16 * 8 + lane % 8, k + lane / 8 % 2));
            }
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 8; j++) mma_m16n8k16(c[i][j], a[i], {b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]});
        }
    }
    // Calls f(row, column, two neighbours), with rows and columns of the block's 128 x 128 outputs.
    template <class F> __device__ void for_each_pair(F f) const {
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int r = 0; r < 2; r++)
                    f(row0 + 16 * i + 8 * r + lane / 4, column0 + 8 * j + lane % 4 * 2, c[i][j][2 * r], c[i][j][2 * r + 1]);
    }
};

struct Slabs {
    Slab x, w;
};

__device__ void load_and_wait(Slab &slab, const bf16 *from, size_t row0, size_t rows, size_t k0, size_t IC) {
#pragma unroll
    for (int i = threadIdx.x; i < block_rows * depth / 8; i += tensor_threads) {
        const int row = i / (depth / 8), c = i % (depth / 8);
        read_8(from, row0 + row, rows, k0 + 8 * c, IC).store(slab.chunk(row, c));
    }
}

__global__ void __launch_bounds__(tensor_threads)
    matmul_forward_kernel4(bf16 *out, const bf16 *x, const bf16 *w, size_t T, size_t IC, size_t OC) {
    auto &s = shared_mem<Slabs>();
    const size_t t0 = blockIdx.x * size_t(block_rows), o0 = blockIdx.y * size_t(block_rows);
    WarpTile tile;
    for (size_t k0 = 0; k0 < IC; k0 += depth) {
        load_and_wait(s.x, x, t0, T, k0, IC);
        load_and_wait(s.w, w, o0, OC, k0, IC);
        __syncthreads();
        tile.multiply(s.x, s.w);
        __syncthreads();
    }
    tile.for_each_pair([&](int row, int column, float first, float second) {
        const size_t t = t0 + size_t(row), o = o0 + size_t(column);
        if (t < T && o < OC) out[t * OC + o] = first;
        if (t < T && o + 1 < OC) out[t * OC + o + 1] = second;
    });
}

void matmul_forward4(CudaBf16 dev, bf16 *out, const bf16 *x, const bf16 *w, size_t T, size_t IC, size_t OC) {
    launch(dev, matmul_forward_kernel4, Grid{ceil_div(T, block_rows), ceil_div(OC, block_rows)}, tensor_threads, sizeof(Slabs),
           out, x, w, T, IC, OC);
}

// ---- version 5: mma.sync and cp.async ------------------------------------------------------------------------------------------
//
// Shared memory has four pairs of slabs, 64 KiB. During the products of one pair the next three are copied from memory to shared
// memory, bypassing the registers. One barrier per slab is enough: after it, slab n has arrived for all threads, and no thread reads
// slab n-1, whose memory slab n+3 reuses. At the end the outputs, two neighbours per lane, are rearranged in the same memory into rows
// of 16-byte chunks.
//
// The tensor cores of an SM of sm_80 do 2048 FLOP per clock. At 1/32 byte per FLOP they use half of the 128 bytes per clock of shared
// memory. On sm_90 they do 4096 FLOP and use all of it; the next step is wgmma, which needs no ldmatrix.

constexpr int stages = 4;

struct Pipeline {
    Slabs stage[stages];
};

__global__ void __launch_bounds__(tensor_threads)
    matmul_forward_kernel5(bf16 *out, const bf16 *x, const bf16 *w, size_t T, size_t IC, size_t OC) {
    auto &s = shared_mem<Pipeline>();
    const auto rows_of = [](unsigned block, size_t rows) {
        const int begin = int(block) * block_rows, end = min(begin + block_rows, int(rows));
        return attention::TileRows{begin, end, begin};
    };
    const auto x_rows = rows_of(blockIdx.x, T), w_rows = rows_of(blockIdx.y, OC);
    const int slabs = int((IC + depth - 1) / depth);
    const auto fetch = [&](int n) {
        if (n < slabs) {
            const size_t k0 = size_t(n) * depth;
            attention::load<tensor_threads>(s.stage[n % stages].x, {x + k0, IC}, x_rows, IC - k0);
            attention::load<tensor_threads>(s.stage[n % stages].w, {w + k0, IC}, w_rows, IC - k0);
        }
        cp_async_commit();  // even if the group is empty, because the waits count groups
    };
    for (int n = 0; n < stages - 1; n++) fetch(n);
    WarpTile tile;
    for (int n = 0; n < slabs; n++) {
        cp_async_wait<stages - 2>();
        __syncthreads();
        fetch(n + stages - 1);
        tile.multiply(s.stage[n % stages].x, s.stage[n % stages].w);
    }

    auto &outputs = shared_mem<attention::Tile<block_rows, block_rows>>();
    __syncthreads();  // all threads are done with the slabs
    tile.for_each_pair([&](int row, int column, float first, float second) {
        reinterpret_cast<uint32_t *>(outputs.chunk(row, column / 8))[column % 8 / 2] = pack_bf16(first, second);
    });
    __syncthreads();
    for (int i = threadIdx.x; i < block_rows * block_rows / 8; i += tensor_threads) {
        const int row = i / (block_rows / 8), c = i % (block_rows / 8), count = min(8, w_rows.size() - 8 * c);
        if (row >= x_rows.size()) break;
        const bf16 *from = outputs.chunk(row, c);
        bf16 *to = out + size_t(x_rows.row + row) * OC + size_t(w_rows.row + 8 * c);
        if (OC % 8 == 0 && count == 8) Vec<bf16>::load(from).store(to);
        else
            for (int j = 0; j < count; j++) to[j] = from[j];
    }
}

void matmul_forward5(CudaBf16 dev, bf16 *out, const bf16 *x, const bf16 *w, size_t T, size_t IC, size_t OC) {
    launch(dev, matmul_forward_kernel5, Grid{ceil_div(T, block_rows), ceil_div(OC, block_rows)}, tensor_threads, sizeof(Pipeline),
           out, x, w, T, IC, OC);
}

// ---- version 6: cuBLAS, version 7: shipped -------------------------------------------------------------------------------------
//
// A library selects tiles, stages and the order of blocks for the shape. llmc uses cuBLASLt, because it adds the bias in its epilogue,
// accumulates gradients in place, and can be restricted to algorithms with a fixed order of sums. Plain cuBLAS shows the cost of this
// restriction. The emulator has no NVIDIA library; the CPU's matmul replaces both.

#ifdef LLMC_EMULATE
void matmul_forward6(CudaBf16 dev, bf16 *out, const bf16 *x, const bf16 *w, size_t T, size_t IC, size_t OC) {
    matmul_forward(dev, out, x, w, nullptr, T, IC, OC);
}
#else
struct Cublas {
    cublasHandle_t handle;
    Cublas() {
        if (const auto status = cublasCreate(&handle)) die("cuBLAS: no handle: %s", cublasGetStatusString(status));
    }
};

// Column-major as in BLAS: out (OC, T) = w (IC, OC)^T x (IC, T).
void matmul_forward6(CudaBf16 dev, bf16 *out, const bf16 *x, const bf16 *w, size_t T, size_t IC, size_t OC) {
    static const Cublas cublas;
    const float one = 1, zero = 0;
    cublasSetStream(cublas.handle, dev.stream);
    const auto status =
        cublasGemmEx(cublas.handle, CUBLAS_OP_T, CUBLAS_OP_N, int(OC), int(T), int(IC), &one, w, CUDA_R_16BF, int(IC), x,
                     CUDA_R_16BF, int(IC), &zero, out, CUDA_R_16BF, int(OC), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    if (status) die("cuBLAS: cublasGemmEx: %s", cublasGetStatusString(status));
}
#endif

void matmul_forward7(CudaBf16 dev, bf16 *out, const bf16 *x, const bf16 *w, size_t T, size_t IC, size_t OC) {
    matmul_forward(dev, out, x, w, nullptr, T, IC, OC);
}

template <class X> struct MatmulForward {
    size_t T, IC, OC;
    std::vector<X> x, w;
    DeviceArray<X> d_x, d_w, out;
    MatmulContext context;

    explicit MatmulForward(const Sizes &s)
        : T(s[0]),
          IC(s[1]),
          OC(s[2]),
          x(random_values<X>(T * IC, 1)),
          w(random_values<X>(OC * IC, 2)),
          d_x(x),
          d_w(w),
          out(T * OC) {
        if (IC % 8) die("IC is %zu, but rows are read 16 bytes at a time\n  fix: use a multiple of 8", IC);
    }

    static constexpr void (*versions[])(CudaBf16, X *out, const X *x, const X *w, size_t T, size_t IC, size_t OC) = {
        matmul_forward1, matmul_forward2, matmul_forward3, matmul_forward4, matmul_forward5, matmul_forward6, matmul_forward7};

    void run(CudaBf16 dev, size_t version) {
        dev.ctx = context.get();
        versions[version - 1](dev, out.data(), d_x.data(), d_w.data(), T, IC, OC);
    }
    void check(Check &check) const {
        const Sums want = product_reference(x, IC, 1, w, 1, IC, {}, T, OC, IC);
        check("out", out.values(), want.value, allowed<X>(want, IC));
    }
    Work work() const { return {.flops = 2.0 * double(T) * double(IC) * double(OC)}; }
};

static const Ladder<MatmulForward, bf16> ladder(
    {.name = "matmul",
     .sizes = {{"T", "tokens", 4096, 1024}, {"IC", "input channels", 4096, 256}, {"OC", "output channels", 4096, 1024}},
     .checked = {{1, 8, 1}, {37, 104, 72}, {300, 72, 131}, {130, 264, 257}},
     .ideas = {"a thread per output", "32 x 32 tiles in shared memory", "an 8 x 8 tile in the registers of each thread",
               "mma.sync, one slab at a time", "mma.sync and cp.async, four stages", "cuBLAS (in the emulator: the CPU's matmul)",
               "shipped: cuBLASLt (in the emulator: the CPU's matmul)"}});

}  // namespace CUDA_BACKEND::workshop
