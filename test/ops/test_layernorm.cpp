// layernorm, and the residual sum fused with it.
#include "../../llmc/ops/layernorm.h"

#include <array>

#include "../../llmc/ops/residual.h"
#include "../finite_difference.h"
#include "../reference_layernorm.h"
#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/layernorm.cuh"
#include "../../llmc/ops/residual.cuh"
#endif

using Vector = std::vector<double>;

static const double eps = 0.125;  // large enough to show where it is forgotten

// One token; vectors, the last of them by few lanes; no vectors; runs of three tokens; few channels, one; GPT-2; all blocks, with runs of 8 and 9
// tokens; rows for which a block has the memory of one warp.
static const std::array<size_t, 2> sizes[] = {{1, 8}, {37, 72},  {19, 77},  {150, 77},  {7, 13},
                                              {5, 1}, {65, 768}, {3, 1600}, {2100, 24}, {2, 12400}};

TEST(LayerNormReference, BackwardEqualsFiniteDifferences) {
    const size_t T = 3, C = 7;
    const Vector x = widen(random_values<float>(T * C, 1)), w = widen(random_values<float>(C, 2, 0.1, 1));
    const Vector bias = widen(random_values<float>(C, 3)), dout = widen(random_values<float>(T * C, 4));
    const LayerNormGradient g = layernorm_backward_reference(dout, x, w, T, C, eps);
    const auto by_x = [&](const Vector &v) { return layernorm_reference(v, w, bias, T, C, eps).out; };
    const auto by_w = [&](const Vector &v) { return layernorm_reference(x, v, bias, T, C, eps).out; };
    const auto by_bias = [&](const Vector &v) { return layernorm_reference(x, w, v, T, C, eps).out; };
    expect_close("dx", g.dx, finite_difference(by_x, x, dout), 1e-8);
    expect_close("dw", g.dw, finite_difference(by_w, w, dout), 1e-8);
    expect_close("dbias", g.dbias, finite_difference(by_bias, bias, dout), 1e-8);
}

template <class Dev> struct LayerNorm : testing::Test {};
TYPED_TEST_SUITE(LayerNorm, Devices);

// In rows around 100 mean(x^2) - mean(x)^2 would be off by a thousandth of its value in float.
TYPED_TEST(LayerNorm, ForwardEqualsReferenceAlsoInPlace) {
    using X = typename TypeParam::X;
    for (const double x_mean : {0, 100})
        for (const auto &[T, C] : sizes) {
            const auto x = random_values<X>(T * C, 1, 1, x_mean), w = random_values<X>(C, 2, 0.1, 1),
                       bias = random_values<X>(C, 3);
            const LayerNormRows want = layernorm_reference(widen(x), widen(w), widen(bias), T, C, eps);
            printf(" T %zu, C %zu, rows around %g\n", T, C, x_mean);
            SameBits same;
            for_each_order<TypeParam>([&, T = T, C = C](TypeParam dev) {
                Array<X> d_x(x), d_w(w), d_bias(bias), out(T * C);
                Array<float> mean(T), rstd(T);
                for (X *onto : {out.data(), d_x.data()}) {
                    layernorm_forward(dev, onto, mean.data(), rstd.data(), d_x.data(), d_w.data(), d_bias.data(), T, C,
                                      float(eps));
                    same(onto == out.data() ? out.values() : d_x.values(), mean.values(), rstd.values());
                }
                expect_close("out", out.values(), want.out, layernorm_error<X>(want));
                expect_close("mean", mean.values(), want.mean, layernorm_mean_error(want));
                expect_close("rstd", rstd.values(), want.rstd, layernorm_rstd_error(want));
            });
        }
}

