// reduce on CUDA. Contract: reduce.h.
#pragma once
#include "reduce.h"
#include "warp.cuh"

inline namespace CUDA_BACKEND {
// One block sums one part. The kernel reads n elements.
template <class G, int N> __global__ void squared_norm_kernel4(double *parts, const G *x, size_t n) {
    const size_t begin = blockIdx.x * squared_norm_part, end = min(n, begin + squared_norm_part);
    double sum = 0;
    for (size_t i = begin + threadIdx.x * N; i < end; i += blockDim.x * N) {
        const auto v = Vec<G, N>::load(x + i);
        for (int j = 0; j < N; j++) sum += double(float(v[j])) * double(float(v[j]));
    }
    sum = block_sum(sum, shared_mem<WarpSums<double>>().partial);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

// One block sums all parts into *sum, or adds them to it.
template <class T> __global__ void sum_parts_kernel3(T *sum, const T *parts, size_t n, bool adds) {
    T mine = 0;
    for (size_t i = threadIdx.x; i < n; i += blockDim.x) mine += parts[i];
    mine = block_sum(mine, shared_mem<WarpSums<T>>().partial);
    if (threadIdx.x == 0) *sum = adds ? *sum + mine : mine;
}

template <class X, class G> void launch_squared_norm(Cuda<X> dev, double *sum, double *scratch, const G *x, size_t n, bool adds) {
    constexpr int N = Vec<G>::size;
    const size_t parts = squared_norm_scratch(n);
    launch(dev, fit_vectors<N>(n, x) ? squared_norm_kernel4<G, N> : squared_norm_kernel4<G, 1>, Grid{parts}, 512,
           sizeof(WarpSums<double>), scratch, x, n);
    launch(dev, sum_parts_kernel3<double>, Grid{1}, 512, sizeof(WarpSums<double>), sum, scratch, parts, adds);
}

template <class X, class G> void add_squared_norm(Cuda<X> dev, double *sum, double *scratch, const G *x, size_t n) {
    if (n) launch_squared_norm(dev, sum, scratch, x, n, true);
}

// Waits for the stream, because it returns a number to the host.
template <class X, class G> double squared_norm(Cuda<X> dev, double *scratch, const G *x, size_t n) {
    if (n == 0) return 0;
    launch_squared_norm(dev, scratch, scratch, x, n, false);
    double sum;
    cudaError_t error = cudaMemcpyAsync(&sum, scratch, sizeof sum, cudaMemcpyDeviceToHost, dev.stream);
    if (!error) error = cudaStreamSynchronize(dev.stream);
    if (error) die("squared_norm of %zu numbers: %s", n, cudaGetErrorString(error));
    return sum;
}
}  // namespace CUDA_BACKEND
