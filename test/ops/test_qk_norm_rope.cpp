#include "../../llmc/ops/qk_norm_rope.h"

#include "../../llmc/ops/rope_table.h"
#include "../reference_rmsnorm.h"
#include "../reference_rope.h"
#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/qk_norm_rope.cuh"
#endif

using Vector = std::vector<double>;

// ---- qk_norm_rope in float64: the references of rmsnorm on each head and of rope on the rows, with the bound of float's error.

struct QkSizes {
    size_t T, H, KV, D;
    double w0 = 0;
    size_t heads() const { return H + KV; }
    size_t width() const { return (H + 2 * KV) * D; }
};

struct QkAngles {
    std::vector<float> table;      // (positions, D/2, 2)
    std::vector<int32_t> doc_pos;  // (T)
};
static QkAngles some_angles(const QkSizes &s) {  // of documents of 7
    QkAngles out{std::vector<float>(7 * s.D), std::vector<int32_t>(s.T)};
    rope_table(out.table.data(), {.theta = 100}, 7, s.D);
    for (size_t t = 0; t < s.T; t++) out.doc_pos[t] = int32_t((t + 5) % 7);
    return out;
}
static QkAngles no_angles(const QkSizes &s) {  // with which nothing turns
    QkAngles out{std::vector<float>(s.D), std::vector<int32_t>(s.T)};
    for (size_t i = 0; i < s.D; i += 2) out.table[i] = 1;
    return out;
}

static Vector rope_reference(const Vector &x, const QkSizes &s, const QkAngles &angles, double sign) {
    return rope_reference(x, angles.table, angles.doc_pos, s.heads(), s.D, s.D, s.width(), sign);
}

// A row of D for each query and key head: (T, H + KV, D), without the value heads.
static Vector gather_heads(const Vector &rows, const QkSizes &s) {
    Vector out;
    for (size_t t = 0; t < s.T; t++) {
        const auto row = rows.begin() + ptrdiff_t(t * s.width());
        out.insert(out.end(), row, row + ptrdiff_t(s.heads() * s.D));
    }
    return out;
}

// Returns `rows` with each query head and key head replaced by op(head, w), where w is the weight of its norm.
template <class Op> Vector each_head(Vector rows, const QkSizes &s, Op op) {
    for (size_t t = 0; t < s.T; t++)
        for (size_t h = 0; h < s.heads(); h++) {
            const auto at = rows.begin() + ptrdiff_t(t * s.width() + h * s.D);
            const Vector out = op(Vector(at, at + ptrdiff_t(s.D)), t * s.heads() + h, h >= s.H);
            std::copy(out.begin(), out.end(), at);
        }
    return rows;
}

struct QkWeights {
    Vector w[2];  // of queries, of keys: (D) each
};

template <class X> struct QkInputs {
    QkSizes s;
    std::vector<X> qkv = random_values<X>(s.T * s.width(), 5), dqkv = random_values<X>(s.T * s.width(), 6);
    std::vector<X> wq = random_values<X>(s.D, 7, 0.1, 1 - s.w0), wk = random_values<X>(s.D, 8, 0.1, 2 - s.w0);
    QkWeights w = {{weights(wq), weights(wk)}};
    QkAngles angles = some_angles(s);

    Vector weights(const std::vector<X> &stored) const {  // w0 + w
        Vector out = widen(stored);
        for (double &v : out) v += s.w0;
        return out;
    }
};

static Vector qk_norm_reference(const Vector &qkv, const QkWeights &w, const QkSizes &s, double eps) {
    return each_head(qkv, s, [&](const Vector &x, size_t, bool key) { return rmsnorm_reference(x, w.w[key], 1, s.D, eps); });
}

struct QkGradient {
    Vector dqkv;             // (T, (H + 2 KV) * D)
    Vector dw[2], terms[2];  // of wq, of wk: as in RmsNormGradient
};

