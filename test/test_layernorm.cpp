// layernorm, and the residual sum fused with it.
#include "../llmc/ops/layernorm.h"

#include <array>

#include "../llmc/ops/residual.h"
#include "check.h"
#include "finite_difference.h"
#include "reference_layernorm.h"

using Vector = std::vector<double>;

static const double eps = 0.125;  // large enough to show where it is forgotten

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

// Inputs and outputs of T rows of C channels.
template <class Dev> struct LayerNormRun {
    using X = typename Dev::X;
    size_t T, C;
    std::vector<X> x, w, bias, dout, dresidual, out, dx;
    std::vector<float> mean, rstd, dw, dbias, scratch;

    LayerNormRun(size_t T, size_t C, double x_mean = 0)
        : T(T),
          C(C),
          x(random_values<X>(T * C, 1, 1, x_mean)),
          w(random_values<X>(C, 2, 0.1, 1)),
          bias(random_values<X>(C, 3)),
          dout(random_values<X>(T * C, 4)),
          dresidual(random_values<X>(T * C, 5)),
          out(T * C),
          dx(T * C),
          mean(T),
          rstd(T),
          dw(C),
          dbias(C),
          scratch(layernorm_scratch(make_device<Dev>(), C)) {}

    void forward(int threads = 2) {
        layernorm_forward(make_device<Dev>(threads), out.data(), mean.data(), rstd.data(), x.data(), w.data(), bias.data(), T, C,
                          float(eps));
    }
    void backward(const X *residual, const X *dout_, int threads = 2) {
        layernorm_backward(make_device<Dev>(threads), dx.data(), dw.data(), dbias.data(), scratch.data(), residual, dout_,
                           x.data(), w.data(), mean.data(), rstd.data(), T, C);
    }

    LayerNormRows reference() const { return layernorm_reference(widen(x), widen(w), widen(bias), T, C, eps); }
    void expect_forward(const char *what) {
        printf(" %s: T %zu, C %zu\n", what, T, C);
        const LayerNormRows want = reference();
        forward();
        expect_close("out", out, want.out, layernorm_error<X>(want));
        expect_close("mean", mean, want.mean, layernorm_mean_error(want));
        expect_close("rstd", rstd, want.rstd, layernorm_rstd_error(want));
    }
    // Twice into the same dw and dbias, which begin with 3.
    void expect_backward(bool with_residual) {
        const LayerNormRows rows = reference();
        LayerNormGradient want = layernorm_backward_reference(widen(dout), widen(x), widen(w), T, C, eps);
        const double dw_error = layernorm_dw_error(T, rows, want), dbias_error = layernorm_dbias_error(T, want);
        if (with_residual)
            for (size_t i = 0; i < want.dx.size(); i++) want.dx[i] += double(float(dresidual[i]));
        for (Vector *sum : {&want.dw, &want.dbias})
            for (double &d : *sum) d = 3 + 2 * d;
        dw.assign(C, 3);
        dbias.assign(C, 3);
        for (int pass = 0; pass < 2; pass++) backward(with_residual ? dresidual.data() : nullptr, dout.data());
        expect_close(with_residual ? "dx with residual" : "dx", dx, want.dx,
                     layernorm_dx_error<X>(C, rows, widen(dout), widen(w), want.dx));
        expect_close("dw", dw, want.dw, 2 * dw_error + 4 * unit_roundoff<float> * largest(want.dw));
        expect_close("dbias", dbias, want.dbias, 2 * dbias_error + 4 * unit_roundoff<float> * largest(want.dbias));
    }
};

template <class Dev> struct LayerNorm : testing::Test {
    static constexpr size_t T = 150, C = 77;  // three tokens a run; no multiple of any vector length
    LayerNormRun<Dev> run{T, C};
};
TYPED_TEST_SUITE(LayerNorm, CpuDevices);

TYPED_TEST(LayerNorm, EqualsReferenceAndAccumulates) {
    this->run.expect_forward("layernorm");
    for (const bool with_residual : {false, true}) this->run.expect_backward(with_residual);
}

TYPED_TEST(LayerNorm, AnyNumberOfChannels) {
    for (const auto &[T, C] : {std::array<size_t, 2>{1, 8}, {5, 1}, {7, 13}, {65, 768}, {3, 1600}}) {
        LayerNormRun<TypeParam> run(T, C);
        run.expect_forward("layernorm");
        run.expect_backward(true);
    }
}

// mean(x^2) - mean(x)^2 would be off by a thousandth of its value in float here.
TYPED_TEST(LayerNorm, RowsFarFromZero) {
    LayerNormRun<TypeParam> run(9, 768, 100);
    run.expect_forward("rows around 100");
    run.expect_backward(false);
}

