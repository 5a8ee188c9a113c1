#include "../llmc/ops/swiglu.h"

#include <limits>

#include "check.h"
#include "finite_difference.h"
#include "reference_swiglu.h"

using Vector = std::vector<double>;

TEST(SwigluReference, BackwardEqualsFiniteDifferences) {
    const size_t T = 2, F = 5;
    const Vector x = widen(random_values<float>(T * 2 * F, 1)), dout = widen(random_values<float>(T * F, 2));
    const Vector want = finite_difference([&](const Vector &v) { return swiglu_reference(v, T, F); }, x, dout);
    expect_close("dgate_up", swiglu_backward_reference(dout, x, T, F), want, 1e-8);
}

template <class Dev> struct Swiglu : testing::Test {
    using X = typename Dev::X;
    static constexpr size_t T = 11, F = 83;  // no multiple of any vector length
    const std::vector<X> gate_up = random_values<X>(T * 2 * F, 1, 2), dout = random_values<X>(T * F, 2);
};
TYPED_TEST_SUITE(Swiglu, CpuDevices);

TYPED_TEST(Swiglu, ForwardEqualsReference) {
    using X = typename TypeParam::X;
    const Vector want = swiglu_reference(widen(this->gate_up), this->T, this->F);
    std::vector<X> out(this->T * this->F);
    for (int threads : {1, 2, 3}) {
        swiglu_forward(make_device<TypeParam>(threads), out.data(), this->gate_up.data(), this->T, this->F);
        expect_close("swiglu_forward", out, want, swiglu_error<X>(want));
    }
}

TYPED_TEST(Swiglu, BackwardEqualsReferenceAlsoInPlace) {
    using X = typename TypeParam::X;
    const Vector want = swiglu_backward_reference(widen(this->dout), widen(this->gate_up), this->T, this->F);
    std::vector<X> apart(this->gate_up.size());
    swiglu_backward(make_device<TypeParam>(1), apart.data(), this->dout.data(), this->gate_up.data(), this->T, this->F);
    expect_close("swiglu_backward", apart, want,
                 swiglu_backward_error<X>(want, widen(this->dout), widen(this->gate_up), this->T, this->F));
    for (int threads : {1, 2, 3}) {
        std::vector<X> in_place = this->gate_up;
        swiglu_backward(make_device<TypeParam>(threads), in_place.data(), this->dout.data(), in_place.data(), this->T, this->F);
        EXPECT_EQ(widen(in_place), widen(apart)) << threads << " threads";
    }
}

// Where exp(-gate) overflows or vanishes, silu is 0 or the gate itself and its derivative 0 or 1; a NaN stays one.
TYPED_TEST(Swiglu, ExtremeGates) {
    using X = typename TypeParam::X;
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const std::vector<float> gates = {-1e30f, -1000, -100, -0.0f, 0, 100, 1000, 1e30f, nan};
    const std::vector<float> silu = {0, 0, 0, 0, 0, 100, 1000, 1e30f, nan}, slope = {0, 0, 0, 0.5f, 0.5f, 1, 1, 1, nan};
    const size_t F = gates.size();
    std::vector<X> gate_up(2 * F, X(1.0f)), dout(F, X(1.0f)), out(F), d(2 * F);
    for (size_t f = 0; f < F; f++) gate_up[f] = gates[f];
    swiglu_forward(make_device<TypeParam>(), out.data(), gate_up.data(), 1, F);
    swiglu_backward(make_device<TypeParam>(), d.data(), dout.data(), gate_up.data(), 1, F);
    for (size_t f = 0; f + 1 < F; f++) {
        EXPECT_NEAR(float(out[f]), float(X(silu[f])), 1e-30) << gates[f];
        EXPECT_NEAR(float(d[f]), slope[f], 1e-30) << gates[f];
        EXPECT_NEAR(float(d[F + f]), float(X(silu[f])), 1e-30) << gates[f];
    }
    EXPECT_TRUE(std::isnan(float(out[F - 1])) && std::isnan(float(d[F - 1])) && std::isnan(float(d[2 * F - 1])));
}
