#include "../../llmc/ops/gelu.h"

#include "../reference_gelu.h"
#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/gelu.cuh"
#endif

// Runs the body for both forms: body.operator()<form>().
template <class Body> static void for_each_form(Body body) {
    body.template operator()<Gelu::erf>();
    body.template operator()<Gelu::tanh>();
}

template <class Dev> struct GeluOp : testing::Test {};
TYPED_TEST_SUITE(GeluOp, Devices);

template <Gelu form, class Dev> void expect_reference(size_t n) {
    using X = typename Dev::X;
    const auto x = random_values<X>(n, 1, 2), dout = random_values<X>(n, 2);
    const auto v = widen(x), d = widen(dout);
    const auto want = gelu_reference<form>(v), want_dx = gelu_backward_reference<form>(d, v);
    SameBits same_out, same_dx;
    for_each_order<Dev>([&](Dev dev) {
        Array<X> d_x(x), d_dout(dout), out(n), dx(n), dx_onto_x(x);
        gelu_forward(dev, out.data(), d_x.data(), n, form);
        gelu_backward(dev, dx.data(), d_dout.data(), d_x.data(), n, form);
        expect_close(format("gelu_forward %s n %zu", gelu_name<form>, n).c_str(), out.values(), want, gelu_error<form, X>(v));
        expect_close(format("gelu_backward %s n %zu", gelu_name<form>, n).c_str(), dx.values(), want_dx,
                     gelu_backward_error<form, X>(d, v));
        gelu_backward(dev, dx_onto_x.data(), d_dout.data(), dx_onto_x.data(), n, form);
        gelu_backward(dev, d_dout.data(), d_dout.data(), d_x.data(), n, form);
        gelu_forward(dev, d_x.data(), d_x.data(), n, form);
        for (const auto &values : {out.values(), d_x.values()}) same_out(values);
        for (const auto &values : {dx.values(), d_dout.values(), dx_onto_x.values()}) same_dx(values);
    });
}

TYPED_TEST(GeluOp, EqualsReferenceAlsoInPlace) {
    for (const size_t n : {1, 8, 1003, 8 * 300}) {
        for_each_form([&]<Gelu form>() { expect_reference<form, TypeParam>(n); });
    }
}

TYPED_TEST(GeluOp, ExtremeInputs) {
    using X = typename TypeParam::X;
    const size_t n = extreme_inputs.size();
    for_each_form([&]<Gelu form>() {
        Array<X> x(std::vector<X>(extreme_inputs.begin(), extreme_inputs.end())), ones(std::vector<X>(n, X(1.0f))), out(n), dx(n);
        gelu_forward(any_device<TypeParam>(), out.data(), x.data(), n, form);
        gelu_backward(any_device<TypeParam>(), dx.data(), ones.data(), x.data(), n, form);
        expect_extremes(out.values(), dx.values());
    });
}
