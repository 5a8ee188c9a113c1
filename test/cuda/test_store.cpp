// Arrays offloaded to pinned host memory and prefetched, concurrent with ops.
#include "../../llmc/core/store.cuh"
#include "check.cuh"

TEST(CudaStore, CopiesKeepTheOrderOfOps) {
    for_each_order_of_streams<CudaF32>([](CudaF32 dev) {
        constexpr size_t bytes = 4096, places = 3;
        CudaMemory memory(dev.stream);
        std::byte *const out = memory.allocate(places * bytes), *const in = memory.allocate(places * bytes);
        {
            const auto store = make_store(dev, "", places * bytes, 0);
            const auto byte = [](size_t round, size_t place) { return uint8_t(1 + 10 * round + place); };
            for (size_t round = 0; round < 4; round++) {
                for (size_t p = 0; p < places; p++) {
                    memory.fill(out + p * bytes, byte(round, p), bytes);
                    store->offload(p * bytes, out + p * bytes, bytes);
                }
                for (size_t p = 0; p < places; p++) {
                    store->wait(p * bytes);
                    memory.fill(out + p * bytes, 0xEE, bytes);  // the offload has ended
                }
                for (size_t p = places; p-- > 0;) store->prefetch(p * bytes, in + p * bytes, bytes);
                for (size_t p = places; p-- > 0;) {
                    store->wait(p * bytes);
                    const auto got = read(memory, in + p * bytes, bytes);
                    EXPECT_EQ(std::count(got.begin(), got.end(), std::byte(byte(round, p))), ptrdiff_t(bytes))
                        << round << " " << p;
                    memory.fill(in + p * bytes, 0xDD, bytes);  // the next prefetch overwrites it
                }
            }
        }
        memory.release(out, places * bytes), memory.release(in, places * bytes);
    });
}
