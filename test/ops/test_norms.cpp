// rmsnorm and layernorm, which share a contract, and their fusion with residual sums.
#include "../../llmc/ops/layernorm.h"
#include "../../llmc/ops/residual.h"
#include "../../llmc/ops/rmsnorm.h"
#include "../finite_difference.h"
#include "../reference_layernorm.h"
#include "../reference_rmsnorm.h"
#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/layernorm.cuh"
#include "../../llmc/ops/residual.cuh"
#include "../../llmc/ops/rmsnorm.cuh"
#endif

using Vector = std::vector<double>;

static const double eps = 0.125;  // large enough to show where an op omits it

TEST(NormReference, BackwardEqualsFiniteDifferences) {
    const size_t T = 3, C = 7;
    const Vector x = widen(random_values<float>(T * C, 1)), w = widen(random_values<float>(C, 2, 0.1, 1));
    const Vector bias = widen(random_values<float>(C, 3)), dout = widen(random_values<float>(T * C, 4));
    const auto expect = [&](const char *what, const Vector &got, const Vector &at, auto forward) {
        expect_close(what, got, finite_difference(forward, at, dout), 1e-8);
    };
    const RmsNormGradient rms = rmsnorm_backward_reference(dout, x, w, T, C, eps);
    expect("rmsnorm, dx", rms.dx, x, [&](const Vector &v) { return rmsnorm_reference(v, w, T, C, eps); });
    expect("rmsnorm, dw", rms.dw, w, [&](const Vector &v) { return rmsnorm_reference(x, v, T, C, eps); });
    const LayerNormGradient layer = layernorm_backward_reference(dout, x, w, T, C, eps);
    expect("layernorm, dx", layer.dx, x, [&](const Vector &v) { return layernorm_reference(v, w, bias, T, C, eps).out; });
    expect("layernorm, dw", layer.dw, w, [&](const Vector &v) { return layernorm_reference(x, v, bias, T, C, eps).out; });
    expect("layernorm, dbias", layer.dbias, bias, [&](const Vector &v) { return layernorm_reference(x, w, v, T, C, eps).out; });
}

// ---- one interface to both ops

struct Rows {
    size_t T, C;
    double mean = 0, w0 = 0;
};

template <class X> struct NormInputs {
    Rows s;
    std::vector<X> x = random_values<X>(s.T * s.C, 1, 1, s.mean), w = random_values<X>(s.C, 2, 0.1, 1 - s.w0),
                   bias = random_values<X>(s.C, 3), dout = random_values<X>(s.T * s.C, 4),
                   dresidual = random_values<X>(s.T * s.C, 5);

    Vector weights() const {  // w0 + w
        Vector out = widen(w);
        for (double &v : out) v += s.w0;
        return out;
    }
};

template <class X> std::vector<X> sum_of(const std::vector<X> &x, const std::vector<X> &y) {  // rounded once
    std::vector<X> out;
    for (size_t i = 0; i < x.size(); i++) out.push_back(X(float(x[i]) + float(y[i])));
    return out;
}
template <class X> Vector plus(Vector x, const std::vector<X> &y) {
    for (size_t i = 0; i < x.size(); i++) x[i] += double(float(y[i]));
    return x;
}

// `got` began with 3, and two backward passes added to it; `allowed` is the error of one sum.
static void expect_added_twice(const char *what, const std::vector<float> &got, Vector want, double allowed) {
    for (double &d : want) d = 3 + 2 * d;
    expect_close(what, got, want, 2 * allowed + 4 * unit_roundoff<float> * largest(want));
}

