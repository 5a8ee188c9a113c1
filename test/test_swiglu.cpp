#include "../llmc/ops/swiglu.h"

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

TYPED_TEST(Swiglu, ExtremeGates) {
    using X = typename TypeParam::X;
    const size_t F = extreme_gates.size();
    std::vector<X> gate_up = extreme_gate_up<X>(), dout(F, X(1.0f)), out(F), d(2 * F);
    swiglu_forward(make_device<TypeParam>(), out.data(), gate_up.data(), 1, F);
    swiglu_backward(make_device<TypeParam>(), d.data(), dout.data(), gate_up.data(), 1, F);
    expect_extremes(out, d);
}
