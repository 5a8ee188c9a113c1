// The head fused with the loss against float64: statistics and gradients, over several chunks, with rows that have no target.
#include "../llmc/ops/loss.h"

#include <array>

#include "reference_loss.h"

template <class Dev> struct Head : testing::Test, HeadCase<typename Dev::X> {
    using X = typename Dev::X;
    using HeadCase<X>::T, HeadCase<X>::C, HeadCase<X>::V, HeadCase<X>::N, HeadCase<X>::x, HeadCase<X>::w, HeadCase<X>::dx,
        HeadCase<X>::dw;
    using HeadCase<X>::rows, HeadCase<X>::targets, HeadCase<X>::weights, HeadCase<X>::dw_before;
    using HeadCase<X>::nll, HeadCase<X>::entropy, HeadCase<X>::correct, HeadCase<X>::max, HeadCase<X>::sum;

    // ends: of the ranges of the vocabulary whose part of dw is made on its own; none: dw as a whole
    void run(bool backward = true, int threads = 2, const std::vector<size_t> &ends = {}, bool accumulate = true) {
        for (auto *v : {&nll, &entropy, &correct, &max, &sum}) v->assign(N, NAN);
        dx.assign(T * C, X(NAN)), dw = dw_before;
        const size_t bytes = lm_head_scratch(make_device<Dev>(), N, C, V);
        std::vector<char> scratch(bytes + 64 + 64, 77);
        char *aligned = reinterpret_cast<char *>(round_up(reinterpret_cast<size_t>(scratch.data()), 64));
        const HeadStats stats = {nll.data(), entropy.data(), correct.data(), max.data(), sum.data()};
        lm_head(make_device<Dev>(threads), stats, backward ? dx.data() : nullptr, backward && ends.empty() ? dw.data() : nullptr,
                aligned, x.data(), w.data(), rows.data(), targets.data(), backward ? weights.data() : nullptr, T, C, V, N,
                accumulate);
        for (size_t i = 0, first = 0; i < ends.size(); first = ends[i++]) {
            const auto begin = dw.begin() + ptrdiff_t(first * C), end = dw.begin() + ptrdiff_t(ends[i] * C);
            std::vector<float> part(begin, end);
            lm_head_weight(make_device<Dev>(threads), part.data(), aligned, x.data(), w.data(), rows.data(), targets.data(),
                           weights.data(), stats, C, V, N, first, ends[i] - first);
            std::copy(part.begin(), part.end(), begin);
        }
        for (char *p = aligned + bytes; p < scratch.data() + scratch.size(); p++)
            ASSERT_EQ(*p, 77);  // nothing beyond the scratch
    }
};
TYPED_TEST_SUITE(Head, CpuDevices);

TEST(HeadReference, EqualsFiniteDifferences) {
    const size_t T = 6, C = 5, V = 11;
    const auto x = widen(random_values<float>(T * C, 1)), w = widen(random_values<float>(V * C, 2));
    const std::vector<int32_t> rows = {0, 2, 3, 5}, targets = {10, 0, 3, 3};
    const std::vector<double> weights = {0.5, -1, 0, 2};
    const auto loss = [&](const std::vector<double> &x, const std::vector<double> &w) {
        return head_reference(x, w, rows, targets, weights, C).loss;
    };
    const auto at = head_reference(x, w, rows, targets, weights, C);
    const double h = 1e-5;  // truncation h^2, roundoff 1e-16 / h
    std::vector<double> dx, dw;
    for (size_t i = 0; i < x.size(); i++) {
        auto up = x, down = x;
        up[i] += h, down[i] -= h;
        dx.push_back((loss(up, w) - loss(down, w)) / (2 * h));
    }
    for (size_t i = 0; i < w.size(); i++) {
        auto up = w, down = w;
        up[i] += h, down[i] -= h;
        dw.push_back((loss(x, up) - loss(x, down)) / (2 * h));
    }
    expect_close("dx", dx, at.dx, 1e-8);
    expect_close("dw", dw, at.dw, 1e-8);
}

TEST(HeadChunk, HoldsAtMost128MiB) {
    EXPECT_EQ(lm_head_chunk(CpuF32{}, 49152), 640u);
    EXPECT_EQ(lm_head_chunk(CpuF32{}, 128256), 256u);
    EXPECT_EQ(lm_head_chunk(CpuF32{}, 600001), 55u);
    EXPECT_EQ(lm_head_chunk(CpuF32{}, size_t(1) << 27), 1u);
    EXPECT_EQ(lm_head_rows(CpuF32{}, 3, 49152), 64u);
    EXPECT_EQ(lm_head_rows(CpuF32{}, 30, size_t(1) << 23), 4u);
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
    for (auto [T, C, V] : {std::array<size_t, 3>{1, 8, 3}, {37, 24, 51}, {64, 20, 1030}, {150, 36, 129}}) {
        this->make(T, C, V);
        this->run();
        this->check();
    }
}

