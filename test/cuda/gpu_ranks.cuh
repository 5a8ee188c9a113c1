// Ranks that are threads, in one of two ways: all on one GPU, or each with a GPU of its own and NCCL between them.
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

// Calls f(dev, comm). Slices are in the memory of dev's GPU; where each rank has one, dev has a stream of its own.
template <class Dev, class F> void with_gpu(Gpus gpus, Comm &host, Dev dev, F f) {
    if (gpus == Gpus::one) {
        host.memory = device_slices(dev.stream);
        return f(dev, host);
    }
    select_gpu(host);
    const CudaStream stream;
#ifdef LLMC_EMULATE
    if (dev.stream) cudaStream_t(stream)->order = dev.stream->order;
#endif
    dev.stream = stream;
    f(dev, *make_gpu_comm(host, stream, 60));
}
