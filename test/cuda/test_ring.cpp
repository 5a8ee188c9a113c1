// Attention over a ring of ranks with kernels: ranks are threads that share one device.
#include "../ring_ranks.h"

#include "../../llmc/ops/attention.cuh"
#include "../../llmc/ops/layout.cuh"
#include "check.cuh"

template <class Dev> struct CudaRing : testing::Test {};
TYPED_TEST_SUITE(CudaRing, CudaDevices);

TYPED_TEST(CudaRing, EqualsOneRank) {
    using X = typename TypeParam::X;
    const AttentionShape a{{1, 40, 55}, 0, 4, 2, 16};
    const AttentionInputs<X> in(a);
    for (const RingCase &c :
         {RingCase{1, SpMode::ring, Layout::contiguous}, RingCase{3, SpMode::ring, Layout::zigzag},
          RingCase{2, SpMode::gather, Layout::longest_first}, RingCase{4, SpMode::ulysses, Layout::contiguous}})
        for_each_order<TypeParam>([&](TypeParam dev) {
            const auto got = run_ring<DeviceArray>(c, a, in, [&]([[maybe_unused]] Comm &comm, auto f) {
#ifndef LLMC_EMULATE
                comm.memory.finish = [&] { cudaStreamSynchronize(dev.stream); };
                comm.memory.copy = [](void *to, const void *from, size_t bytes) {
                    cudaMemcpy(to, from, bytes, cudaMemcpyDefault);
                };
#endif
                f(dev);
            });
            check_attention(c.name().c_str(), a, in, got.result);
        });
}
