// Wavefronts of shared memory in versions of the ladder matmul, against arithmetic by hand.
#include "../../../dev/cuda/matmul.cu"
#include "counted.h"

namespace {
const size_t T = 128, IC = 64, OC = 256, warps = 8;  // of a block of version 3
const ptx::Extent grid = {1, 2, 1};
}  // namespace

// Version 3, whose tiles are neither swizzled nor padded. For each k a warp makes four loads of 16 bytes a lane. Two of them are of x: its lanes want
// two places, 8 words, the same in pairs, and are answered by halves of the warp, though one wavefront would do; two are of w, 64 words, answered
// by quarters, for which two would do. For each slab a warp writes 8 rows of x and of w, 32 neighbours at a time.
TEST(PtxCounts, MatmulReadsItsUnswizzledTilesByQuarters) {
    gpu::workshop::MatmulForward<bf16> op({T, IC, OC});
    const auto launch = counted("matmul_forward_kernel3", grid, [&] { op.run({}, 3); });
    const size_t slabs = IC / 16, blocks = 2, of_slab = blocks * slabs * warps;
    EXPECT_EQ(launch.total().wavefronts, of_slab * (16 * (2 * 2 + 2 * 4) + 8 * 2));
    EXPECT_EQ(launch.total().wavefronts - launch.total().least_wavefronts, of_slab * 16 * (2 * 1 + 2 * 2));
}

// Version 5, whose rows of 16 bytes are swizzled: rows that ldmatrix or cp.async touches at a time are in different banks.
TEST(PtxCounts, MatmulHasNoConflictsInSwizzledTiles) {
    gpu::workshop::MatmulForward<bf16> op({T, IC, OC});
    const auto launch = counted("matmul_forward_kernel5", grid, [&] { op.run({}, 5); });
    EXPECT_GT(launch.total().wavefronts, 0u);
    EXPECT_EQ(launch.total().wavefronts, launch.total().least_wavefronts);
    EXPECT_EQ(executed(launch, ptx::Pipe::tensor), T * IC * OC / (16 * 8 * 16));
}
