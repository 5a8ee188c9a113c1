// Attention against a float64 reference that materialises every score. By its contract the result does not depend on the split of a row over ranks, on
// the number and order of threads, or on other documents.
#include "../../llmc/ops/attention_prompts.h"

#include <map>

#include "../finite_difference.h"
#include "../reference_attention.h"
#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/attention.cuh"
#endif

TEST(AttentionReference, GradientEqualsCentralDifferences) {
    const AttentionCase a{{3, 1, 5}, 4, 2, 1, 8};
    const auto qkv = widen(random_values<float>(a.T() * 4 * a.D, 1));
    const auto dout = widen(random_values<float>(a.T() * 2 * a.D, 2));
    AttentionReference ref = attention_reference(a, qkv);
    attention_reference_backward(ref, a, qkv, ref.out, dout);
    const auto out = [&](const std::vector<double> &qkv) { return attention_reference(a, qkv).out; };
    // Third derivatives have the order of 100 here: the truncation error is 100 * 1e-10 / 6.
    expect_close("reference gradient", ref.dqkv, finite_difference(out, qkv, dout), 3e-9);
}

// ---- the op

template <class Dev> struct Attention : testing::Test {
    using X = typename Dev::X;
    using Inputs = AttentionValues<X>;
    using Result = AttentionResult<X>;
    template <class... Ranks> static Result run(const AttentionCase &a, const Inputs &in, const Ranks &...ranks) {
        return run_attention<Array>(any_device<Dev>(), a, in, ranks...);
    }
    template <class... Ranks> static Result same_in_every_order(const AttentionCase &a, const Inputs &in, const Ranks &...ranks) {
        Result got;
        SameBits same;
        for_each_order<Dev>([&](Dev dev) {
            got = run_attention<Array>(dev, a, in, ranks...);
            same(got.out, got.lse, got.dqkv);
        });
        return got;
    }
    template <class... Ranks> static void check(const char *what, const AttentionCase &a, const Ranks &...ranks) {
        SCOPED_TRACE(what);
        const Inputs in(a);
        check_attention(what, a, in, same_in_every_order(a, in, ranks...));
    }
};
TYPED_TEST_SUITE(Attention, Devices);

TYPED_TEST(Attention, EqualsReference) {
    const std::map<std::string, AttentionCase> shapes = {
        {"one token, D 8", {{1}, 0, 1, 1, 8}},
        {"one document, D 64", {{203}, 0, 2, 2, 64}},
        {"packed, 3:1, D 64", {{5, 1, 13, 118, 2, 130, 1, 1, 64}, 0, 3, 1, 64}},
        {"with cuts, 3:1, D 64", {{5, 1, 13, 118, 2, 130, 1, 1, 64}, 0, 3, 1, 64, 1}},
        {"40 cuts, D 8", {std::vector<size_t>(41, 3), 0, 1, 1, 8, 1}},
        {"packed, 7:1, D 16", {{64, 1, 32, 97}, 0, 7, 1, 16}},
        {"window 24, D 80", {{140, 30, 1, 17}, 24, 2, 1, 80}},
        {"window 1, D 24", {{70, 3}, 1, 2, 1, 24}},
        {"packed, D 96", {{90, 1, 70}, 0, 1, 1, 96}},
        {"packed, D 128", {{100, 1, 59}, 0, 2, 1, 128}},
        {"packed, 2:1, D 136", {{33, 90}, 0, 2, 1, 136}},
        {"packed, D 256", {{33, 80}, 0, 1, 1, 256}},
#ifndef CUDA_HALF  // several tiles on the CPU, which take long in the emulator
        {"long, one document, 1:1, D 64", {{443}, 0, 2, 2, 64}},
        {"long, packed, 3:1, D 64", {{5, 1, 13, 118, 2, 230, 1, 1, 64}, 0, 6, 2, 64}},
        {"long, packed, 7:1, D 16", {{192, 1, 96, 97}, 0, 7, 1, 16}},
        {"long, window 24, D 80", {{200, 30, 1, 217}, 24, 3, 1, 80}},
        {"long, one document, D 8", {{291}, 0, 2, 1, 8}},
        {"long, packed, D 128", {{100, 1, 129}, 0, 3, 1, 128}},
        {"long, packed, D 256", {{33, 260}, 0, 1, 1, 256}},
        {"long, window 150, 5:1, D 64", {{430, 20}, 150, 5, 1, 64}},
#endif
    };
    for (const auto &[name, a] : shapes) this->check(name.c_str(), a);
}

TYPED_TEST(Attention, DocumentsBehindASharedPromptSeeIt) {
    const size_t far = TileCuts::shortest;
    for (size_t D : {16, 64, 128}) {
        this->check("one answer behind", {{9, 4}, 0, 2, 1, D, far, 0, {0, 5}});
        this->check("documents between", {{3, 70, 1, 40, 7, 9, 33, 2, 2}, 0, 2, 1, D, far, 0, {0, 0, 61, 61, 0, 0, 0, 30, 30}});
        this->check("at once", {{64, 30, 20, 3, 40, 1}, 0, 1, 1, D, 30, 0, {0, 63, 63, 0, 2, 2}});
        this->check("window 9", {{20, 12, 3, 30, 7}, 9, 2, 1, D, far, 0, {0, 15, 15, 15, 0}});
    }
    // More documents and prompts than Pieces can hold.
    AttentionCase many{{}, 5, 1, 1, 16};
    for (size_t i = 0; i < 40; i++) many.documents.push_back(i % 2 ? 3 : 5), many.shared.push_back(i % 2 ? 4 : 0);
    for (size_t i = 0; i < 20; i++) many.documents.push_back(2), many.shared.push_back(4);
    this->check("many prompts, window 5", many);
    many.window = 0;
    this->check("many prompts", many);
}

