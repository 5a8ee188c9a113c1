#include "../../llmc/ops/qk_norm_rope.cuh"

#include "../reference_qk_norm_rope.h"
#include "check.cuh"

using Vector = std::vector<double>;

static const double eps = 0.125;  // large enough to show where it is forgotten

// One token; a lane for a head; lanes without channels; runs of one and two tokens; a warp for a head; more heads than a block takes.
static const QkSizes sizes[] = {{1, 2, 1, 128}, {70, 5, 3, 8}, {37, 3, 2, 80}, {300, 4, 2, 64}, {9, 5, 1, 256}, {3, 35, 9, 64}};

// The arrays of the op on the device. Calls work on copies of rows.
template <class Dev> struct QkOp {
    using X = typename Dev::X;
    using Rows = std::vector<X>;
    Dev dev;
    QkSizes s;
    DeviceArray<X> wq, wk, raw = DeviceArray<X>(s.T * s.heads() * s.D);
    DeviceArray<float> rstd = DeviceArray<float>(s.T * s.heads()), scratch = DeviceArray<float>(rmsnorm_scratch(dev, 2 * s.D));
    DeviceArray<float> dwq = DeviceArray<float>(std::vector<float>(s.D, 1)), dwk = DeviceArray<float>(std::vector<float>(s.D, 2));

    QkOp(Dev dev, const QkInputs<X> &in) : dev(dev), s(in.s), wq(in.wq), wk(in.wk) {}

    Rows forward(const Rows &qkv, const QkAngles &angles, bool norms = true) {
        DeviceArray<X> x(qkv);
        DeviceArray<float> table(angles.table);
        DeviceArray<int32_t> pos(angles.doc_pos);
        qk_norm_rope_forward(dev, x.data(), raw.data(), rstd.data(), norms ? wq.data() : nullptr, norms ? wk.data() : nullptr,
                             table.data(), pos.data(), s.T, s.H, s.KV, s.D, float(eps));
        return x.values();
    }
    Rows backward(const Rows &dqkv, const QkAngles &angles, bool norms = true) {
        DeviceArray<X> d(dqkv);
        DeviceArray<float> table(angles.table);
        DeviceArray<int32_t> pos(angles.doc_pos);
        qk_norm_rope_backward(dev, d.data(), dwq.data(), dwk.data(), scratch.data(), raw.data(), norms ? wq.data() : nullptr,
                              norms ? wk.data() : nullptr, rstd.data(), table.data(), pos.data(), s.T, s.H, s.KV, s.D);
        return d.values();
    }
};

template <class Dev> struct QkNormRope : testing::Test {};
TYPED_TEST_SUITE(QkNormRope, CudaDevices);

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
            DeviceArray<X> x(in.qkv), d(in.dqkv);
            DeviceArray<float> table(in.angles.table);
            DeviceArray<int32_t> pos(in.angles.doc_pos);
            rope_forward(dev, x.data(), table.data(), pos.data(), s.T, s.heads(), s.D, s.width());
            rope_backward(dev, d.data(), table.data(), pos.data(), s.T, s.heads(), s.D, s.width());
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
    DeviceArray<X> x(in.qkv), raw(s.T * s.heads() * s.D), w(both);
    DeviceArray<float> rstd(s.T * s.heads()), table(in.angles.table);
    DeviceArray<int32_t> pos(in.angles.doc_pos);
    const X *wq = w.data() + 1, *wk = wq + s.D;
    qk_norm_rope_forward(TypeParam{}, x.data(), raw.data(), rstd.data(), wq, wk, table.data(), pos.data(), s.T, s.H, s.KV, s.D,
                         float(eps));
    expect_close("qkv", x.values(), rope_reference(normed, s, in.angles, 1), qk_norm_rope_error<X>(s, gather_heads(normed, s)));
}
