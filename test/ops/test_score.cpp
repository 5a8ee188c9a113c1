// The head of a reward model.
#include "../../llmc/ops/score.h"

#include <numeric>

#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/score.cuh"
#endif

using Vector = std::vector<double>;

// ---- The head of a reward model in float64, and how far float may be from it.

static Vector score_reference(const Vector &x, const Vector &w, const std::vector<int32_t> &rows) {
    Vector scores;
    for (int32_t row : rows) {
        scores.push_back(0);
        for (size_t c = 0; c < w.size(); c++) scores.back() += x[size_t(row) * w.size() + c] * w[c];
    }
    return scores;
}

struct ScoreGradient {
    Vector dx, dw;
};

static ScoreGradient score_backward_reference(const Vector &dscores, const Vector &x, const Vector &w,
                                              const std::vector<int32_t> &rows) {
    const size_t C = w.size();
    ScoreGradient g{Vector(x.size()), Vector(C)};
    for (size_t n = 0; n < rows.size(); n++)
        for (size_t c = 0; c < C; c++) {
            const size_t at = size_t(rows[n]) * C + c;
            g.dx[at] = dscores[n] * w[c];
            g.dw[c] += dscores[n] * x[at];
        }
    return g;
}

static Vector absolute(Vector v) {
    for (double &e : v) e = std::abs(e);
    return v;
}

// A float sum of n terms is off by at most n roundings of the sum of the terms' absolute values; 8 more are for the
// products and the second-order terms. dx: one product, rounded to float and to X.
static double score_error(const Vector &x, const Vector &w, const std::vector<int32_t> &rows) {
    return double(w.size() + 8) * unit_roundoff<float> * largest(score_reference(absolute(x), absolute(w), rows));
}
template <class X> double score_dx_error(const Vector &want) {
    return (2 * unit_roundoff<float> + unit_roundoff<X>)*largest(want);
}
// Checks a dw that was `before` everywhere and was added to `passes` times.
static double score_dw_error(const Vector &dscores, const Vector &x, const Vector &w, const std::vector<int32_t> &rows,
                             double before, size_t passes) {
    const double terms = largest(score_backward_reference(absolute(dscores), absolute(x), w, rows).dw);
    return double(passes * rows.size() + 8) * unit_roundoff<float> * (std::abs(before) + double(passes) * terms);
}

template <class X> void expect_zero_elsewhere(const std::vector<X> &dx, const std::vector<int32_t> &rows, size_t C) {
    for (size_t i = 0; i < dx.size(); i++) {
        if (std::ranges::count(rows, int32_t(i / C)) > 0) continue;
        ASSERT_EQ(float(dx[i]), 0) << "row " << i / C << ", channel " << i % C;
    }
}

// ---- the op

struct ScoreSizes {
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
static const ScoreSizes score_sizes[] = {{1, 8, {0}},
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
    for (const auto &[T, C, rows] : score_sizes) {
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
