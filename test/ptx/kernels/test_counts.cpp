// What the interpreter counts of shipped kernels, against arithmetic by hand.
#include "../../../llmc/ops/attention.cuh"
#include "../../../llmc/ops/attention_decode.cuh"
#include "../../../llmc/ops/swiglu.cuh"
#include "../../cuda/check.cuh"
#include "../../reference_attention_decode.h"
#include "counted.h"

// A warp loads two vectors and stores one, of 32 x 16 bytes = 16 sectors each: the least that can be, as all bytes are wanted.
TEST(PtxCounts, SwigluTouchesEachSectorOnce) {
    const size_t T = 23, F = 2048;
    const auto launch = counted("swiglu_forward_kernel4<(Gate)0, bf16, 8>", {T, 2, 1}, [&] {
        DeviceArray<bf16> gate_up(random_values<bf16>(T * 2 * F, 1)), out(T * F);
        swiglu_forward(CudaBf16{}, out.data(), gate_up.data(), T, F);
    });
    const ptx::Count all = launch.total();
    EXPECT_EQ(all.requests, 3 * T * F / 8 / 32);
    EXPECT_EQ(all.sectors, 3 * T * F * sizeof(bf16) / 32);
    EXPECT_EQ(all.wavefronts, 0u);
    EXPECT_EQ(all.threads, all.executed * 32);
}

// A warp has 32 queries and multiplies them by every tile of 64 keys that one of them sees: with T = 256 tiles 1, 1, 2, 2, 3, 3, 4, 4, which
// is 20 where half of all would be 16, the mask's share. Each takes 2 products of 32 x 64 x 64, and an mma does 16 x 8 x 16 of them.
TEST(PtxCounts, AttentionMultipliesWhatTheMaskLeaves) {
    const AttentionCase a{{256}, 0, 5, 1, 64};
    const AttentionValues<bf16> in(a);
    const ptx::OtherGpu ampere(80);
    const auto launch =
        counted("attention_forward_kernel5<64, bf16>", {2, 5, 1}, [&] { run_attention<DeviceArray>(CudaBf16{}, a, in); });
    EXPECT_EQ(executed(launch, ptx::Pipe::tensor), a.H * 20 * 2 * (32 * 64 * 64) / (16 * 8 * 16));
    // Tiles are swizzled, so that the rows of ldmatrix are in different banks.
    const ptx::Count shared = launch.by_pipe[size_t(ptx::Pipe::shared)];
    printf("  attention_forward: %zu wavefronts, %zu at least\n", size_t(shared.wavefronts), size_t(shared.least_wavefronts));
    EXPECT_LT(double(shared.wavefronts), 1.1 * double(shared.least_wavefronts));
}

// The four query heads of a group share their reads of the cache. Queries, the table and the written parts are small in comparison.
TEST(PtxCounts, AttentionDecodeReadsTheCacheOnce) {
    const DecodeShape s{{0, 0, 0}, {256, 256, 256}, 8, 2, 64};
    const DecodeInputs<bf16> in(s);
    const auto cache = run_cache_store<DeviceArray>(CudaBf16{}, s, in);
    const auto launch =
        counted("attention_decode_kernel5<bf16, 4>", {3, 2, 2}, [&] { run_decode<DeviceArray>(CudaBf16{}, s, in, cache); });
    const double sectors = 3 * 256 * 2 * 2 * 64 * sizeof(bf16) / 32;
    printf("  attention_decode: %zu sectors, %.0f of the cache\n", size_t(launch.total().sectors), sectors);
    EXPECT_GE(double(launch.total().sectors), sectors);
    EXPECT_LT(double(launch.total().sectors), 1.1 * sectors);
}
