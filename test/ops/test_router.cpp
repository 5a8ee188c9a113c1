#include "../../llmc/ops/router.h"

#include <array>
#include <numeric>

#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/router.cuh"
#endif

using Vector = std::vector<double>;

// ---- the router in float64, and the bounds of float

struct RouterReference {
    Vector probs, weights;
    std::vector<int32_t> chosen;
};

static RouterReference router_reference(const Vector &logits, size_t T, size_t E, size_t K, bool normed) {
    RouterReference r;
    for (size_t t = 0; t < T; t++) {
        const double *z = logits.data() + t * E, most = *std::max_element(z, z + E);
        Vector p(E);
        double sum = 0, total = 0;
        for (size_t e = 0; e < E; e++) sum += p[e] = std::exp(z[e] - most);
        for (double &v : p) v /= sum;
        std::vector<int32_t> order(E);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return p[size_t(a)] > p[size_t(b)]; });
        for (size_t k = 0; k < K; k++) total += p[size_t(order[k])];
        for (size_t k = 0; k < K; k++) r.weights.push_back(p[size_t(order[k])] / (normed ? total : 1));
        r.chosen.insert(r.chosen.end(), order.begin(), order.begin() + ptrdiff_t(K));
        r.probs.insert(r.probs.end(), p.begin(), p.end());
    }
    return r;
}

static Vector router_backward_reference(const Vector &dweights, const RouterReference &r, const Vector &balance,
                                        const std::vector<int32_t> &copies, size_t T, size_t E, size_t K, bool normed) {
    Vector dlogits(T * E);
    for (size_t t = 0; t < T; t++) {
        Vector dp(E);
        const double *p = r.probs.data() + t * E;
        double along = 0, total = 0, mean = 0;
        for (size_t k = t * K; k < (t + 1) * K; k++) along += dweights[k] * r.weights[k], total += p[r.chosen[k]];
        for (size_t k = t * K; k < (t + 1) * K; k++)
            dp[size_t(r.chosen[k])] = normed ? (dweights[k] - along) / total : dweights[k];
        for (size_t e = 0; e < E; e++) dp[e] += copies[t] * balance[e];
        for (size_t e = 0; e < E; e++) mean += dp[e] * p[e];
        for (size_t e = 0; e < E; e++) dlogits[t * E + e] = p[e] * (dp[e] - mean);
    }
    return dlogits;
}

// exp of a rounded difference of at most 2 max|z|; a sum of E terms; a division; with `normed` a sum of K terms and another division.
static double router_error(const Vector &logits, size_t E, size_t K) {
    return (4 * largest(logits) + double(E + K) + 8) * unit_roundoff<float>;
}

// ---- the op

using RouterSizes = std::array<size_t, 3>;  // T, E, K

template <class Dev> struct Router : testing::Test {};
TYPED_TEST_SUITE(Router, Devices);

