// attention.h against a float64 reference that materialises every score, and against what its contract promises: any split of a
// row over ranks, any number of threads and any content of the other documents give the same result.
#include "../llmc/ops/attention.h"

#include <map>

#include "reference_attention.h"

TEST(AttentionReference, GradientEqualsCentralDifferences) {
    const AttentionCase a{{3, 1, 5}, 4, 2, 1, 8};
    auto qkv = widen(random_values<float>(a.T() * 4 * a.D, 1));
    const auto dout = widen(random_values<float>(a.T() * 2 * a.D, 2));
    AttentionReference ref = attention_reference(a, qkv);
    attention_reference_backward(ref, a, qkv, ref.out, dout);
    const double step = 1e-5;
    const auto loss = [&] {
        const auto out = attention_reference(a, qkv).out;
        double sum = 0;
        for (size_t i = 0; i < out.size(); i++) sum += out[i] * dout[i];
        return sum;
    };
    std::vector<double> numeric(qkv.size());
    for (size_t i = 0; i < qkv.size(); i++) {
        const double x = qkv[i];
        qkv[i] = x + step;
        const double above = loss();
        qkv[i] = x - step;
        numeric[i] = (above - loss()) / (2 * step);
        qkv[i] = x;
    }
    // third derivatives are of the order of 100 here, and the loss of 10: truncation 100 step^2 / 6, roundoff 10 * 2^-52 / step
    expect_close("reference gradient", ref.dqkv, numeric, 20 * step * step + 1e-9);
}

// ---- the op

template <class Dev> struct Attention : testing::Test {
    using X = typename Dev::X;
    using Inputs = AttentionValues<X>;
    template <class... Args>
    static AttentionResult<X> run(Dev dev, const AttentionCase &a, const Inputs &in, const Args &...ranks) {
        return run_attention<HostArray>(dev, a, in, ranks...);
    }
    static void check(const char *what, const AttentionCase &a, const Inputs &in, const AttentionResult<X> &got) {
        check_attention(what, a, in, got);
    }
};
TYPED_TEST_SUITE(Attention, CpuDevices);

static const std::map<std::string, AttentionCase> shapes = {
    {"one token", {{1}, 0, 1, 1, 8}},
    {"one document, 1:1, D 64", {{443}, 0, 2, 2, 64}},
    {"packed, 3:1, D 64", {{5, 1, 13, 118, 2, 230, 1, 1, 64}, 0, 6, 2, 64}},
    {"packed, 7:1, D 16", {{192, 1, 96, 97}, 0, 7, 1, 16}},
    {"window 24, D 80", {{200, 30, 1, 217}, 24, 3, 1, 80}},
    {"window 1, D 24", {{70, 3}, 1, 2, 1, 24}},
    {"one document, D 8", {{291}, 0, 2, 1, 8}},
    {"packed, D 128", {{100, 1, 129}, 0, 3, 1, 128}},
    {"packed, D 256", {{33, 260}, 0, 1, 1, 256}},
    {"window 150, 5:1, D 64", {{430, 20}, 150, 5, 1, 64}},
};

TYPED_TEST(Attention, EqualsReference) {
    using Test = Attention<TypeParam>;
    for (const auto &[name, a] : shapes) {
        const auto in = typename Test::Inputs(a);
        Test::check(name.c_str(), a, in, Test::run(make_device<TypeParam>(), a, in));
    }
}