static std::vector<float> joined(std::vector<float> a, const std::vector<float> &b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

// The arrays of rmsnorm or, if the rows are centred, of layernorm, in the device's memory.
template <class Dev, bool centred> struct NormOp {
    using Device = Dev;
    using X = typename Dev::X;
    static constexpr bool is_centred = centred;
    // One token; vectors, the last of them by few lanes; no vectors; runs of three tokens; all blocks, with runs of 8 and 9 tokens. rmsnorm: weights
    // with an added 1, and rows above 48 KB. layernorm: few channels, one channel, GPT-2, and rows that leave a block memory for one warp.
    static std::vector<Rows> sizes() {
        std::vector<Rows> all = {{1, 8}, {37, 72}, {19, 77}, {150, 77}, {2100, 24}};
        const std::vector<Rows> of_rmsnorm = {{37, 72, 0, 1}, {2, 24600, 0, 1}},
                                of_layernorm = {{7, 13}, {5, 1}, {65, 768}, {3, 1600}, {2, 12400}};
        const std::vector<Rows> &more = centred ? of_layernorm : of_rmsnorm;
        all.insert(all.end(), more.begin(), more.end());
        return all;
    }

    Dev dev;
    size_t T, C;
    NormShape shape;
    Array<X> w, bias;
    Array<float> mean = Array<float>(T), rstd = Array<float>(T), dw = Array<float>(std::vector<float>(C, 3)),
                 dbias = Array<float>(dw.values());
    Array<float> scratch = Array<float>(centred ? layernorm_scratch(dev, C) : rmsnorm_scratch(dev, C));

    NormOp(Dev dev, const NormInputs<X> &in)
        : dev(dev), T(in.s.T), C(in.s.C), shape{T, C, float(eps), float(in.s.w0)}, w(in.w), bias(in.bias) {}

    LayerNormStats stats() { return {mean.data(), rstd.data()}; }
    LayerNormWeights<const X> weights() { return {w.data(), bias.data()}; }

    void forward(X *out, const X *x) {
        if (centred) layernorm_forward(dev, out, stats(), x, weights(), shape);
        else rmsnorm_forward(dev, out, rstd.data(), x, w.data(), shape);
    }
    void residual_forward(X *sum, X *out, const X *x, const X *y) {
        if (centred) residual_layernorm_forward(dev, sum, out, stats(), x, y, weights(), shape);
        else residual_rmsnorm_forward(dev, sum, out, rstd.data(), x, y, w.data(), shape);
    }
    void backward(X *dx, const X *dresidual, const X *dout, const X *x) {
        const LayerNormWeights<float> dweights{dw.data(), dbias.data()};
        if (centred) layernorm_backward(dev, dx, dweights, scratch.data(), dresidual, dout, x, w.data(), stats(), shape);
        else rmsnorm_backward(dev, dx, dw.data(), scratch.data(), dresidual, dout, x, w.data(), rstd.data(), shape);
    }
    std::vector<float> statistics() const { return joined(mean.values(), rstd.values()); }
    std::vector<float> weight_gradients() const { return joined(dw.values(), dbias.values()); }

    void expect_forward(const std::vector<X> &out, const NormInputs<X> &in) const {
        if (!centred) {
            const Vector want = rmsnorm_reference(widen(in.x), in.weights(), T, C, eps);
            return expect_close("rmsnorm, out", out, want, rmsnorm_error<X>(C, want));
        }
        const LayerNormRows want = layernorm_reference(widen(in.x), widen(in.w), widen(in.bias), T, C, eps);
        expect_close("layernorm, out", out, want.out, layernorm_error<X>(want));
        expect_close("layernorm, mean", mean.values(), want.mean, layernorm_mean_error(want));
        expect_close("layernorm, rstd", rstd.values(), want.rstd, layernorm_rstd_error(want));
    }
    // `sum` is dx with the residual's gradient.
    void expect_backward(const std::vector<X> &dx, const std::vector<X> &sum, const NormInputs<X> &in) const {
        const Vector x = widen(in.x), dout = widen(in.dout);
        const auto expect = [&](const Vector &want, const Vector &want_dw, auto allowed, double dw_error) {
            expect_close("dx", dx, want, allowed(want));
            const Vector want_sum = plus(want, in.dresidual);
            expect_close("dx with residual", sum, want_sum, allowed(want_sum));
            expect_added_twice("dw", dw.values(), want_dw, dw_error);
        };
        if (!centred) {
            const RmsNormGradient want = rmsnorm_backward_reference(dout, x, in.weights(), T, C, eps);
            return expect(
                want.dx, want.dw, [&](const Vector &v) { return rmsnorm_error<X>(C, v); }, rmsnorm_dw_error(T, C, want));
        }
        const Vector w = widen(in.w);
        const LayerNormRows rows = layernorm_reference(x, w, widen(in.bias), T, C, eps);
        const LayerNormGradient want = layernorm_backward_reference(dout, x, w, T, C, eps);
        expect(
            want.dx, want.dw, [&](const Vector &v) { return layernorm_dx_error<X>(C, rows, dout, w, v); },
            layernorm_dw_error(T, rows, want));
        expect_added_twice("dbias", dbias.values(), want.dbias, layernorm_dbias_error(T, want));
    }
};

// ---- the contract

template <class F32, class Bf16>
using OpsOn = testing::Types<NormOp<F32, false>, NormOp<Bf16, false>, NormOp<F32, true>, NormOp<Bf16, true>>;
#ifdef CUDA_HALF
using NormOps = OpsOn<CudaF32, CudaBf16>;
#else
using NormOps = OpsOn<CpuF32, CpuBf16>;
#endif
template <class Op> struct Norms : testing::Test {
    // layernorm also has rows around 100, where mean(x^2) - mean(x)^2 in float would have a relative error of a thousandth.
    static std::vector<Rows> rows() {
        std::vector<Rows> out = Op::sizes();
        for (const Rows &s : Op::sizes())
            if (Op::is_centred) out.push_back({s.T, s.C, 100, s.w0});
        return out;
    }
};
TYPED_TEST_SUITE(Norms, NormOps);

TYPED_TEST(Norms, ForwardEqualsReferenceAlsoInPlace) {
    using X = typename TypeParam::X;
    for (const Rows &s : this->rows()) {
        const NormInputs<X> in{s};
        printf(" T %zu, C %zu, rows around %g\n", s.T, s.C, s.mean);
        SameBits same;
        for_each_order<typename TypeParam::Device>([&](auto dev) {
            TypeParam op(dev, in);
            Array<X> x(in.x), out(s.T * s.C);
            op.forward(out.data(), x.data());
            op.expect_forward(out.values(), in);
            same(out.values(), op.statistics());
            if (s.T == 37) {  // rows that are multiples of a vector, but not aligned
                std::vector<X> behind_one = in.x;
                behind_one.insert(behind_one.begin(), X(0.0f));
                Array<X> odd(behind_one);
                op.forward(out.data(), odd.data() + 1);
                op.expect_forward(out.values(), in);
            }
            op.forward(x.data(), x.data());
            same(x.values(), op.statistics());
        });
    }
}

// Two passes add to the gradients of weights, without and with the residual's gradient.
TYPED_TEST(Norms, BackwardEqualsReferenceAndAccumulates) {
    using X = typename TypeParam::X;
    for (const Rows &s : this->rows()) {
        if (s.mean != 0 && s.C != 768) continue;
        const NormInputs<X> in{s};
        printf(" T %zu, C %zu, rows around %g\n", s.T, s.C, s.mean);
        SameBits same;
        for_each_order<typename TypeParam::Device>([&](auto dev) {
            TypeParam op(dev, in);
            Array<X> x(in.x), dout(in.dout), dresidual(in.dresidual), dx(s.T * s.C), sum(s.T * s.C);
            op.forward(dx.data(), x.data());
            op.backward(dx.data(), nullptr, dout.data(), x.data());
            op.backward(sum.data(), dresidual.data(), dout.data(), x.data());
            op.expect_backward(dx.values(), sum.values(), in);
            same(dx.values(), sum.values(), op.weight_gradients());
            if (s.T != 37 && s.T != 150) return;  // dx overwrites dout, and the residual's gradient
            Array<X> onto_dout(in.dout);
            op.backward(onto_dout.data(), dresidual.data(), onto_dout.data(), x.data());
            op.backward(dresidual.data(), dresidual.data(), dout.data(), x.data());
            for (const auto &onto : {onto_dout.values(), dresidual.values()}) EXPECT_EQ(widen(onto), widen(sum.values()));
        });
    }
}

// The fused op has the bits of the residual sum followed by the norm, also if the sum overwrites x or y, or out overwrites y.
TYPED_TEST(Norms, ResidualAndNormInOne) {
    using X = typename TypeParam::X;
    for (const Rows &s : {Rows{37, 72}, {5, 77}, {150, 77}, {37, 72, 0, 1}}) {
        const NormInputs<X> in{s};
        SameBits same;
        for_each_order<typename TypeParam::Device>([&](auto dev) {
            TypeParam op(dev, in);
            Array<X> sum(sum_of(in.x, in.dout)), out(s.T * s.C);
            op.forward(out.data(), sum.data());
            same(sum.values(), out.values(), op.statistics());
            for (int onto = 0; onto < 4; onto++) {  // overwrites nothing, x by sum, y by sum, y by out
                Array<X> x(in.x), y(in.dout), apart(s.T * s.C), normed(s.T * s.C);
                Array<X> &sums = onto == 1 ? x : onto == 2 ? y : apart, &outs = onto == 3 ? y : normed;
                op.residual_forward(sums.data(), outs.data(), x.data(), y.data());
                same(sums.values(), outs.values(), op.statistics());
            }
        });
    }
}

// ---- the residual sum

template <class Dev> struct Residual : testing::Test {};
TYPED_TEST_SUITE(Residual, Devices);

TYPED_TEST(Residual, SumsAlsoInPlace) {
    using X = typename TypeParam::X;
    for (const size_t n : {8 * 300, 1003, 150 * 77}) {
        const auto a = random_values<X>(n, 1), b = random_values<X>(n, 2);
        SameBits same;
        same(sum_of(a, b));
        for_each_order<TypeParam>([&](TypeParam dev) {
            Array<X> d_a(a), d_b(b), onto_b(b), out(n);
            residual_forward(dev, out.data(), d_a.data(), d_b.data(), n);
            residual_forward(dev, onto_b.data(), d_a.data(), onto_b.data(), n);
            residual_forward(dev, d_a.data(), d_a.data(), d_b.data(), n);
            for (const auto &sums : {out.values(), onto_b.values(), d_a.values()}) same(sums);
        });
    }
}
