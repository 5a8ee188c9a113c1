// The store of a GPU's arrays: pinned host memory. Copies out and copies in have one stream each, and wait by events for the ops before them.
#pragma once
#include <map>

#include "memory.cuh"
#include "store.h"

inline namespace CUDA_BACKEND {
class PinnedStore final : public Store {
  public:
    PinnedStore(cudaStream_t ops, size_t bytes) : ops_(ops) {
        if (cudaError_t error = cudaMallocHost(&bytes_, bytes))
            die("cannot pin %s of the host's memory for --offload: %s\n  fix: offload less, or lower --row_tokens; see --plan",
                human_bytes(bytes).c_str(), cudaGetErrorString(error));
        cuda_check(cudaEventCreateWithFlags(&reached_, cudaEventDisableTiming), "no event");
    }
    ~PinnedStore() override {
        cudaStreamSynchronize(out_), cudaStreamSynchronize(in_);
        cudaFreeHost(bytes_);
        cudaEventDestroy(reached_);
        for (auto &[place, copied] : copied_) cudaEventDestroy(copied);
    }
    PinnedStore(const PinnedStore &) = delete;
    PinnedStore &operator=(const PinnedStore &) = delete;

    std::string name() const override { return "pinned memory of the host"; }
    void offload(size_t place, const void *from, size_t bytes) override { copy(place, out_, bytes_ + place, from, bytes); }
    void prefetch(size_t place, void *to, size_t bytes) override { copy(place, in_, to, bytes_ + place, bytes); }
    void wait(size_t place) override {
        const auto copied = copied_.find(place);
        if (copied != copied_.end()) cuda_check(cudaStreamWaitEvent(ops_, copied->second), "waiting for an offloaded array");
    }

  private:
    void copy(size_t place, cudaStream_t stream, void *to, const void *from, size_t bytes) {
        cudaEvent_t &copied = copied_[place];
        // The place's last copy, on either stream.
        if (copied) cuda_check(cudaStreamWaitEvent(stream, copied), "copying an offloaded array");
        else cuda_check(cudaEventCreateWithFlags(&copied, cudaEventDisableTiming), "no event");
        cuda_check(cudaEventRecord(reached_, ops_), "copying an offloaded array");
        cuda_check(cudaStreamWaitEvent(stream, reached_), "copying an offloaded array");
        cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "copying an offloaded array");
        cuda_check(cudaEventRecord(copied, stream), "copying an offloaded array");
    }

    cudaStream_t ops_;
    CudaStream out_, in_;
    std::byte *bytes_ = nullptr;
    cudaEvent_t reached_ = nullptr;         // on the ops' stream, at the last call of copy()
    std::map<size_t, cudaEvent_t> copied_;  // the end of the last copy of each place
};

template <class X> std::unique_ptr<Store> make_store(Cuda<X> dev, const std::string &, size_t bytes, double) {
    return std::make_unique<PinnedStore>(dev.stream, bytes);
}
}  // namespace CUDA_BACKEND
