#include "../../llmc/ops/qk_norm_rope.h"

#include "../finite_difference.h"
#include "../reference_qk_norm_rope.h"
#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/qk_norm_rope.cuh"
#endif

using Vector = std::vector<double>;

static const double eps = 0.125;  // large enough to show where it is forgotten

// One token; a lane for a head; lanes without channels; runs of one, two and three tokens; a warp for a head; more heads than a block takes; 1 + weight.
static const QkSizes sizes[] = {{1, 2, 1, 128},  {70, 5, 3, 8},  {37, 3, 2, 80}, {150, 3, 1, 24},
                                {300, 4, 2, 64}, {9, 5, 1, 256}, {3, 35, 9, 64}, {9, 5, 1, 256, 1}};

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

// The arrays of the op where the device computes. Calls work on copies of rows.
template <class Dev> struct QkOp {
    using X = typename Dev::X;
    using Rows = std::vector<X>;
    Dev dev;
    QkSizes s;
    Array<X> wq, wk, raw = Array<X>(s.T * s.heads() * s.D);
    Array<float> rstd = Array<float>(s.T * s.heads()), scratch = Array<float>(rmsnorm_scratch(dev, 2 * s.D));
    Array<float> dwq = Array<float>(std::vector<float>(s.D, 1)), dwk = Array<float>(std::vector<float>(s.D, 2));

    QkOp(Dev dev, const QkInputs<X> &in) : dev(dev), s(in.s), wq(in.wq), wk(in.wk) {}

    Rows forward(const Rows &qkv, const QkAngles &angles, bool norms = true) {
        Array<X> x(qkv);
        Array<float> table(angles.table);
        Array<int32_t> pos(angles.doc_pos);
        X *const none = nullptr;
        if (norms)
            qk_norm_rope_forward(dev, x.data(), raw.data(), rstd.data(), wq.data(), wk.data(), table.data(), pos.data(), s.T, s.H,
                                 s.KV, s.D, s.D, float(eps), float(s.w0));
        else
            qk_norm_rope_forward(dev, x.data(), none, nullptr, none, none, table.data(), pos.data(), s.T, s.H, s.KV, s.D, s.D,
                                 float(eps));
        return x.values();
    }
    Rows backward(const Rows &dqkv, const QkAngles &angles, bool norms = true) {
        Array<X> d(dqkv);
        Array<float> table(angles.table);
        Array<int32_t> pos(angles.doc_pos);
        X *const none = nullptr;
        if (norms)
            qk_norm_rope_backward(dev, d.data(), dwq.data(), dwk.data(), scratch.data(), raw.data(), wq.data(), wk.data(),
                                  rstd.data(), table.data(), pos.data(), s.T, s.H, s.KV, s.D, s.D, float(s.w0));
        else
            qk_norm_rope_backward(dev, d.data(), nullptr, nullptr, nullptr, none, none, none, nullptr, table.data(), pos.data(),
                                  s.T, s.H, s.KV, s.D, s.D);
        return d.values();
    }
};

template <class Dev> struct QkNormRope : testing::Test {};
TYPED_TEST_SUITE(QkNormRope, Devices);

TYPED_TEST(QkNormRope, EqualsReferenceAndAccumulates) {
    using X = typename TypeParam::X;
    for (const QkSizes &s : sizes) {
        const QkInputs<X> in = {s};
        const Vector normed = qk_norm_reference(widen(in.qkv), in.w, s, eps), want = rope_reference(normed, s, in.angles, 1);
        const QkGradient gradient = qk_norm_rope_backward_reference(widen(in.dqkv), widen(in.qkv), in.w, s, in.angles, eps);
        printf(" T %zu, H %zu, KV %zu, D %zu\n", s.T, s.H, s.KV, s.D);
        SameBits same;
        for_each_order<TypeParam>([&](TypeParam dev) {
            QkOp op(dev, in);
            const auto qkv = op.forward(in.qkv, in.angles);
            expect_close("qkv", qkv, want, qk_norm_rope_error<X>(s, gather_heads(normed, s)));
            expect_value_heads_equal(qkv, in.qkv, s);
            EXPECT_EQ(widen(op.raw.values()), gather_heads(widen(in.qkv), s));
            const auto dqkv = op.backward(in.dqkv, in.angles);
            op.backward(in.dqkv, in.angles);
            expect_close("dqkv", dqkv, gradient.dqkv, qk_norm_rope_dx_error(in, gradient, eps));
            expect_value_heads_equal(dqkv, in.dqkv, s);
            expect_dw_twice(op.dwq.values(), false, in, gradient);
            expect_dw_twice(op.dwk.values(), true, in, gradient);
            same(qkv, op.rstd.values(), dqkv, op.dwq.values(), op.dwk.values());
        });
    }
}

// Without weights it is rope, bit for bit; and with them the norm, which is the op with angles of 0, and rope after it, or before it.
TYPED_TEST(QkNormRope, IsTheNormAndRopeBitForBit) {
    using X = typename TypeParam::X;
    for (const QkSizes &s : sizes) {
        const QkInputs<X> in = {s};
        const QkAngles still = no_angles(s);
        for_each_order<TypeParam>([&](TypeParam dev) {
            QkOp fused(dev, in), apart(dev, in);
            Array<X> x(in.qkv), d(in.dqkv);
            Array<float> table(in.angles.table);
            Array<int32_t> pos(in.angles.doc_pos);
            rope_forward(dev, x.data(), table.data(), pos.data(), s.T, s.heads(), s.D, s.D, s.width());
            rope_backward(dev, d.data(), table.data(), pos.data(), s.T, s.heads(), s.D, s.D, s.width());
            EXPECT_EQ(widen(fused.forward(in.qkv, in.angles, false)), widen(x.values()));
            EXPECT_EQ(widen(fused.backward(in.dqkv, in.angles, false)), widen(d.values()));

            SameBits forward, backward;
            forward(fused.forward(in.qkv, in.angles), fused.raw.values(), fused.rstd.values());
            forward(apart.forward(apart.forward(in.qkv, still), in.angles, false), apart.raw.values(), apart.rstd.values());
            backward(fused.backward(in.dqkv, in.angles), fused.dwq.values(), fused.dwk.values());
            backward(apart.backward(d.values(), still), apart.dwq.values(), apart.dwk.values());
        });
    }
}

// A weight comes after others in one flat array: nothing says that it begins at a multiple of 16 bytes.
TYPED_TEST(QkNormRope, WeightsThatAreNotAligned) {
    using X = typename TypeParam::X;
    const QkInputs<X> in = {{3, 2, 1, 16}};
    const QkSizes &s = in.s;
    std::vector<X> both = {X(0.0f)};
    both.insert(both.end(), in.wq.begin(), in.wq.end());
    both.insert(both.end(), in.wk.begin(), in.wk.end());
    const Vector normed = qk_norm_reference(widen(in.qkv), in.w, s, eps);
    Array<X> x(in.qkv), raw(s.T * s.heads() * s.D), w(both);
    Array<float> rstd(s.T * s.heads()), table(in.angles.table);
    Array<int32_t> pos(in.angles.doc_pos);
    const X *wq = w.data() + 1, *wk = wq + s.D;
    qk_norm_rope_forward(any_device<TypeParam>(), x.data(), raw.data(), rstd.data(), wq, wk, table.data(), pos.data(), s.T, s.H,
                         s.KV, s.D, s.D, float(eps));
    expect_close("qkv", x.values(), rope_reference(normed, s, in.angles, 1), qk_norm_rope_error<X>(s, gather_heads(normed, s)));
}