TYPED_TEST(Attention, AnySplitOverRanksEqualsTheWhole) {
    using Test = Attention<TypeParam>;
    const AttentionCase several_blocks{{900, 101}, 0, 2, 1, 8};  // on each rank, more than one block of queries
    const auto several = typename Test::Inputs(several_blocks);
    Test::check("500 rows on each of 2", several_blocks, several,
                Test::run(make_device<TypeParam>(), several_blocks, several, deal(several_blocks.T(), 2, 2, false)));
    for (const AttentionCase &a :
         {AttentionCase{{5, 1, 13, 18, 2, 330}, 0, 3, 1, 16}, AttentionCase{{120, 1, 100}, 24, 2, 2, 32}}) {
        const auto in = typename Test::Inputs(a);
        for (size_t ranks = 1; ranks <= 7; ranks++) {
            Test::check(format("contiguous over %zu", ranks).c_str(), a, in,
                        Test::run(make_device<TypeParam>(), a, in, deal(a.T(), ranks, ranks, false)));
            Test::check(format("zigzag over %zu", ranks).c_str(), a, in,
                        Test::run(make_device<TypeParam>(), a, in, deal(a.T(), ranks, 2 * ranks, true)));
        }
        Test::check("16 pieces on each of 3", a, in, Test::run(make_device<TypeParam>(), a, in, deal(a.T(), 3, 48, false)));
    }
}

TYPED_TEST(Attention, NumberOfThreadsChangesNoBit) {
    using Test = Attention<TypeParam>;
    const AttentionCase a{{5, 700, 1, 350, 60}, 0, 4, 2, 32};
    const auto in = typename Test::Inputs(a);
    for (const auto &ranks : {deal(a.T(), 1, 1, false), deal(a.T(), 2, 4, true)}) {
        const auto one = Test::run(make_device<TypeParam>(1), a, in, ranks);
        for (int threads : {2, 3}) {
            TypeParam dev = make_device<TypeParam>();
            dev.threads = threads;
            const auto many = Test::run(dev, a, in, ranks);
            EXPECT_TRUE(same_bits(one.out.data(), many.out.data(), one.out.size())) << threads;
            EXPECT_TRUE(same_bits(one.lse.data(), many.lse.data(), one.lse.size())) << threads;
            EXPECT_TRUE(same_bits(one.dqkv.data(), many.dqkv.data(), one.dqkv.size())) << threads;
        }
    }
}

TYPED_TEST(Attention, OtherDocumentsChangeNoBit) {
    using Test = Attention<TypeParam>;
    using X = typename TypeParam::X;
    const AttentionCase a{{40, 1, 300, 77}, 0, 3, 1, 24};
    const size_t T = a.T(), begin = 41, end = 341, row = (a.H + 2 * a.KV) * a.D, out_row = a.H * a.D;  // the document of 300
    const auto in = typename Test::Inputs(a);
    auto noisy = in;
    const auto noise = random_values<X>(in.qkv.size(), 3, 20);
    std::copy(noise.begin() + long(begin * row), noise.begin() + long(end * row), noisy.qkv.begin() + long(begin * row));
    std::copy(noise.begin() + long(begin * out_row), noise.begin() + long(end * out_row),
              noisy.dout.begin() + long(begin * out_row));
    const auto want = Test::run(make_device<TypeParam>(), a, in), got = Test::run(make_device<TypeParam>(), a, noisy);
    for (size_t t = 0; t < T; t++) {
        const bool same = same_bits(&got.out[t * out_row], &want.out[t * out_row], out_row) &&
                          same_bits(&got.dqkv[t * row], &want.dqkv[t * row], row);
        EXPECT_EQ(same, t < begin || t >= end) << t;
    }
}

TYPED_TEST(Attention, NanReachesExactlyTheQueriesThatSeeIt) {
    using Test = Attention<TypeParam>;
    const AttentionCase a{{200, 150}, 0, 2, 1, 16};
    const size_t row = (a.H + 2 * a.KV) * a.D, bad = 70;
    for (size_t head : {size_t(0), a.H, a.H + a.KV}) {  // in q (of the first head), in k, in v
        auto in = typename Test::Inputs(a);
        in.qkv[bad * row + head * a.D + 3] = NAN;
        const auto got = Test::run(make_device<TypeParam>(), a, in);
        for (size_t t = 0; t < a.T(); t++) {
            if (head == a.H + a.KV && (t < bad || t >= 192)) continue;  // a masked probability is 0, and 0 * NaN is NaN
            const bool expected = head == 0 ? t == bad : t >= bad && t < 200;
            const float seen = got.out[t * a.H * a.D + 3];
            EXPECT_EQ(std::isnan(seen), expected) << "head " << head << " row " << t;
        }
    }
}

