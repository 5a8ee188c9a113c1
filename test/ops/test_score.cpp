// The head of a reward model.
#include "../../llmc/ops/score.h"

#include <numeric>

#include "../reference_matmul.h"
#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/score.cuh"
#endif

// The error of a float sum is at most n roundings of the sum of absolute values; 8 more cover the products and second-order terms.
static double sum_error(size_t n, const Sums &sums) { return double(n + 8) * unit_roundoff<float> * sums.largest_absolute; }

template <class X> void expect_zero_elsewhere(const std::vector<X> &dx, const std::vector<int32_t> &rows, size_t C) {
    for (size_t i = 0; i < dx.size(); i++) {
        if (std::ranges::count(rows, int32_t(i / C)) > 0) continue;
        ASSERT_EQ(float(dx[i]), 0) << "row " << i / C << ", channel " << i % C;
    }
}

struct ScoreSizes {
    size_t T, C;
    std::vector<int32_t> rows;
};
static std::vector<int32_t> every_row(size_t T) {
    std::vector<int32_t> rows(T);
    std::iota(rows.begin(), rows.end(), 0);
    return rows;
}
// One token; vectors, the last of them by few threads; no vectors; two slices of channels and a partial one; several passes of a block; every row; no
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

// Two passes add to the same dw.
TYPED_TEST(Score, EqualsReferenceAndAccumulates) {
    using X = typename TypeParam::X;
    for (const auto &[T, C, rows] : score_sizes) {
        const size_t N = rows.size();
        const auto x = random_values<X>(T * C, 1), w = random_values<X>(C, 2);
        const auto dscores = random_values<float>(N, 3);
        std::vector<double> tokens, dx(T * C);  // tokens: (N, C)
        for (size_t n = 0; n < N; n++)
            for (size_t c = 0; c < C; c++) {
                tokens.push_back(x[size_t(rows[n]) * C + c]);
                dx[size_t(rows[n]) * C + c] = double(dscores[n]) * double(w[c]);
            }
        const Sums scores = product_reference(tokens, C, 1, widen(w), 1, 1, {}, N, 1, C);
        Sums dw = product_reference(widen(dscores), 1, 1, tokens, C, 1, {}, 1, C, N);
        dw.largest_absolute = 3 + 2 * dw.largest_absolute;
        for (double &d : dw.value) d = 3 + 2 * d;
        printf(" T %zu, C %zu, N %zu\n", T, C, N);
        SameBits same;
        for_each_order<TypeParam>([&, T = T, C = C, &rows = rows](TypeParam dev) {
            Array<X> d_x(x), d_w(w), d_dx(T * C);
            Array<int32_t> d_rows(rows);
            Array<float> d_scores(N), d_dscores(dscores), d_dw(std::vector<float>(C, 3));
            score_forward(dev, d_scores.data(), d_x.data(), d_w.data(), d_rows.data(), C, N);
            for (int pass = 0; pass < 2; pass++)
                score_backward(dev, d_dx.data(), d_dw.data(), d_x.data(), d_w.data(), d_rows.data(), d_dscores.data(), T, C, N);
            expect_close("scores", d_scores.values(), scores.value, sum_error(C, scores));
            expect_close("dx", d_dx.values(), dx, (2 * unit_roundoff<float> + unit_roundoff<X>)*largest(dx));
            expect_close("dw", d_dw.values(), dw.value, sum_error(2 * N, dw));
            expect_zero_elsewhere(d_dx.values(), rows, C);
            same(d_scores.values(), d_dx.values(), d_dw.values());
        });
    }
}
