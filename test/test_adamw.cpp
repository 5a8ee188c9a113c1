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

// Of moments in bf16 nothing is lost on average, and their bits depend on the seed, the step and the element's number alone.
TYPED_TEST(AdamWUpdate, Bf16MomentsAreRightOnAverage) {
    using X = typename TypeParam::X;
    const size_t n = 20000, steps = 50;
    const float g = 0.3f;  // of every element: what differs between them is the rounding
    const auto run = [&](size_t parts, uint64_t seed) {
        HostFloats<X> params(std::vector<float>(n, 1));
        std::vector<bf16> m(n, bf16(0.0f)), v(n, bf16(0.0f));
        const std::vector<float> grads(n, g);
        for (size_t step = 1; step <= steps; step++)
            for (size_t part = 0; part < parts; part++) {
                const size_t begin = n * part / parts, end = n * (part + 1) / parts;
                AdamW a = adamw_setting(step);
                a.seed = seed, a.first = 7 + begin;
                adamw_update(make_device<TypeParam>(int(parts)), params.where() + begin, &m[begin], &v[begin], &grads[begin], a,
                             end - begin);
            }
        return std::pair(widen(m), widen(v));
    };
    const auto [m, v] = run(1, 1);
    AdamWState want{{1}, {0}, {0}};
    for (size_t step = 1; step <= steps; step++) adamw_reference(want, {g}, adamw_setting(step));
    const auto expect_mean = [&](const char *what, const std::vector<double> &got, double want, double decay) {
        double sum = 0;
        for (double x : got) sum += x;
        // A rounding is off by at most 2^-7 of the value, by 2^-8 in the root of the mean square, and decays with the moment.
        const double deviation = want * 0x1p-8 / std::sqrt(1 - decay * decay) / std::sqrt(double(n));
        expect_close(what, std::vector<double>{sum / double(n)}, std::vector<double>{want}, 5 * deviation);
    };
    expect_mean("mean of m", m, want.m[0], 0.9);
    expect_mean("mean of v", v, want.v[0], 0.999);
    EXPECT_EQ(run(3, 1), std::pair(m, v));
    EXPECT_NE(run(1, 2), std::pair(m, v));
}

TEST(Bf16, StochasticRoundingKeepsWhatIsNotFinite) {
    for (uint32_t random : {0u, 0xffffu}) {
        EXPECT_EQ(float(round_stochastically(-INFINITY, random)), -INFINITY);
        EXPECT_TRUE(std::isnan(float(round_stochastically(std::bit_cast<float>(0x7f800001u), random))));
        EXPECT_EQ(float(round_stochastically(1.5f, random)), 1.5f);
    }
    EXPECT_EQ(float(round_stochastically(1.00390625f, 0x7fff)), 1.0f);  // half way
    EXPECT_EQ(float(round_stochastically(1.00390625f, 0x8000)), 1.0078125f);
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