TYPED_TEST(Router, EqualsReference) {
    using X = typename TypeParam::X;
    for (const auto &[T, E, K] : {RouterSizes{1, 1, 1}, {70, 8, 2}, {9, 60, 4}, {6, 131, 8}, {3, 5, 5}})
        for (const bool normed : {false, true}) {
            const auto logits = random_values<float>(T * E, 1, 2), dw = random_values<float>(T * K, 2),
                       balance = random_values<float>(E, 3);
            std::vector<int32_t> copies(T);
            for (size_t t = 0; t < T; t++) copies[t] = int32_t(t % 5 == 3 ? 7 : t % 3);
            const auto want = router_reference(widen(logits), T, E, K, normed);
            const double error = router_error(widen(logits), E, K);
            SameBits same;
            for_each_order<TypeParam>([&, T = T, E = E, K = K](TypeParam dev) {
                Array<float> probs(logits), weights(T * K), d_dw(dw), d_balance(balance);
                Array<int32_t> chosen(T * K), d_copies(copies);
                Array<X> dlogits(T * E), unbalanced(T * E);
                Array<int64_t> sums(std::vector<int64_t>(2 * E + 2));
                const RouterShape shape{T, E, K, normed};
                router_forward(dev, probs.data(), chosen.data(), weights.data(), probs.data(), shape);
                router_backward(dev, dlogits.data(), d_dw.data(), probs.data(), chosen.data(), weights.data(), d_balance.data(),
                                d_copies.data(), shape);
                router_backward(dev, unbalanced.data(), d_dw.data(), probs.data(), chosen.data(), weights.data(),
                                (const float *)nullptr, d_copies.data(), shape);
                for (int i = 0; i < 2; i++) router_sums(dev, sums.data(), probs.data(), chosen.data(), d_copies.data(), shape);
                EXPECT_EQ(chosen.values(), want.chosen);
                expect_close("probabilities", probs.values(), want.probs, error);
                expect_close("weights", weights.values(), want.weights, error);
                const auto d = router_backward_reference(widen(dw), want, widen(balance), copies, T, E, K, normed);
                const auto plain = router_backward_reference(widen(dw), want, Vector(E), copies, T, E, K, normed);
                double least = 1;  // least sum of chosen probabilities, the divisor in the derivative of normed weights
                for (size_t t = 0; normed && t < T; t++) {
                    double total = 0;
                    for (size_t k = 0; k < K; k++) total += want.probs[t * E + size_t(want.chosen[t * K + k])];
                    least = std::min(least, total);
                }
                const double allowed = (4 * error + 2 * double(K + E) * unit_roundoff<float>)*(
                    2 * double(K) * largest(dw) / least + 7 * largest(balance));
                expect_close("dlogits", dlogits.values(), d, allowed + unit_roundoff<X> * largest(d));
                expect_close("dlogits, unbalanced", unbalanced.values(), plain, allowed + unit_roundoff<X> * largest(plain));
                same(probs.values(), weights.values(), dlogits.values(), sums.values());

                Vector counts(E), p(E), of_sums;
                double tokens = 0, entropy = 0;
                for (size_t t = 0; t < T; t++) {
                    const double n = 2 * copies[t];
                    for (size_t k = 0; k < K; k++) counts[size_t(want.chosen[t * K + k])] += n;
                    for (size_t e = 0; e < E; e++) {
                        const double q = want.probs[t * E + e];
                        p[e] += n * q, entropy -= n * q * std::log(q);
                    }
                    tokens += n;
                }
                const auto got = sums.values();
                for (size_t e = 0; e < E; e++) {
                    EXPECT_EQ(double(got[e]), counts[e]);
                    of_sums.push_back(double(got[E + e]) * 0x1p-32);
                }
                EXPECT_EQ(double(got[2 * E + 1]), tokens);
                expect_close("sums of probabilities", of_sums, p, tokens * (error + 0x1p-32));
                expect_close("entropy", Vector{double(got[2 * E]) * 0x1p-32}, Vector{entropy},
                             tokens * (double(E) * 8 * error + 0x1p-31 * 8));
            });
        }
}

// Ties go to the lower expert, also beyond a warp's lanes. NaN leads to no access outside the arrays.
TYPED_TEST(Router, TiesAndNaN) {
    const size_t E = 70, K = 3;
    std::vector<float> logits(3 * E, 1.0f);
    logits[E + 69] = logits[E + 64] = logits[E + 40] = 2, logits[E + 1] = 3;
    logits[2 * E + 7] = NAN;
    for_each_order<TypeParam>([&](TypeParam dev) {
        Array<float> probs(logits), weights(3 * K);
        Array<int32_t> chosen(3 * K);
        router_forward(dev, probs.data(), chosen.data(), weights.data(), probs.data(), {3, E, K, true});
        EXPECT_EQ(chosen.values(), (std::vector<int32_t>{0, 1, 2, 1, 40, 64, 0, 1, 2}));
        for (size_t k = 0; k < K; k++) EXPECT_TRUE(std::isnan(weights.values()[2 * K + k]));
    });
}

TYPED_TEST(Router, Gate) {
    using X = typename TypeParam::X;
    const size_t T = 131;
    const auto logits = random_values<float>(T, 1, 3), dw = random_values<float>(T, 2);
    Vector w, d;
    for (size_t t = 0; t < T; t++) w.push_back(1 / (1 + std::exp(-double(logits[t])))), d.push_back(dw[t] * w[t] * (1 - w[t]));
    for_each_order<TypeParam>([&](TypeParam dev) {
        Array<float> weights(logits), d_dw(dw);
        Array<X> dlogits(T);
        gate_forward(dev, weights.data(), weights.data(), T);
        gate_backward(dev, dlogits.data(), d_dw.data(), weights.data(), T);
        expect_close("weights", weights.values(), w, 4 * unit_roundoff<float>);
        expect_close("dlogits", dlogits.values(), d, (8 * unit_roundoff<float> + unit_roundoff<X>)*largest(d));
    });
}
