#include "../../llmc/ops/gated_delta.h"

#include "../finite_difference.h"
#include "../reference_gated_delta.h"
#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/gated_delta.cuh"
#endif

struct DeltaCase {
    std::vector<size_t> documents;
    size_t Hk, Hv, Dk, Dv;

    DeltaShape shape() const {
        size_t T = 0;
        for (const size_t length : documents) T += length;
        return {T, Hk, Hv, Dk, Dv, 1e-6f};
    }
    std::vector<int32_t> doc_pos() const {
        std::vector<int32_t> out;
        for (const size_t length : documents)
            for (size_t i = 0; i < length; i++) out.push_back(int32_t(i));
        return out;
    }
};

enum class Decay { weak, strong, mixed };  // g near -1e-4, near -20, and from one token to the next between them

template <class X> struct DeltaInputs {
    std::vector<X> qkv, dout;
    std::vector<float> g, beta;
    DeltaInputs(const DeltaCase &a, Decay decay)
        : qkv(random_values<X>(a.shape().T * a.shape().row(), 1)),
          dout(random_values<X>(a.shape().T * a.Hv * a.Dv, 2)),
          g(random_values<float>(a.shape().T * a.Hv, 3)),
          beta(random_values<float>(g.size(), 4, 2)) {
        for (float &b : beta) b = 1 / (1 + std::exp(-b));
        for (size_t i = 0; i < g.size(); i++) {
            const float weak = -1e-4f * std::exp(g[i]), strong = -20 * (1 - 0.1f * std::abs(std::tanh(g[i])));
            g[i] = decay == Decay::weak                   ? weak
                   : decay == Decay::strong || i % 5 == 2 ? strong
                   : i % 3                                ? weak
                                                          : -0.3f * std::exp(g[i]);
        }
    }
    DeltaInputs64 wide() const { return {widen(qkv), widen(g), widen(beta), widen(dout)}; }
};

template <class X> struct DeltaResult {
    std::vector<X> out, dqkv;
    std::vector<float> dg, dbeta;
};

template <class Dev, class X = typename Dev::X> DeltaResult<X> run_delta(Dev dev, const DeltaCase &a, const DeltaInputs<X> &in) {
    const DeltaShape s = a.shape();
    Array<X> qkv(in.qkv), dout(in.dout), out(s.T * s.Hv * s.Dv), dqkv(s.T * s.row());
    Array<float> g(in.g), beta(in.beta), dg(s.T * s.Hv), dbeta(s.T * s.Hv), states(gated_delta_states(s)),
        scratch(gated_delta_scratch(dev, s));
    Array<int32_t> doc_pos(a.doc_pos());
    const DeltaGates<const float> gates{g.data(), beta.data()};
    gated_delta_forward(dev, out.data(), states.data(), scratch.data(), qkv.data(), gates, doc_pos.data(), s);
    gated_delta_backward(dev, dqkv.data(), DeltaGates<float>{dg.data(), dbeta.data()}, scratch.data(), dout.data(), qkv.data(),
                         gates, states.data(), doc_pos.data(), s);
    return {out.values(), dqkv.values(), dg.values(), dbeta.values()};
}

TEST(DeltaReference, BackwardEqualsFiniteDifferences) {
    const DeltaCase a{{5, 3}, 1, 2, 3, 4};
    const DeltaShape s = a.shape();
    const DeltaInputs64 in = DeltaInputs<float>(a, Decay::mixed).wide();
    const DeltaReference r = delta_reference(in, a.doc_pos(), s);
    const auto expect = [&](const char *what, const std::vector<double> &got, std::vector<double> DeltaInputs64::*input) {
        const auto out = [&](const std::vector<double> &v) {
            DeltaInputs64 changed = in;
            changed.*input = v;
            return delta_reference(changed, a.doc_pos(), s).out;
        };
        expect_close(what, got, finite_difference(out, in.*input, in.dout), 1e-8);
    };
    expect("dqkv", r.dqkv, &DeltaInputs64::qkv);
    expect("dg", r.dg, &DeltaInputs64::g);
    expect("dbeta", r.dbeta, &DeltaInputs64::beta);
}

template <class Dev> struct GatedDelta : testing::Test {};
TYPED_TEST_SUITE(GatedDelta, Devices);

// The elements [begin, end) of each row.
template <class V> static V columns_of(const V &values, size_t row, size_t begin, size_t end) {
    V out;
    for (size_t at = 0; at < values.size(); at += row)
        out.insert(out.end(), values.begin() + long(at + begin), values.begin() + long(at + end));
    return out;
}

template <class Dev> static void expect_reference(const DeltaCase &a, Decay decay) {
    using X = typename Dev::X;
    const DeltaShape s = a.shape();
    const DeltaInputs<X> in(a, decay);
    const DeltaReference want = delta_reference(in.wide(), a.doc_pos(), s);
    const DeltaErrors allowed = delta_errors(want, s);
    printf(" T %zu, Hk %zu, Hv %zu, Dk %zu, Dv %zu\n", s.T, s.Hk, s.Hv, s.Dk, s.Dv);
    SameBits same;
    for_each_order<Dev>([&](Dev dev) {
        const auto got = run_delta(dev, a, in);
        const auto expect_rows = [&](const char *what, size_t begin, size_t end, double error) {
            const auto wanted = columns_of(want.dqkv, s.row(), begin, end);
            expect_close(what, columns_of(got.dqkv, s.row(), begin, end), wanted, error + unit_roundoff<X> * largest(wanted));
        };
        expect_close("out", got.out, want.out, allowed.out + unit_roundoff<X> * largest(want.out));
        expect_rows("dq", 0, s.Hk * s.Dk, allowed.dq);
        expect_rows("dk", s.Hk * s.Dk, 2 * s.Hk * s.Dk, allowed.dk);
        expect_rows("dv", 2 * s.Hk * s.Dk, s.row(), allowed.dv);
        expect_close("dbeta", got.dbeta, want.dbeta, allowed.dbeta);
        std::vector<double> dg = widen(got.dg), want_dg = want.dg;
        for (size_t i = 0; i < dg.size(); i++) dg[i] /= want.decay[i], want_dg[i] /= want.decay[i];
        expect_close("dg / exp(g)", dg, want_dg, allowed.dg);
        same(got.out, got.dqkv, got.dg, got.dbeta);
    });
}