TYPED_TEST(LayerNorm, AConstantRowGivesTheBias) {
    using X = typename TypeParam::X;
    const std::vector<float> values = {0, 1000.1f, -3e-5f, 1.7e6f};
    for (const size_t C : {1, 77, 768, 1600}) {
        LayerNormRun<TypeParam> run(values.size(), C);
        for (size_t i = 0; i < run.x.size(); i++) run.x[i] = values[i / C];
        layernorm_forward(make_device<TypeParam>(), run.out.data(), run.mean.data(), run.rstd.data(), run.x.data(), run.w.data(),
                          run.bias.data(), run.T, C, 1e-5f);
        for (size_t i = 0; i < run.out.size(); i++) ASSERT_EQ(float(run.out[i]), float(run.bias[i % C])) << "row " << i / C;
        for (size_t t = 0; t < run.T; t++) {
            EXPECT_EQ(run.mean[t], float(X(values[t])));
            EXPECT_FLOAT_EQ(run.rstd[t], 1 / std::sqrt(1e-5f)) << values[t];
        }
    }
}

TYPED_TEST(LayerNorm, ForwardInPlace) {
    auto &run = this->run;
    run.forward();
    const Vector want = widen(run.out);
    layernorm_forward(make_device<TypeParam>(), run.x.data(), run.mean.data(), run.rstd.data(), run.x.data(), run.w.data(),
                      run.bias.data(), run.T, run.C, float(eps));
    EXPECT_EQ(widen(run.x), want);
}

TYPED_TEST(LayerNorm, BackwardMayOverwriteItsInputs) {
    auto &run = this->run;
    run.forward();
    run.backward(run.dresidual.data(), run.dout.data());
    const Vector want_dx = widen(run.dx), want_dw = widen(run.dw), want_dbias = widen(run.dbias);
    for (const bool onto_dout : {true, false}) {
        run.dx = onto_dout ? run.dout : run.dresidual;
        run.dw.assign(run.C, 0);
        run.dbias.assign(run.C, 0);
        run.backward(onto_dout ? run.dresidual.data() : run.dx.data(), onto_dout ? run.dx.data() : run.dout.data());
        EXPECT_EQ(widen(run.dx), want_dx);
        EXPECT_EQ(widen(run.dw), want_dw);
        EXPECT_EQ(widen(run.dbias), want_dbias);
    }
}

TYPED_TEST(LayerNorm, ThreadsDoNotChangeABit) {
    auto &run = this->run;
    Vector want;
    for (const int threads : {1, 2, 3}) {
        run.forward(threads);
        run.dw.assign(run.C, 0);
        run.dbias.assign(run.C, 0);
        run.backward(run.dresidual.data(), run.dout.data(), threads);
        Vector got;
        for (const Vector &part :
             {widen(run.out), widen(run.mean), widen(run.rstd), widen(run.dx), widen(run.dw), widen(run.dbias)})
            got.insert(got.end(), part.begin(), part.end());
        if (want.empty()) want = got;
        EXPECT_EQ(got, want) << threads << " threads";
    }
}

// residual_layernorm_forward is residual_forward and then layernorm_forward, bit for bit, also where sum overwrites x or y.
TYPED_TEST(LayerNorm, ResidualAndNormInOne) {
    using X = typename TypeParam::X;
    const auto dev = make_device<TypeParam>();
    auto &run = this->run;
    const std::vector<X> x = run.x, y = run.dresidual;
    residual_forward(dev, run.x.data(), x.data(), y.data(), x.size());
    run.forward();
    const Vector want_sum = widen(run.x), want_out = widen(run.out);
    const std::vector<float> want_mean = run.mean, want_rstd = run.rstd;

    const auto check = [&](std::vector<X> &sum, const X *a, const X *b) {
        residual_layernorm_forward(dev, sum.data(), run.out.data(), run.mean.data(), run.rstd.data(), a, b, run.w.data(),
                                   run.bias.data(), run.T, run.C, float(eps));
        EXPECT_EQ(widen(sum), want_sum);
        EXPECT_EQ(widen(run.out), want_out);
        EXPECT_EQ(run.mean, want_mean);
        EXPECT_EQ(run.rstd, want_rstd);
    };
    std::vector<X> apart(x.size()), onto_x = x, onto_y = y;
    check(apart, x.data(), y.data());
    check(onto_x, onto_x.data(), y.data());
    check(onto_y, x.data(), onto_y.data());
}
