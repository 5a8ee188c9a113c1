#include "../../llmc/ops/swiglu.h"

#include <array>

#include "../reference_gelu.h"
#include "../reference_swiglu.h"
#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/swiglu.cuh"
#endif

template <class Dev> struct Swiglu : testing::Test {};
TYPED_TEST_SUITE(Swiglu, Devices);

template <Gate form, class Dev> void expect_reference_also_in_place() {
    using X = typename Dev::X;
    for (const auto &[T, F] : {std::array<size_t, 2>{1, 8}, {11, 83}, {5, 1032}, {3, 131}}) {
        const auto gate_up = random_values<X>(T * 2 * F, 1, 2), dout = random_values<X>(T * F, 2);
        const auto g = widen(gate_up), d = widen(dout);
        const auto want = swiglu_reference(g, T, F, form), want_d = swiglu_backward_reference(d, g, T, F, form);
        SameBits same;
        for_each_order<Dev>([&, T = T, F = F](Dev dev) {
            Array<X> d_gate_up(gate_up), d_dout(dout), out(T * F), apart(T * 2 * F);
            swiglu_forward(dev, out.data(), d_gate_up.data(), T, F, form);
            swiglu_backward(dev, apart.data(), d_dout.data(), d_gate_up.data(), T, F, form);
            expect_close(format("swiglu_forward T %zu F %zu", T, F).c_str(), out.values(), want,
                         swiglu_error<X>(want, g, T, F, form));
            expect_close(format("swiglu_backward T %zu F %zu", T, F).c_str(), apart.values(), want_d,
                         swiglu_backward_error<X>(want_d, d, g, T, F, form));
            same(out.values(), apart.values());
            swiglu_backward(dev, d_gate_up.data(), d_dout.data(), d_gate_up.data(), T, F, form);
            same(out.values(), d_gate_up.values());
        });
    }
}
TYPED_TEST(Swiglu, EqualsReferenceAlsoInPlace) { expect_reference_also_in_place<Gate::silu, TypeParam>(); }
TYPED_TEST(Swiglu, WithGeluEqualsReferenceAlsoInPlace) { expect_reference_also_in_place<Gate::gelu, TypeParam>(); }

template <Gate form, class Dev> void expect_extreme_gates() {  // with up = 1, dgate is the gate's slope and dup the gate itself
    using X = typename Dev::X;
    const size_t F = extreme_inputs.size();
    std::vector<X> gates(extreme_inputs.begin(), extreme_inputs.end());
    gates.resize(2 * F, X(1.0f));
    Array<X> gate_up(gates), dout(std::vector<X>(F, X(1.0f))), out(F), d(2 * F);
    swiglu_forward(any_device<Dev>(), out.data(), gate_up.data(), 1, F, form);
    swiglu_backward(any_device<Dev>(), d.data(), dout.data(), gate_up.data(), 1, F, form);
    const auto gradients = d.values();
    const auto middle = gradients.begin() + ptrdiff_t(F);
    for (const auto &result : {out.values(), std::vector<X>(middle, gradients.end())})
        expect_extremes<X>(result, {gradients.begin(), middle});
}
TYPED_TEST(Swiglu, ExtremeGates) { expect_extreme_gates<Gate::silu, TypeParam>(), expect_extreme_gates<Gate::gelu, TypeParam>(); }
