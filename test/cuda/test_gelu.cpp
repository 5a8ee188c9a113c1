#include "../../llmc/ops/gelu.cuh"

#include "../reference_gelu.h"
#include "check.cuh"

template <class Dev> struct GeluOp : testing::Test {};
TYPED_TEST_SUITE(GeluOp, CudaDevices);

template <Gelu form, class Dev> void expect_reference(size_t n) {
    using X = typename Dev::X;
    const auto x = random_values<X>(n, 1, 2), dout = random_values<X>(n, 2);
    const auto v = widen(x), d = widen(dout);
    const auto want = gelu_reference<form>(v), want_dx = gelu_backward_reference<form>(d, v);
    SameBits same_out, same_dx;
    for_each_order<Dev>([&](Dev dev) {
        DeviceArray<X> d_x(x), d_dout(dout), out(n), dx(n), dx_onto_x(x);
        gelu_forward<form>(dev, out.data(), d_x.data(), n);
        gelu_backward<form>(dev, dx.data(), d_dout.data(), d_x.data(), n);
        expect_close(format("gelu_forward %s n %zu", gelu_name<form>, n).c_str(), out.values(), want, gelu_error<form, X>(v));
        expect_close(format("gelu_backward %s n %zu", gelu_name<form>, n).c_str(), dx.values(), want_dx,
                     gelu_backward_error<form, X>(d, v));
        gelu_backward<form>(dev, dx_onto_x.data(), d_dout.data(), dx_onto_x.data(), n);
        gelu_backward<form>(dev, d_dout.data(), d_dout.data(), d_x.data(), n);
        gelu_forward<form>(dev, d_x.data(), d_x.data(), n);
        for (const auto &values : {out.values(), d_x.values()}) same_out(values);
        for (const auto &values : {dx.values(), d_dout.values(), dx_onto_x.values()}) same_dx(values);
    });
}

TYPED_TEST(GeluOp, EqualsReferenceAlsoInPlace) {
    for (const size_t n : {1, 8, 1003, 8 * 300}) {
        expect_reference<Gelu::erf, TypeParam>(n);
        expect_reference<Gelu::tanh, TypeParam>(n);
    }
}

template <Gelu form, class Dev> void check_extremes() {
    using X = typename Dev::X;
    const size_t n = extreme_inputs.size();
    DeviceArray<X> x(std::vector<X>(extreme_inputs.begin(), extreme_inputs.end())), ones(std::vector<X>(n, X(1.0f))), out(n),
        dx(n);
    gelu_forward<form>(Dev{}, out.data(), x.data(), n);
    gelu_backward<form>(Dev{}, dx.data(), ones.data(), x.data(), n);
    expect_gelu_extremes(out.values(), dx.values());
}

TYPED_TEST(GeluOp, ExtremeInputs) {
    check_extremes<Gelu::erf, TypeParam>();
    check_extremes<Gelu::tanh, TypeParam>();
}
