#include "../../llmc/ops/expert_rows.h"

#include <array>

#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/expert_rows.cuh"
#endif

using Vector = std::vector<double>;

// K different experts for each token, never the last expert.
static std::vector<int32_t> random_choices(size_t T, size_t E, size_t K) {
    std::vector<int32_t> chosen;
    const Random random{1, Purpose::test, 7};
    for (size_t t = 0; t < T; t++)
        for (size_t k = 0, first = random.block(t)[0] % (E - 1); k < K; k++) chosen.push_back(int32_t((first + 3 * k) % (E - 1)));
    return chosen;
}

template <class Dev> struct ExpertRows : testing::Test {};
TYPED_TEST_SUITE(ExpertRows, Devices);

TYPED_TEST(ExpertRows, SortsByExpertThenByToken) {
    for (const auto &[T, E, K] : {std::array<size_t, 3>{1, 2, 1}, {300, 8, 2}, {70, 131, 4}}) {
        const auto chosen = random_choices(T, E, K);
        for_each_order<TypeParam>([&, T = T, E = E, K = K](TypeParam dev) {
            Array<int32_t> d_chosen(chosen), starts(E + 1), counts(E), row_of(T * K), token_of(T * K);
            sort_by_expert(dev, starts.data(), counts.data(), row_of.data(), token_of.data(), d_chosen.data(), T, E, K);
            int32_t row = 0;
            for (size_t e = 0; e < E; e++) {
                EXPECT_EQ(starts.values()[e], row);
                for (size_t i = 0; i < T * K; i++) {
                    if (chosen[i] != int32_t(e)) continue;
                    ASSERT_EQ(row_of.values()[i], row);
                    ASSERT_EQ(token_of.values()[size_t(row++)], int32_t(i / K));
                }
                EXPECT_EQ(counts.values()[e], row - starts.values()[e]);
            }
            EXPECT_EQ(starts.values()[E], row);
        });
    }
}

TYPED_TEST(ExpertRows, CombineAndWeigh) {
    using X = typename TypeParam::X;
    for (const auto &[T, E, K, C] : {std::array<size_t, 4>{1, 2, 1, 3}, {40, 8, 2, 40}, {9, 20, 4, 131}}) {
        const auto chosen = random_choices(T, E, K);
        const auto rows = random_values<X>(T * K * C, 1), base = random_values<X>(T * C, 2),
                   dact = random_values<X>(T * K * C, 3);
        const auto weights = random_values<float>(T * K, 4);
        SameBits same;
        for_each_order<TypeParam>([&, T = T, E = E, K = K, C = C](TypeParam dev) {
            Array<int32_t> d_chosen(chosen), starts(E + 1), counts(E), row_of(T * K), token_of(T * K);
            sort_by_expert(dev, starts.data(), counts.data(), row_of.data(), token_of.data(), d_chosen.data(), T, E, K);
            const auto places = row_of.values();
            Array<X> d_rows(rows), out(base), plain(T * C), d(dact), act(rows);
            Array<float> w(weights), dw(T * K), sorted(T * K), unsorted(T * K);
            combine_rows(dev, out.data(), out.data(), d_rows.data(), w.data(), row_of.data(), T, K, C);
            combine_rows(dev, plain.data(), (const X *)nullptr, d_rows.data(), (const float *)nullptr, (const int32_t *)nullptr,
                         T, K, C);
            weigh_rows_backward(dev, dw.data(), d.data(), act.data(), w.data(), row_of.data(), T, K, C);

            // The same in the order of experts' rows, in place.
            Array<X> d_of_rows(dact), act_of_rows(rows);
            sort_weights(dev, sorted.data(), w.data(), row_of.data(), T * K);
            for (size_t i = 0; i < T * K; i++) ASSERT_EQ(sorted.values()[size_t(places[i])], weights[i]);
            weigh_rows_backward(dev, sorted.data(), d_of_rows.data(), act_of_rows.data(), sorted.data(), (const int32_t *)nullptr,
                                T * K, 1, C);
            unsort_weights(dev, unsorted.data(), sorted.data(), row_of.data(), T * K);
            EXPECT_EQ(unsorted.values(), dw.values());
            EXPECT_EQ(d_of_rows.values(), d.values());
            EXPECT_EQ(act_of_rows.values(), act.values());

            Vector want = widen(base), want_plain(T * C), want_dw(T * K), want_d = widen(dact), want_act = widen(rows);
            double terms = 0, dots = 0;
            for (size_t i = 0; i < T * K; i++) {
                double dot = 0;
                for (size_t c = 0; c < C; c++) {
                    const size_t at = size_t(places[i]) * C + c;
                    want[i / K * C + c] += double(weights[i]) * double(rows[at]);
                    want_plain[i / K * C + c] += double(rows[i * C + c]);
                    want_dw[i] += double(dact[at]) * double(rows[at]), dot += std::abs(double(dact[at]) * double(rows[at]));
                    want_d[at] *= double(weights[i]), want_act[at] *= double(weights[i]);
                    terms = std::max(terms, double(K + 1) * std::abs(double(weights[i]) * double(rows[at])));
                }
                dots = std::max(dots, dot);
            }
            const double sum_error = double(2 * K + 2) * unit_roundoff<float> * (terms + largest(base));
            expect_close("combined", out.values(), want, sum_error + unit_roundoff<X> * largest(want));
            expect_close("combined, plain", plain.values(), want_plain,
                         double(K) * unit_roundoff<float> * double(K) * largest(rows) + unit_roundoff<X> * largest(want_plain));
            expect_close("dweights", dw.values(), want_dw, double(C + 1) * unit_roundoff<float> * dots);
            const double rounding = (unit_roundoff<X> + 2 * unit_roundoff<float>);
            expect_close("dact", d.values(), want_d, rounding * largest(want_d));
            expect_close("act", act.values(), want_act, rounding * largest(want_act));
            same(out.values(), plain.values(), dw.values(), d.values(), act.values());
        });
    }
}