TYPED_TEST(LayerNorm, AConstantRowGivesTheBias) {
    using X = typename TypeParam::X;
    const std::vector<float> values = {0, 1000.1f, -3e-5f, 1.7e6f};
    for (const size_t C : {1, 77, 768, 1600}) {
        const size_t T = values.size();
        const auto w = random_values<X>(C, 1), bias = random_values<X>(C, 2);
        std::vector<X> x(T * C);
        for (size_t i = 0; i < x.size(); i++) x[i] = values[i / C];
        Array<X> d_x(x), d_w(w), d_bias(bias), out(T * C);
        Array<float> mean(T), rstd(T);
        layernorm_forward(any_device<TypeParam>(), out.data(), mean.data(), rstd.data(), d_x.data(), d_w.data(), d_bias.data(), T,
                          C, 1e-5f);
        const auto got = out.values();
        const auto means = mean.values(), rstds = rstd.values();
        for (size_t i = 0; i < x.size(); i++) ASSERT_EQ(float(got[i]), float(bias[i % C])) << "row " << i / C;
        for (size_t t = 0; t < T; t++) {
            EXPECT_EQ(means[t], float(X(values[t])));
            EXPECT_FLOAT_EQ(rstds[t], 1 / std::sqrt(1e-5f)) << values[t];
        }
    }
}

TYPED_TEST(LayerNorm, RowsThatAreNotAligned) {
    using X = typename TypeParam::X;
    const size_t T = 3, C = 16;
    const auto x = random_values<X>(1 + T * C, 1), w = random_values<X>(C, 2, 0.1, 1), bias = random_values<X>(C, 3);
    const LayerNormRows want =
        layernorm_reference(widen(std::vector<X>(x.begin() + 1, x.end())), widen(w), widen(bias), T, C, eps);
    Array<X> d_x(x), d_w(w), d_bias(bias), out(T * C);
    Array<float> mean(T), rstd(T);
    layernorm_forward(any_device<TypeParam>(), out.data(), mean.data(), rstd.data(), d_x.data() + 1, d_w.data(), d_bias.data(), T,
                      C, float(eps));
    expect_close("layernorm_forward", out.values(), want.out, layernorm_error<X>(want));
}

// Twice into the same dw and dbias, without the residual's gradient and with it.
TYPED_TEST(LayerNorm, BackwardEqualsReferenceAndAccumulates) {
    using X = typename TypeParam::X;
    for (const double x_mean : {0, 100})
        for (const auto &[T, C] : sizes) {
            if (x_mean != 0 && C != 768) continue;
            const auto x = random_values<X>(T * C, 1, 1, x_mean), w = random_values<X>(C, 2, 0.1, 1),
                       bias = random_values<X>(C, 3);
            const auto dout = random_values<X>(T * C, 4), dresidual = random_values<X>(T * C, 5);
            const LayerNormRows rows = layernorm_reference(widen(x), widen(w), widen(bias), T, C, eps);
            LayerNormGradient want = layernorm_backward_reference(widen(dout), widen(x), widen(w), T, C, eps);
            Vector want_sum = want.dx;
            for (size_t i = 0; i < T * C; i++) want_sum[i] += double(float(dresidual[i]));
            const double dw_error = layernorm_dw_error(T, rows, want), dbias_error = layernorm_dbias_error(T, want);
            for (Vector *sum : {&want.dw, &want.dbias})
                for (double &d : *sum) d = 3 + 2 * d;
            printf(" T %zu, C %zu, rows around %g\n", T, C, x_mean);
            SameBits same;
            for_each_order<TypeParam>([&, T = T, C = C](TypeParam dev) {
                Array<X> d_x(x), d_w(w), d_bias(bias), d_dout(dout), d_dresidual(dresidual), dx(T * C), sum(T * C);
                Array<float> mean(T), rstd(T), scratch(layernorm_scratch(dev, C));
                Array<float> dw(std::vector<float>(C, 3)), dbias(std::vector<float>(C, 3));
                layernorm_forward(dev, dx.data(), mean.data(), rstd.data(), d_x.data(), d_w.data(), d_bias.data(), T, C,
                                  float(eps));
                const X *none = nullptr;
                layernorm_backward(dev, dx.data(), dw.data(), dbias.data(), scratch.data(), none, d_dout.data(), d_x.data(),
                                   d_w.data(), mean.data(), rstd.data(), T, C);
                layernorm_backward(dev, sum.data(), dw.data(), dbias.data(), scratch.data(), d_dresidual.data(), d_dout.data(),
                                   d_x.data(), d_w.data(), mean.data(), rstd.data(), T, C);
                const auto allowed = [&, C = C](const Vector &dx) {
                    return layernorm_dx_error<X>(C, rows, widen(dout), widen(w), dx);
                };
                expect_close("dx", dx.values(), want.dx, allowed(want.dx));
                expect_close("dx with residual", sum.values(), want_sum, allowed(want_sum));
                expect_close("dw", dw.values(), want.dw, 2 * dw_error + 4 * unit_roundoff<float> * largest(want.dw));
                expect_close("dbias", dbias.values(), want.dbias,
                             2 * dbias_error + 4 * unit_roundoff<float> * largest(want.dbias));
                same(dx.values(), sum.values(), dw.values(), dbias.values());
            });
        }
}

