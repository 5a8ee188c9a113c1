// rmsnorm, and the residual sum fused with it.
#include "../../llmc/ops/rmsnorm.h"

#include <array>

#include "../../llmc/ops/residual.h"
#include "../finite_difference.h"
#include "../reference_rmsnorm.h"
#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/residual.cuh"
#include "../../llmc/ops/rmsnorm.cuh"
#endif

using Vector = std::vector<double>;

static const double eps = 0.125;  // large enough to show where it is forgotten

// One token; vectors, the last of them by few lanes; no vectors; runs of three tokens; all blocks, with runs of 8 and 9 tokens; rows
// above 48 KB.
static const std::array<size_t, 2> sizes[] = {{1, 8}, {37, 72}, {19, 77}, {150, 77}, {2100, 24}, {2, 24600}};

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

template <class Dev> struct RmsNorm : testing::Test {};
TYPED_TEST_SUITE(RmsNorm, Devices);

TYPED_TEST(RmsNorm, ForwardEqualsReferenceAlsoInPlace) {
    using X = typename TypeParam::X;
    for (const auto &[T, C] : sizes) {
        const auto x = random_values<X>(T * C, 1), w = random_values<X>(C, 2, 0.1, 1);
        const Vector want = rmsnorm_reference(widen(x), widen(w), T, C, eps);
        SameBits same;
        for_each_order<TypeParam>([&, T = T, C = C](TypeParam dev) {
            Array<X> d_x(x), d_w(w), out(T * C);
            Array<float> rstd(T);
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
    Array<X> d_x(x), d_w(w), out(T * C);
    Array<float> rstd(T);
    rmsnorm_forward(any_device<TypeParam>(), out.data(), rstd.data(), d_x.data() + 1, d_w.data(), T, C, float(eps));
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
            Array<X> d_x(x), d_w(w), d_dout(dout), d_dresidual(dresidual), dx(T * C), sum(T * C);
            Array<float> rstd(T), dw(std::vector<float>(C, 3)), scratch(rmsnorm_scratch(dev, C));
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
    for (const auto &[T, C] : {std::array<size_t, 2>{21, 72}, {150, 77}}) {
        const auto x = random_values<X>(T * C, 1), w = random_values<X>(C, 2, 0.1, 1);
        const auto dout = random_values<X>(T * C, 3), dresidual = random_values<X>(T * C, 4);
        SameBits same;
        for_each_order<TypeParam>([&, T = T, C = C](TypeParam dev) {
            Array<X> d_x(x), d_w(w), dx(T * C);
            Array<float> rstd(T), scratch(rmsnorm_scratch(dev, C));
            rmsnorm_forward(dev, dx.data(), rstd.data(), d_x.data(), d_w.data(), T, C, float(eps));
            for (int onto = 0; onto < 3; onto++) {  // nothing, dout, dresidual
                Array<X> d_dout(dout), d_dresidual(dresidual);
                Array<float> dw(std::vector<float>(C, 0));
                Array<X> &out = onto == 0 ? dx : onto == 1 ? d_dout : d_dresidual;
                rmsnorm_backward(dev, out.data(), dw.data(), scratch.data(), d_dresidual.data(), d_dout.data(), d_x.data(),
                                 d_w.data(), rstd.data(), T, C);
                same(out.values(), dw.values());
            }
        });
    }
}

// residual_rmsnorm_forward is residual_forward and then rmsnorm_forward, bit for bit, also where sum overwrites x or y, or out y.
TYPED_TEST(RmsNorm, ResidualAndNormInOne) {
    using X = typename TypeParam::X;
    for (const auto &[T, C] : {std::array<size_t, 2>{37, 72}, {5, 77}, {150, 77}}) {
        const auto x = random_values<X>(T * C, 1), y = random_values<X>(T * C, 2), w = random_values<X>(C, 3, 0.1, 1);
        SameBits same;
        for_each_order<TypeParam>([&, T = T, C = C](TypeParam dev) {
            Array<X> d_x(x), d_y(y), d_w(w), sum(T * C), out(T * C);
            Array<float> rstd(T);
            residual_forward(dev, sum.data(), d_x.data(), d_y.data(), T * C);
            const auto sums = sum.values();
            for (size_t i = 0; i < T * C; i++) ASSERT_EQ(float(sums[i]), float(X(float(x[i]) + float(y[i])))) << i;
            rmsnorm_forward(dev, out.data(), rstd.data(), sum.data(), d_w.data(), T, C, float(eps));
            same(sums, out.values(), rstd.values());
            for (int onto = 0; onto < 4; onto++) {  // nothing, sum on x, sum on y, out on y
                Array<X> a(x), b(y), apart(T * C), normed(T * C);
                Array<X> &s = onto == 1 ? a : onto == 2 ? b : apart, &o = onto == 3 ? b : normed;
                residual_rmsnorm_forward(dev, s.data(), o.data(), rstd.data(), a.data(), b.data(), d_w.data(), T, C, float(eps));
                same(s.values(), o.values(), rstd.values());
            }
        });
    }
}

TYPED_TEST(RmsNorm, ResidualInPlace) {
    using X = typename TypeParam::X;
    for (const size_t n : {8 * 300, 1003, 150 * 77}) {
        const auto a = random_values<X>(n, 1), b = random_values<X>(n, 2);
        SameBits same;
        for_each_order<TypeParam>([&](TypeParam dev) {
            Array<X> d_a(a), d_b(b), onto_b(b), out(n);
            residual_forward(dev, out.data(), d_a.data(), d_b.data(), n);
            same(out.values());
            residual_forward(dev, onto_b.data(), d_a.data(), onto_b.data(), n);
            same(onto_b.values());
            residual_forward(dev, d_a.data(), d_a.data(), d_b.data(), n);
            same(d_a.values());
        });
    }
}
