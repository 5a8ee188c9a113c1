// rmsnorm, the residual sum fused with it, and the norm of query and key heads.
#include "../../llmc/ops/rmsnorm.cuh"

#include <array>

#include "../../llmc/ops/residual.cuh"
#include "../reference_rmsnorm.h"
#include "check.cuh"

using Vector = std::vector<double>;

static const double eps = 0.125;  // large enough to show where it is forgotten

// One token; vectors, the last of them by few lanes; no vectors; all blocks, with runs of 8 and 9 tokens; rows above 48 KB.
static const std::array<size_t, 2> sizes[] = {{1, 8}, {37, 72}, {19, 77}, {2100, 24}, {2, 24600}};

template <class Dev> struct RmsNorm : testing::Test {};
TYPED_TEST_SUITE(RmsNorm, CudaDevices);

TYPED_TEST(RmsNorm, ForwardEqualsReferenceAlsoInPlace) {
    using X = typename TypeParam::X;
    for (const auto &[T, C] : sizes) {
        const auto x = random_values<X>(T * C, 1), w = random_values<X>(C, 2, 0.1, 1);
        const Vector want = rmsnorm_reference(widen(x), widen(w), T, C, eps);
        SameBits same;
        for_each_order<TypeParam>([&, T = T, C = C](TypeParam dev) {
            DeviceArray<X> d_x(x), d_w(w), out(T * C);
            DeviceArray<float> rstd(T);
            rmsnorm_forward(dev, out.data(), rstd.data(), d_x.data(), d_w.data(), T, C, float(eps));
            expect_close(format("rmsnorm_forward T %zu C %zu", T, C).c_str(), out.values(), want, rmsnorm_error<X>(C, want));
            same(out.values(), rstd.values());
            rmsnorm_forward(dev, d_x.data(), rstd.data(), d_x.data(), d_w.data(), T, C, float(eps));
            same(d_x.values(), rstd.values());
        });
    }
}

TYPED_TEST(RmsNorm, RowsThatAreNotAligned) {
    using X = typename TypeParam::X;
    const size_t T = 3, C = 16;
    const auto x = random_values<X>(1 + T * C, 1), w = random_values<X>(C, 2, 0.1, 1);
    const Vector want = rmsnorm_reference(widen(std::vector<X>(x.begin() + 1, x.end())), widen(w), T, C, eps);
    DeviceArray<X> d_x(x), d_w(w), out(T * C);
    DeviceArray<float> rstd(T);
    rmsnorm_forward(TypeParam{}, out.data(), rstd.data(), d_x.data() + 1, d_w.data(), T, C, float(eps));
    expect_close("rmsnorm_forward", out.values(), want, rmsnorm_error<X>(C, want));
}

// Twice into the same dw, without the residual's gradient and with it.
TYPED_TEST(RmsNorm, BackwardEqualsReferenceAndAccumulates) {
    using X = typename TypeParam::X;
    for (const auto &[T, C] : sizes) {
        const auto x = random_values<X>(T * C, 1), w = random_values<X>(C, 2, 0.1, 1);
        const auto dout = random_values<X>(T * C, 3), dresidual = random_values<X>(T * C, 4);
        RmsNormGradient want = rmsnorm_backward_reference(widen(dout), widen(x), widen(w), T, C, eps);
        Vector want_sum = want.dx;
        for (size_t i = 0; i < T * C; i++) want_sum[i] += double(float(dresidual[i]));
        const double dw_error = rmsnorm_dw_error(T, C, want);
        for (double &d : want.dw) d = 3 + 2 * d;
        printf(" T %zu, C %zu\n", T, C);
        SameBits same;
        for_each_order<TypeParam>([&, T = T, C = C](TypeParam dev) {
            DeviceArray<X> d_x(x), d_w(w), d_dout(dout), d_dresidual(dresidual), dx(T * C), sum(T * C);
            DeviceArray<float> rstd(T), dw(std::vector<float>(C, 3)), scratch(rmsnorm_scratch(dev, C));
            rmsnorm_forward(dev, dx.data(), rstd.data(), d_x.data(), d_w.data(), T, C, float(eps));
            const X *none = nullptr;
            rmsnorm_backward(dev, dx.data(), dw.data(), scratch.data(), none, d_dout.data(), d_x.data(), d_w.data(), rstd.data(),
                             T, C);
            rmsnorm_backward(dev, sum.data(), dw.data(), scratch.data(), d_dresidual.data(), d_dout.data(), d_x.data(),
                             d_w.data(), rstd.data(), T, C);
            expect_close("dx", dx.values(), want.dx, rmsnorm_error<X>(C, want.dx));
            expect_close("dx with residual", sum.values(), want_sum, rmsnorm_error<X>(C, want_sum));
            expect_close("dw", dw.values(), want.dw, 2 * dw_error + 4 * unit_roundoff<float> * largest(want.dw));
            same(dx.values(), sum.values(), dw.values());
        });
    }
}

