// Slices in device memory for ranks that are threads and share a device. Their communicators copy with calls on the host: they wait for the rank's
// stream, and are done when they return. Ranks with one GPU each use comm_nccl.h.
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
