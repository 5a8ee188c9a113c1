// The head fused with the loss against float64: statistics and gradients, over several chunks, with rows that have no target.
#include "../../llmc/ops/loss.h"

#include <array>

#include "../finite_difference.h"
#include "../reference_loss.h"
#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/loss.cuh"
#include "../cuda/matmul_context.cuh"
#endif

using Vector = std::vector<double>;

// One warp, a part of one; vectors and none; more vectors than threads; sums of more than one run.
static const std::array<size_t, 3> sizes[] = {{1, 8, 3},    {37, 24, 51},   {20, 16, 136},
                                              {6, 8, 4100}, {64, 20, 1030}, {150, 36, 129}};

template <class Dev> struct Head : testing::Test, HeadCase<typename Dev::X> {
    using X = typename Dev::X;
    using HeadCase<X>::T, HeadCase<X>::C, HeadCase<X>::V, HeadCase<X>::N, HeadCase<X>::x, HeadCase<X>::w, HeadCase<X>::dx,
        HeadCase<X>::dw;
    using HeadCase<X>::rows, HeadCase<X>::targets, HeadCase<X>::weights, HeadCase<X>::dw_before;
    using HeadCase<X>::entropy_weight, HeadCase<X>::temperature, HeadCase<X>::nll, HeadCase<X>::entropy, HeadCase<X>::correct,
        HeadCase<X>::max, HeadCase<X>::sum;
    MatmulContext context;

    // ends: of the ranges of the vocabulary whose part of dw is made on its own; none: dw as a whole
    void run(Dev dev, bool backward = true, const std::vector<size_t> &ends = {}, bool accumulate = true) {
        dev = context.device(dev);
        Array<X> d_x(x), d_w(w), d_dx(T * C);
        Array<int32_t> d_rows(rows), d_targets(targets);
        Array<float> d_weights(weights), d_dw(dw_before), d_nll(N), d_entropy(N), d_correct(N), d_max(N), d_sum(N);
        const size_t bytes = lm_head_scratch(dev, N, C, V);
        Array<char> scratch(std::vector<char>(bytes + 64 + 64, 77));
        char *aligned = reinterpret_cast<char *>(round_up(reinterpret_cast<size_t>(scratch.data()), 64));
        const HeadStats stats = {d_nll.data(), d_entropy.data(), d_correct.data(), d_max.data(), d_sum.data()};
        const HeadLoss loss = {d_rows.data(), d_targets.data(), backward ? d_weights.data() : nullptr, entropy_weight,
                               temperature};
        lm_head(dev, stats, backward ? d_dx.data() : nullptr, backward && ends.empty() ? d_dw.data() : nullptr, aligned,
                d_x.data(), d_w.data(), loss, T, C, V, N, accumulate);
        nll = d_nll.values(), entropy = d_entropy.values(), correct = d_correct.values();
        max = d_max.values(), sum = d_sum.values();
        dx = d_dx.values(), dw = d_dw.values();
        for (size_t i = 0, first = 0; i < ends.size(); first = ends[i++]) {
            const auto begin = dw.begin() + ptrdiff_t(first * C), end = dw.begin() + ptrdiff_t(ends[i] * C);
            Array<float> part(std::vector<float>(begin, end));
            lm_head_weight(dev, part.data(), aligned, d_x.data(), d_w.data(), loss, stats, C, V, N, first, ends[i] - first);
            std::ranges::copy(part.values(), begin);
        }
        const auto after = scratch.values();
        for (size_t i = size_t(aligned - scratch.data()) + bytes; i < after.size(); i++)
            ASSERT_EQ(after[i], 77);  // nothing beyond the scratch
    }

    // More rows than `full` chunks hold, for the whole vocabulary and for the part in front of `end`.
    void expect_chunks(size_t full, size_t tokens, size_t channels, size_t vocab, size_t end) {
        const Dev dev = any_device<Dev>();
        this->make(tokens, channels, vocab);
        ASSERT_GT(N, full * lm_head_chunk(dev, V));
        ASSERT_GT(N, full * lm_head_range_rows(dev, N, C, V, end));
        for (const std::vector<size_t> &ends : {std::vector<size_t>{}, {end, V}}) {
            run(dev, true, ends);
            this->check();
        }
    }
    void expect_overwritten() {
        dw_before.assign(V * C, NAN);
        run(any_device<Dev>(), true, {}, false);
        dw_before.assign(V * C, 0);
        this->check();
    }
};
TYPED_TEST_SUITE(Head, Devices);

