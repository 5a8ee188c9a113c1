// Attention over a ring of ranks, with kernels.
#include "../ring_ranks.h"

#include "../../llmc/ops/attention.cuh"
#include "../../llmc/ops/layout.cuh"
#include "gpu_ranks.cuh"

template <class Dev> struct CudaRing : testing::Test {};
TYPED_TEST_SUITE(CudaRing, CudaDevices);

template <class Dev> void equals_one_rank(const RingCase &c, Gpus gpus) {
    const AttentionCase a{{1, 40, 55}, 0, 4, 2, 16};
    const AttentionValues<typename Dev::X> in(a);
    const auto run = [&](Dev dev) {
        const auto got = run_ring<DeviceArray>(c, a, in, [&](Comm &host, auto f) { with_gpu(gpus, host, dev, f); });
        check_attention(c.name().c_str(), a, in, got.result);
    };
    if (gpus == Gpus::one) for_each_order<Dev>(run);
    else for_each_order_of_streams<Dev>(run);
}

TYPED_TEST(CudaRing, EqualsOneRank) {
    for (const RingCase &c :
         {RingCase{1, SpMode::ring, Layout::contiguous}, RingCase{3, SpMode::ring, Layout::zigzag},
          RingCase{2, SpMode::gather, Layout::longest_first}, RingCase{4, SpMode::ulysses, Layout::contiguous}})
        equals_one_rank<TypeParam>(c, Gpus::one);
}

TYPED_TEST(CudaRing, EqualsOneRankOverGpus) {
    const size_t ranks = std::min(4, ranks_with_gpus());  // a row of 96 tokens has at most 4 x 8 pieces
    if (ranks < 2) GTEST_SKIP() << "2 GPUs are needed, and NCCL";
    for (const RingCase &c :
         {RingCase{ranks, SpMode::ring, Layout::zigzag}, RingCase{ranks, SpMode::gather, Layout::longest_first},
          RingCase{2, SpMode::ulysses, Layout::contiguous}})
        equals_one_rank<TypeParam>(c, Gpus::each);
}

// The plan has floats only to merge parts. A rank with all rows of its heads needs none: the bf16 kernels write the result.
TEST(CudaRingFloats, AreOnlyForMerging) {
    const AttentionShape shape = {96, 6, 2, 64, 0.125f};
    const size_t all = shape.T * shape.H * shape.D;
    for (SpMode mode : {SpMode::ring, SpMode::gather, SpMode::ulysses}) {
        EXPECT_EQ(ring_attention_floats(CudaBf16{}, mode, 1, false, shape), 0u);
        EXPECT_EQ(ring_attention_floats(CudaF32{}, mode, 1, false, shape), all);
        EXPECT_EQ(ring_attention_floats(CudaBf16{}, mode, 1, true, shape), all);
        EXPECT_EQ(ring_attention_floats(CudaBf16{}, mode, 2, false, shape), mode == SpMode::ulysses ? 0 : all);
    }
}
