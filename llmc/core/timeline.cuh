// Marks on a stream are CUDA events. NVTX ranges name the work that the host queues between them; `nsys profile` shows them above the kernels.
#pragma once
#include "memory.cuh"
#include "timeline.h"
#if !defined(LLMC_EMULATE) && __has_include(<nvtx3/nvToolsExt.h>)  // some toolkits lack it
#include <nvtx3/nvToolsExt.h>
#define LLMC_NVTX
#endif

inline namespace CUDA_BACKEND {
#ifndef LLMC_NVTX
inline void nvtxRangePushA(const char *) {}
inline void nvtxRangePop() {}
#endif

class CudaTimeline final : public Timeline {
  public:
    explicit CudaTimeline(cudaStream_t stream) : stream_(stream) {}
    ~CudaTimeline() override {
        for (cudaEvent_t event : events_) cudaEventDestroy(event);
    }
    CudaTimeline(const CudaTimeline &) = delete;
    CudaTimeline &operator=(const CudaTimeline &) = delete;

    void mark(const char *next) override {
        if (used_ == events_.size()) cuda_check(cudaEventCreateWithFlags(&events_.emplace_back(), cudaEventDefault), "no event");
        cuda_check(cudaEventRecord(events_[used_++], stream_), "marking the time");
        if (named_) nvtxRangePop();
        named_ = next != nullptr;
        if (named_) nvtxRangePushA(next);
    }

    std::vector<double> take() override {
        std::vector<double> seconds;
        if (used_ > 0) cuda_check(cudaEventSynchronize(events_[used_ - 1]), "waiting for the GPU");
        for (size_t i = 1; i < used_; i++) {
            float milliseconds = 0;
            cuda_check(cudaEventElapsedTime(&milliseconds, events_[i - 1], events_[i]), "reading the time");
            seconds.push_back(milliseconds * 1e-3);
        }
        used_ = 0;
        return seconds;
    }

  private:
    cudaStream_t stream_;
    std::vector<cudaEvent_t> events_;  // the most events needed at once
    size_t used_ = 0;
    bool named_ = false;
};

template <class X> std::unique_ptr<Timeline> make_timeline(Cuda<X> dev) { return std::make_unique<CudaTimeline>(dev.stream); }
}  // namespace CUDA_BACKEND
