#include "../../llmc/core/timeline.cuh"

#include <numeric>

#include "check.cuh"

// A stream fills memory between marks. take() frees the events for reuse.
TEST(Timeline, MarksAStream) {
    const CudaStream stream;
    CudaTimeline timeline(stream);
    DeviceArray<float> bytes(size_t(16) << 20);
    EXPECT_TRUE(timeline.take().empty());
    for (size_t ops : {3, 1, 5}) {
        const auto start = std::chrono::steady_clock::now();
        for (size_t i = 0; i < ops; i++) {
            timeline.mark("fill");
            cuda_check(cudaMemsetAsync(bytes.data(), 0, bytes.size() * sizeof(float), stream), "filling");
        }
        timeline.mark(nullptr);
        const auto seconds = timeline.take();
        const double waited = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        ASSERT_EQ(seconds.size(), ops);
        for (double s : seconds) EXPECT_GT(s, 0);
        EXPECT_LE(std::accumulate(seconds.begin(), seconds.end(), 0.0), waited * 1.001);  // floats on two clocks
    }
}
