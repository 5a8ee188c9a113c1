#include "../llmc/ops/gelu.h"

#include "check.h"
#include "finite_difference.h"
#include "reference_gelu.h"

using Vector = std::vector<double>;

// Runs the body for both forms: body.operator()<form>().
template <class Body> static void for_each_form(Body body) {
    body.template operator()<Gelu::erf>();
    body.template operator()<Gelu::tanh>();
}

TEST(GeluReference, BackwardEqualsFiniteDifferences) {
    const Vector x = widen(random_values<float>(20, 1, 2)), dout = widen(random_values<float>(20, 2));
    for_each_form([&]<Gelu form>() {
        const Vector want = finite_difference([](const Vector &v) { return gelu_reference<form>(v); }, x, dout);
        expect_close(gelu_name<form>, gelu_backward_reference<form>(dout, x), want, 1e-8);
    });
}

// What torch.nn.functional.gelu(x, approximate="none" or "tanh") of PyTorch 2.15 gives in float64.
TEST(GeluReference, EqualsPyTorch) {
    const Vector x = {-3, -1, 0.5, 2};
    expect_close("none", gelu_reference<Gelu::erf>(x),
                 Vector{-0.00404969409489031, -0.158655253931457, 0.345731230637007, 1.95449973610364}, 1e-14);
    expect_close("tanh", gelu_reference<Gelu::tanh>(x),
                 Vector{-0.00363739208177299, -0.158808009391723, 0.345714009825144, 1.95459769408777}, 1e-14);
}

// relative to P, wherever P and its exp are normal floats
TEST(Gelu, ApproximationOfPIsWithinItsBound) {
    for_each_form([&]<Gelu form>() {
        double worst = 0;
        for (int i = -12000; i <= 14000; i++) {
            const float x = float(i) * 1e-3f, exponent = gelu_exponent<form>(x);
            if (exponent < -87 || exponent > 87) continue;
            const GeluReference want = gelu_reference<form>(x);
            const double error = std::abs(gelu_factor<form>(x, fast_exp(exponent)).P - want.P) / want.P;
            worst = std::max(worst, error / gelu_P_error(want));
            ASSERT_LE(error, gelu_P_error(want)) << gelu_name<form> << " at " << x;
        }
        printf("  %s: error / bound up to %.2f\n", gelu_name<form>, worst);
    });
}

template <class Dev> struct GeluOp : testing::Test {
    using X = typename Dev::X;
    static constexpr size_t n = 1003;  // no multiple of any vector length
    const std::vector<X> x = random_values<X>(n, 1, 2), dout = random_values<X>(n, 2);
};
TYPED_TEST_SUITE(GeluOp, CpuDevices);

TYPED_TEST(GeluOp, EqualsReferenceAlsoInPlace) {
    using X = typename TypeParam::X;
    for_each_form([&]<Gelu form>() {
        const Vector x = widen(this->x), dout = widen(this->dout);
        std::vector<X> out(this->n), dx(this->n);
        gelu_forward<form>(make_device<TypeParam>(1), out.data(), this->x.data(), this->n);
        gelu_backward<form>(make_device<TypeParam>(1), dx.data(), this->dout.data(), this->x.data(), this->n);
        printf(" %s\n", gelu_name<form>);
        expect_close("out", out, gelu_reference<form>(x), gelu_error<form, X>(x));
        expect_close("dx", dx, gelu_backward_reference<form>(dout, x), gelu_backward_error<form, X>(dout, x));
        for (const int threads : {1, 2, 3}) {
            const auto dev = make_device<TypeParam>(threads);
            std::vector<X> onto_x = this->x, onto_dout = this->dout, dx_onto_x = this->x;
            gelu_forward<form>(dev, onto_x.data(), onto_x.data(), this->n);
            gelu_backward<form>(dev, onto_dout.data(), onto_dout.data(), this->x.data(), this->n);
            gelu_backward<form>(dev, dx_onto_x.data(), this->dout.data(), dx_onto_x.data(), this->n);
            EXPECT_EQ(widen(onto_x), widen(out)) << threads << " threads";
            EXPECT_EQ(widen(onto_dout), widen(dx)) << threads << " threads";
            EXPECT_EQ(widen(dx_onto_x), widen(dx)) << threads << " threads";
        }
    });
}

TYPED_TEST(GeluOp, ExtremeInputs) {
    using X = typename TypeParam::X;
    const size_t n = extreme_inputs.size();
    const std::vector<X> x(extreme_inputs.begin(), extreme_inputs.end()), ones(n, X(1.0f));
    for_each_form([&]<Gelu form>() {
        std::vector<X> out(n), dx(n);
        gelu_forward<form>(make_device<TypeParam>(), out.data(), x.data(), n);
        gelu_backward<form>(make_device<TypeParam>(), dx.data(), ones.data(), x.data(), n);
        expect_gelu_extremes(out, dx);
    });
}
