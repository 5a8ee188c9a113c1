// Sums and maxima over a warp and over a block, in an order that depends on the number of threads alone, and 16-byte vectors.
#pragma once
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "../core/launch.cuh"

inline namespace CUDA_BACKEND {
constexpr unsigned all_lanes = 0xffffffff;

// Returns the sum over all 32 lanes, or over groups of `lanes` neighbours, a power of two, to every lane: a butterfly of shuffles.
template <class T> __device__ T warp_sum(T v, unsigned lanes = 32) {
    for (unsigned distance = lanes / 2; distance > 0; distance /= 2) v += __shfl_xor_sync(all_lanes, v, distance);
    return v;
}

__device__ inline float warp_max(float v) {
    for (int distance = 16; distance > 0; distance /= 2) v = fmaxf(v, __shfl_xor_sync(all_lanes, v, distance));
    return v;
}

// Each of the first `lanes` lanes has `count` items, numbered consecutively lane by lane; the other lanes have none. Returns the lane of item n, and
// sets n to the item's number within that lane. If there are too few items, returns 32, and subtracts their number from n. All lanes of the warp pass
// the same n.
__device__ inline unsigned lane_of_item(unsigned count, unsigned lanes, unsigned &n) {
    const unsigned lane = threadIdx.x % 32;
    unsigned end = count;  // the number of items in this lane and in those below
    for (unsigned distance = 1; distance < lanes; distance *= 2) {
        const unsigned lower = __shfl_up_sync(all_lanes, end, distance);
        if (lane >= distance) end += lower;
    }
    const unsigned above = __ballot_sync(all_lanes, end > n);
    const unsigned found = above ? unsigned(__ffs(int(above))) - 1 : 32;
    n -= __shfl_sync(all_lanes, above ? end - count : end, int(above ? found : lanes - 1));
    return found;
}

template <class T> struct WarpSums { T partial[32]; };

// Returns the sum over all threads of a block to each of them. `partial` is 32 values of shared memory, which may be reused at once.
// The number of threads must be a multiple of 32.
template <class T> __device__ T block_sum(T v, T *partial) {
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    v = warp_sum(v);
    if (lane == 0) partial[warp] = v;
    __syncthreads();
    v = warp_sum(lane < blockDim.x / 32 ? partial[lane] : T(0));
    __syncthreads();
    return v;
}

__device__ inline float block_max(float v, float *partial) {
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    v = warp_max(v);
    if (lane == 0) partial[warp] = v;
    __syncthreads();
    v = warp_max(lane < blockDim.x / 32 ? partial[lane] : -INFINITY);
    __syncthreads();
    return v;
}

// Returns a / b for a result that is then rounded to X. For bf16, whose rounding is 2^14 times larger, it skips the steps that make float division
// exact; |b| must then be below 2^126, or the result is 0.
template <class X> __device__ float divide(float a, float b) { return sizeof(X) < sizeof(float) ? __fdividef(a, b) : a / b; }

// N values of X, read and written 16, 8 or 4 bytes at a time; the address must be a multiple of that. Vec<X, 1> is a plain X.
template <class X, int N = 16 / sizeof(X)> struct Vec {
    static constexpr int size = N;
    static constexpr size_t bytes = N * sizeof(X);
    using Word = std::conditional_t<bytes % 16 == 0, uint4,
                                    std::conditional_t<bytes == 8, uint2, std::conditional_t<bytes == 4 && N != 1, unsigned, X>>>;
    X v[N];

    __device__ X &operator[](int i) { return v[i]; }
    __device__ const X &operator[](int i) const { return v[i]; }
    __device__ static Vec load(const X *from) {
        Word words[bytes / sizeof(Word)];
#pragma unroll
        for (size_t i = 0; i < bytes / sizeof(Word); i++) words[i] = reinterpret_cast<const Word *>(from)[i];
        Vec out;
        memcpy(&out, words, bytes);
        return out;
    }
    __device__ void store(X *to) const {
        Word words[bytes / sizeof(Word)];
        memcpy(words, this, bytes);
#pragma unroll
        for (size_t i = 0; i < bytes / sizeof(Word); i++) reinterpret_cast<Word *>(to)[i] = words[i];
    }
};

// True if rows of C elements of these arrays can be read and written as Vec<., N>. Otherwise kernels run with N = 1.
template <int N, class... Arrays> bool fit_vectors(size_t C, const Arrays *...arrays) {
    return C % N == 0 && ((reinterpret_cast<uintptr_t>(arrays) % std::min<size_t>(16, N * sizeof(Arrays)) == 0) && ...);
}
}  // namespace CUDA_BACKEND