TYPED_TEST(Head, LargeLogits) {  // exp(logit) would overflow
    this->make(40, 16, 60, 100);
    this->run();
    this->check();
}

TYPED_TEST(Head, SeveralChunks) {
    this->make(240, 3, 400009);
    ASSERT_GT(this->N, 2 * lm_head_chunk(TypeParam{}, this->V));
    this->run();
    this->check();
    ASSERT_GT(this->N, 2 * lm_head_range_rows(TypeParam{}, this->N, this->C, this->V, 300001));
    this->run(true, 2, {300001, this->V});
    this->check();
    this->dw_before.assign(this->dw.size(), NAN);  // overwritten by the first chunk, added to by the others
    this->run(true, 2, {}, false);
    this->dw_before.assign(this->dw.size(), 0);
    this->check();
}

TYPED_TEST(Head, RangesEqualReference) {  // of any length, one of them without a target
    for (auto [T, C, V] : {std::array<size_t, 3>{1, 8, 5}, {37, 24, 51}, {64, 20, 1030}, {150, 36, 129}}) {
        this->make(T, C, V);
        for (int32_t &y : this->targets) y = y == int32_t(V / 3) ? 0 : y;
        this->run(true, 2, {V / 3, V / 3 + 1, V - 1, V});
        this->check();
    }
}

TYPED_TEST(Head, RangesGiveTheSameBits) {
    this->make_separate(60, 48, 333);
    this->run();
    const auto dw = this->dw;
    const auto dx = widen(this->dx);
    for (const std::vector<size_t> &ends : {std::vector<size_t>{333}, {1, 18, 82, 301, 333}, {128, 333}}) {
        this->run(true, 2, ends);
        EXPECT_EQ(dw, this->dw);
        EXPECT_EQ(dx, widen(this->dx));
    }
}

TYPED_TEST(Head, ForwardAloneGivesTheSameStatistics) {
    this->make(100, 24, 300);
    this->run(true);
    const auto nll = this->nll, entropy = this->entropy, correct = this->correct, max = this->max, sum = this->sum;
    this->run(false);
    EXPECT_EQ(nll, this->nll);
    EXPECT_EQ(entropy, this->entropy);
    EXPECT_EQ(correct, this->correct);
    EXPECT_EQ(max, this->max);
    EXPECT_EQ(sum, this->sum);
    EXPECT_EQ(this->dw, this->dw_before);
}

TYPED_TEST(Head, RowsWithoutATargetOrWeightGetNoGradient) {
    this->make(50, 24, 70);
    this->run();
    std::vector<bool> has(this->T, false);
    for (size_t n = 0; n < this->N; n++) has[size_t(this->rows[n])] = this->weights[n] != 0;
    for (size_t t = 0; t < this->T; t++)
        for (size_t c = 0; c < this->C && !has[t]; c++) EXPECT_EQ(float(this->dx[t * this->C + c]), 0.0f);

    this->N = 0;  // no target at all
    for (const std::vector<size_t> &ends : {std::vector<size_t>{}, {13, 70}}) {
        this->run(true, 2, ends);
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
        this->run();
        for (size_t n = 0; n < this->N; n++) EXPECT_EQ(std::isnan(this->nll[n]), n == 1) << n;
        this->x = x;
    }
}

TYPED_TEST(Head, TiesGoToTheFirst) {  // all logits 0
    using X = typename TypeParam::X;
    this->make(3, 8, 50);
    this->rows = {0, 1, 2}, this->targets = {0, 1, 49}, this->weights = {1, 1, 1}, this->N = 3;
    std::fill(this->x.begin(), this->x.end(), X(0.0f));
    this->run();
    EXPECT_EQ(this->correct, (std::vector<float>{1, 0, 0}));
    expect_close("nll", this->nll, std::vector<double>(3, std::log(50.0)), 0x1p-22);
    expect_close("entropy", this->entropy, std::vector<double>(3, std::log(50.0)), 0x1p-22);
}

TYPED_TEST(Head, ThreadsDoNotChangeABit) {
    this->make(300, 24, 900);
    for (const std::vector<size_t> &ends : {std::vector<size_t>{}, {301, 900}}) {
        this->run(true, 1, ends);
        const auto nll = this->nll, entropy = this->entropy, dw = this->dw;
        const auto dx = widen(this->dx);
        for (int threads : {2, 3}) {
            this->run(true, threads, ends);
            EXPECT_EQ(nll, this->nll);
            EXPECT_EQ(entropy, this->entropy);
            EXPECT_EQ(dw, this->dw);
            EXPECT_EQ(dx, widen(this->dx));
        }
    }
}
