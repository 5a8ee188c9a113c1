// The parts that rmsnorm, layernorm and the norm of queries and keys share on CUDA; norm.h is for the CPU.
#pragma once
#include <bit>

#include "norm.h"
#include "warp.cuh"

inline namespace CUDA_BACKEND {

// ---- one row, by one warp -----------------------------------------------------------------------------------------------------

// Copies x, or x + y rounded to X, which is also written to `sum`, to shared memory, so that every byte is read once, however often the row is
// needed. y and sum may be null. Each lane reads only its own stores, so no barrier is needed. Returns the sum of term(element).
template <class X, int N, class Term> __device__ float norm_read(X *row, X *sum, const X *x, const X *y, size_t C, Term term) {
    const size_t lane = threadIdx.x % 32;
    float terms = 0;
    for (size_t c = lane * N; c < C; c += 32 * N) {
        auto v = Vec<X, N>::load(x + c);
        if (y) {
            const auto other = Vec<X, N>::load(y + c);
            for (int i = 0; i < N; i++) v[i] = float(v[i]) + float(other[i]);
        }
        if (sum) v.store(sum + c);
        v.store(row + c);
        for (int i = 0; i < N; i++) terms += term(float(v[i]));
    }
    return warp_sum(terms);
}

// dx = gradient + dresidual, which may be null, for N elements
template <class X, int N> __device__ void norm_store(X *dx, const X *dresidual, Vec<float, N> gradient) {
    if (dresidual) {
        const auto residual = Vec<X, N>::load(dresidual);
        for (int i = 0; i < N; i++) gradient[i] += float(residual[i]);
    }
    Vec<X, N> rounded;
    for (int i = 0; i < N; i++) rounded[i] = gradient[i];
    rounded.store(dx);
}

// Returns the warps of a block that needs this much shared memory for each warp. A longer row gets a block of its own.
inline size_t norm_warps(size_t shared_bytes, size_t bytes_per_warp) {
    return std::clamp<size_t>(shared_bytes / bytes_per_warp, 1, 8);
}

// ---- one row, by a group of warps ---------------------------------------------------------------------------------------------

// A group of neighbouring warps shares a row, so that each lane has about `vectors` vectors of it. A block has several groups.
struct NormGroups {
    static constexpr unsigned most = 16;  // warps of a block
    unsigned warps, groups;               // of a group, of a block

    NormGroups(size_t C, int N, size_t vectors)
        : warps(unsigned(std::clamp<size_t>(std::bit_ceil(ceil_div(C, 32 * vectors * size_t(N))), 1, most))),
          groups(std::max(1u, 8 / warps)) {}
    unsigned threads() const { return groups * warps * 32; }
};

// What a lane needs of a row for the backward pass: V vectors of dout, x and dresidual. Behind the last row and column they are 0.
template <class X, int N, int V> struct NormRows {
    const X *dresidual, *dout, *x;  // dresidual may be null
    size_t end, C;
    unsigned lane, lanes;

    struct Row {
        Vec<X, N> d[V], x[V];
    };

    __device__ size_t column(int k) const { return (size_t(k) * lanes + lane) * N; }
    __device__ Row load(size_t t) const {
        Row row = {};
#pragma unroll
        for (int k = 0; k < V; k++) {
            const size_t at = t * C + column(k);
            if (t < end && column(k) < C) row.d[k] = Vec<X, N>::load(dout + at), row.x[k] = Vec<X, N>::load(x + at);
        }
        return row;
    }
    __device__ Vec<X, N> residual(size_t t, int k) const {
        return dresidual && t < end && column(k) < C ? Vec<X, N>::load(dresidual + t * C + column(k)) : Vec<X, N>{};
    }
};

// The rows follow it in shared memory.
struct NormShared {
    float parts[2][2][NormGroups::most];  // in turns; of one sum or two
};

template <class T> __device__ T *norm_rows() { return reinterpret_cast<T *>(&shared_mem<NormShared>() + 1); }

class NormGroup {
    unsigned warps, turn = 0;

  public:
    unsigned index, lane, lanes;  // of the group in its block, of the thread in its group, of a group

    __device__ explicit NormGroup(unsigned warps)
        : warps(warps), index(threadIdx.x / 32 / warps), lane(threadIdx.x % (32 * warps)), lanes(32 * warps) {}

    // Replaces each value by its sum over the lanes of the group, in an order that depends on their number alone. All threads of the block call it
    // equally often. Two places in shared memory take turns, so that one barrier suffices: whoever writes to one has passed the other's barrier.
    template <int n> __device__ void sum(float (&v)[n]) {
        for (float &x : v) x = warp_sum(x);
        if (warps == 1) return;
        auto &parts = shared_mem<NormShared>().parts[turn++ % 2];
        const unsigned lane_of_warp = threadIdx.x % 32;
        if (lane_of_warp == 0)
            for (int i = 0; i < n; i++) parts[i][threadIdx.x / 32] = v[i];
        __syncthreads();
        for (int i = 0; i < n; i++) v[i] = warp_sum(parts[i][index * warps + lane_of_warp % warps], warps);
    }
    __device__ float sum(float v) {
        float one[] = {v};
        sum(one);
        return one[0];
    }
};

// ---- gradients of the weights: summed over the rows of a warp, the warps of a block, the blocks -------------------------------

constexpr size_t norm_blocks = 256;  // the largest number of blocks: two for every SM, and few parts to sum

__device__ inline void norm_clear(float *dw, size_t n) {
    for (size_t i = threadIdx.x; i < n; i += blockDim.x) dw[i] = 0;
    __syncthreads();
}

// out[c] = sum_part dw[part, c]
__device__ inline void norm_sum_parts(float *out, const float *dw, size_t parts, size_t C) {
    __syncthreads();
    for (size_t c = threadIdx.x; c < C; c += blockDim.x) {
        float sum = 0;
        for (size_t part = 0; part < parts; part++) sum += dw[part * C + c];
        out[c] = sum;
    }
}

constexpr unsigned norm_columns = 8;  // of a block that sums runs: of each run 32 bytes, which is what memory delivers

template <int warps> struct NormColumns { float sum[warps][norm_columns]; };

// dw[c] += sum_run parts[run, c]. A second array, or null, has its parts behind those of the first. A block has a few columns, so that there are blocks
// for all of a GPU, and its groups of neighbouring lanes take runs in turn.
template <int warps>
__global__ void norm_add_runs_kernel3(float *first, float *second, const float *parts, size_t runs, size_t C) {
    auto &columns = shared_mem<NormColumns<warps>>();
    float *dw = blockIdx.y ? second : first;
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane % norm_columns;
    const size_t c0 = blockIdx.x * size_t(norm_columns), c = c0 + column;
    const bool adds = threadIdx.x < norm_columns && c < C;
    const float before = adds ? dw[c] : 0;
    parts += blockIdx.y * runs * C + c;
    float sum = 0;
    if (c < C)
        for (unsigned run = threadIdx.x / norm_columns; run < unsigned(runs); run += warps * 32 / norm_columns)
            sum += parts[run * C];
    for (unsigned distance = norm_columns; distance < 32; distance *= 2) sum += __shfl_xor_sync(all_lanes, sum, distance);
    if (lane < norm_columns) columns.sum[warp][column] = sum;
    __syncthreads();
    if (!adds) return;
    for (int i = 1; i < warps; i++) sum += columns.sum[i][column];
    dw[c] = before + sum;
}

template <class X> void norm_add_runs(Cuda<X> dev, float *first, float *second, const float *parts, size_t runs, size_t C) {
    constexpr int warps = 16;
    launch(dev, norm_add_runs_kernel3<warps>, Grid{ceil_div(C, norm_columns), second ? 2u : 1u}, warps * 32,
           sizeof(NormColumns<warps>), first, second, parts, runs, C);
}
template <class X> void norm_add_runs(Cuda<X> dev, float *dw, const float *parts, size_t runs, size_t C) {
    norm_add_runs(dev, dw, nullptr, parts, runs, C);
}
}  // namespace CUDA_BACKEND