TYPED_TEST(RmsNorm, BackwardMayOverwriteItsInputs) {
    using X = typename TypeParam::X;
    const size_t T = 21, C = 72;
    const auto x = random_values<X>(T * C, 1), w = random_values<X>(C, 2, 0.1, 1);
    const auto dout = random_values<X>(T * C, 3), dresidual = random_values<X>(T * C, 4);
    SameBits same;
    for_each_order<TypeParam>([&](TypeParam dev) {
        DeviceArray<X> d_x(x), d_w(w), dx(T * C);
        DeviceArray<float> rstd(T), scratch(rmsnorm_scratch(dev, C));
        rmsnorm_forward(dev, dx.data(), rstd.data(), d_x.data(), d_w.data(), T, C, float(eps));
        for (int onto = 0; onto < 3; onto++) {  // nothing, dout, dresidual
            DeviceArray<X> d_dout(dout), d_dresidual(dresidual);
            DeviceArray<float> dw(std::vector<float>(C, 0));
            DeviceArray<X> &out = onto == 0 ? dx : onto == 1 ? d_dout : d_dresidual;
            rmsnorm_backward(dev, out.data(), dw.data(), scratch.data(), d_dresidual.data(), d_dout.data(), d_x.data(),
                             d_w.data(), rstd.data(), T, C);
            same(out.values(), dw.values());
        }
    });
}

// residual_rmsnorm_forward is residual_forward and then rmsnorm_forward, bit for bit, also where sum overwrites x or y, or out y.
TYPED_TEST(RmsNorm, ResidualAndNormInOne) {
    using X = typename TypeParam::X;
    for (const auto &[T, C] : {std::array<size_t, 2>{37, 72}, {5, 77}}) {
        const auto x = random_values<X>(T * C, 1), y = random_values<X>(T * C, 2), w = random_values<X>(C, 3, 0.1, 1);
        SameBits same;
        for_each_order<TypeParam>([&, T = T, C = C](TypeParam dev) {
            DeviceArray<X> d_x(x), d_y(y), d_w(w), sum(T * C), out(T * C);
            DeviceArray<float> rstd(T);
            residual_forward(dev, sum.data(), d_x.data(), d_y.data(), T * C);
            const auto sums = sum.values();
            for (size_t i = 0; i < T * C; i++) ASSERT_EQ(float(sums[i]), float(X(float(x[i]) + float(y[i])))) << i;
            rmsnorm_forward(dev, out.data(), rstd.data(), sum.data(), d_w.data(), T, C, float(eps));
            same(sums, out.values(), rstd.values());
            for (int onto = 0; onto < 4; onto++) {  // nothing, sum on x, sum on y, out on y
                DeviceArray<X> a(x), b(y), apart(T * C), normed(T * C);
                DeviceArray<X> &s = onto == 1 ? a : onto == 2 ? b : apart, &o = onto == 3 ? b : normed;
                residual_rmsnorm_forward(dev, s.data(), o.data(), rstd.data(), a.data(), b.data(), d_w.data(), T, C, float(eps));
                same(s.values(), o.values(), rstd.values());
            }
        });
    }
}

TYPED_TEST(RmsNorm, ResidualInPlace) {
    using X = typename TypeParam::X;
    for (const size_t n : {size_t(8 * 300), size_t(1003)}) {
        const auto a = random_values<X>(n, 1), b = random_values<X>(n, 2);
        SameBits same;
        for_each_order<TypeParam>([&](TypeParam dev) {
            DeviceArray<X> d_a(a), d_b(b), out(n);
            residual_forward(dev, out.data(), d_a.data(), d_b.data(), n);
            same(out.values());
            residual_forward(dev, d_b.data(), d_a.data(), d_b.data(), n);
            same(d_b.values());
        });
    }
}

