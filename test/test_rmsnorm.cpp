// rmsnorm, and the residual sum fused with it.
#include "../llmc/ops/rmsnorm.h"

#include "../llmc/ops/residual.h"
#include "check.h"
#include "finite_difference.h"
#include "reference_rmsnorm.h"

using Vector = std::vector<double>;

static const double eps = 0.125;  // large enough to show where it is forgotten

TEST(RmsNormReference, BackwardEqualsFiniteDifferences) {
    const size_t T = 3, C = 7;
    const Vector x = widen(random_values<float>(T * C, 1)), w = widen(random_values<float>(C, 2, 0.1, 1));
    const Vector dout = widen(random_values<float>(T * C, 3));
    const RmsNormGradient g = rmsnorm_backward_reference(dout, x, w, T, C, eps);
    expect_close("dx", g.dx, finite_difference([&](const Vector &v) { return rmsnorm_reference(v, w, T, C, eps); }, x, dout),
                 1e-8);
    expect_close("dw", g.dw, finite_difference([&](const Vector &v) { return rmsnorm_reference(x, v, T, C, eps); }, w, dout),
                 1e-8);
}

template <class Dev> struct RmsNorm : testing::Test {
    using X = typename Dev::X;
    static constexpr size_t T = 150, C = 77;  // three tokens a run; no multiple of any vector length
    const std::vector<X> x = random_values<X>(T * C, 1), w = random_values<X>(C, 2, 0.1, 1), dout = random_values<X>(T * C, 3);
    const std::vector<X> dresidual = random_values<X>(T * C, 4);
    std::vector<X> out = std::vector<X>(T * C), dx = out;
    std::vector<float> rstd = std::vector<float>(T), dw = std::vector<float>(C),
                       scratch = std::vector<float>(rmsnorm_scratch(make_device<Dev>(), C));

    void forward(int threads = 2) {
        rmsnorm_forward(make_device<Dev>(threads), out.data(), rstd.data(), x.data(), w.data(), T, C, float(eps));
    }
    void backward(const X *residual, const X *dout_, int threads = 2) {
        rmsnorm_backward(make_device<Dev>(threads), dx.data(), dw.data(), scratch.data(), residual, dout_, x.data(), w.data(),
                         rstd.data(), T, C);
    }
};
TYPED_TEST_SUITE(RmsNorm, CpuDevices);

TYPED_TEST(RmsNorm, ForwardEqualsReference) {
    this->forward();
    const Vector want = rmsnorm_reference(widen(this->x), widen(this->w), this->T, this->C, eps);
    expect_close("rmsnorm_forward", this->out, want, rmsnorm_error<typename TypeParam::X>(this->C, want));
}

TYPED_TEST(RmsNorm, ForwardInPlace) {
    this->forward();
    auto in_place = this->x;
    rmsnorm_forward(make_device<TypeParam>(), in_place.data(), this->rstd.data(), in_place.data(), this->w.data(), this->T,
                    this->C, float(eps));
    EXPECT_EQ(widen(in_place), widen(this->out));
}

TYPED_TEST(RmsNorm, BackwardEqualsReferenceAndAccumulates) {
    using X = typename TypeParam::X;
    this->forward();
    for (bool with_residual : {false, true}) {
        RmsNormGradient want =
            rmsnorm_backward_reference(widen(this->dout), widen(this->x), widen(this->w), this->T, this->C, eps);
        const double dw_error = rmsnorm_dw_error(this->T, this->C, want);
        if (with_residual)
            for (size_t i = 0; i < want.dx.size(); i++) want.dx[i] += double(float(this->dresidual[i]));
        for (double &d : want.dw) d = 3 + 2 * d;
        this->dw.assign(this->C, 3);
        for (int pass = 0; pass < 2; pass++) this->backward(with_residual ? this->dresidual.data() : nullptr, this->dout.data());
        expect_close(with_residual ? "dx with residual" : "dx", this->dx, want.dx, rmsnorm_error<X>(this->C, want.dx));
        expect_close("dw", this->dw, want.dw, 2 * dw_error + 4 * unit_roundoff<float> * largest(want.dw));
    }
}

TYPED_TEST(RmsNorm, BackwardMayOverwriteItsInputs) {
    this->forward();
    this->backward(this->dresidual.data(), this->dout.data());
    const Vector want_dx = widen(this->dx), want_dw = widen(this->dw);
    for (bool onto_dout : {true, false}) {
        this->dx = onto_dout ? this->dout : this->dresidual;
        this->dw.assign(this->C, 0);
        this->backward(onto_dout ? this->dresidual.data() : this->dx.data(), onto_dout ? this->dx.data() : this->dout.data());
        EXPECT_EQ(widen(this->dx), want_dx);
        EXPECT_EQ(widen(this->dw), want_dw);
    }
}

TYPED_TEST(RmsNorm, ThreadsDoNotChangeABit) {
    Vector want;
    for (int threads : {1, 2, 3}) {
        this->forward(threads);
        this->dw.assign(this->C, 0);
        this->backward(this->dresidual.data(), this->dout.data(), threads);
        Vector got;
        for (const Vector &part : {widen(this->out), widen(this->rstd), widen(this->dx), widen(this->dw)})
            got.insert(got.end(), part.begin(), part.end());
        if (want.empty()) want = got;
        EXPECT_EQ(got, want) << threads << " threads";
    }
}

// residual_rmsnorm_forward is residual_forward and then rmsnorm_forward, bit for bit, also where sum overwrites x or y.
TYPED_TEST(RmsNorm, ResidualAndNormInOne) {
    using X = typename TypeParam::X;
    const auto dev = make_device<TypeParam>();
    const std::vector<X> &x = this->x, &y = this->dresidual;
    std::vector<X> want_sum(x.size()), want_out(x.size());
    std::vector<float> want_rstd(this->T);
    residual_forward(dev, want_sum.data(), x.data(), y.data(), x.size());
    for (size_t i = 0; i < x.size(); i++) ASSERT_EQ(float(want_sum[i]), float(X(float(x[i]) + float(y[i])))) << i;
    rmsnorm_forward(dev, want_out.data(), want_rstd.data(), want_sum.data(), this->w.data(), this->T, this->C, float(eps));

    auto check = [&](std::vector<X> &sum, const X *a, const X *b) {
        residual_rmsnorm_forward(dev, sum.data(), this->out.data(), this->rstd.data(), a, b, this->w.data(), this->T, this->C,
                                 float(eps));
        EXPECT_EQ(widen(sum), widen(want_sum));
        EXPECT_EQ(widen(this->out), widen(want_out));
        EXPECT_EQ(this->rstd, want_rstd);
    };
    std::vector<X> apart(x.size()), onto_x = x, onto_y = y;
    check(apart, x.data(), y.data());
    check(onto_x, onto_x.data(), y.data());
    check(onto_y, x.data(), onto_y.data());
}

TYPED_TEST(RmsNorm, ResidualInPlace) {
    using X = typename TypeParam::X;
    std::vector<X> want(this->x.size()), a = this->x, b = this->dresidual;
    residual_forward(make_device<TypeParam>(), want.data(), a.data(), b.data(), want.size());
    residual_forward(make_device<TypeParam>(3), b.data(), a.data(), b.data(), want.size());
    residual_forward(make_device<TypeParam>(1), a.data(), a.data(), this->dresidual.data(), want.size());
    EXPECT_EQ(widen(a), widen(want));
    EXPECT_EQ(widen(b), widen(want));
}
