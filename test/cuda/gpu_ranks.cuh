// Ranks that are threads, in one of two ways: all on one GPU, or each with a GPU of its own and NCCL between them. In the emulator both are
// ranks that share the memory of the host.
#pragma once
#include "../../llmc/parallel/comm_nccl.h"
#include "../../llmc/parallel/slices.cuh"
#include "check.cuh"

enum class Gpus { one, each };

// The ranks that can have a GPU each, 3 at most.
inline int ranks_with_gpus() {
    int count = 3;
#if !defined(LLMC_EMULATE) && !defined(LLMC_NCCL)
    count = 0;
#elif !defined(LLMC_EMULATE)
    if (cudaGetDeviceCount(&count)) count = 0;
#endif
    return std::min(count, 3);
}

// f(comm), for slices in the memory of this rank's GPU; the kernels of f run on `stream`.
template <class F> void with_gpu(Gpus gpus, Comm &host, cudaStream_t stream, F f) {
    if (gpus == Gpus::one) {
        host.memory = device_slices(stream);
        return f(host);
    }
    select_gpu(host);
    f(*make_gpu_comm(host, stream, 60));
}
