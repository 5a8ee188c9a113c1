// attention.cuh against the float64 reference of the CPU's tests, and against what the contract promises.
#include "../../llmc/ops/attention.cuh"

#include <map>
#include <optional>
#include <set>

#include "../reference_attention.h"
#include "check.cuh"

template <class Dev> struct CudaAttention : testing::Test {
    using X = typename Dev::X;
    using Inputs = AttentionValues<X>;
    using Result = AttentionResult<X>;
    template <class... Args> static Result run(Dev dev, const AttentionCase &a, const Inputs &in, const Args &...ranks) {
        return run_attention<DeviceArray>(dev, a, in, ranks...);
    }
    // The same bits in every order of threads, and close to the reference.
    template <class... Args> static void check(const char *what, const AttentionCase &a, const Args &...ranks) {
        const Inputs in(a);
        std::optional<Result> first;
        for_each_order<Dev>([&](Dev dev) {
            const Result got = run(dev, a, in, ranks...);
            if (!first) {
                first = got;
                check_attention(what, a, in, got);
            }
            EXPECT_TRUE(same_bits(got.out.data(), first->out.data(), got.out.size())) << what;
            EXPECT_TRUE(same_bits(got.lse.data(), first->lse.data(), got.lse.size())) << what;
            EXPECT_TRUE(same_bits(got.dqkv.data(), first->dqkv.data(), got.dqkv.size())) << what;
        });
    }
};
TYPED_TEST_SUITE(CudaAttention, CudaDevices);

TYPED_TEST(CudaAttention, EqualsReference) {
    const std::map<std::string, AttentionCase> shapes = {
        {"one token, D 8", {{1}, 0, 1, 1, 8}},
        {"one document, D 64", {{203}, 0, 2, 2, 64}},
        {"packed, 3:1, D 64", {{5, 1, 13, 118, 2, 130, 1, 1, 64}, 0, 3, 1, 64}},
        {"packed, 7:1, D 16", {{64, 1, 32, 97}, 0, 7, 1, 16}},
        {"window 24, D 80", {{140, 30, 1, 17}, 24, 2, 1, 80}},
        {"window 1, D 24", {{70, 3}, 1, 2, 1, 24}},
        {"packed, D 96", {{90, 1, 70}, 0, 1, 1, 96}},
        {"packed, D 128", {{100, 1, 59}, 0, 2, 1, 128}},
        {"packed, 2:1, D 136", {{33, 90}, 0, 2, 1, 136}},
        {"packed, D 256", {{33, 80}, 0, 1, 1, 256}},
    };
    for (const auto &[name, a] : shapes) CudaAttention<TypeParam>::check(name.c_str(), a);
}

TYPED_TEST(CudaAttention, AnySplitOverRanksEqualsTheWhole) {
    using Test = CudaAttention<TypeParam>;
    const AttentionCase packed{{5, 1, 13, 18, 2, 230}, 0, 3, 1, 16}, window{{120, 1, 100}, 24, 2, 2, 32};
    for (const AttentionCase &a : {packed, window}) {
        Test::check("contiguous over 2", a, deal(a.T(), 2, 2, false));
        Test::check("zigzag over 3", a, deal(a.T(), 3, 6, true));
        Test::check("16 pieces on each of 2", a, deal(a.T(), 2, 32, false));
    }
}

TYPED_TEST(CudaAttention, OtherDocumentsChangeNoBit) {
    using Test = CudaAttention<TypeParam>;
    using X = typename TypeParam::X;
    const AttentionCase a{{40, 1, 150, 77}, 0, 3, 1, 24};
    const size_t begin = 41, end = 191, row = (a.H + 2 * a.KV) * a.D, out_row = a.H * a.D;  // the document of 150
    const AttentionValues<X> in(a);
    auto noisy = in;
    const auto noise = random_values<X>(in.qkv.size(), 3, 20);
    std::copy(noise.begin() + long(begin * row), noise.begin() + long(end * row), noisy.qkv.begin() + long(begin * row));
    std::copy(noise.begin() + long(begin * out_row), noise.begin() + long(end * out_row),
              noisy.dout.begin() + long(begin * out_row));
    const TypeParam dev = TypeParam{};
    const auto want = Test::run(dev, a, in), got = Test::run(dev, a, noisy);
    for (size_t t = 0; t < a.T(); t++) {
        const bool same = same_bits(&got.out[t * out_row], &want.out[t * out_row], out_row) &&
                          same_bits(&got.dqkv[t * row], &want.dqkv[t * row], row);
        EXPECT_EQ(same, t < begin || t >= end) << t;
    }
}

