// Slices in device memory, for communicators that move bytes by the host's calls: of ranks that are threads and share a device. What such
// communicators do waits for the rank's stream, and is done when they return. (Ranks with a GPU each: comm_nccl.h.)
#pragma once
#include "../core/memory.cuh"
#include "comm.h"

inline namespace CUDA_BACKEND {
inline SliceMemory device_slices(cudaStream_t stream) {
    return {[=] { cuda_check_kernels(cudaStreamSynchronize(stream)); },
            [=](void *to, const void *from, size_t bytes) {
                cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "a copy between ranks");
                cuda_check_kernels(cudaStreamSynchronize(stream));
            }};
}
}  // namespace CUDA_BACKEND
