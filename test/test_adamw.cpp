#include "../llmc/ops/adamw.h"

#include "reference_adamw.h"

template <class Dev> struct AdamWUpdate : testing::Test {};
TYPED_TEST_SUITE(AdamWUpdate, CpuDevices);

TYPED_TEST(AdamWUpdate, EqualsTorch) {
    using X = typename TypeParam::X;
    const double grad_scale = 0.25;  // a power of two: scaling gradients up beforehand changes no bit
    HostFloats<X> params({1, -0.5f, 0.25f, 3, 0});
    std::vector<float> m(torch_n), v(torch_n);
    for (size_t step = 1; step <= 10; step++) {
        std::vector<float> grads = {0.5f, -0.25f * float(step), 0, 2 - float(step), 1e-9f};
        for (float &g : grads) g *= 4;
        adamw_update(make_device<TypeParam>(), params.where(), m.data(), v.data(), grads.data(),
                     {0.01 / double(step), 0.9, 0.95, 1e-8, 0.1, grad_scale, step}, torch_n);
        for (const TorchState &torch : torch_states)
            if (torch.step == step) expect_close("params", params.values(), torch.params, torch_error);
    }
    for (size_t i = 0; i < torch_n; i++) {
        EXPECT_NEAR(m[i], torch_m[i], 40 * 0x1p-24 * std::abs(torch_m[i]) + 0x1p-24) << i;
        EXPECT_NEAR(v[i], torch_v[i], 40 * 0x1p-24 * std::abs(torch_v[i])) << i;
    }
}

TYPED_TEST(AdamWUpdate, EqualsReferenceForAnyThreads) {
    using X = typename TypeParam::X;
    const size_t n = 1003, steps = 4;
    const auto start = widen(random_values<X>(n, 1));
    AdamWState want{start, std::vector<double>(n), std::vector<double>(n)};
    for (size_t step = 1; step <= steps; step++)
        adamw_reference(want, widen(random_values<float>(n, uint32_t(10 + step))), adamw_setting(step));

    std::vector<float> first;
    for (int threads : {1, 2, 3}) {
        HostFloats<X> params(std::vector<float>(start.begin(), start.end()));
        std::vector<float> m(n), v(n);
        for (size_t step = 1; step <= steps; step++) {
            const auto grads = random_values<float>(n, uint32_t(10 + step));
            adamw_update(make_device<TypeParam>(threads), params.where(), m.data(), v.data(), grads.data(), adamw_setting(step),
                         n);
        }
        const std::vector<float> got = params.values();
        if (first.empty()) {
            first = got;
            expect_adamw(got, m, v, want, steps);
        }
        EXPECT_EQ(got, first) << threads << " threads";
        expect_nearest(params.rounded, got);
    }
}

// Updates far below half a unit in the last place of bf16 are lost in bf16 weights, not where their lower halves are kept.
TEST(AdamWUpdate, SmallUpdatesReachBf16ThroughTheLowerHalves) {
    HostFloats<bf16> params({1});
    std::vector<float> m = {0}, v = {0}, grads = {-1};
    for (size_t step = 1; step <= 100; step++)
        adamw_update(make_device<CpuBf16>(), params.where(), m.data(), v.data(), grads.data(),
                     {1e-4, 0.9, 0.95, 1e-8, 0, 1, step}, 1);
    EXPECT_NEAR(params.values()[0], 1.01f, 1e-5);
    EXPECT_EQ(float(params.rounded[0]), 1.0078125f);
}