TYPED_TEST(LayerNorm, BackwardMayOverwriteItsInputs) {
    using X = typename TypeParam::X;
    for (const auto &[T, C] : {std::array<size_t, 2>{21, 72}, {150, 77}}) {
        const auto x = random_values<X>(T * C, 1), w = random_values<X>(C, 2, 0.1, 1), bias = random_values<X>(C, 3);
        const auto dout = random_values<X>(T * C, 4), dresidual = random_values<X>(T * C, 5);
        SameBits same;
        for_each_order<TypeParam>([&, T = T, C = C](TypeParam dev) {
            Array<X> d_x(x), d_w(w), d_bias(bias), dx(T * C);
            Array<float> mean(T), rstd(T), scratch(layernorm_scratch(dev, C));
            layernorm_forward(dev, dx.data(), mean.data(), rstd.data(), d_x.data(), d_w.data(), d_bias.data(), T, C, float(eps));
            for (int onto = 0; onto < 3; onto++) {  // nothing, dout, dresidual
                Array<X> d_dout(dout), d_dresidual(dresidual);
                Array<float> dw(std::vector<float>(C, 0)), dbias(std::vector<float>(C, 0));
                Array<X> &out = onto == 0 ? dx : onto == 1 ? d_dout : d_dresidual;
                layernorm_backward(dev, out.data(), dw.data(), dbias.data(), scratch.data(), d_dresidual.data(), d_dout.data(),
                                   d_x.data(), d_w.data(), mean.data(), rstd.data(), T, C);
                same(out.values(), dw.values(), dbias.values());
            }
        });
    }
}

// residual_layernorm_forward is residual_forward and then layernorm_forward, bit for bit, also where sum overwrites x or y, or out y.
TYPED_TEST(LayerNorm, ResidualAndNormInOne) {
    using X = typename TypeParam::X;
    for (const auto &[T, C] : {std::array<size_t, 2>{37, 72}, {5, 77}, {150, 77}}) {
        const auto x = random_values<X>(T * C, 1), y = random_values<X>(T * C, 2), w = random_values<X>(C, 3, 0.1, 1);
        const auto bias = random_values<X>(C, 4);
        SameBits same;
        for_each_order<TypeParam>([&, T = T, C = C](TypeParam dev) {
            Array<X> d_x(x), d_y(y), d_w(w), d_bias(bias), sum(T * C), out(T * C);
            Array<float> mean(T), rstd(T);
            residual_forward(dev, sum.data(), d_x.data(), d_y.data(), T * C);
            layernorm_forward(dev, out.data(), mean.data(), rstd.data(), sum.data(), d_w.data(), d_bias.data(), T, C, float(eps));
            same(sum.values(), out.values(), mean.values(), rstd.values());
            for (int onto = 0; onto < 4; onto++) {  // nothing, sum on x, sum on y, out on y
                Array<X> a(x), b(y), apart(T * C), normed(T * C);
                Array<X> &s = onto == 1 ? a : onto == 2 ? b : apart, &o = onto == 3 ? b : normed;
                residual_layernorm_forward(dev, s.data(), o.data(), mean.data(), rstd.data(), a.data(), b.data(), d_w.data(),
                                           d_bias.data(), T, C, float(eps));
                same(s.values(), o.values(), mean.values(), rstd.values());
            }
        });
    }
}
