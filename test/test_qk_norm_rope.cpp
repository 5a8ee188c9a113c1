#include "../llmc/ops/qk_norm_rope.h"

#include "check.h"
#include "finite_difference.h"
#include "reference_qk_norm_rope.h"

using Vector = std::vector<double>;

static const double eps = 0.125;  // large enough to show where it is forgotten

TEST(QkNormRopeReference, BackwardEqualsFiniteDifferences) {
    const QkSizes s = {3, 2, 1, 8};
    const QkAngles angles = some_angles(s);
    const Vector qkv = widen(random_values<float>(s.T * s.width(), 1)), dout = widen(random_values<float>(qkv.size(), 2));
    const QkWeights w = {widen(random_values<float>(s.D, 3, 0.1, 1)), widen(random_values<float>(s.D, 4, 0.1, 2))};
    const auto forward = [&](const Vector &x, const QkWeights &v) {
        return rope_reference(qk_norm_reference(x, v, s, eps), s, angles, 1);
    };
    const QkGradient g = qk_norm_rope_backward_reference(dout, qkv, w, s, angles, eps);
    expect_close("dqkv", g.dqkv, finite_difference([&](const Vector &x) { return forward(x, w); }, qkv, dout), 1e-8);
    for (int key : {0, 1}) {
        const auto of_weight = [&](const Vector &v) { return key ? forward(qkv, {w.w[0], v}) : forward(qkv, {v, w.w[1]}); };
        expect_close(key ? "dwk" : "dwq", g.dw[key], finite_difference(of_weight, w.w[key], dout), 1e-8);
    }
}

template <class Dev> struct QkNormRope : testing::Test {
    using X = typename Dev::X;
    const QkSizes s = {150, 3, 1, 24};  // three tokens a run
    const QkInputs<X> in = {s};
    const float *table = in.angles.table.data();
    const int32_t *doc_pos = in.angles.doc_pos.data();
    std::vector<X> qk_raw = std::vector<X>(s.T * s.heads() * s.D), turned, gradient;
    std::vector<float> rstd = std::vector<float>(s.T * s.heads()), dwq, dwk,
                       scratch = std::vector<float>(rmsnorm_scratch(make_device<Dev>(), 2 * s.D));

    void forward(int threads = 2) {
        turned = in.qkv;
        qk_norm_rope_forward(make_device<Dev>(threads), turned.data(), qk_raw.data(), rstd.data(), in.wq.data(), in.wk.data(),
                             table, doc_pos, s.T, s.H, s.KV, s.D, float(eps));
    }
    void backward(int threads = 2) {
        gradient = in.dqkv;
        qk_norm_rope_backward(make_device<Dev>(threads), gradient.data(), dwq.data(), dwk.data(), scratch.data(), qk_raw.data(),
                              in.wq.data(), in.wk.data(), rstd.data(), table, doc_pos, s.T, s.H, s.KV, s.D);
    }
};
TYPED_TEST_SUITE(QkNormRope, CpuDevices);

TYPED_TEST(QkNormRope, ForwardEqualsReferenceAndKeepsTheRaw) {
    const auto &in = this->in;
    const QkSizes &s = in.s;
    this->forward();
    const Vector normed = qk_norm_reference(widen(in.qkv), in.w, s, eps);
    expect_close("qkv", this->turned, rope_reference(normed, s, in.angles, 1),
                 qk_norm_rope_error<typename TypeParam::X>(s, gather_heads(normed, s)));
    expect_value_heads_equal(this->turned, in.qkv, s);
    EXPECT_EQ(widen(this->qk_raw), gather_heads(widen(in.qkv), s));
}

TYPED_TEST(QkNormRope, BackwardEqualsReferenceAndAccumulates) {
    const auto &in = this->in;
    const QkSizes &s = in.s;
    this->forward();
    this->dwq.assign(s.D, 1), this->dwk.assign(s.D, 2);
    for (int pass = 0; pass < 2; pass++) this->backward();
    const QkGradient want = qk_norm_rope_backward_reference(widen(in.dqkv), widen(in.qkv), in.w, s, in.angles, eps);
    expect_close("dqkv", this->gradient, want.dqkv, qk_norm_rope_dx_error(in, want, eps));
    expect_value_heads_equal(this->gradient, in.dqkv, s);
    expect_dw_twice(this->dwq, false, in, want);
    expect_dw_twice(this->dwk, true, in, want);
}

TYPED_TEST(QkNormRope, WithoutWeightsItIsRope) {
    using X = typename TypeParam::X;
    const QkSizes &s = this->s;
    const auto dev = make_device<TypeParam>();
    X *no_raw = nullptr;
    const X *none = nullptr;
    std::vector<X> got = this->in.qkv, want = got;
    qk_norm_rope_forward(dev, got.data(), no_raw, nullptr, none, none, this->table, this->doc_pos, s.T, s.H, s.KV, s.D,
                         float(eps));
    rope_forward(dev, want.data(), this->table, this->doc_pos, s.T, s.heads(), s.D, s.width());
    EXPECT_EQ(widen(got), widen(want));
    qk_norm_rope_backward(dev, got.data(), nullptr, nullptr, nullptr, none, none, none, nullptr, this->table, this->doc_pos, s.T,
                          s.H, s.KV, s.D);
    rope_backward(dev, want.data(), this->table, this->doc_pos, s.T, s.heads(), s.D, s.width());
    EXPECT_EQ(widen(got), widen(want));
}

TYPED_TEST(QkNormRope, ThreadsDoNotChangeABit) {
    Vector want;
    for (int threads : {1, 2, 3}) {
        this->dwq.assign(this->s.D, 0), this->dwk.assign(this->s.D, 0);
        this->forward(threads);
        this->backward(threads);
        Vector got;
        for (const Vector &part :
             {widen(this->turned), widen(this->rstd), widen(this->gradient), widen(this->dwq), widen(this->dwk)})
            got.insert(got.end(), part.begin(), part.end());
        if (want.empty()) want = got;
        EXPECT_EQ(got, want) << threads << " threads";
    }
}