// Cost follows the documents: keys before the first document of a block of queries take no part in it, not even as 0 * NaN.
TYPED_TEST(Attention, UnseenBlocksAreSkipped) {
    using Test = Attention<TypeParam>;
    const size_t first = 2 * attention::queries;
    const AttentionCase a{{first, 250}, 0, 2, 1, 16};
    const size_t row = (a.H + 2 * a.KV) * a.D;
    const auto in = typename Test::Inputs(a);
    auto poisoned = in;
    std::fill(poisoned.qkv.begin(), poisoned.qkv.begin() + long(first * row), NAN);
    const auto want = Test::run(make_device<TypeParam>(), a, in), got = Test::run(make_device<TypeParam>(), a, poisoned);
    EXPECT_TRUE(same_bits(&got.out[first * a.H * a.D], &want.out[first * a.H * a.D], 250 * a.H * a.D));
    EXPECT_TRUE(same_bits(&got.dqkv[first * row], &want.dqkv[first * row], 250 * row));
}

// ---- simd.h

TEST(Simd, FastExp) {
    std::vector<float> x, y(1 << 20);
    for (size_t i = 0; i < y.size(); i++) x.push_back(-87.33f + float(i) * (176.05f / float(y.size())));
#pragma omp simd
    for (size_t i = 0; i < y.size(); i++) y[i] = fast_exp(x[i]);
    double worst = 0;  // in units in the last place
    for (size_t i = 0; i < y.size(); i++) {
        const double want = std::exp(double(x[i]));
        worst = std::max(worst, std::abs(y[i] - want) / std::ldexp(1.0, std::ilogb(want) - 23));
    }
    printf("  %-40s %.2g of %.2g allowed\n", "fast_exp, units in the last place", worst, 1.5);
    EXPECT_LE(worst, 1.5);
    EXPECT_EQ(fast_exp(0.0f), 1.0f);
    EXPECT_EQ(fast_exp(-INFINITY), 0.0f);
    EXPECT_EQ(fast_exp(-100.0f), 0.0f);
    EXPECT_EQ(fast_exp(INFINITY), INFINITY);
    EXPECT_EQ(fast_exp(89.0f), INFINITY);
    for (uint32_t bits : {0x7fc00000u, 0xffffffffu, 0x7fffffffu, 0xffc00001u})
        EXPECT_TRUE(std::isnan(fast_exp(std::bit_cast<float>(bits))));
}

// Every upper half of a float with lower halves around a tie, at every place of a vector and in the elements after the last one.
TEST(Simd, StoresTheNearestBf16) {
    std::vector<float> x;
    for (uint32_t upper = 0; upper < 0x10000; upper++)
        for (uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) x.push_back(std::bit_cast<float>(upper << 16 | low));
    for (size_t end : {x.size(), x.size() - 1, x.size() - 5}) {
        std::vector<bf16> y(end), again(end);
        simd::for_each(end, [&]<class V>(size_t i) { simd::store(&y[i], simd::load<V>(&x[i])); });
        simd::for_each(end, [&]<class V>(size_t i) { simd::store(&again[i], simd::load<V>(&y[i])); });
        for (size_t i = 0; i < end; i++) {
            const bf16 want = x[i];
            if (std::isnan(x[i])) {
                EXPECT_TRUE(std::isnan(float(y[i])) && std::isnan(float(again[i])));
            } else if (float(want) == 0 || std::isnormal(x[i])) {
                ASSERT_EQ(y[i].bits, want.bits) << x[i];
            } else {  // the CPU's instruction makes 0 of it
                ASSERT_TRUE(y[i].bits == want.bits || y[i] == 0) << x[i];
            }
            if (y[i] == 0 || std::isnormal(float(y[i]))) {
                ASSERT_EQ(again[i].bits, y[i].bits) << x[i];
            }
        }
    }
}
