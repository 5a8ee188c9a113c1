// CUDA graphs: a stream's launches are captured instead of run, and form one executable graph.
#pragma once
#include <map>

#include "graphs.h"
#include "memory.cuh"

inline namespace CUDA_BACKEND {
class CudaGraphs final : public Graphs {
  public:
    explicit CudaGraphs(cudaStream_t stream) : stream_(stream) {}
    ~CudaGraphs() override { clear(); }
    CudaGraphs(const CudaGraphs &) = delete;
    CudaGraphs &operator=(const CudaGraphs &) = delete;

    void run(const Stretch &stretch, const std::function<void()> &work) override {
        const auto found = graphs_.find(stretch);
        if (found == graphs_.end()) {
            if (graphs_.size() >= most_graphs) clear();
            graphs_[stretch] = nullptr;
            return work();
        }
        if (!found->second) found->second = record(work);
        cuda_check(cudaGraphLaunch(found->second, stream_), "a graph does not start");
    }

  private:
    static constexpr size_t most_graphs = 4096;  // a limit for rows whose lengths never repeat

    cudaGraphExec_t record(const std::function<void()> &work) const {
        cudaGraph_t recorded;
        cudaGraphExec_t graph;
        cuda_check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "launches cannot be recorded");
        work();
        cuda_check(cudaStreamEndCapture(stream_, &recorded), "launches cannot be recorded");
        cuda_check(cudaGraphInstantiate(&graph, recorded, 0), "recorded launches make no graph");
        cuda_check(cudaGraphDestroy(recorded), "recorded launches cannot be removed");
        return graph;
    }

    void clear() {
        for (auto &[stretch, graph] : graphs_)
            if (graph) cudaGraphExecDestroy(graph);
        graphs_.clear();
    }

    cudaStream_t stream_;
    std::map<Stretch, cudaGraphExec_t> graphs_;  // null: the stretch has run once
};

template <class X> std::unique_ptr<Graphs> make_graphs(Cuda<X> dev) { return std::make_unique<CudaGraphs>(dev.stream); }
}  // namespace CUDA_BACKEND
