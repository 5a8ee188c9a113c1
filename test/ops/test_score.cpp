// The head of a reward model.
#include "../../llmc/ops/score.h"

#include <numeric>

#include "../finite_difference.h"
#include "../reference_score.h"
#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/score.cuh"
#endif

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

struct Sizes {
    size_t T, C;
    std::vector<int32_t> rows;
};
static std::vector<int32_t> every_row(size_t T) {
    std::vector<int32_t> rows(T);
    std::iota(rows.begin(), rows.end(), 0);
    return rows;
}
// One token; vectors, the last of them by few threads; no vectors; two slices of channels and a rest; more than one pass of a block; every row; no
// document; a critic's tokens, more than a block has warps, with and without vectors.
static const Sizes sizes[] = {{1, 8, {0}},
                              {37, 72, {0, 6, 7, 20, 36}},
                              {19, 77, {3, 18}},
                              {40, 139, {0, 6, 7, 20, 39}},
                              {5, 1064, {1, 4}},
                              {6, 264, {0, 1, 2, 3, 4, 5}},
                              {9, 40, {}},
                              {95, 264, every_row(95)},
                              {70, 77, every_row(70)}};

template <class Dev> struct Score : testing::Test {};
TYPED_TEST_SUITE(Score, Devices);

// Twice into the same dw.
TYPED_TEST(Score, EqualsReferenceAndAccumulates) {
    using X = typename TypeParam::X;
    for (const auto &[T, C, rows] : sizes) {
        const size_t N = rows.size();
        const auto x = random_values<X>(T * C, 1), w = random_values<X>(C, 2);
        const auto dscores = random_values<float>(N, 3);
        const Vector x64 = widen(x), w64 = widen(w), dscores64 = widen(dscores), scores = score_reference(x64, w64, rows);
        ScoreGradient want = score_backward_reference(dscores64, x64, w64, rows);
        for (double &d : want.dw) d = 3 + 2 * d;
        printf(" T %zu, C %zu, N %zu\n", T, C, N);
        SameBits same;
        for_each_order<TypeParam>([&, T = T, C = C, &rows = rows](TypeParam dev) {
            Array<X> d_x(x), d_w(w), dx(T * C);
            Array<int32_t> d_rows(rows);
            Array<float> d_scores(N), d_dscores(dscores), dw(std::vector<float>(C, 3));
            score_forward(dev, d_scores.data(), d_x.data(), d_w.data(), d_rows.data(), C, N);
            for (int pass = 0; pass < 2; pass++)
                score_backward(dev, dx.data(), dw.data(), d_x.data(), d_w.data(), d_rows.data(), d_dscores.data(), T, C, N);
            expect_close("scores", d_scores.values(), scores, score_error(x64, w64, rows));
            expect_close("dx", dx.values(), want.dx, score_dx_error<X>(want.dx));
            expect_close("dw", dw.values(), want.dw, score_dw_error(dscores64, x64, w64, rows, 3, 2));
            expect_zero_elsewhere(dx.values(), rows, C);
            same(d_scores.values(), dx.values(), dw.values());
        });
    }
}

TYPED_TEST(Score, WithoutADocument) {
    using X = typename TypeParam::X;
    const size_t T = 40, C = 139;
    Array<X> x(random_values<X>(T * C, 1)), w(random_values<X>(C, 2)), dx(T * C);
    Array<int32_t> rows(0);
    Array<float> dscores(0), dw(std::vector<float>(C, 3));
    score_backward(any_device<TypeParam>(), dx.data(), dw.data(), x.data(), w.data(), rows.data(), dscores.data(), T, C, 0);
    EXPECT_EQ(widen(dx.values()), Vector(T * C, 0));
    EXPECT_EQ(dw.values(), std::vector<float>(C, 3));
}
