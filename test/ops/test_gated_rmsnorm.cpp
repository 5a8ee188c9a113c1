#include "../../llmc/ops/gated_rmsnorm.h"

#include <array>

#include "../finite_difference.h"
#include "../reference_gated_rmsnorm.h"
#include "../reference_gelu.h"
#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/gated_rmsnorm.cuh"
#endif

static const double gated_eps = 0.125;  // large enough to show where the op omits it

TEST(GatedRmsNormReference, BackwardEqualsFiniteDifferences) {
    const size_t T = 3, C = 7, n = T * C;
    const auto x = widen(random_values<float>(n, 1)), z = widen(random_values<float>(n, 2)),
               dout = widen(random_values<float>(n, 4));
    const auto w = widen(random_values<float>(C, 3, 0.1, 1));
    const auto got = gated_rmsnorm_backward_reference(dout, x, z, w, T, C, gated_eps);
    const auto out = [&](const auto &x, const auto &z, const auto &w) {
        return gated_rmsnorm_reference(x, z, w, T, C, gated_eps);
    };
    expect_close("dx", got.norm.dx, finite_difference([&](const auto &v) { return out(v, z, w); }, x, dout), 1e-8);
    expect_close("dz", got.dz, finite_difference([&](const auto &v) { return out(x, v, w); }, z, dout), 1e-8);
    expect_close("dw", got.norm.dw, finite_difference([&](const auto &v) { return out(x, z, v); }, w, dout), 1e-8);
}

template <class Dev> struct GatedRmsNorm : testing::Test {};
TYPED_TEST_SUITE(GatedRmsNorm, Devices);

// One row; a vector for each lane; more; no vectors; runs of several rows.
TYPED_TEST(GatedRmsNorm, EqualsReferenceAlsoInPlace) {
    using X = typename TypeParam::X;
    for (const auto &[T, C] : {std::array<size_t, 2>{1, 8}, {37, 128}, {9, 136}, {19, 77}, {1300, 16}})
        for (const double w0 : {0, 1}) {
            const size_t n = T * C;
            const auto x = random_values<X>(n, 1), z = random_values<X>(n, 2, 2), dout = random_values<X>(n, 4);
            const auto w = random_values<X>(C, 3, 0.1, 1 - w0);
            auto full = widen(w);
            for (double &v : full) v += w0;
            const auto want = gated_rmsnorm_reference(widen(x), widen(z), full, T, C, gated_eps);
            const auto gradient = gated_rmsnorm_backward_reference(widen(dout), widen(x), widen(z), full, T, C, gated_eps);
            auto want_dw = gradient.norm.dw;
            for (double &d : want_dw) d = 3 + 2 * d;
            const NormShape shape{T, C, float(gated_eps), float(w0)};
            printf(" T %zu, C %zu\n", T, C);
            SameBits same;
            for_each_order<TypeParam>([&, T = T, C = C](TypeParam dev) {
                Array<X> d_x(x), d_z(z), d_w(w), d_dout(dout), out(n), dx(n), dz(n);
                Array<float> dw(std::vector<float>(C, 3)), scratch(gated_rmsnorm_scratch(dev, C));
                gated_rmsnorm_forward(dev, out.data(), d_x.data(), d_z.data(), d_w.data(), shape);
                gated_rmsnorm_backward(dev, dx.data(), dz.data(), dw.data(), scratch.data(), d_dout.data(), d_x.data(),
                                       d_z.data(), d_w.data(), shape);
                expect_close("out", out.values(), want, gated_rmsnorm_error<X>(C, want));
                expect_close("dx", dx.values(), gradient.norm.dx, gated_rmsnorm_error<X>(C, gradient.norm.dx));
                expect_close("dz", dz.values(), gradient.dz, gated_rmsnorm_dz_error<X>(C, gradient));
                same(out.values(), dx.values(), dz.values());
                Array<X> again(z);
                gated_rmsnorm_forward(dev, again.data(), d_x.data(), again.data(), d_w.data(), shape);
                gated_rmsnorm_backward(dev, d_dout.data(), d_z.data(), dw.data(), scratch.data(), d_dout.data(), d_x.data(),
                                       d_z.data(), d_w.data(), shape);
                same(again.values(), d_dout.values(), d_z.values());
                expect_close("dw", dw.values(), want_dw,
                             2 * rmsnorm_dw_error(T, C + 8, gradient.norm) + 4 * unit_roundoff<float> * largest(want_dw));
                gated_rmsnorm_backward(dev, dx.data(), dz.data(), nullptr, scratch.data(), dx.data(), d_x.data(), dz.data(),
                                       d_w.data(),
                                       shape);  // frozen
            });
        }
}

TYPED_TEST(GatedRmsNorm, ExtremeGates) {  // rows of one channel, normed to 1
    using X = typename TypeParam::X;
    const size_t n = extreme_inputs.size();
    const std::vector<X> one(n, X(1.0f));
    Array<X> z(std::vector<X>(extreme_inputs.begin(), extreme_inputs.end())), x(one), dout(one), w(std::vector<X>(1, X(1.0f)));
    Array<X> out(n), dx(n), dz(n);
    Array<float> scratch(gated_rmsnorm_scratch(any_device<TypeParam>(), 1));
    const NormShape shape{n, 1, 0};
    gated_rmsnorm_forward(any_device<TypeParam>(), out.data(), x.data(), z.data(), w.data(), shape);
    gated_rmsnorm_backward(any_device<TypeParam>(), dx.data(), dz.data(), nullptr, scratch.data(), dout.data(), x.data(),
                           z.data(), w.data(), shape);
    expect_extremes(out.values(), dz.values(), 4 * unit_roundoff<float>);  // of rsqrt(1), which GPUs approximate
}