TEST(HeadReference, EqualsFiniteDifferences) {
    const size_t T = 6, C = 5, V = 11;
    const auto x = widen(random_values<float>(T * C, 1)), w = widen(random_values<float>(V * C, 2));
    const std::vector<int32_t> rows = {0, 2, 3, 5}, targets = {10, 0, 3, 3};
    const Vector weights = {0.5, -1, 0, 2};
    const auto reference = [&](const Vector &x, const Vector &w) {
        return head_reference(x, w, rows, targets, weights, C, -0.7, 1.6);
    };
    const auto by_x = [&](const Vector &x) { return std::vector{reference(x, w).loss}; };
    const auto by_w = [&](const Vector &w) { return std::vector{reference(x, w).loss}; };
    expect_close("dx", finite_difference(by_x, x, {1}), reference(x, w).dx, 1e-8);
    expect_close("dw", finite_difference(by_w, w, {1}), reference(x, w).dw, 1e-8);
}

TEST(HeadChunk, OfARangeFitsTheScratchOfTheHead) {
    const size_t N = 10000, C = 576, V = 49152, bytes = lm_head_scratch(CpuBf16{}, N, C, V);
    EXPECT_EQ(lm_head_range_rows(CpuBf16{}, N, C, V, V), lm_head_rows(CpuBf16{}, N, V));
    EXPECT_EQ(lm_head_range_rows(CpuBf16{}, N, C, V, 1), 10048u);  // all of them
    EXPECT_EQ(lm_head_range_rows(CpuBf16{}, 3, C, V, 1), 64u);
    for (size_t count : {size_t(4096), V / 2, V / 2 + 1, V - 1}) {
        const size_t rows = lm_head_range_rows(CpuBf16{}, N, C, V, count);
        EXPECT_LE(lm_head_chunk_bytes(CpuBf16{}, rows, C, count), bytes);
        EXPECT_GT(lm_head_chunk_bytes(CpuBf16{}, rows + 64, C, count), bytes);
    }
}

TYPED_TEST(Head, EqualsReference) {
    for (const auto &[T, C, V] : sizes) {
        this->make(T, C, V);
        SameBits same;
        for_each_order<TypeParam>([&](TypeParam dev) {
            this->run(dev);
            this->check();
            same(this->nll, this->entropy, this->correct, this->dx, this->dw);
        });
    }
}

TYPED_TEST(Head, OverwritesTheGradientOfItsWeights) {
    this->make(37, 24, 51);
    this->expect_overwritten();
}

TYPED_TEST(Head, LargeLogits) {  // exp(logit) would overflow
    this->make(40, 16, 60, 100);
    this->run(any_device<TypeParam>());
    this->check();
}

TYPED_TEST(Head, EntropyAndTemperature) {
    for (const auto &[T, C, tokens] : sizes)
        for (const float temperature : {0.5f, 1.0f, 1.7f}) {
            const size_t V = std::max(tokens, size_t(5));
            this->make(T, C, V, temperature == 0.5f ? 100 : 1);  // also where most probabilities are 0
            this->entropy_weight = -0.3f, this->temperature = temperature;
            for (const std::vector<size_t> &ends : {std::vector<size_t>{}, {V / 2, V}}) {
                this->run(any_device<TypeParam>(), true, ends);
                this->check();
            }
        }
}

