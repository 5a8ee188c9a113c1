// wide_norm: the channels of the parts together are normed as one vector.
#include "../../llmc/ops/wide_norm.h"

#include <deque>

#include "../reference_rmsnorm.h"
#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/rmsnorm.cuh"
#include "../../llmc/ops/wide_norm.cuh"
#endif

using Vector = std::vector<double>;

template <class Dev> struct WideNorm : testing::Test {};
TYPED_TEST_SUITE(WideNorm, Devices);

// Columns [first, first + n) of rows of C elements.
template <class T> static std::vector<T> columns_of(const std::vector<T> &x, size_t C, size_t first, size_t n) {
    std::vector<T> out;
    for (size_t row = 0; row < x.size(); row += C)
        out.insert(out.end(), x.begin() + ptrdiff_t(row + first), x.begin() + ptrdiff_t(row + first + n));
    return out;
}

// One part and several of different sizes, with and without vectors; rows with a stride; more tokens than runs.
TYPED_TEST(WideNorm, PartsEqualTheNormOfAllChannels) {
    using X = typename TypeParam::X;
    const double eps = 0.125;
    const std::pair<size_t, std::vector<size_t>> cases[] = {{1, {8}},     {37, {72}},         {19, {77}},
                                                            {5, {16, 8}}, {150, {40, 1, 36}}, {300, {8, 24, 8, 8}}};
    for (const auto &[T, widths] : cases) {
        size_t C = 0;
        for (size_t width : widths) C += width;
        const auto x = random_values<X>(T * C, 1), w = random_values<X>(C, 2, 0.1, 1), dout = random_values<X>(T * C, 3);
        const Vector want = rmsnorm_reference(widen(x), widen(w), T, C, eps);
        const RmsNormGradient gradient = rmsnorm_backward_reference(widen(dout), widen(x), widen(w), T, C, eps);
        SameBits same;
        for_each_order<TypeParam>([&, T = T, &widths = widths](TypeParam dev) {
            const size_t R = widths.size(), gap = 8;
            std::vector<float> results;
            const auto keep = [&](const auto &values) {
                for (auto v : values) results.push_back(float(v));
            };
            Array<float> sums(R * (T + 3)), rstd(T);
            std::deque<Array<X>> raw, rows;
            const auto for_parts = [&](auto f) {
                for (size_t r = 0, first = 0; r < R; first += widths[r++]) {
                    const WideNormShape shape{T, widths[r], widths[r] + gap, C, R, T + 3, float(eps)};
                    f(r, first, shape, Array<X>(columns_of(w, C, first, widths[r])));
                }
            };
            const auto fill = [&](const std::vector<X> &values, size_t first, const WideNormShape &s) {
                std::vector<X> with_gaps(T * s.stride, X(7.0f));
                for (size_t t = 0; t < T; t++) std::copy_n(&values[t * C + first], s.C, &with_gaps[t * s.stride]);
                return with_gaps;
            };
            for_parts([&](size_t r, size_t first, const WideNormShape &s, Array<X>) {
                rows.emplace_back(fill(x, first, s)), raw.emplace_back(T * s.C);
                wide_norm_squares(dev, sums.data() + r * s.of_rank, rows[r].data(), s);
            });
            for_parts([&](size_t r, size_t first, const WideNormShape &s, Array<X> weights) {
                wide_norm_forward(dev, rows[r].data(), raw[r].data(), rstd.data(), weights.data(), sums.data(), s);
                expect_close("wide_norm_forward", columns_of(rows[r].values(), s.stride, 0, s.C), columns_of(want, C, first, s.C),
                             rmsnorm_error<X>(C, want));
                EXPECT_EQ(columns_of(rows[r].values(), s.stride, s.C, gap), std::vector<X>(T * gap, X(7.0f)));
                EXPECT_EQ(raw[r].values(), columns_of(x, C, first, s.C));
                keep(rows[r].values());
            });
            rows.clear();
            for_parts([&](size_t r, size_t first, const WideNormShape &s, Array<X> weights) {
                rows.emplace_back(fill(dout, first, s));
                wide_norm_dots(dev, sums.data() + r * s.of_rank, rows[r].data(), raw[r].data(), weights.data(), s);
            });
            for_parts([&](size_t r, size_t first, const WideNormShape &s, Array<X> weights) {
                Array<float> dw(std::vector<float>(s.C, 3)), scratch(rmsnorm_scratch(dev, s.C));
                wide_norm_backward(dev, rows[r].data(), dw.data(), scratch.data(), raw[r].data(), weights.data(), rstd.data(),
                                   sums.data(), s);
                expect_close("wide_norm_backward, dx", columns_of(rows[r].values(), s.stride, 0, s.C),
                             columns_of(gradient.dx, C, first, s.C), rmsnorm_error<X>(C, gradient.dx));
                Vector want_dw = columns_of(gradient.dw, C, first, s.C);
                for (double &d : want_dw) d += 3;
                expect_close("wide_norm_backward, dw", dw.values(), want_dw,
                             rmsnorm_dw_error(T, C, gradient) + 2 * unit_roundoff<float> * largest(want_dw));
                keep(rows[r].values()), keep(dw.values());
            });
            same(results);
        });
    }
}
