#include "../../llmc/ops/qk_norm_rope.h"

#include "../../llmc/ops/rope_table.h"
#include "../reference_rmsnorm.h"
#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/qk_norm_rope.cuh"
#endif

using Vector = std::vector<double>;

struct QkSizes {
    size_t T, H, KV, D;
    double w0 = 0;
    size_t rotated = 0;  // channels of a head; 0: all
    size_t R() const { return rotated ? rotated : D; }
    size_t heads() const { return H + KV; }
    size_t width() const { return (H + 2 * KV) * D; }
};

struct QkAngles {
    std::vector<float> table;      // (positions, R/2, 2)
    std::vector<int32_t> doc_pos;  // (T)
};
static QkAngles some_angles(const QkSizes &s) {  // documents of 7 tokens
    QkAngles out{std::vector<float>(7 * s.R()), std::vector<int32_t>(s.T)};
    rope_table(out.table.data(), {.theta = 100, .rotated = double(s.R()) / double(s.D)}, 7, s.D);
    for (size_t t = 0; t < s.T; t++) out.doc_pos[t] = int32_t((t + 5) % 7);
    return out;
}
static QkAngles no_angles(const QkSizes &s) {  // all 0
    QkAngles out{std::vector<float>(s.R()), std::vector<int32_t>(s.T)};
    for (size_t i = 0; i < s.R(); i += 2) out.table[i] = 1;
    return out;
}

// The query heads or the key heads as rows: (T * H, D) or (T * KV, D).
static Vector heads_of(const Vector &rows, const QkSizes &s, bool key) {
    Vector out;
    for (size_t t = 0; t < s.T; t++) {
        const double *row = &rows[t * s.width() + (key ? s.H * s.D : 0)];
        out.insert(out.end(), row, row + (key ? s.KV : s.H) * s.D);
    }
    return out;
}

template <class X> struct QkInputs {
    QkSizes s;
    std::vector<X> qkv = random_values<X>(s.T * s.width(), 5), dqkv = random_values<X>(s.T * s.width(), 6);
    std::vector<X> w[2] = {random_values<X>(s.D, 7, 0.1, 1 - s.w0), random_values<X>(s.D, 8, 0.1, 2 - s.w0)};  // queries, keys
    QkAngles angles = some_angles(s);
};

template <class X> void expect_value_heads_equal(const std::vector<X> &got, const std::vector<X> &want, const QkSizes &s) {
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); i++)
        if (i % s.width() >= s.heads() * s.D) {
            ASSERT_EQ(float(got[i]), float(want[i])) << "value heads, at " << i;
        }
}

// ---- the op

static const double eps = 0.125;  // large enough to show where the op omits it

// One token; one lane per head; lanes without channels; runs of one, two and three tokens; one warp per head; more heads than a block has; 1 + weight;
// partial rotation.
// If T is odd, the weights are not aligned to 16 bytes, as in the flat array of a model's parameters.
static const QkSizes qk_sizes[] = {{1, 2, 1, 128},        {70, 5, 3, 8},        {37, 3, 2, 80}, {150, 3, 1, 24},
                                   {300, 4, 2, 64},       {9, 5, 1, 256},       {3, 35, 9, 64}, {9, 5, 1, 256, 1},
                                   {9, 5, 1, 256, 1, 64}, {37, 3, 2, 80, 0, 24}};

