// The head fused with the loss against float64: statistics and gradients, over several chunks, with rows that have no target.
#include "check.h"

#include <array>

#include "../llmc/ops/loss.h"

struct HeadResult {
    std::vector<double> nll, entropy, correct, dx, dw;
    double loss = 0;              // sum_n weights[n] nll[n]
    double size = 0, spread = 0;  // largest sum_c |x w| of a logit; largest distance of logits in a row
};

static HeadResult head_reference(const std::vector<double> &x, const std::vector<double> &w, const std::vector<int32_t> &rows,
                                 const std::vector<int32_t> &targets, const std::vector<double> &weights, size_t C) {
    const size_t V = w.size() / C;
    HeadResult out;
    out.dx.assign(x.size(), 0), out.dw.assign(w.size(), 0);
    std::vector<double> logit(V);
    for (size_t n = 0; n < rows.size(); n++) {
        const double *x_t = &x[size_t(rows[n]) * C];
        double *dx_t = &out.dx[size_t(rows[n]) * C];
        for (size_t v = 0; v < V; v++) {
            double sum = 0, size = 0;
            for (size_t c = 0; c < C; c++) sum += x_t[c] * w[v * C + c], size += std::abs(x_t[c] * w[v * C + c]);
            logit[v] = sum;
            out.size = std::max(out.size, size);
        }
        const auto max = std::max_element(logit.begin(), logit.end()), min = std::min_element(logit.begin(), logit.end());
        const size_t y = size_t(targets[n]);
        double total = 0, entropy = 0;
        for (double l : logit) total += std::exp(l - *max);
        const double lse = *max + std::log(total);
        for (double l : logit) entropy -= std::exp(l - lse) * (l - lse);
        out.nll.push_back(lse - logit[y]);
        out.entropy.push_back(entropy);
        out.correct.push_back(size_t(max - logit.begin()) == y);
        out.loss += weights[n] * (lse - logit[y]);
        out.spread = std::max(out.spread, *max - *min);
        for (size_t v = 0; v < V; v++) {
            const double dlogit = weights[n] * (std::exp(logit[v] - lse) - (v == y));
            for (size_t c = 0; c < C; c++) {
                dx_t[c] += dlogit * w[v * C + c];
                out.dw[v * C + c] += dlogit * x_t[c];
            }
        }
    }
    return out;
}

template <class T> static double largest(const std::vector<T> &v) {
    double out = 0;
    for (const T &e : v) out = std::max(out, std::abs(double(e)));
    return out;
}

static double sum_error(size_t n) { return 4 * std::sqrt(double(n + 1)) * 0x1p-24; }  // relative, of n terms in float

