#include "../../llmc/ops/causal_conv.h"

#include "../finite_difference.h"
#include "../reference_causal_conv.h"
#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/causal_conv.cuh"
#endif

static std::vector<int32_t> positions_of(const std::vector<size_t> &documents) {
    std::vector<int32_t> out;
    for (const size_t length : documents)
        for (size_t i = 0; i < length; i++) out.push_back(int32_t(i));
    return out;
}

struct ConvCase {
    std::vector<size_t> documents;
    size_t C;
};
// Documents shorter than the filter; one run of tokens, and several; a slice of channels, and several; no whole vector.
static const ConvCase conv_cases[] = {{{1}, 8}, {{3}, 24}, {{4, 1, 2, 5}, 32}, {{63, 3}, 13}, {{64, 65, 1}, 40}, {{5, 125}, 264}};

template <class X> struct ConvInputs {
    std::vector<int32_t> doc_pos;
    std::vector<X> x, w, dout;
    ConvInputs(const ConvCase &a)
        : doc_pos(positions_of(a.documents)),
          x(random_values<X>(doc_pos.size() * a.C, 1)),
          w(random_values<X>(a.C * conv_taps, 2, 0.7)),
          dout(random_values<X>(doc_pos.size() * a.C, 3)) {}
};

template <class X> struct ConvResult {
    std::vector<X> out, dx;
    std::vector<float> dw;  // began with 3; two passes added to it
};

template <class Dev, class X = typename Dev::X> ConvResult<X> run_conv(Dev dev, const ConvInputs<X> &in, size_t C) {
    const size_t T = in.doc_pos.size();
    Array<X> x(in.x), w(in.w), dout(in.dout), out(T * C), dx(T * C);
    Array<int32_t> doc_pos(in.doc_pos);
    Array<float> dw(std::vector<float>(C * conv_taps, 3)), scratch(causal_conv_scratch(dev, C));
    causal_conv_forward(dev, out.data(), x.data(), w.data(), doc_pos.data(), T, C);
    for (int pass = 0; pass < 2; pass++)
        causal_conv_backward(dev, dx.data(), dw.data(), scratch.data(), dout.data(), x.data(), w.data(), doc_pos.data(), T, C);
    return {out.values(), dx.values(), dw.values()};
}

TEST(ConvReference, BackwardEqualsFiniteDifferences) {
    const ConvCase a{{4, 2, 1, 5}, 3};
    const ConvInputs<float> in(a);
    const auto x = widen(in.x), w = widen(in.w), dout = widen(in.dout);
    const ConvReference r = conv_reference(dout, x, w, in.doc_pos, a.C);
    const auto out = [&](const auto &at_x, const auto &at_w) { return conv_reference(dout, at_x, at_w, in.doc_pos, a.C).out; };
    expect_close("dx", r.dx, finite_difference([&](const auto &v) { return out(v, w); }, x, dout), 1e-8);
    expect_close("dw", r.dw, finite_difference([&](const auto &v) { return out(x, v); }, w, dout), 1e-8);
}

template <class Dev> struct CausalConv : testing::Test {};
TYPED_TEST_SUITE(CausalConv, Devices);

TYPED_TEST(CausalConv, EqualsReference) {
    using X = typename TypeParam::X;
    for (const ConvCase &a : conv_cases) {
        const ConvInputs<X> in(a);
        ConvReference want = conv_reference(widen(in.dout), widen(in.x), widen(in.w), in.doc_pos, a.C);
        for (double &d : want.dw) d = 3 + 2 * d;
        printf(" T %zu, C %zu\n", in.doc_pos.size(), a.C);
        SameBits same;
        for_each_order<TypeParam>([&](TypeParam dev) {
            const auto got = run_conv(dev, in, a.C);
            expect_close("out", got.out, want.out, want.out_error + unit_roundoff<X> * largest(want.out));
            expect_close("dx", got.dx, want.dx, want.dx_error + unit_roundoff<X> * largest(want.dx));
            expect_close("dw", got.dw, want.dw, 2 * want.dw_error + 4 * unit_roundoff<float> * largest(want.dw));
            same(got.out, got.dx, got.dw);
        });
    }
}

// A frozen filter gets no gradient.
TYPED_TEST(CausalConv, FrozenFilter) {
    using X = typename TypeParam::X;
    const ConvCase a{{5, 3}, 16};
    const ConvInputs<X> in(a);
    const size_t T = in.doc_pos.size();
    Array<X> x(in.x), w(in.w), dout(in.dout), dx(T * a.C);
    Array<int32_t> doc_pos(in.doc_pos);
    Array<float> scratch(causal_conv_scratch(any_device<TypeParam>(), a.C));
    causal_conv_backward(any_device<TypeParam>(), dx.data(), nullptr, scratch.data(), dout.data(), x.data(), w.data(),
                         doc_pos.data(), T, a.C);
    EXPECT_EQ(widen(dx.values()), widen(run_conv(any_device<TypeParam>(), in, a.C).dx));
}

// NaN in a document reaches no other document.
TYPED_TEST(CausalConv, OtherDocumentsChangeNoBit) {
    using X = typename TypeParam::X;
    const ConvCase a{{2, 40, 1, 7}, 24};
    const size_t begin = 2, end = 42;
    const ConvInputs<X> in(a);
    auto poisoned = in;
    for (size_t i = begin * a.C; i < end * a.C; i++) poisoned.x[i] = poisoned.dout[i] = X(NAN);
    const auto want = run_conv(any_device<TypeParam>(), in, a.C), got = run_conv(any_device<TypeParam>(), poisoned, a.C);
    for (size_t t = 0; t < in.doc_pos.size(); t++)
        for (size_t i = t * a.C; i < (t + 1) * a.C; i++) {
            const bool inside = t >= begin && t < end;
            ASSERT_EQ(std::isnan(float(got.out[i])), inside) << t;
            ASSERT_EQ(std::isnan(float(got.dx[i])), inside) << t;
            ASSERT_TRUE(inside || (float(got.out[i]) == float(want.out[i]) && float(got.dx[i]) == float(want.dx[i]))) << t;
        }
}