// Chunks of one token, of few, of one less than a whole one, whole, and one more; groups of 1, 2 and 3; small and large heads; kept states;
// more tokens than a window of the CUDA backward pass.
TYPED_TEST(GatedDelta, EqualsReference) {
    const std::vector<DeltaCase> cases = {
        {{1}, 2, 2, 8, 8},    {{3}, 2, 4, 8, 16}, {{4}, 2, 6, 16, 8},   {{5}, 2, 2, 24, 40},
        {{63}, 2, 4, 16, 16}, {{64}, 2, 6, 8, 8}, {{65}, 2, 2, 40, 16}, {{5, 64, 1, 65, 3}, 1, 2, 16, 24},
        {{1100}, 1, 2, 8, 8}};
    for (const DeltaCase &a : cases)
        for (const Decay decay : {Decay::weak, Decay::strong, Decay::mixed}) expect_reference<TypeParam>(a, decay);
    for (const Decay decay : {Decay::weak, Decay::mixed}) expect_reference<TypeParam>({{130}, 1, 1, 128, 128}, decay);
    expect_reference<TypeParam>({{700, 1900, 40}, 1, 1, 8, 8}, Decay::mixed);
}

// A packed row gives each document the bits that it has alone.
TYPED_TEST(GatedDelta, PackedEqualsAlone) {
    using X = typename TypeParam::X;
    const DeltaCase a{{70, 1, 64, 530, 129, 5}, 1, 2, 8, 16};
    const DeltaShape s = a.shape();
    const DeltaInputs<X> in(a, Decay::mixed);
    const auto packed = run_delta(any_device<TypeParam>(), a, in);
    size_t begin = 0;
    for (const size_t length : a.documents) {
        const auto part = [&](const auto &values, size_t row) {
            return std::vector(values.begin() + long(begin * row), values.begin() + long((begin + length) * row));
        };
        const DeltaCase one{{length}, a.Hk, a.Hv, a.Dk, a.Dv};
        DeltaInputs<X> alone(one, Decay::mixed);
        alone.qkv = part(in.qkv, s.row()), alone.dout = part(in.dout, s.Hv * s.Dv);
        alone.g = part(in.g, s.Hv), alone.beta = part(in.beta, s.Hv);
        const auto got = run_delta(any_device<TypeParam>(), one, alone);
        SCOPED_TRACE(format("the document of %zu tokens", length));
        SameBits same;
        same(got.out, got.dqkv, got.dg, got.dbeta);
        same(part(packed.out, s.Hv * s.Dv), part(packed.dqkv, s.row()), part(packed.dg, s.Hv), part(packed.dbeta, s.Hv));
        begin += length;
    }
}

// NaN in a document reaches no other document.
TYPED_TEST(GatedDelta, OtherDocumentsChangeNoBit) {
    using X = typename TypeParam::X;
    const DeltaCase a{{66, 90, 3}, 1, 1, 8, 8};
    const DeltaShape s = a.shape();
    const size_t begin = 66, end = 156;
    const DeltaInputs<X> in(a, Decay::weak);
    auto poisoned = in;
    std::fill(poisoned.qkv.begin() + long(begin * s.row()), poisoned.qkv.begin() + long(end * s.row()), X(NAN));
    std::fill(poisoned.g.begin() + long(begin), poisoned.g.begin() + long(end), NAN);
    const auto want = run_delta(any_device<TypeParam>(), a, in), got = run_delta(any_device<TypeParam>(), a, poisoned);
    const auto outside = [&](const auto &values, size_t row) {
        auto out = values;
        out.erase(out.begin() + long(begin * row), out.begin() + long(end * row));
        return out;
    };
    SameBits same;
    for (const auto &r : {want, got})
        same(outside(r.out, s.Hv * s.Dv), outside(r.dqkv, s.row()), outside(r.dg, s.Hv), outside(r.dbeta, s.Hv));
}

#ifdef CUDA_HALF
// Kernels multiply floats as sums of two bf16: for the same inputs a bf16 model has the sums of a float model to 16 bits, not to 8.
TEST(CudaGatedDelta, SumsOfBf16AreNearThoseOfFloat) {
    const DeltaCase a{{130}, 1, 1, 128, 128};
    const DeltaInputs<bf16> in(a, Decay::weak);
    DeltaInputs<float> same(a, Decay::weak);
    same.qkv.assign(in.qkv.begin(), in.qkv.end()), same.dout.assign(in.dout.begin(), in.dout.end());
    const auto got = run_delta(CudaBf16{}, a, in);
    const auto want = run_delta(CudaF32{}, a, same);
    expect_close("dbeta", got.dbeta, widen(want.dbeta), std::ldexp(largest(widen(want.dbeta)), -13));
    expect_close("dg", got.dg, widen(want.dg), std::ldexp(largest(widen(want.dg)), -13));
}
#endif
