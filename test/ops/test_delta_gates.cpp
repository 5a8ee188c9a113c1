#include "../../llmc/ops/delta_gates.h"

#include <array>

#include "../finite_difference.h"
#include "../reference_delta_gates.h"
#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/delta_gates.cuh"
#endif

TEST(DeltaGatesReference, BackwardEqualsFiniteDifferences) {
    const size_t T = 3, H = 5;
    const auto ba = widen(random_values<float>(T * 2 * H, 1, 2)), A_log = widen(random_values<float>(H, 2)),
               dt_bias = widen(random_values<float>(H, 3)), dg = widen(random_values<float>(T * H, 4)),
               dbeta = widen(random_values<float>(T * H, 5));
    const auto got = delta_gates_backward_reference(dg, dbeta, ba, A_log, dt_bias, T, H);
    std::vector<double> dout = dg;
    dout.insert(dout.end(), dbeta.begin(), dbeta.end());
    const auto out = [&](const auto &ba, const auto &A_log, const auto &dt_bias) {
        DeltaGatesReference gates = delta_gates_reference(ba, A_log, dt_bias, T, H);
        gates.g.insert(gates.g.end(), gates.beta.begin(), gates.beta.end());
        return gates.g;
    };
    expect_close("dba", got.dba, finite_difference([&](const auto &v) { return out(v, A_log, dt_bias); }, ba, dout), 1e-8);
    expect_close("dA_log", got.dA_log, finite_difference([&](const auto &v) { return out(ba, v, dt_bias); }, A_log, dout), 1e-8);
    expect_close("ddt_bias", got.ddt_bias, finite_difference([&](const auto &v) { return out(ba, A_log, v); }, dt_bias, dout),
                 1e-8);
}

template <class Dev> struct DeltaGatesOp : testing::Test {};
TYPED_TEST_SUITE(DeltaGatesOp, Devices);

// One token; a head; the heads of Qwen3.5-27B; more heads than a block has threads; runs of several tokens.
TYPED_TEST(DeltaGatesOp, EqualsReferenceAlsoInPlace) {
    using X = typename TypeParam::X;
    for (const auto &[T, H] : {std::array<size_t, 2>{1, 4}, {65, 1}, {9, 48}, {5, 70}, {1300, 3}}) {
        const size_t n = T * H;
        const auto ba = random_values<X>(2 * n, 1, 2), A_log = random_values<X>(H, 2), dt_bias = random_values<X>(H, 3);
        const auto dg = random_values<float>(n, 4), dbeta = random_values<float>(n, 5);
        const auto want = delta_gates_reference(widen(ba), widen(A_log), widen(dt_bias), T, H);
        const auto gradient =
            delta_gates_backward_reference(widen(dg), widen(dbeta), widen(ba), widen(A_log), widen(dt_bias), T, H);
        std::vector<double> dA_log = gradient.dA_log, ddt_bias = gradient.ddt_bias;
        for (double &d : dA_log) d = 3 + 2 * d;
        for (double &d : ddt_bias) d = 4 + 2 * d;
        printf(" T %zu, H %zu\n", T, H);
        SameBits same;
        for_each_order<TypeParam>([&, T = T, H = H](TypeParam dev) {
            Array<X> d_ba(ba), d_A_log(A_log), d_dt_bias(dt_bias), dba(2 * n);
            Array<float> g(n), beta(n), d_dg(dg), d_dbeta(dbeta), dA(std::vector<float>(H, 3)), dbias(std::vector<float>(H, 4)),
                scratch(delta_gates_scratch(dev, H));
            const auto backward = [&](X *out, float *dA_log, float *ddt_bias) {
                delta_gates_backward(
                    dev, out, dA_log, ddt_bias, scratch.data(), DeltaGates<const float>{d_dg.data(), d_dbeta.data()},
                    DeltaGates<const float>{g.data(), beta.data()}, d_ba.data(), d_A_log.data(), d_dt_bias.data(), T, H);
            };
            delta_gates_forward(dev, DeltaGates<float>{g.data(), beta.data()}, d_ba.data(), d_A_log.data(), d_dt_bias.data(), T,
                                H);
            backward(dba.data(), dA.data(), dbias.data());
            expect_close("g", g.values(), want.g, delta_gates_error<float>(want.g));
            expect_close("beta", beta.values(), want.beta, delta_gates_error<float>(want.beta));
            expect_close("dba", dba.values(), gradient.dba, delta_gates_error<X>(gradient.dba));
            backward(dba.data(), nullptr, nullptr);  // frozen
            backward(d_ba.data(), dA.data(), dbias.data());
            same(d_ba.values(), dba.values(), g.values(), beta.values());
            EXPECT_EQ(widen(d_ba.values()), widen(dba.values()));
            expect_close("dA_log", dA.values(), dA_log,
                         2 * delta_gates_sum_error(T, gradient.A_terms) + 4 * unit_roundoff<float> * largest(dA_log));
            expect_close("ddt_bias", dbias.values(), ddt_bias,
                         2 * delta_gates_sum_error(T, gradient.bias_terms) + 4 * unit_roundoff<float> * largest(ddt_bias));
        });
    }
}

// softplus is 0 far below 0 and its argument far above, and the gates and their gradients are finite.
TYPED_TEST(DeltaGatesOp, ExtremeInputs) {
    using X = typename TypeParam::X;
    const std::vector<float> inputs = {-1e30f, -1000, -50, 0, 50, 1000, 1e30f, NAN};
    const size_t H = inputs.size();
    std::vector<X> rows(inputs.begin(), inputs.end());
    rows.insert(rows.end(), inputs.begin(), inputs.end());
    Array<X> ba(rows), zeros(std::vector<X>(H, X(0.0f))), dba(2 * H);
    Array<float> g(H), beta(H), ones(std::vector<float>(H, 1)), scratch(delta_gates_scratch(any_device<TypeParam>(), H));
    delta_gates_forward(any_device<TypeParam>(), DeltaGates<float>{g.data(), beta.data()}, ba.data(), zeros.data(), zeros.data(),
                        1, H);
    delta_gates_backward(any_device<TypeParam>(), dba.data(), nullptr, nullptr, scratch.data(),
                         DeltaGates<const float>{ones.data(), ones.data()}, DeltaGates<const float>{g.data(), beta.data()},
                         ba.data(), zeros.data(), zeros.data(), 1, H);
    const std::vector<double> want_beta = {0, 0, 0, 0.5, 1, 1, 1}, slope = {0, 0, 0, 0.25, 0, 0, 0};
    const double rounding = 4 * unit_roundoff<float>;
    for (size_t h = 0; h + 1 < H; h++) {
        SCOPED_TRACE(inputs[h]);
        const double x = float(rows[h]), softplus = std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x)));
        EXPECT_NEAR(g.values()[h], -softplus, rounding * softplus + 1e-37);
        EXPECT_NEAR(beta.values()[h], want_beta[h], 1e-20);
        EXPECT_NEAR(float(dba.values()[h]), slope[h], 1e-20);
        EXPECT_NEAR(float(dba.values()[H + h]), -want_beta[h], 1e-20);
    }
    EXPECT_TRUE(std::isnan(g.values().back()) && std::isnan(beta.values().back()));
}
