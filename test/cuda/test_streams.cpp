// Streams of the device, concurrent with the host.
#include <numeric>

#include "check.cuh"

// The host writes more than its pinned memory holds, so it waits for copies.
TEST(Streams, CopyAllThatTheHostWrites) {
    for_each_order_of_streams<CudaF32>([](CudaF32 dev) {
        CudaMemory memory(dev.stream);
        std::vector<int> host(size_t(5) << 20);
        DeviceArray<int> array(host.size());
        for (int i = 0; i < 3; i++) {
            std::iota(host.begin(), host.end(), i);
            memory.write(array.data(), host.data(), host.size() * sizeof(int));
            std::vector<int> got(host.size());
            memory.read(got.data(), array.data(), got.size() * sizeof(int));
            EXPECT_EQ(got, host);
        }
    });
}

#ifdef LLMC_EMULATE
TEST(Streams, ErrorsAreReportedWhereTheHostWaits) {
    EXPECT_THROW(in_random_order<CudaF32>(2,
                                          [](CudaF32 dev) {
                                              simt::enqueue(dev.stream, [] { die("a kernel that fails"); });
                                              EXPECT_THROW(cudaStreamSynchronize(dev.stream), Error);
                                          }),
                 Error);
}
#endif
