// The head fused with the loss against float64: statistics and gradients, over several chunks, with rows that have no target.
#include "../../llmc/ops/loss.cuh"

#include <array>

#include "../reference_loss.h"
#include "matmul_context.cuh"

template <class Dev> struct Head : testing::Test, HeadCase<typename Dev::X> {
    using X = typename Dev::X;
    const MatmulContext context;

    // ends: of the ranges of the vocabulary whose part of dw is made on its own; none: dw as a whole
    void run(Dev dev, bool backward = true, const std::vector<size_t> &ends = {}) {
        dev.ctx = context.get();
        DeviceArray<X> d_x(this->x), d_w(this->w), d_dx(this->T * this->C);
        DeviceArray<int32_t> d_rows(this->rows), d_targets(this->targets);
        DeviceArray<float> d_weights(this->weights), d_dw(this->dw_before), d_nll(this->N), d_entropy(this->N),
            d_correct(this->N), d_max(this->N), d_sum(this->N);
        DeviceArray<char> scratch(lm_head_scratch(dev, this->N, this->C, this->V));
        const HeadStats stats = {d_nll.data(), d_entropy.data(), d_correct.data(), d_max.data(), d_sum.data()};
        lm_head(dev, stats, backward ? d_dx.data() : nullptr, backward && ends.empty() ? d_dw.data() : nullptr, scratch.data(),
                d_x.data(), d_w.data(), d_rows.data(), d_targets.data(), backward ? d_weights.data() : nullptr, this->T, this->C,
                this->V, this->N, true);
        this->nll = d_nll.values(), this->entropy = d_entropy.values(), this->correct = d_correct.values();
        this->max = d_max.values(), this->sum = d_sum.values();
        this->dx = d_dx.values(), this->dw = d_dw.values();
        for (size_t i = 0, first = 0; i < ends.size(); first = ends[i++]) {
            const auto begin = this->dw.begin() + ptrdiff_t(first * this->C),
                       end = this->dw.begin() + ptrdiff_t(ends[i] * this->C);
            DeviceArray<float> part(std::vector<float>(begin, end));
            lm_head_weight(dev, part.data(), scratch.data(), d_x.data(), d_w.data(), d_rows.data(), d_targets.data(),
                           d_weights.data(), stats, this->C, this->V, this->N, first, ends[i] - first);
            std::ranges::copy(part.values(), begin);
        }
    }
};
TYPED_TEST_SUITE(Head, CudaDevices);
template <class Dev> struct SlowHead : Head<Dev> {};
TYPED_TEST_SUITE(SlowHead, CudaDevices);

TYPED_TEST(Head, EqualsReference) {  // one warp, a part of one; vectors and none; more vectors than threads
    for (const auto &[T, C, V] : {std::array<size_t, 3>{1, 8, 3}, {37, 24, 51}, {20, 16, 136}, {6, 8, 4100}}) {
        this->make(T, C, V);
        SameBits same;
        for_each_order<TypeParam>([&](TypeParam dev) {
            this->run(dev);
            this->check();
            same(this->nll, this->entropy, this->correct, this->dx, this->dw);
        });
    }
}

TYPED_TEST(Head, LargeLogits) {  // exp(logit) would overflow
    this->make(20, 16, 60, 100);
    this->run(TypeParam{});
    this->check();
}

TYPED_TEST(SlowHead, SeveralChunks) {  // more than 256 MiB of logits
    this->make(40, 1, size_t(1) << 22);
    ASSERT_GT(this->N, lm_head_chunk(TypeParam{}, this->V));
    for (const std::vector<size_t> &ends : {std::vector<size_t>{}, {(size_t(3) << 20) + 1, this->V}}) {
        this->run(TypeParam{}, true, ends);
        this->check();
    }
}

TYPED_TEST(Head, RangesEqualReference) {  // with vectors and without, one of them without a target
    for (const auto &[T, C, V] : {std::array<size_t, 3>{1, 8, 5}, {37, 24, 51}, {20, 16, 136}, {6, 8, 4100}}) {
        this->make(T, C, V);
        for (int32_t &y : this->targets) y = y == int32_t(V / 3) ? 0 : y;
        SameBits same;
        for_each_order<TypeParam>([&, V = V](TypeParam dev) {
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
        for (const std::vector<size_t> &ends : {std::vector<size_t>{}, {333}, {1, 17, 81, 301, 333}, {128, 333}}) {
            this->run(dev, true, ends);
            same(this->dw, this->dx);
        }
    });
}

TYPED_TEST(Head, ForwardAloneGivesTheSameStatistics) {
    this->make(20, 24, 300);
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
    this->make(30, 24, 70);
    this->run(TypeParam{});
    std::vector<bool> has(this->T, false);
    for (size_t n = 0; n < this->N; n++) has[size_t(this->rows[n])] = this->weights[n] != 0;
    for (size_t t = 0; t < this->T; t++)
        for (size_t c = 0; c < this->C && !has[t]; c++) EXPECT_EQ(float(this->dx[t * this->C + c]), 0.0f);

    this->N = 0;  // no target at all
    for (const std::vector<size_t> &ends : {std::vector<size_t>{}, {13, 70}}) {
        this->run(TypeParam{}, true, ends);
        EXPECT_EQ(largest(widen(this->dx)), 0);
        EXPECT_EQ(this->dw, this->dw_before);
    }
}

TYPED_TEST(Head, ANaNIsNeverHidden) {
    using X = typename TypeParam::X;
    this->make(12, 24, 90);
    for (float bad : {NAN, INFINITY}) {
        auto x = this->x;
        this->x[size_t(this->rows[1]) * this->C + 5] = X(bad);
        this->run(TypeParam{});
        for (size_t n = 0; n < this->N; n++) EXPECT_EQ(std::isnan(this->nll[n]), n == 1) << n;
        this->x = x;
    }
}

TYPED_TEST(Head, TiesGoToTheFirst) {  // all logits 0
    using X = typename TypeParam::X;
    this->make(3, 8, 200);
    this->rows = {0, 1, 2}, this->targets = {0, 1, 199}, this->weights = {1, 1, 1}, this->N = 3;
    std::fill(this->x.begin(), this->x.end(), X(0.0f));
    for_each_order<TypeParam>([&](TypeParam dev) {
        this->run(dev);
        EXPECT_EQ(this->correct, (std::vector<float>{1, 0, 0}));
        expect_close("nll", this->nll, std::vector<double>(3, std::log(200.0)), 0x1p-21);
        expect_close("entropy", this->entropy, std::vector<double>(3, std::log(200.0)), 0x1p-21);
    });
}

TYPED_TEST(Head, SumsAddUp) {
    const size_t N = 2500;
    std::vector<float> nll(N), entropy(N), correct(N);
    std::vector<double> want = {1, 2, 3};
    for (size_t n = 0; n < N; n++) {
        nll[n] = float(n % 17) / 8, entropy[n] = float(n % 5) / 4, correct[n] = n % 3 == 0;  // sums are exact
        want[0] += nll[n], want[1] += entropy[n], want[2] += correct[n];
    }
    for_each_order<TypeParam>([&](TypeParam dev) {
        DeviceArray<float> d_nll(nll), d_entropy(entropy), d_correct(correct);
        DeviceArray<double> sums(std::vector<double>{1, 2, 3});
        head_sums(dev, sums.data(), {d_nll.data(), d_entropy.data(), d_correct.data(), nullptr, nullptr}, N);
        EXPECT_EQ(sums.values(), want);
    });
}