TEST(FastLog, IsExactToTheLastPlaces) {
    double worst = 0;
    for (float x = 0x1p-126f; x < 3e38f; x *= 1.00013f) {
        const double want = std::log(double(x)), place = std::max(std::abs(want), 1.0) * 0x1p-23;
        worst = std::max(worst, std::abs(fast_log(x) - want) / place);
    }
    EXPECT_LE(worst, 1) << "units in the last place of the larger of 1 and the result";
    EXPECT_EQ(fast_log(1.0f), 0.0f);
    EXPECT_EQ(0.0f * fast_log(0.0f), 0.0f);
}

#ifdef CUDA_HALF  // chunks of 1024 rows and 256 MiB at least, which take long in the emulator

template <class Dev> struct SlowHead : Head<Dev> {};
TYPED_TEST_SUITE(SlowHead, Devices);
TYPED_TEST(SlowHead, SeveralChunks) { this->expect_chunks(1, 2600, 1, size_t(1) << 16, (size_t(3) << 14) + 1); }
#else  // chunks of 128 MiB, and rows enough for three threads
TYPED_TEST(Head, SeveralChunks) {
    this->expect_chunks(2, 240, 3, 400009, 300001);
    this->expect_overwritten();  // by the first chunk, added to by the others
}

TYPED_TEST(Head, ThreadsDoNotChangeABit) {
    this->make(300, 24, 900);
    for (const std::vector<size_t> &ends : {std::vector<size_t>{}, {301, 900}}) {
        SameBits same;
        for_each_order<TypeParam>([&](TypeParam dev) {
            this->run(dev, true, ends);
            same(this->nll, this->entropy, this->dw, this->dx);
        });
    }
}
#endif

TYPED_TEST(Head, RangesEqualReference) {  // of any length, one of them without a target
    for (const auto &[T, C, tokens] : sizes) {
        const size_t V = std::max(tokens, size_t(5));  // else one of the ranges would be empty
        this->make(T, C, V);
        for (int32_t &y : this->targets) y = y == int32_t(V / 3) ? 0 : y;
        SameBits same;
        for_each_order<TypeParam>([&](TypeParam dev) {
            this->run(dev, true, {V / 3, V / 3 + 1, V - 1, V});
            this->check();
            same(this->dx, this->dw);
        });
    }
}

TYPED_TEST(Head, RangesGiveTheSameBits) {
    this->make_separate(60, 48, 333);
    SameBits same;
    for_each_order<TypeParam>([&](TypeParam dev) {
        for (const std::vector<size_t> &ends :
             {std::vector<size_t>{}, {333}, {1, 17, 81, 301, 333}, {1, 18, 82, 301, 333}, {128, 333}}) {
            this->run(dev, true, ends);
            same(this->dw, this->dx);
        }
    });
}

TYPED_TEST(Head, ForwardAloneGivesTheSameStatistics) {
    this->make(100, 24, 300);
    SameBits same;
    for_each_order<TypeParam>([&](TypeParam dev) {
        for (bool backward : {true, false}) {
            this->run(dev, backward);
            same(this->nll, this->entropy, this->correct, this->max, this->sum);
        }
        EXPECT_EQ(this->dw, this->dw_before);
    });
}

TYPED_TEST(Head, RowsWithoutATargetOrWeightGetNoGradient) {
    const TypeParam dev = any_device<TypeParam>();
    this->make(50, 24, 70);
    this->run(dev);
    std::vector<bool> has(this->T, false);
    for (size_t n = 0; n < this->N; n++) has[size_t(this->rows[n])] = this->weights[n] != 0;
    for (size_t t = 0; t < this->T; t++)
        for (size_t c = 0; c < this->C && !has[t]; c++) EXPECT_EQ(float(this->dx[t * this->C + c]), 0.0f);

    this->N = 0;  // no target at all
    for (const std::vector<size_t> &ends : {std::vector<size_t>{}, {13, 70}}) {
        this->run(dev, true, ends);
        EXPECT_EQ(largest(widen(this->dx)), 0);
        EXPECT_EQ(this->dw, this->dw_before);
    }
}