template <class Dev> struct Head : testing::Test {
    using X = typename Dev::X;
    size_t T, C, V, N;
    std::vector<X> x, w, dx;
    std::vector<int32_t> rows, targets;
    std::vector<float> weights, nll, entropy, correct, dw, dw_before;

    // Every second row or so has a target; weights are of both signs and some are 0, as in DPO.
    void make(size_t tokens, size_t channels, size_t vocab, double deviation = 1) {
        T = tokens, C = channels, V = vocab;
        x = random_values<X>(T * C, 1, deviation), w = random_values<X>(V * C, 2, 1 / std::sqrt(double(C)));
        const Random random{1, Purpose::test, 3};
        rows.clear(), targets.clear(), weights.clear();
        for (size_t t = 0; t < T; t++)
            if (t == 0 || random.uniform(t) < 0.6) {
                rows.push_back(int32_t(t));
                targets.push_back(int32_t(random.below(T + t, V)));
                weights.push_back(t % 5 == 3 ? 0.0f : float(random.normal(2 * T + t)));
            }
        N = rows.size();
        dw_before = random_values<float>(V * C, 4);
        printf(" T %zu, C %zu, V %zu, N %zu, chunks of %zu\n", T, C, V, N, lm_head_chunk(V));
    }
    void run(bool backward = true, int threads = 2) {
        for (auto *v : {&nll, &entropy, &correct}) v->assign(N, NAN);
        dx.assign(T * C, X(NAN)), dw = dw_before;
        const size_t bytes = lm_head_scratch(N, C, V);
        std::vector<char> scratch(bytes + 64 + 64, 77);
        char *aligned = reinterpret_cast<char *>(round_up(reinterpret_cast<size_t>(scratch.data()), 64));
        lm_head(make_device<Dev>(threads), {nll.data(), entropy.data(), correct.data()}, backward ? dx.data() : nullptr,
                backward ? dw.data() : nullptr, aligned, x.data(), w.data(), rows.data(), targets.data(),
                backward ? weights.data() : nullptr, T, C, V, N);
        for (char *p = aligned + bytes; p < scratch.data() + scratch.size(); p++)
            ASSERT_EQ(*p, 77);  // nothing beyond the scratch
    }
    // logit: the error of a float sum of C products (see test_matmul.cpp); e: the relative error of exp and a float sum of 1024.
    void check() {
        const auto want = head_reference(widen(x), widen(w), rows, targets, widen(weights), C);
        const double u = 0x1p-24, uX = unit_roundoff<X>, logit = sum_error(C) * want.size, e = 4 * u + sum_error(1024);
        double sum = 0;
        for (float v : weights) sum += std::abs(v);
        expect_close("nll", nll, want.nll, 2 * logit + e + 2 * u * (largest(want.nll) + want.spread));
        expect_close("entropy", entropy, want.entropy, (logit + e + u) * (2 + want.spread));
        EXPECT_EQ(widen(correct), want.correct);

        // dlogit is off by (2 logit + e) p and the rounding to X; p and |dlogit| sum to 1 and to at most 2 per unit of weight.
        const double dlogit = 2 * logit + e + 2 * uX, long_sum = 2 * sum_error(V), short_sum = 2 * sum_error(N);
        expect_close("dx", dx, want.dx, largest(weights) * largest(widen(w)) * (dlogit + long_sum) + uX * largest(want.dx));
        auto dw_want = want.dw;
        for (size_t i = 0; i < dw_want.size(); i++) dw_want[i] += dw_before[i];
        expect_close("dw", dw, dw_want, sum * largest(widen(x)) * (dlogit + short_sum) + u * double(N) * largest(dw_want));
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

TEST(HeadChunk, HoldsAtMost64MiB) {
    EXPECT_EQ(lm_head_chunk(49152), 320u);
    EXPECT_EQ(lm_head_chunk(128256), 128u);
    EXPECT_EQ(lm_head_chunk(300001), 55u);
    EXPECT_EQ(lm_head_chunk(size_t(1) << 26), 1u);
    EXPECT_EQ(lm_head_rows(3, 49152), 64u);
    EXPECT_EQ(lm_head_rows(30, size_t(1) << 22), 4u);
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
    this->make(240, 3, 200003);
    ASSERT_GT(this->N, 2 * lm_head_chunk(this->V));
    this->run();
    this->check();
}

TYPED_TEST(Head, ForwardAloneGivesTheSameStatistics) {
    this->make(100, 24, 300);
    this->run(true);
    const auto nll = this->nll, entropy = this->entropy, correct = this->correct;
    this->run(false);
    EXPECT_EQ(nll, this->nll);
    EXPECT_EQ(entropy, this->entropy);
    EXPECT_EQ(correct, this->correct);
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
    this->run();
    EXPECT_EQ(largest(widen(this->dx)), 0);
    EXPECT_EQ(this->dw, this->dw_before);
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
    this->run(true, 1);
    const auto nll = this->nll, entropy = this->entropy, dw = this->dw;
    const auto dx = widen(this->dx);
    for (int threads : {2, 3}) {
        this->run(true, threads);
        EXPECT_EQ(nll, this->nll);
        EXPECT_EQ(entropy, this->entropy);
        EXPECT_EQ(dw, this->dw);
        EXPECT_EQ(dx, widen(this->dx));
    }
}
