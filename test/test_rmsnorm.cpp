// rmsnorm, the residual sum fused with it, and the norm of query and key heads.
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

// ---- query and key heads: each is a row of its own, so the reference is the reference of rmsnorm on the heads gathered ------

template <class Dev> struct QkNorm : testing::Test {
    using X = typename Dev::X;
    static constexpr size_t T = 70, H = 3, KV = 1, D = 26, width = (H + 2 * KV) * D;
    const std::vector<X> qkv = random_values<X>(T * width, 5), dqkv = random_values<X>(T * width, 6);
    const std::vector<X> wq = random_values<X>(D, 7, 0.1, 1), wk = random_values<X>(D, 8, 0.1, 2);
    std::vector<X> qk_raw = std::vector<X>(T * (H + KV) * D), normed, gradient;
    std::vector<float> rstd = std::vector<float>(T * (H + KV)), dwq = std::vector<float>(D, 1), dwk = std::vector<float>(D, 2);
    std::vector<float> scratch = std::vector<float>(qk_norm_scratch(make_device<Dev>(), D));

    static Vector heads(const std::vector<X> &rows, size_t begin, size_t end) { return gather_heads(rows, width, D, begin, end); }
    void forward(int threads = 2) {
        normed = qkv;
        qk_norm_forward(make_device<Dev>(threads), normed.data(), qk_raw.data(), rstd.data(), wq.data(), wk.data(), T, H, KV, D,
                        float(eps));
    }
    void backward(int threads = 2) {
        gradient = dqkv;
        qk_norm_backward(make_device<Dev>(threads), gradient.data(), dwq.data(), dwk.data(), scratch.data(), qk_raw.data(),
                         wq.data(), wk.data(), rstd.data(), T, H, KV, D);
    }
};
TYPED_TEST_SUITE(QkNorm, CpuDevices);

TYPED_TEST(QkNorm, ForwardNormalisesHeadsAndKeepsTheRaw) {
    using X = typename TypeParam::X;
    const size_t T = this->T, H = this->H, KV = this->KV, D = this->D;
    this->forward();
    const Vector want_q = rmsnorm_reference(this->heads(this->qkv, 0, H), widen(this->wq), T * H, D, eps);
    const Vector want_k = rmsnorm_reference(this->heads(this->qkv, H, H + KV), widen(this->wk), T * KV, D, eps);
    expect_close("query heads", this->heads(this->normed, 0, H), want_q, rmsnorm_error<X>(D, want_q));
    expect_close("key heads", this->heads(this->normed, H, H + KV), want_k, rmsnorm_error<X>(D, want_k));
    EXPECT_EQ(this->heads(this->normed, H + KV, H + 2 * KV), this->heads(this->qkv, H + KV, H + 2 * KV)) << "value heads";
    EXPECT_EQ(widen(this->qk_raw), this->heads(this->qkv, 0, H + KV));
}

TYPED_TEST(QkNorm, BackwardEqualsReferenceAndAccumulates) {
    using X = typename TypeParam::X;
    const size_t T = this->T, H = this->H, KV = this->KV, D = this->D;
    this->forward();
    for (int pass = 0; pass < 2; pass++) this->backward();
    auto q =
        rmsnorm_backward_reference(this->heads(this->dqkv, 0, H), this->heads(this->qkv, 0, H), widen(this->wq), T * H, D, eps);
    auto k = rmsnorm_backward_reference(this->heads(this->dqkv, H, H + KV), this->heads(this->qkv, H, H + KV), widen(this->wk),
                                        T * KV, D, eps);
    for (double &d : q.dw) d = 1 + 2 * d;
    for (double &d : k.dw) d = 2 + 2 * d;
    expect_close("d query heads", this->heads(this->gradient, 0, H), q.dx, rmsnorm_error<X>(D, q.dx));
    expect_close("d key heads", this->heads(this->gradient, H, H + KV), k.dx, rmsnorm_error<X>(D, k.dx));
    EXPECT_EQ(this->heads(this->gradient, H + KV, H + 2 * KV), this->heads(this->dqkv, H + KV, H + 2 * KV)) << "value heads";
    expect_close("dwq", this->dwq, q.dw, 2 * rmsnorm_dw_error(T * H, D, q) + 4 * unit_roundoff<float> * largest(q.dw));
    expect_close("dwk", this->dwk, k.dw, 2 * rmsnorm_dw_error(T * KV, D, k) + 4 * unit_roundoff<float> * largest(k.dw));
}

TYPED_TEST(QkNorm, ThreadsDoNotChangeABit) {
    Vector want;
    for (int threads : {1, 2, 3}) {
        this->dwq.assign(this->D, 0), this->dwk.assign(this->D, 0);
        this->forward(threads);
        this->backward(threads);
        Vector got;
        for (const Vector &part :
             {widen(this->normed), widen(this->rstd), widen(this->gradient), widen(this->dwq), widen(this->dwk)})
            got.insert(got.end(), part.begin(), part.end());
        if (want.empty()) want = got;
        EXPECT_EQ(got, want) << threads << " threads";
    }
}
