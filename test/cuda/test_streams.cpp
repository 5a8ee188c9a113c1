// Two streams that hand arrays to each other, right and with events missing: the emulator's orders of streams (dev/emulator/streams.h) must notice.
#include <numeric>

#include "check.cuh"

namespace {

struct Event {
    cudaEvent_t event = nullptr;
    Event() { cuda_check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "an event"); }
    ~Event() { cudaEventDestroy(event); }
    void order(cudaStream_t before, cudaStream_t behind) {
        cuda_check(cudaEventRecord(event, before), "an event");
        cuda_check(cudaStreamWaitEvent(behind, event), "an event");
    }
};

enum Missing { nothing, before_reading, before_overwriting };

// Ten times one stream fills an array and the other takes a copy. Returns whether each copy has its number.
bool hand_over(cudaStream_t first, Missing missing) {
    constexpr size_t bytes = 1000, times = 10;
    const CudaStream second;
    DeviceArray<uint8_t> array(bytes), copies(bytes * times);
    Event filled, copied;
    for (size_t i = 0; i < times; i++) {
        cuda_check(cudaMemsetAsync(array.data(), int(i), bytes, first), "filling");
        if (missing != before_reading) filled.order(first, second);
        cuda_check(cudaMemcpyAsync(copies.data() + i * bytes, array.data(), bytes, cudaMemcpyDeviceToDevice, second), "a copy");
        if (missing != before_overwriting) copied.order(second, first);
    }
    const auto got = copies.values();
    for (size_t i = 0; i < got.size(); i++)
        if (got[i] != i / bytes) return false;
    return true;
}

}  // namespace

TEST(Streams, WaitForEvents) {
    for_each_order_of_streams<CudaF32>([](CudaF32 dev) { EXPECT_TRUE(hand_over(dev.stream, nothing)); });
}

// The host runs ahead of copies from its pinned memory, of which it has less than it writes.
TEST(Streams, TakeWhatTheHostWrote) {
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
static void expect_caught(const char *what, Missing missing) {
    unsigned wrong = 0;
    constexpr unsigned orders = 12;
    for (unsigned seed = 0; seed < orders; seed++)
        in_random_order<CudaF32>(seed, [&](CudaF32 dev) { wrong += !hand_over(dev.stream, missing); });
    printf("  %-40s noticed in %u of %u orders\n", what, wrong, orders);
    EXPECT_GE(wrong, orders / 2);
}
TEST(Streams, CatchAMissingEventBeforeReading) { expect_caught("no event before reading", before_reading); }
TEST(Streams, CatchAMissingEventBeforeOverwriting) { expect_caught("no event before overwriting", before_overwriting); }

TEST(Streams, ErrorsComeWhereTheHostWaits) {
    EXPECT_THROW(in_random_order<CudaF32>(2,
                                          [](CudaF32 dev) {
                                              simt::enqueue(dev.stream, [] { die("a kernel that fails"); });
                                              EXPECT_THROW(cudaStreamSynchronize(dev.stream), Error);
                                          }),
                 Error);
}
#endif
