// The head fused with the loss: statistics and gradients, over several chunks, with rows that have no target.
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

template <class Dev> struct Head : testing::Test {
    using X = typename Dev::X;
    MatmulContext context;
    size_t T, C, V, N;
    std::vector<X> x, w, dx;
    std::vector<int32_t> rows, targets;
    std::vector<float> weights, nll, entropy, correct, max, sum, dw, dw_before;
    float entropy_weight = 0, temperature = 1;
    size_t chunk = least_head_chunk;

    HeadShape shape() const { return {T, C, V, N, chunk}; }

    // About every second row has a target. Weights have both signs, and some are 0, as in DPO. No target is V / 3.
    void make(size_t tokens, size_t channels, size_t vocab, double deviation = 1) {
        T = tokens, C = channels, V = vocab;
        x = random_values<X>(T * C, 1, deviation), w = random_values<X>(V * C, 2, 1 / std::sqrt(double(C)));
        const Random random{1, Purpose::test, 3};
        rows.clear(), targets.clear(), weights.clear();
        for (size_t t = 0; t < T; t++)
            if (t == 0 || random.uniform(t) < 0.6) {
                const size_t target = random.below(T + t, V);
                rows.push_back(int32_t(t));
                targets.push_back(target == V / 3 ? 0 : int32_t(target));
                weights.push_back(t % 5 == 3 ? 0.0f : float(random.normal(2 * T + t)));
            }
        N = rows.size();
        dw_before = random_values<float>(V * C, 4);
        printf(" T %zu, C %zu, V %zu, N %zu, chunks of %zu\n", T, C, V, N, lm_head_chunk(Dev{}, V, chunk));
    }
    // logit: error of a float sum of C products (reference_matmul.h), divided by the temperature. e: relative error of exp and a float sum of 1024.
    void check() {
        const auto want = head_reference(widen(x), widen(w), rows, targets, widen(weights), C, entropy_weight, temperature);
        const double u = 0x1p-24, uX = unit_roundoff<X>, tau = temperature, e = 4 * u + rounded_sum_error(1025),
                     logit = (sum_error_of<X>(C + 1) + (tau == 1 ? 0 : 2 * u)) * want.size / tau;
        double total_weight = 0;
        for (float v : weights) total_weight += std::abs(v);
        expect_close("nll", nll, want.nll, 2 * logit + e + 2 * u * (largest(want.nll) + want.spread));
        expect_close("entropy", entropy, want.entropy, (logit + e + u) * (2 + want.spread));
        EXPECT_EQ(widen(correct), want.correct);
        std::vector<double> lse;
        for (size_t n = 0; n < N; n++) lse.push_back(double(max[n]) + std::log(double(sum[n])));
        expect_close("lse", lse, want.lse, logit + e + u);

        // The error of dlogit is (2 logit + e) p and the rounding to X; p and |dlogit| sum to 1 and to at most 2 per unit of weight.
        const double dlogit = 2 * logit + e + 2 * uX, long_sum = 2 * sum_error_of<X>(V + 1),
                     short_sum = 2 * sum_error_of<X>(N + 1);
        // The entropy weight adds p times log p + entropy, which is at most `reach` and has the errors of both.
        const double h = std::abs(entropy_weight), reach = want.spread + std::log(double(V)),
                     of_entropy =
                         (2 * logit + e) * (1 + reach) + 3 * u * reach + (logit + e + u) * (2 + want.spread) + 2 * uX * reach;
        expect_close("dx", dx, want.dx,
                     (largest(weights) * (dlogit + long_sum) + h * (of_entropy + reach * long_sum)) / tau * largest(widen(w)) +
                         uX * largest(want.dx));
        auto dw_want = want.dw;
        for (size_t i = 0; i < dw_want.size(); i++) dw_want[i] += dw_before[i];
        expect_close(
            "dw", dw, dw_want,
            (total_weight * (dlogit + short_sum) + double(N) * h * (of_entropy + reach * short_sum)) / tau * largest(widen(x)) +
                u * double(N) * largest(dw_want));
    }

    // `ends` are the ends of vocabulary ranges whose parts of dw are computed separately; empty: dw as a whole. weighs: the weights are only known once
    // a chunk has its statistics.
    void run(Dev dev, bool backward = true, const std::vector<size_t> &ends = {}, bool accumulate = true, bool weighs = false) {
        dev = context.device(dev);
        Array<X> d_x(x), d_w(w), d_dx(T * C);
        Array<int32_t> d_rows(rows), d_targets(targets);
        Array<float> d_weights(weights), d_dw(dw_before), d_nll(N), d_entropy(N), d_correct(N), d_max(N), d_sum(N);
        const size_t bytes = lm_head_scratch(dev, shape());
        Array<char> scratch(std::vector<char>(bytes + 64 + 64, 77));
        char *aligned = reinterpret_cast<char *>(round_up(reinterpret_cast<size_t>(scratch.data()), 64));
        const HeadStats stats = {d_nll.data(), d_entropy.data(), d_correct.data(), d_max.data(), d_sum.data()};
        const HeadLoss loss = {d_rows.data(), d_targets.data(), backward ? d_weights.data() : nullptr, entropy_weight,
                               temperature};
        const auto memory = make_memory(dev);
        if (weighs) write(*memory, d_weights.data(), std::vector<float>(N, NAN));
        const std::function<void(size_t, size_t)> weigh = [&](size_t n0, size_t n) {
            EXPECT_EQ(read(*memory, d_nll.data() + n0, n),
                      std::vector(nll.begin() + ptrdiff_t(n0), nll.begin() + ptrdiff_t(n0 + n)));
            write(*memory, d_weights.data() + n0,
                  std::vector(weights.begin() + ptrdiff_t(n0), weights.begin() + ptrdiff_t(n0 + n)));
        };
        lm_head(dev, stats, backward ? d_dx.data() : nullptr, backward && ends.empty() ? d_dw.data() : nullptr, aligned,
                d_x.data(), d_w.data(), loss, shape(), accumulate, weighs ? weigh : nullptr);
        nll = d_nll.values(), entropy = d_entropy.values(), correct = d_correct.values();
        max = d_max.values(), sum = d_sum.values();
        dx = d_dx.values(), dw = d_dw.values();
        for (size_t i = 0, first = 0; i < ends.size(); first = ends[i++]) {
            const auto begin = dw.begin() + ptrdiff_t(first * C), end = dw.begin() + ptrdiff_t(ends[i] * C);
            Array<float> part(std::vector<float>(begin, end));
            lm_head_weight(dev, part.data(), aligned, d_x.data(), d_w.data(), loss, stats, shape(), first, ends[i] - first);
            std::ranges::copy(part.values(), begin);
        }
        const auto after = scratch.values();
        for (size_t i = size_t(aligned - scratch.data()) + bytes; i < after.size(); i++)
            ASSERT_EQ(after[i], 77);  // no write beyond the scratch
    }

    // More rows than `full` chunks hold, for the whole vocabulary and for the part before `end`.
    void expect_chunks(size_t full, size_t tokens, size_t channels, size_t vocab, size_t end) {
        const Dev dev = any_device<Dev>();
        // With wider logits most probabilities are below the last bit of a sum of 2^16 products, which loses them all in one direction; the bound is
        // for roundings of both signs.
        this->make(tokens, channels, vocab, 0.5);
        ASSERT_GT(N, full * lm_head_chunk(dev, V, chunk));
        ASSERT_GT(N, full * lm_head_range_rows(dev, shape(), end));
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

TYPED_TEST(Head, EqualsReference) {
    struct Case {
        size_t T, C, V;
        double deviation = 1;  // of x; with 100, exp(logit) overflows and most probabilities are 0
        float entropy_weight = 0, temperature = 1;
    };
    // One warp, a partial warp; with and without vectors; more vectors than threads; sums of several runs.
    const Case cases[] = {{1, 8, 5},
                          {37, 24, 51},
                          {20, 600, 136},
                          {6, 7, 4100},
                          {64, 20, 1030},
                          {150, 36, 129},
#ifndef CUDA_HALF  // rows for three threads, which take long in the emulator
                          {300, 24, 900},
#endif
                          {1, 8, 5, 100, -0.3f, 0.5f},
                          {37, 24, 51, 1, -0.3f, 1},
                          {20, 16, 136, 1, -0.3f, 1.7f},
                          {6, 8, 4100, 100, -0.3f, 0.5f},
                          {64, 20, 1030, 1, -0.3f, 1.7f},
                          {150, 36, 129, 100, 0, 1}};
    for (const auto &[T, C, V, deviation, entropy_weight, temperature] : cases) {
        this->make(T, C, V, deviation);
        this->entropy_weight = entropy_weight, this->temperature = temperature;
        for (const std::vector<size_t> &ends :
             {std::vector<size_t>{}, {V / 3, V / 3 + 1, V - 1, V}}) {  // one range has no target
            SameBits same, statistics;
            for_each_order<TypeParam>([&](TypeParam dev) {
                this->run(dev, true, ends);
                this->check();
                same(this->dx, this->dw);
                statistics(this->nll, this->entropy, this->correct, this->max, this->sum);
                if (!ends.empty()) return;
                this->run(dev, false);  // forward alone
                statistics(this->nll, this->entropy, this->correct, this->max, this->sum);
                EXPECT_EQ(this->dw, this->dw_before);
                this->run(dev, true, ends, true, true);  // weights that follow from the statistics
                same(this->dx, this->dw);
            });
        }
    }
}

TYPED_TEST(Head, OverwritesTheGradientOfItsWeights) {
    this->make(37, 24, 51);
    this->expect_overwritten();
}

#ifdef CUDA_HALF  // chunks have at least 1024 rows and 256 MiB, which take long in the emulator

template <class Dev> struct SlowHead : Head<Dev> {};
TYPED_TEST_SUITE(SlowHead, Devices);
TYPED_TEST(SlowHead, SeveralChunks) { this->expect_chunks(1, 2600, 1, size_t(1) << 16, (size_t(3) << 14) + 1); }
#else
TYPED_TEST(Head, SeveralChunks) {
    this->chunk = size_t(1) << 20;
    this->expect_chunks(2, 240, 3, 4009, 3001);
    this->expect_overwritten();  // the first chunk overwrites, the others add
    this->run(any_device<TypeParam>(), true, {}, true, true);
    this->check();
}
#endif

TYPED_TEST(Head, RowsWithoutATargetOrWeightGetNoGradient) {
    this->make(50, 24, 70);
    expect_no_gradient_without_a_target(*this, any_device<TypeParam>());
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