TYPED_TEST(Attention, AnySplitOverRanksEqualsTheWhole) {
    const AttentionCase packed{{5, 1, 13, 18, 2, 230}, 0, 3, 1, 16}, window{{120, 1, 100}, 24, 2, 2, 32};
    for (const AttentionCase &a : {packed, window}) {
        this->check("contiguous over 2", a, deal(a.T(), 2, 2, false));
        this->check("zigzag over 3", a, deal(a.T(), 3, 6, true));
        this->check("16 pieces on each of 2", a, deal(a.T(), 2, 32, false));
        this->check("a whole of 5 pieces", a, deal(a.T(), 1, 5, false));
    }
    for (const size_t window : {0, 20}) {
        const AttentionCase a{{9, 41, 30, 7, 50, 22, 6}, window, 2, 1, 16, TileCuts::shortest, 0, {0, 0, 33, 33, 33, 0, 11}};
        this->check("prompts, contiguous over 2", a, deal(a.T(), 2, 2, false));
        this->check("prompts, zigzag over 3", a, deal(a.T(), 3, 6, true));
        this->check("prompts, 8 pieces on each of 2", a, deal(a.T(), 2, 16, false));
    }
    const AttentionCase cut{{5, 1, 13, 58, 2, 60}, 0, 2, 1, 16, 1};
    this->check("with cuts, zigzag over 2", cut, deal(cut.T(), 2, 4, true));
    for (size_t D : {64, 96, 128, 136, 256})  // kernels for parts have the same widths as kernels for a whole row
        this->check(format("over 2, D %zu", D).c_str(), {{25, 40}, 0, 2, 1, D}, deal(65, 2, 2, false));
#ifndef CUDA_HALF  // these cases also take long in the emulator
    const auto check_once = [](const char *what, const AttentionCase &a, const std::vector<Pieces> &ranks) {
        const typename TestFixture::Inputs in(a);
        check_attention(what, a, in, TestFixture::run(a, in, ranks));
    };
    const AttentionCase longer{{5, 1, 13, 18, 2, 330}, 0, 3, 1, 16};
    const AttentionCase several_blocks{{900, 101}, 0, 2, 1, 8};  // several blocks of queries on each rank
    check_once("500 rows on each of 2", several_blocks, deal(several_blocks.T(), 2, 2, false));
    for (const AttentionCase &a : {longer, window}) {
        for (size_t ranks = 1; ranks <= 7; ranks++) {
            check_once(format("contiguous over %zu", ranks).c_str(), a, deal(a.T(), ranks, ranks, false));
            check_once(format("zigzag over %zu", ranks).c_str(), a, deal(a.T(), ranks, 2 * ranks, true));
        }
        check_once("16 pieces on each of 3", a, deal(a.T(), 3, 48, false));
    }
#endif
}

TYPED_TEST(Attention, OtherDocumentsChangeNoBit) {
    using X = typename TypeParam::X;
    for (const size_t D : {24, 64}) {  // 64: Hopper's kernels on a Hopper GPU
        const AttentionCase a{{40, 1, 300, 77}, 0, 3, 1, D};
        const size_t begin = 41, end = 341;  // the document of 300
        const typename TestFixture::Inputs in(a);
        auto noisy = in;
        const auto noise = random_values<X>(in.qkv.size(), 3, 20);
        const auto overwrite = [&](std::vector<X> &values, size_t row) {
            std::copy(noise.begin() + long(begin * row), noise.begin() + long(end * row), values.begin() + long(begin * row));
        };
        overwrite(noisy.qkv, a.row()), overwrite(noisy.dout, a.H * D);
        const auto want = this->run(a, in), got = this->run(a, noisy);
        for (size_t t = 0; t < a.T(); t++) EXPECT_EQ(same_rows(a, got, want, t, t + 1), t < begin || t >= end) << t;
    }
}

TYPED_TEST(Attention, NanReachesOnlyTheQueriesThatSeeIt) {
    const AttentionCase a{{200, 150}, 0, 2, 1, 16};
    const size_t row = a.row(), bad = 70;
    for (size_t head : {size_t(0), a.H, a.H + a.KV}) {  // in q of the first head, in k, in v
        typename TestFixture::Inputs in(a);
        in.qkv[bad * row + head * a.D + 3] = NAN;
        const auto got = this->run(a, in);
        for (size_t t = 0; t < a.T(); t++) {
            if (head == a.H + a.KV && (t < bad || t >= 192)) continue;  // a masked probability is 0, and 0 * NaN is NaN
            const bool expected = head == 0 ? t == bad : t >= bad && t < 200;
            const float seen = got.out[t * a.H * a.D + 3];
            EXPECT_EQ(std::isnan(seen), expected) << "head " << head << " row " << t;
        }
    }
}

// A block of queries skips the keys before its first document, even if they are NaN, so that the cost follows the documents.
TYPED_TEST(Attention, UnseenBlocksAreSkipped) {
    const size_t first = 384;  // a multiple of a block's queries: 96 on the CPU, up to 128 on a GPU
    const AttentionCase a{{first, 250}, 0, 2, 1, 16};
    const typename TestFixture::Inputs in(a);
    auto poisoned = in;
    std::fill(poisoned.qkv.begin(), poisoned.qkv.begin() + long(first * a.row()), NAN);
    EXPECT_TRUE(same_rows(a, this->run(a, poisoned), this->run(a, in), first, a.T()));
}

#ifdef CUDA_HALF
// A block uses at most 99 KiB of shared memory, which every GPU from 8.0 on has.
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
#endif