TYPED_TEST(Head, ANaNIsNeverHidden) {
    using X = typename TypeParam::X;
    this->make(70, 24, 90);
    for (float bad : {NAN, INFINITY}) {
        auto x = this->x;
        this->x[size_t(this->rows[1]) * this->C + 5] = X(bad);
        this->run(any_device<TypeParam>());
        for (size_t n = 0; n < this->N; n++) EXPECT_EQ(std::isnan(this->nll[n]), n == 1) << n;
        this->x = x;
    }
}

TYPED_TEST(Head, TiesGoToTheFirst) {  // all logits 0
    using X = typename TypeParam::X;
    for (const size_t V : {50, 200}) {
        this->make(3, 8, V);
        this->rows = {0, 1, 2}, this->targets = {0, 1, int32_t(V - 1)}, this->weights = {1, 1, 1}, this->N = 3;
        std::fill(this->x.begin(), this->x.end(), X(0.0f));
        const Vector want(3, std::log(double(V)));
        const double last_place = std::ldexp(1, std::ilogb(want[0]) - 23);
        for_each_order<TypeParam>([&](TypeParam dev) {
            this->run(dev);
            EXPECT_EQ(this->correct, (std::vector<float>{1, 0, 0}));
            expect_close("nll", this->nll, want, last_place);
            expect_close("entropy", this->entropy, want, last_place);
        });
    }
}

TYPED_TEST(Head, GathersAndScattersRows) {
    using X = typename TypeParam::X;
    const std::vector<int32_t> rows = {4, 0, 3};
    for (const size_t C : {7, 8, 600}) {
        const size_t T = 6, n = rows.size(), padded = 4;
        const auto x = random_values<X>(T * C, 1);
        for_each_order<TypeParam>([&](TypeParam dev) {
            Array<X> d_x(x), gathered(padded * C), scattered(T * C);
            Array<int32_t> d_rows(rows);
            gather_rows(dev, gathered.data(), d_x.data(), d_rows.data(), n, padded, C);
            scatter_rows(dev, scattered.data(), gathered.data(), d_rows.data(), n, C);
            const auto got = gathered.values(), back = scattered.values();
            for (size_t i = 0; i < padded * C; i++)
                EXPECT_EQ(float(got[i]), i < n * C ? float(x[size_t(rows[i / C]) * C + i % C]) : 0) << i;
            for (size_t t = 0; t < T; t++) {
                const bool moved = std::find(rows.begin(), rows.end(), int32_t(t)) != rows.end();
                for (size_t i = t * C; i < (t + 1) * C; i++)
                    if (moved) EXPECT_EQ(float(back[i]), float(x[i])) << i;
                    else EXPECT_TRUE(std::isnan(float(back[i]))) << i;
            }
        });
    }
}

TYPED_TEST(Head, SumsAddUp) {
    const size_t N = 2500;
    std::vector<float> nll(N), entropy(N), correct(N);
    Vector want = {1, 2, 3};
    for (size_t n = 0; n < N; n++) {
        nll[n] = float(n % 17) / 8, entropy[n] = float(n % 5) / 4, correct[n] = n % 3 == 0;  // sums are exact
        want[0] += nll[n], want[1] += entropy[n], want[2] += correct[n];
    }
    for_each_order<TypeParam>([&](TypeParam dev) {
        Array<float> d_nll(nll), d_entropy(entropy), d_correct(correct);
        Array<double> sums(Vector{1, 2, 3});
        head_sums(dev, sums.data(), {d_nll.data(), d_entropy.data(), d_correct.data(), nullptr, nullptr}, N);
        EXPECT_EQ(sums.values(), want);
    });
}
