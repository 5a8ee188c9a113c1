// The head of a reward model.
#include "../llmc/ops/score.h"

#include "check.h"
#include "finite_difference.h"
#include "reference_score.h"

using Vector = std::vector<double>;

TEST(ScoreReference, BackwardEqualsFiniteDifferences) {
    const size_t T = 5, C = 7;
    const std::vector<int32_t> rows = {1, 4};
    const Vector x = widen(random_values<float>(T * C, 1)), w = widen(random_values<float>(C, 2));
    const Vector dscores = widen(random_values<float>(rows.size(), 3));
    const ScoreGradient g = score_backward_reference(dscores, x, w, rows);
    expect_close("dx", g.dx, finite_difference([&](const Vector &v) { return score_reference(v, w, rows); }, x, dscores), 1e-8);
    expect_close("dw", g.dw, finite_difference([&](const Vector &v) { return score_reference(x, v, rows); }, w, dscores), 1e-8);
}

template <class Dev> struct Score : testing::Test {
    using X = typename Dev::X;
    static constexpr size_t T = 40, C = 139;  // two slices of channels and a rest
    const std::vector<X> x = random_values<X>(T * C, 1), w = random_values<X>(C, 2);
    const std::vector<int32_t> rows = {0, 6, 7, 20, 39};  // documents of 1, 6, 1, 13 and 19 tokens
    const std::vector<float> dscores = random_values<float>(rows.size(), 3);
    std::vector<float> scores = std::vector<float>(rows.size(), NAN), dw = std::vector<float>(C, 3);
    std::vector<X> dx = std::vector<X>(T * C, X(NAN));

    void forward(int threads = 2) {
        score_forward(make_device<Dev>(threads), scores.data(), x.data(), w.data(), rows.data(), C, rows.size());
    }
    void backward(size_t N, int threads = 2) {
        score_backward(make_device<Dev>(threads), dx.data(), dw.data(), x.data(), w.data(), rows.data(), dscores.data(), T, C, N);
    }
};
TYPED_TEST_SUITE(Score, CpuDevices);

TYPED_TEST(Score, ForwardEqualsReference) {
    this->forward();
    const Vector x = widen(this->x), w = widen(this->w);
    expect_close("score_forward", this->scores, score_reference(x, w, this->rows), score_error(x, w, this->rows));
}

TYPED_TEST(Score, BackwardEqualsReferenceAndAccumulates) {
    const Vector x = widen(this->x), w = widen(this->w), dscores = widen(this->dscores);
    ScoreGradient want = score_backward_reference(dscores, x, w, this->rows);
    for (double &d : want.dw) d = 3 + 2 * d;
    for (int pass = 0; pass < 2; pass++) this->backward(this->rows.size());
    expect_close("dx", this->dx, want.dx, score_dx_error<typename TypeParam::X>(want.dx));
    expect_close("dw", this->dw, want.dw, score_dw_error(dscores, x, w, this->rows, 3, 2));
    expect_zero_elsewhere(this->dx, this->rows, this->C);
}

TYPED_TEST(Score, WithoutADocument) {
    this->backward(0);
    EXPECT_EQ(widen(this->dx), Vector(this->T * this->C, 0));
    EXPECT_EQ(this->dw, std::vector<float>(this->C, 3));
}

TYPED_TEST(Score, ThreadsDoNotChangeABit) {
    Vector want;
    for (int threads : {1, 2, 3}) {
        this->dw.assign(this->C, 3);
        this->forward(threads);
        this->backward(this->rows.size(), threads);
        Vector got;
        for (const Vector &part : {widen(this->scores), widen(this->dx), widen(this->dw)})
            got.insert(got.end(), part.begin(), part.end());
        if (want.empty()) want = got;
        EXPECT_EQ(got, want) << threads << " threads";
    }
}
