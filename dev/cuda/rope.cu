// rope_forward: for each of the H + KV query and key heads of a row, and i < D/2, with (cos, sin) = table[doc_pos[t], i]
//     (x[i], x[i + D/2])  <-  (x[i] * cos - x[i + D/2] * sin,  x[i + D/2] * cos + x[i] * sin)            Contract: llmc/ops/rope.h
//
// Timed with T 8192, H 32, KV 8, D 128 in bf16. The op works in place, so it moves 2 T (H + KV) D elements. All heads of a token read
// the same row of the table, which should hit the cache. There is little to compute, so the arithmetic of addresses matters.
#include "../../llmc/ops/rope.cuh"
#include "../../llmc/ops/rope_table.h"
#include "../../test/reference_rope.h"
#include "common.h"

namespace CUDA_BACKEND::workshop {

template <class X> __device__ void turn_pair(X *first, X *second, const float *cos_sin) {
    const float x = *first, y = *second;
    *first = x * cos_sin[0] - y * cos_sin[1];
    *second = y * cos_sin[0] + x * cos_sin[1];
}

// ---- version 1: a thread per token ---------------------------------------------------------------------------------------------
//
// The loops of the CPU. Neighbouring threads access addresses a row of heads apart, so each element of a warp's load is in another line.

template <class X>
__global__ void rope_kernel1(X *qkv, const float *table, const int32_t *doc_pos, size_t T, size_t heads, size_t D,
                             size_t stride) {
    const size_t t = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (t >= T) return;
    for (size_t h = 0; h < heads; h++)
        for (size_t i = 0; i < D / 2; i++) {
            X *x = qkv + t * stride + h * D + i;
            turn_pair(x, x + D / 2, table + size_t(doc_pos[t]) * D + 2 * i);
        }
}

template <class X>
void rope1(Cuda<X> dev, X *qkv, const float *table, const int32_t *doc_pos, size_t T, size_t heads, size_t D, size_t stride) {
    launch(dev, rope_kernel1<X>, Grid{ceil_div(T, 64)}, 64, 0, qkv, table, doc_pos, T, heads, D, stride);
}

// ---- version 2: a thread per pair ----------------------------------------------------------------------------------------------
//
// Neighbouring threads rotate neighbouring pairs, one pair per thread. A thread computes token, head and pair from one number with
// 64-bit divisions, for which no GPU has an instruction. The kernel has twice the instructions of version 3, half of them integer
// instructions (dev/cuda/ladder_counts.md). Instructions are the limit, not bytes.

template <class X>
__global__ void rope_kernel2(X *qkv, const float *table, const int32_t *doc_pos, size_t T, size_t heads, size_t D,
                             size_t stride) {
    const size_t n = blockIdx.x * size_t(blockDim.x) + threadIdx.x, half = D / 2;
    const size_t i = n % half, h = n / half % heads, t = n / half / heads;
    if (t >= T) return;
    X *x = qkv + t * stride + h * D + i;
    turn_pair(x, x + half, table + size_t(doc_pos[t]) * D + 2 * i);
}

template <class X>
void rope2(Cuda<X> dev, X *qkv, const float *table, const int32_t *doc_pos, size_t T, size_t heads, size_t D, size_t stride) {
    launch(dev, rope_kernel2<X>, Grid{ceil_div(T * heads * (D / 2), 256)}, 256, 0, qkv, table, doc_pos, T, heads, D, stride);
}

// ---- version 3: a block per token ----------------------------------------------------------------------------------------------
//
// The block's number is the token, the other divisions fit 32 bits, and all heads of the block's token read the same row of the table
// from L1. Loads still have 2 bytes.

template <class X>
__global__ void rope_kernel3(X *qkv, const float *table, const int32_t *doc_pos, unsigned heads, unsigned D, size_t stride) {
    const unsigned half = D / 2;
    const float *row = table + size_t(doc_pos[blockIdx.x]) * D;
    for (unsigned n = threadIdx.x; n < heads * half; n += blockDim.x) {
        const unsigned h = n / half, i = n % half;
        X *x = qkv + blockIdx.x * stride + h * D + i;
        turn_pair(x, x + half, row + 2 * i);
    }
}

template <class X>
void rope3(Cuda<X> dev, X *qkv, const float *table, const int32_t *doc_pos, size_t T, size_t heads, size_t D, size_t stride) {
    launch(dev, rope_kernel3<X>, Grid{T}, 128, 0, qkv, table, doc_pos, unsigned(heads), unsigned(D), stride);
}

// ---- version 4: llmc/ops/rope.cuh ----------------------------------------------------------------------------------------------
//
// A thread rotates neighbouring pairs whose first halves fill 16 bytes: one division and four wide loads for 8 pairs in bf16 (two
// loads of X, and the table in pieces of 16 bytes). The memory bandwidth is the limit.

template <class X>
void rope4(Cuda<X> dev, X *qkv, const float *table, const int32_t *doc_pos, size_t T, size_t heads, size_t D, size_t stride) {
    rope_forward(dev, qkv, table, doc_pos, T, heads, D, D, stride);
}

template <class X> struct Rope {
    size_t T, heads, D, stride;
    std::vector<X> x;
    std::vector<int32_t> doc_pos;
    std::vector<float> table;
    DeviceArray<X> d_x;
    DeviceArray<int32_t> d_pos;
    DeviceArray<float> d_table;

    explicit Rope(const Sizes &s)
        : T(s[0]),
          heads(s[1] + s[2]),
          D(even(s[3])),
          stride((s[1] + 2 * s[2]) * D),
          x(random_values<X>(T * stride, 1)),
          doc_pos(documents(T)),
          table(angles(T, D)),
          d_x(x),
          d_pos(doc_pos),
          d_table(table) {}

    static size_t even(size_t D) {
        if (D % 2) die("rope rotates pairs of channels, and a head has %zu\n  fix: use an even D", D);
        return D;
    }
    static std::vector<int32_t> documents(size_t T) {  // of two documents
        std::vector<int32_t> out(T);
        for (size_t t = 0; t < T; t++) out[t] = int32_t(t < T / 3 ? t : t - T / 3);
        return out;
    }
    static std::vector<float> angles(size_t positions, size_t D) {
        std::vector<float> out(positions * D);
        rope_table(out.data(), {.theta = 100}, positions, D);
        return out;
    }

    static constexpr void (*versions[])(Cuda<X>, X *qkv, const float *table, const int32_t *doc_pos, size_t T, size_t heads,
                                        size_t D, size_t stride) = {rope1, rope2, rope3, rope4};

    void run(Cuda<X> dev, size_t version) {
        versions[version - 1](dev, d_x.data(), d_table.data(), d_pos.data(), T, heads, D, stride);
    }

    void check(Check &check) const {  // the reference includes the value heads, which the op does not change
        check("qkv", d_x.values(), rope_reference(widen(x), table, doc_pos, heads, D, D, stride, 1), rope_error<X>);
    }

    Work work() const { return {.bytes = 2.0 * double(T * heads * D) * sizeof(X)}; }
};

static const Ladder<Rope, float, bf16> ladder(
    {.name = "rope",
     .sizes = {{"T", "tokens", 8192, 256},
               {"H", "query heads", 32, 32},
               {"KV", "key heads", 8, 8},
               {"D", "channels of a head", 128, 128}},
     .checked = {{1, 1, 1, 2}, {7, 3, 1, 22}, {9, 2, 1, 16}, {70, 2, 2, 24}, {3, 16, 5, 64}},
     .ideas = {"a thread per token", "a thread per pair", "a block per token, no 64-bit division",
               "shipped: 16 bytes per load"}});
}  // namespace CUDA_BACKEND::workshop