static QkGradient qk_norm_rope_backward_reference(const Vector &dqkv, const Vector &qkv, const QkWeights &w, const QkSizes &s,
                                                  const QkAngles &angles, double eps) {
    const Vector zeros(s.D), raw = gather_heads(qkv, s);
    QkGradient out{{}, {zeros, zeros}, {zeros, zeros}};
    out.dqkv = each_head(rope_reference(dqkv, s, angles, -1), s, [&](const Vector &d, size_t i, bool key) {
        const Vector x(raw.begin() + ptrdiff_t(i * s.D), raw.begin() + ptrdiff_t((i + 1) * s.D));
        const RmsNormGradient g = rmsnorm_backward_reference(d, x, w.w[key], 1, s.D, eps);
        for (size_t c = 0; c < s.D; c++) out.dw[key][c] += g.dw[c], out.terms[key][c] += g.dw_terms[c];
        return g.dx;
    });
    return out;
}

// Rounded products of a rotation of values up to `size`: a pair's two, then once to X.
template <class X> double turn_error(double size) { return (3 * unit_roundoff<float> + unit_roundoff<X>)*2 * size; }

// Each of a pair may be off by the norm's error before it turns.
template <class X> double qk_norm_rope_error(const QkSizes &s, const Vector &normed) {
    return 2 * rmsnorm_error<X>(s.D, normed) + turn_error<X>(largest(normed));
}

// The norm takes an error e of its input to at most rstd * w * e * (1 + |xh|): the mean of |xh| is below 1.
template <class X> double qk_norm_rope_dx_error(const QkInputs<X> &in, const QkGradient &want, double eps) {
    const Vector raw = gather_heads(widen(in.qkv), in.s);
    const double rstd = largest(rmsnorm_rstd(raw, in.s.T * in.s.heads(), in.s.D, eps));
    const double w = std::max(largest(in.w.w[0]), largest(in.w.w[1]));
    return rmsnorm_error<X>(in.s.D, want.dqkv) + turn_error<X>(largest(widen(in.dqkv))) * rstd * w * (1 + largest(raw) * rstd);
}

// Rounding to X is relative to a term; a turn's products are to the larger of a pair.
template <class X> double qk_norm_rope_dw_error(const QkInputs<X> &in, const QkGradient &want, bool key) {
    const double u = unit_roundoff<float>, rows = double(in.s.T * (key ? in.s.KV : in.s.H)), D = double(in.s.D);
    return ((rows + D + 8) * u + unit_roundoff<X>)*largest(want.terms[key]) +
           6 * u * largest(widen(in.dqkv)) * rows * std::sqrt(D);  // |xh| is at most sqrt(D)
}

template <class X> void expect_value_heads_equal(const std::vector<X> &got, const std::vector<X> &want, const QkSizes &s) {
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); i++)
        if (i % s.width() >= s.heads() * s.D) {
            ASSERT_EQ(float(got[i]), float(want[i])) << "value heads, at " << i;
        }
}

// dw began with 1 (of wk with 2) and was added to twice.
template <class X> void expect_dw_twice(const std::vector<float> &dw, bool key, const QkInputs<X> &in, const QkGradient &g) {
    Vector want = g.dw[key];
    for (double &d : want) d = 1 + key + 2 * d;
    expect_close(key ? "dwk" : "dwq", dw, want, 2 * qk_norm_rope_dw_error(in, g, key) + 4 * unit_roundoff<float> * largest(want));
}

// ---- the op

static const double eps = 0.125;  // large enough to show where it is forgotten

// One token; a lane for a head; lanes without channels; runs of one, two and three tokens; a warp for a head; more heads than a block takes; 1 + weight.
static const QkSizes qk_sizes[] = {{1, 2, 1, 128},  {70, 5, 3, 8},  {37, 3, 2, 80}, {150, 3, 1, 24},
                                   {300, 4, 2, 64}, {9, 5, 1, 256}, {3, 35, 9, 64}, {9, 5, 1, 256, 1}};

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
    for (const QkSizes &s : qk_sizes) {
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
    for (const QkSizes &s : qk_sizes) {
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
