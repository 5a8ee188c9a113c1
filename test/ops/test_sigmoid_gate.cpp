#include "../../llmc/ops/sigmoid_gate.h"

#include <array>

#include "../reference_gelu.h"
#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/sigmoid_gate.cuh"
#endif

// The gates are the last C elements of longer rows, whose other elements do not change.
template <class X> struct GateInputs {
    size_t T, C, stride;
    std::vector<X> x = random_values<X>(T * C, 1), rows = random_values<X>(T * stride, 2, 2), dout = random_values<X>(T * C, 3);
    double gate(size_t t, size_t c) const { return double(float(rows[t * stride + stride - C + c])); }
};

template <class Dev> struct SigmoidGate : testing::Test {};
TYPED_TEST_SUITE(SigmoidGate, Devices);

// s has at most 4 roundings (exp counts as two), 1 - s is off by one rounding of 1, and there are 4 products.
TYPED_TEST(SigmoidGate, EqualsReferenceAlsoInPlace) {
    using X = typename TypeParam::X;
    for (const auto &[T, C, stride] : {std::array<size_t, 3>{1, 8, 8}, {5, 1032, 2064}, {7, 83, 100}, {3, 64, 67}}) {
        const GateInputs<X> in{T, C, stride};
        std::vector<double> out, dx, drows = widen(in.rows);
        double size = 0;
        for (size_t t = 0; t < T; t++)
            for (size_t c = 0; c < C; c++) {
                const double s = 1 / (1 + std::exp(-in.gate(t, c))), v = double(float(in.x[t * C + c])),
                             d = double(float(in.dout[t * C + c]));
                out.push_back(v * s), dx.push_back(d * s);
                drows[t * stride + stride - C + c] = d * v * s * (1 - s);
                size = std::max({size, std::abs(v), std::abs(d), std::abs(d * v)});
            }
        const auto allowed = [&](const std::vector<double> &want) {
            return 8 * unit_roundoff<float> * size + unit_roundoff<X> * largest(want);
        };
        SameBits same;
        for_each_order<TypeParam>([&, T = T, C = C, stride = stride](TypeParam dev) {
            Array<X> x(in.x), rows(in.rows), dout(in.dout), got(T * C), got_dx(T * C), got_drows(in.rows);
            const size_t gates = stride - C;
            sigmoid_gate_forward(dev, got.data(), x.data(), rows.data() + gates, T, C, stride);
            sigmoid_gate_backward(dev, got_dx.data(), got_drows.data() + gates, dout.data(), x.data(), rows.data() + gates, T, C,
                                  stride);
            expect_close("out", got.values(), out, allowed(out));
            expect_close("dx", got_dx.values(), dx, allowed(dx));
            expect_close("dgate", got_drows.values(), drows, allowed(drows));
            same(got.values(), got_dx.values(), got_drows.values());
            Array<X> onto(in.x);
            sigmoid_gate_forward(dev, onto.data(), onto.data(), rows.data() + gates, T, C, stride);
            sigmoid_gate_backward(dev, dout.data(), rows.data() + gates, dout.data(), x.data(), rows.data() + gates, T, C,
                                  stride);
            same(onto.values(), dout.values(), rows.values());
        });
    }
}

TYPED_TEST(SigmoidGate, ExtremeGates) {
    using X = typename TypeParam::X;
    const size_t n = extreme_inputs.size();
    Array<X> gate(std::vector<X>(extreme_inputs.begin(), extreme_inputs.end())), ones(std::vector<X>(n, X(1.0f))), out(n), dx(n),
        dgate(n);
    sigmoid_gate_forward(any_device<TypeParam>(), out.data(), ones.data(), gate.data(), 1, n, n);
    sigmoid_gate_backward(any_device<TypeParam>(), dx.data(), dgate.data(), ones.data(), ones.data(), gate.data(), 1, n, n);
    const std::vector<double> want = {0, 0, 0, 0.5, 0.5, 1, 1, 1}, slope = {0, 0, 0, 0.25, 0.25, 0, 0, 0};
    for (size_t i = 0; i < want.size(); i++) {
        EXPECT_NEAR(float(out.values()[i]), want[i], 1e-30) << extreme_inputs[i];
        EXPECT_NEAR(float(dx.values()[i]), want[i], 1e-30) << extreme_inputs[i];
        EXPECT_NEAR(float(dgate.values()[i]), slope[i], 1e-30) << extreme_inputs[i];
    }
    EXPECT_TRUE(std::isnan(float(out.values().back())) && std::isnan(float(dgate.values().back())));
}
