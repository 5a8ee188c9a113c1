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

struct NormShared {
    float parts[2][NormGroups::most];
};  // the rows follow it in shared memory

template <class T> __device__ T *norm_rows() { return reinterpret_cast<T *>(&shared_mem<NormShared>() + 1); }

class NormGroup {
    unsigned warps, turn = 0;

  public:
    unsigned index, lane, lanes;  // of the group in its block, of the thread in its group, of a group

    __device__ explicit NormGroup(unsigned warps)
        : warps(warps), index(threadIdx.x / 32 / warps), lane(threadIdx.x % (32 * warps)), lanes(32 * warps) {}

    // Returns the sum over the lanes of the group, in an order that depends on their number alone. All threads of the block call it equally
    // often. Two places in shared memory take turns, so that one barrier suffices: whoever writes to one has passed the other's barrier.
    __device__ float sum(float v) {
        v = warp_sum(v);
        if (warps == 1) return v;
        float *parts = shared_mem<NormShared>().parts[turn++ % 2];
        if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
        __syncthreads();
        return warp_sum(threadIdx.x % 32 < warps ? parts[index * warps + threadIdx.x % 32] : 0.0f);
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

template <int warps> struct NormColumns { float sum[warps][32]; };

// dw[c] += sum_run parts[run, c]. A block has 32 columns; each of its warps sums every warps-th run.
template <int warps> __global__ void norm_add_runs_kernel2(float *dw, const float *parts, size_t runs, size_t C) {
    auto &columns = shared_mem<NormColumns<warps>>();
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const size_t c = blockIdx.x * size_t(32) + lane;
    float sum = 0;
    if (c < C)
        for (size_t run = warp; run < runs; run += warps) sum += parts[run * C + c];
    columns.sum[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || c >= C) return;
    for (int i = 1; i < warps; i++) sum += columns.sum[i][lane];
    dw[c] += sum;
}

template <class X> void norm_add_runs(Cuda<X> dev, float *dw, const float *parts, size_t runs, size_t C) {
    constexpr int warps = 32;
    launch(dev, norm_add_runs_kernel2<warps>, Grid{ceil_div(C, 32)}, warps * 32, sizeof(NormColumns<warps>), dw, parts, runs, C);
}
}  // namespace CUDA_BACKEND
