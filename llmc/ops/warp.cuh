// Sums and maxima over a warp and over a block, in an order that depends on the number of threads alone, and 16-byte vectors.
#pragma once
#include <cmath>

#include "../core/launch.cuh"

inline namespace CUDA_BACKEND {
constexpr unsigned all_lanes = 0xffffffff;

// Butterfly: after the step with distance d a lane holds the sum over 2d lanes; in the end every lane holds the sum over all 32.
__device__ inline float warp_sum(float v) {
    for (int distance = 16; distance > 0; distance /= 2) v += __shfl_xor_sync(all_lanes, v, distance);
    return v;
}

__device__ inline float warp_max(float v) {
    for (int distance = 16; distance > 0; distance /= 2) v = fmaxf(v, __shfl_xor_sync(all_lanes, v, distance));
    return v;
}

// Sum over all threads of a block, known to all of them; `partial` is 32 floats of shared memory, free to be used again at once.
// The number of threads must be a multiple of 32.
__device__ inline float block_sum(float v, float *partial) {
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    v = warp_sum(v);
    if (lane == 0) partial[warp] = v;
    __syncthreads();
    v = warp_sum(lane < blockDim.x / 32 ? partial[lane] : 0.0f);
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

// 16 bytes of X, read and written by one instruction: 4 floats or 8 bf16. The address must be a multiple of 16.
template <class X> struct alignas(16) Vec {
    static constexpr int size = 16 / sizeof(X);
    X v[size];

    __device__ X &operator[](int i) { return v[i]; }
    __device__ const X &operator[](int i) const { return v[i]; }
    __device__ static Vec load(const X *from) {
        const uint4 bits = *reinterpret_cast<const uint4 *>(from);
        Vec out;
        memcpy(&out, &bits, 16);
        return out;
    }
    __device__ void store(X *to) const {
        uint4 bits;
        memcpy(&bits, this, 16);
        *reinterpret_cast<uint4 *>(to) = bits;
    }
};
}  // namespace CUDA_BACKEND
