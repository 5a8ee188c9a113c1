// Ranks as threads: all on one GPU, or each on its own GPU with NCCL.
#pragma once
#include "../../llmc/parallel/comm_nccl.h"
#include "../../llmc/parallel/slices.cuh"
#include "check.cuh"

enum class Gpus { one, each };

// Number of ranks that can have a GPU each, at most 8.
inline int ranks_with_gpus() {
    int count = 8;
#if !defined(LLMC_EMULATE) && !defined(LLMC_NCCL)
    count = 0;
#elif !defined(LLMC_EMULATE)
    if (cudaGetDeviceCount(&count)) count = 0;
#endif
    return std::min(count, 8);
}

// Calls f(dev, comm). Slices are in the memory of dev's GPU; a rank with its own GPU has its own stream.
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