// The op's arrays in the device's memory. Calls work on copies of rows.
template <class Dev> struct QkOp {
    using X = typename Dev::X;
    using Rows = std::vector<X>;
    Dev dev;
    QkSizes s;
    Array<X> w, raw = Array<X>(s.T * s.heads() * s.D);
    QkWeights<const X> weights{w.data() + s.T % 2, w.data() + s.T % 2 + s.D};
    QkShape shape{s.T, s.H, s.KV, s.D, s.R(), float(eps), float(s.w0)};
    Array<float> rstd = Array<float>(s.T * s.heads()), scratch = Array<float>(rmsnorm_scratch(dev, 2 * s.D));
    Array<float> dwq = Array<float>(std::vector<float>(s.D, 1)), dwk = Array<float>(std::vector<float>(s.D, 2));

    QkOp(Dev dev, const QkInputs<X> &in) : dev(dev), s(in.s), w(joined(in)) {}
    static std::vector<X> joined(const QkInputs<X> &in) {
        std::vector<X> all(in.s.T % 2);
        for (const auto &w : in.w) all.insert(all.end(), w.begin(), w.end());
        return all;
    }

    Rows forward(const Rows &qkv, const QkAngles &angles, bool norms = true) {
        Array<X> x(qkv);
        Array<float> table(angles.table);
        Array<int32_t> pos(angles.doc_pos);
        qk_norm_rope_forward(dev, x.data(), norms ? raw.data() : nullptr, norms ? rstd.data() : nullptr,
                             norms ? weights : QkWeights<const X>{}, table.data(), pos.data(), shape);
        return x.values();
    }
    Rows backward(const Rows &dqkv, const QkAngles &angles, bool norms = true) {
        Array<X> d(dqkv);
        Array<float> table(angles.table);
        Array<int32_t> pos(angles.doc_pos);
        qk_norm_rope_backward(dev, d.data(), norms ? QkWeights<float>{dwq.data(), dwk.data()} : QkWeights<float>{},
                              norms ? scratch.data() : nullptr, norms ? raw.data() : nullptr,
                              norms ? weights : QkWeights<const X>{}, norms ? rstd.data() : nullptr, table.data(), pos.data(),
                              shape);
        return d.values();
    }
};

template <class Dev> struct QkNormRope : testing::Test {};
TYPED_TEST_SUITE(QkNormRope, Devices);

// With angles of 0. dwq began with 1 and dwk with 2; two passes add to them.
TYPED_TEST(QkNormRope, NormsEachHeadAndAccumulates) {
    using X = typename TypeParam::X;
    for (const QkSizes &s : qk_sizes) {
        const QkInputs<X> in = {s};
        const QkAngles still = no_angles(s);
        printf(" T %zu, H %zu, KV %zu, D %zu\n", s.T, s.H, s.KV, s.D);
        SameBits same;
        for_each_order<TypeParam>([&](TypeParam dev) {
            QkOp op(dev, in);
            const auto qkv = op.forward(in.qkv, still), dqkv = op.backward(in.dqkv, still);
            op.backward(in.dqkv, still);
            for (const bool key : {false, true}) {
                Vector w = widen(in.w[key]);
                for (double &v : w) v += s.w0;
                const Vector x = heads_of(widen(in.qkv), s, key), d = heads_of(widen(in.dqkv), s, key);
                const size_t rows = x.size() / s.D;
                const Vector want = rmsnorm_reference(x, w, rows, s.D, eps);
                RmsNormGradient gradient = rmsnorm_backward_reference(d, x, w, rows, s.D, eps);
                for (double &v : gradient.dw) v = 1 + key + 2 * v;
                expect_close(key ? "k" : "q", heads_of(widen(qkv), s, key), want, rmsnorm_error<X>(s.D, want));
                expect_close(key ? "dk" : "dq", heads_of(widen(dqkv), s, key), gradient.dx, rmsnorm_error<X>(s.D, gradient.dx));
                expect_close(key ? "dwk" : "dwq", (key ? op.dwk : op.dwq).values(), gradient.dw,
                             2 * rmsnorm_dw_error(rows, s.D, gradient) + 4 * unit_roundoff<float> * largest(gradient.dw));
            }
            expect_value_heads_equal(qkv, in.qkv, s);
            expect_value_heads_equal(dqkv, in.dqkv, s);
            same(qkv, op.rstd.values(), dqkv, op.dwq.values(), op.dwk.values());
        });
    }
}

// Without weights the op has rope's bits. With weights it has the bits of the norm (the op with angles of 0) and rope, in this order; backward reversed.
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
            rope_forward(dev, x.data(), table.data(), pos.data(), s.T, s.heads(), s.D, s.R(), s.width());
            rope_backward(dev, d.data(), table.data(), pos.data(), s.T, s.heads(), s.D, s.R(), s.width());
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