// ---- query and key heads: each is a row of its own, so the reference is the reference of rmsnorm on the heads gathered --------

template <class Dev> struct QkNorm : testing::Test {};
TYPED_TEST_SUITE(QkNorm, CudaDevices);

TYPED_TEST(QkNorm, EqualsReferenceAndAccumulates) {
    using X = typename TypeParam::X;
    const size_t KV = 2;
    for (const auto &[T, H, D] : {std::array<size_t, 3>{1, 2, 128}, {70, 3, 26}, {300, 4, 20}, {9, 2, 136}}) {
        const size_t width = (H + 2 * KV) * D;
        const auto qkv = random_values<X>(T * width, 5), dqkv = random_values<X>(T * width, 6);
        const auto wq = random_values<X>(D, 7, 0.1, 1), wk = random_values<X>(D, 8, 0.1, 2);
        const auto q = gather_heads(qkv, width, D, 0, H), k = gather_heads(qkv, width, D, H, H + KV);
        const Vector want_q = rmsnorm_reference(q, widen(wq), T * H, D, eps),
                     want_k = rmsnorm_reference(k, widen(wk), T * KV, D, eps);
        auto dq = rmsnorm_backward_reference(gather_heads(dqkv, width, D, 0, H), q, widen(wq), T * H, D, eps);
        auto dk = rmsnorm_backward_reference(gather_heads(dqkv, width, D, H, H + KV), k, widen(wk), T * KV, D, eps);
        for (double &d : dq.dw) d = 1 + 2 * d;
        for (double &d : dk.dw) d = 2 + 2 * d;
        printf(" T %zu, H %zu, KV %zu, D %zu\n", T, H, KV, D);
        SameBits same;
        for_each_order<TypeParam>([&, T = T, H = H, D = D](TypeParam dev) {
            DeviceArray<X> d_qkv(qkv), raw(T * (H + KV) * D), d_wq(wq), d_wk(wk);
            DeviceArray<float> rstd(T * (H + KV)), dwq(std::vector<float>(D, 1)), dwk(std::vector<float>(D, 2));
            DeviceArray<float> scratch(qk_norm_scratch(dev, D));
            qk_norm_forward(dev, d_qkv.data(), raw.data(), rstd.data(), d_wq.data(), d_wk.data(), T, H, KV, D, float(eps));
            const auto normed = d_qkv.values();
            expect_close("query heads", gather_heads(normed, width, D, 0, H), want_q, rmsnorm_error<X>(D, want_q));
            expect_close("key heads", gather_heads(normed, width, D, H, H + KV), want_k, rmsnorm_error<X>(D, want_k));
            EXPECT_EQ(gather_heads(normed, width, D, H + KV, H + 2 * KV), gather_heads(qkv, width, D, H + KV, H + 2 * KV));
            EXPECT_EQ(widen(raw.values()), gather_heads(qkv, width, D, 0, H + KV));

            std::vector<X> gradient;
            for (int pass = 0; pass < 2; pass++) {
                DeviceArray<X> d_dqkv(dqkv);
                qk_norm_backward(dev, d_dqkv.data(), dwq.data(), dwk.data(), scratch.data(), raw.data(), d_wq.data(), d_wk.data(),
                                 rstd.data(), T, H, KV, D);
                gradient = d_dqkv.values();
            }
            const double u = unit_roundoff<float>;
            expect_close("d query heads", gather_heads(gradient, width, D, 0, H), dq.dx, rmsnorm_error<X>(D, dq.dx));
            expect_close("d key heads", gather_heads(gradient, width, D, H, H + KV), dk.dx, rmsnorm_error<X>(D, dk.dx));
            EXPECT_EQ(gather_heads(gradient, width, D, H + KV, H + 2 * KV), gather_heads(dqkv, width, D, H + KV, H + 2 * KV));
            expect_close("dwq", dwq.values(), dq.dw, 2 * rmsnorm_dw_error(T * H, D, dq) + 4 * u * largest(dq.dw));
            expect_close("dwk", dwk.values(), dk.dw, 2 * rmsnorm_dw_error(T * KV, D, dk) + 4 * u * largest(dk.dw));
            same(normed, rstd.values(), gradient, dwq.values(), dwk.values());
        });
    }
}
