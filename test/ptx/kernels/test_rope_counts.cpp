// What versions of the ladder rope touch, against arithmetic by hand.
#include "../../../dev/cuda/rope.cu"
#include "counted.h"

// For each pair a warp makes 9 requests: the position, x and y, cos and sin; it stores x; cos and sin again, which that store might have changed;
// and it stores y. The positions of 32 neighbouring tokens are all different here (two documents, the first of 32 tokens).
namespace {
const size_t T = 96, H = 2, KV = 1, D = 64, pairs = (H + KV) * D / 2;
}

// A thread per token: the lanes of a warp access elements that are rows apart, in 32 sectors; only the positions are neighbours, 128 bytes.
TEST(PtxCounts, RopeOfAThreadPerTokenTouchesASectorPerLane) {
    gpu::workshop::Rope<bf16> op({T, H, KV, D});
    const auto launch = counted("rope_kernel1<bf16>", {2, 1, 1}, [&] { op.run({}, 1); });
    const size_t warps = T / 32;
    EXPECT_EQ(launch.total().requests, warps * pairs * 9);
    EXPECT_EQ(launch.total().sectors, warps * pairs * (8 * 32 + 4));
}

// A thread per pair: a warp turns a head. 32 elements of bf16 are 2 sectors, 32 of the table's pairs 8, and the position is one.
TEST(PtxCounts, RopeOfAThreadPerPairTouchesNeighbours) {
    gpu::workshop::Rope<bf16> op({T, H, KV, D});
    const auto launch = counted("rope_kernel2<bf16>", {T * pairs / 256, 1, 1}, [&] { op.run({}, 2); });
    const size_t warps = T * pairs / 32;
    EXPECT_EQ(launch.total().requests, warps * 9);
    EXPECT_EQ(launch.total().sectors, warps * (4 * 2 + 4 * 8 + 1));
    // Every element is read once and written once, and of the table the rows of 64 positions.
    EXPECT_EQ(launch.traffic.written, T * (H + KV) * D * sizeof(bf16));
    EXPECT_EQ(launch.traffic.read, T * (H + KV) * D * sizeof(bf16) + T * sizeof(int32_t) + 64 * D * sizeof(float));
}