TYPED_TEST(CudaAttention, NanReachesExactlyTheQueriesThatSeeIt) {
    using Test = CudaAttention<TypeParam>;
    const AttentionCase a{{100, 60}, 0, 2, 1, 16};
    const size_t row = (a.H + 2 * a.KV) * a.D, bad = 70;
    for (size_t head : {size_t(0), a.H}) {  // in q (of the first head), in k
        AttentionValues<typename TypeParam::X> in(a);
        in.qkv[bad * row + head * a.D + 3] = NAN;
        const auto got = Test::run(TypeParam{}, a, in);
        for (size_t t = 0; t < a.T(); t++) {
            const bool expected = head == 0 ? t == bad : t >= bad && t < 100;
            EXPECT_EQ(std::isnan(float(got.out[t * a.H * a.D + 3])), expected) << "head " << head << " row " << t;
        }
    }
}

// Cost follows the documents: keys before the first document of a block of queries take no part in it, not even as 0 * NaN.
TYPED_TEST(CudaAttention, UnseenBlocksAreSkipped) {
    using Test = CudaAttention<TypeParam>;
    const size_t first = 128;
    const AttentionCase a{{first, 100}, 0, 2, 1, 16};
    const size_t row = (a.H + 2 * a.KV) * a.D, out_row = a.H * a.D;
    const AttentionValues<typename TypeParam::X> in(a);
    auto poisoned = in;
    std::fill(poisoned.qkv.begin(), poisoned.qkv.begin() + long(first * row), NAN);
    const TypeParam dev = TypeParam{};
    const auto want = Test::run(dev, a, in), got = Test::run(dev, a, poisoned);
    EXPECT_TRUE(same_bits(&got.out[first * out_row], &want.out[first * out_row], 100 * out_row));
    EXPECT_TRUE(same_bits(&got.dqkv[first * row], &want.dqkv[first * row], 100 * row));
}

// ldmatrix reads 16 bytes of each of eight rows at once: no two of them may lie in the same banks, which repeat every 128 bytes.
template <int D> static void expect_no_bank_conflicts() {
    static attention::Tile<16, D> tile;
    for (int r0 = 0; r0 < 16; r0 += 8)
        for (int c = 0; c < D / 8; c++) {
            std::set<size_t> banks;
            for (int r = r0; r < r0 + 8; r++) {
                banks.insert(reinterpret_cast<uintptr_t>(tile.chunk(r, c)) % 128);
                EXPECT_EQ(tile.right(tile.chunk(r, c % 2), c / 2 * 2), tile.chunk(r, c)) << D << " " << r << " " << c;
            }
            EXPECT_EQ(banks.size(), 8u) << "head size " << D << ", rows from " << r0 << ", chunk " << c;
        }
}
TEST(CudaAttentionTile, NoBankConflicts) {
    expect_no_bank_conflicts<32>();
    expect_no_bank_conflicts<64>();
    expect_no_bank_conflicts<96>();
    expect_no_bank_conflicts<128>();
    expect_no_bank_conflicts<192>();
    expect_no_bank_conflicts<256>();
}

// A block's shared memory, at most the 99 KiB that GPUs from 8.0 on have at least.
TEST(AttentionShapes, SharedMemoryFits) {
    const auto row = [](const char *kernel, size_t width, size_t bytes) {
        printf("  %-20s width %3zu  %6.1f KiB of shared memory\n", kernel, width, double(bytes) / 1024);
        EXPECT_LE(bytes, size_t(99) << 10);
    };
    for (size_t width : {32, 64, 96, 128, 192, 256})
        attention::with_width(width, [&](auto D) {
            row("attention_forward", width, sizeof(typename attention::ForwardShape<D.value>::Shared));
            row("backward_queries", width, sizeof(typename attention::BackwardQueriesShape<D.value>::Shared));
            row("backward_keys", width, sizeof(typename attention::BackwardKeysShape<D.value>::Shared));
        });
    row("f32 forward", attention::max_D, sizeof(attention::PlainForward));
    row("f32 backward", attention::max_D, sizeof(attention::PlainShape::Shared));
}
