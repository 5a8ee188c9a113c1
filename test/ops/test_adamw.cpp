#include "../../llmc/ops/adamw.h"

#include "../reference_adamw.h"
#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/adamw.cuh"
#endif

// Parameters and what AdamW remembers of them, where the device computes.
template <class X> struct Parameters {
    FloatsArray<X> params;
    Array<float> m, v;
    size_t n;
    explicit Parameters(const std::vector<float> &start)
        : params(start), m(std::vector<float>(start.size(), 0)), v(std::vector<float>(start.size(), 0)), n(start.size()) {}

    template <class Dev> void update(Dev dev, const std::vector<float> &grads, const AdamW &a) {
        Array<float> d_grads(grads);
        adamw_update(dev, params.where(), m.data(), v.data(), d_grads.data(), a, n);
        expect_nearest(params.rounded.values(), params.values());
    }
};

template <class Dev> struct AdamWUpdate : testing::Test {};
TYPED_TEST_SUITE(AdamWUpdate, Devices);

TYPED_TEST(AdamWUpdate, EqualsTorch) {
    for_each_order<TypeParam>([&](TypeParam dev) {
        const double grad_scale = 0.25;  // a power of two: scaling gradients up beforehand changes no bit
        Parameters<typename TypeParam::X> p({1, -0.5f, 0.25f, 3, 0});
        for (size_t step = 1; step <= 10; step++) {
            std::vector<float> grads = {0.5f, -0.25f * float(step), 0, 2 - float(step), 1e-9f};
            for (float &g : grads) g *= 4;
            p.update(dev, grads, {0.01 / double(step), 0.9, 0.95, 1e-8, 0.1, grad_scale, step});
            for (const TorchState &torch : torch_states)
                if (torch.step == step) expect_close("params", p.params.values(), torch.params, torch_error);
        }
        const auto m = p.m.values(), v = p.v.values();
        for (size_t i = 0; i < torch_n; i++) {
            EXPECT_NEAR(m[i], torch_m[i], 40 * 0x1p-24 * std::abs(torch_m[i]) + 0x1p-24) << i;
            EXPECT_NEAR(v[i], torch_v[i], 40 * 0x1p-24 * std::abs(torch_v[i])) << i;
        }
    });
}

// The moments of the CPU's op, of which a fused multiply-add may make the next bf16.
TYPED_TEST(AdamWUpdate, Bf16Moments) {
    using X = typename TypeParam::X;
    for (const size_t n : {size_t(1003), size_t(1100)}) {  // without vectors and with
        const auto start = random_values<X>(n, 1);
        HostFloats<X> want(std::vector<float>(start.begin(), start.end()));
        std::vector<bf16> want_m(n, bf16(0.0f)), want_v = want_m;
        const auto setting = [](size_t step) {
            AdamW a = adamw_setting(step);
            a.seed = 3, a.first = 12345;
            return a;
        };
        const auto grads = random_values<float>(n, 2);
        for (size_t step = 1; step <= 4; step++)
            adamw_update(Cpu<X>{1}, want.where(), want_m.data(), want_v.data(), grads.data(), setting(step), n);
        for_each_order<TypeParam>([&](TypeParam dev) {
            FloatsArray<X> params(std::vector<float>(start.begin(), start.end()));
            Array<bf16> m(std::vector<bf16>(n, bf16(0.0f))), v(std::vector<bf16>(n, bf16(0.0f)));
            Array<float> d_grads(grads);
            for (size_t step = 1; step <= 4; step++)
                adamw_update(dev, params.where(), m.data(), v.data(), d_grads.data(), setting(step), n);
            const auto got_m = m.values(), got_v = v.values();
            for (size_t i = 0; i < n; i++) {
                ASSERT_LE(std::abs(int(got_m[i].bits) - int(want_m[i].bits)), 1) << i;
                ASSERT_LE(std::abs(int(got_v[i].bits) - int(want_v[i].bits)), 1) << i;
            }
            expect_close("params", params.values(), widen(want.values()), adamw_error(4).params + 4 * 1e-2 * 0x1p-6);
        });
    }
}

TYPED_TEST(AdamWUpdate, EqualsReference) {
    const size_t steps = 4;
    for (const size_t n : {size_t(1003), size_t(1100)}) {  // without vectors and with
        const auto start = random_values<typename TypeParam::X>(n, 1);
        AdamWState want{widen(start), std::vector<double>(n), std::vector<double>(n)};
        for (size_t step = 1; step <= steps; step++)
            adamw_reference(want, widen(random_values<float>(n, uint32_t(10 + step))), adamw_setting(step));
        SameBits same;
        for_each_order<TypeParam>([&](TypeParam dev) {
            Parameters<typename TypeParam::X> p(std::vector<float>(start.begin(), start.end()));
            for (size_t step = 1; step <= steps; step++)
                p.update(dev, random_values<float>(n, uint32_t(10 + step)), adamw_setting(step));
            expect_adamw(p.params.values(), p.m.values(), p.v.values(), want, steps);
            same(p.params.values(), p.m.values(), p.v.values());
        });
    }
}

// Of moments in bf16 nothing is lost on average, and their bits depend on the seed, the step and the element's number alone.
TYPED_TEST(AdamWUpdate, Bf16MomentsAreRightOnAverage) {
    using X = typename TypeParam::X;
    const size_t n = 20000, steps = 50;
    const float g = 0.3f;  // of every element: what differs between them is the rounding
    const auto run = [&](TypeParam dev, size_t parts, uint64_t seed) {
        FloatsArray<X> params(std::vector<float>(n, 1));
        Array<bf16> m(std::vector<bf16>(n, bf16(0.0f))), v(std::vector<bf16>(n, bf16(0.0f)));
        Array<float> grads(std::vector<float>(n, g));
        for (size_t step = 1; step <= steps; step++)
            for (size_t part = 0; part < parts; part++) {
                const size_t begin = n * part / parts, end = n * (part + 1) / parts;
                AdamW a = adamw_setting(step);
                a.seed = seed, a.first = 7 + begin;
                adamw_update(dev, params.where() + begin, m.data() + begin, v.data() + begin, grads.data() + begin, a,
                             end - begin);
            }
        return std::pair(widen(m.values()), widen(v.values()));
    };
    const auto [m, v] = run(any_device<TypeParam>(), 1, 1);
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
#ifdef CUDA_HALF
    const size_t parts = 4;  // each begins at a vector: in the kernel without vectors nvcc fuses other products with sums
#else
    const size_t parts = 3;
#endif
    for_each_order<TypeParam>([&, m = m, v = v](TypeParam dev) { EXPECT_EQ(run(dev, parts, 1), std::pair(m, v)); });
    EXPECT_NE(run(any_device<TypeParam>(), 1, 2), std::pair(m, v));
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
TYPED_TEST(AdamWUpdate, SmallUpdatesReachBf16ThroughTheLowerHalves) {
    using X = typename TypeParam::X;
    FloatsArray<X> params(std::vector<float>{1});
    Array<float> m(std::vector<float>{0}), v(std::vector<float>{0}), grads(std::vector<float>{-1});
    for (size_t step = 1; step <= 100; step++)
        adamw_update(any_device<TypeParam>(), params.where(), m.data(), v.data(), grads.data(),
                     {1e-4, 0.9, 0.95, 1e-8, 0, 1, step}, 1);
    EXPECT_NEAR(params.values()[0], 1.01f, 1e-5);
    if (Floats<X>::halves) {
        EXPECT_EQ(float(params.rounded.values()[0]), 1.0078125f);
    }
}

// One update of any state in blocks, the first and the last of which are not whole. A fused multiply-add may make the next fraction the nearest.
TYPED_TEST(AdamWUpdate, MomentsInBlocks) {
    using X = typename TypeParam::X;
    const Random random{5, Purpose::test, 0};
    for (const size_t skip : {size_t(0), size_t(100)})
        for (const size_t n : {size_t(50), size_t(1003)}) {
            const size_t blocks = (skip + n + 255) / 256;
            const auto start = random_values<X>(n, 1);
            const auto grads = random_values<float>(n, 2);
            std::vector<uint8_t> codes_m(n), codes_v(n);
            std::vector<float> scales_m(blocks), scales_v(blocks), m(n), v(n);
            for (size_t b = 0; b < blocks; b++) scales_m[b] = 0.1f * float(b + 1), scales_v[b] = 0.02f * float(b + 1);
            for (size_t i = 0; i < n; i++) {
                codes_m[i] = uint8_t(random.block(i)[0]), codes_v[i] = uint8_t(random.block(i)[1]);
                m[i] = fractions(true).of[codes_m[i]] * scales_m[(skip + i) / 256];
                v[i] = fractions(false).of[codes_v[i]] * scales_v[(skip + i) / 256];
            }
            HostFloats<X> want(std::vector<float>(start.begin(), start.end()));
            adamw_update(Cpu<X>{1}, want.where(), m.data(), v.data(), grads.data(), adamw_setting(3), n);
            SameBits same;
            for_each_order<TypeParam>([&](TypeParam dev) {
                FloatsArray<X> params(std::vector<float>(start.begin(), start.end()));
                Array<uint8_t> got_m(codes_m), got_v(codes_v);
                Array<float> got_scales_m(scales_m), got_scales_v(scales_v), d_grads(grads);
                adamw_update(dev, params.where(), Blockwise{got_m.data(), got_scales_m.data(), skip, n, true},
                             Blockwise{got_v.data(), got_scales_v.data(), skip, n, false}, d_grads.data(), adamw_setting(3), n);
                expect_close("params", params.values(), widen(want.values()), adamw_error(1).params);
                for (size_t b = 0; b < blocks; b++) {
                    const size_t first = std::max(b * 256, skip) - skip, end = std::min((b + 1) * 256 - skip, n);
                    float most_m = 0, most_v = 0;
                    for (size_t i = first; i < end; i++)
                        most_m = std::max(most_m, std::abs(m[i])), most_v = std::max(most_v, v[i]);
                    EXPECT_NEAR(got_scales_m.values()[b], most_m, 0x1p-22 * most_m);
                    EXPECT_NEAR(got_scales_v.values()[b], most_v, 0x1p-22 * most_v);
                    for (size_t i = first; i < end; i++) {
                        ASSERT_LE(std::abs(int(got_m.values()[i]) - int(code_of(fractions(true).of, most_m, m[i]))), 1) << i;
                        ASSERT_LE(std::abs(int(got_v.values()[i]) - int(code_of(fractions(false).of, most_v, v[i]))), 1) << i;
                    }
                }
                same(params.values(), got_scales_m.values(), got_scales_v.values());
            });
        }
}

// Gradients in bf16 are used as their exact float values: every kind of moments gets the same result as with those floats, but for a fused multiply-add in
// one of two kernels, which may make the next bf16 of a moment, or the next fraction, the nearest.
TYPED_TEST(AdamWUpdate, Bf16Gradients) {
    using X = typename TypeParam::X;
    const auto expect_moments = [](const auto &got, const auto &want, double relative) {
        for (size_t i = 0; i < got.size(); i++)
            ASSERT_NEAR(float(got[i]), float(want[i]), relative * std::abs(double(want[i])) + 0x1p-24) << i;
    };
    for (const size_t n : {size_t(1003), size_t(1100)}) {  // without vectors and with
        const auto rounded = random_values<bf16>(n, 2);
        const std::vector<float> floats(rounded.begin(), rounded.end()), start(n, 0.3f);
        const auto updated = [&](TypeParam dev, const auto *grads, auto zero) {  // the moments begin as zeros of that type
            using M = decltype(zero);
            FloatsArray<X> params(start);
            Array<M> m(std::vector<M>(n, zero)), v(std::vector<M>(n, zero));
            adamw_update(dev, params.where(), m.data(), v.data(), grads, adamw_setting(1), n);
            return std::tuple(params.values(), m.values(), v.values());
        };
        const auto in_blocks = [&](TypeParam dev, const auto *grads) {
            FloatsArray<X> params(start);
            const std::vector<float> scales(ceil_div(n, Blockwise::size), 0.1f);
            Array<uint8_t> m(std::vector<uint8_t>(n, 128)), v(std::vector<uint8_t>(n, 9));
            Array<float> of_m(scales), of_v(scales);
            adamw_update(dev, params.where(), Blockwise{m.data(), of_m.data(), 0, n, true},
                         Blockwise{v.data(), of_v.data(), 0, n, false}, grads, adamw_setting(1), n);
            return std::tuple(params.values(), m.values(), v.values());
        };
        for_each_order<TypeParam>([&](TypeParam dev) {
            Array<bf16> in_bf16(rounded);
            Array<float> in_float(floats);
            const auto expect = [&](const auto &got, const auto &want, double relative) {
                expect_close("params", std::get<0>(got), std::get<0>(want), adamw_error(1).params);
                expect_moments(std::get<1>(got), std::get<1>(want), relative);
                expect_moments(std::get<2>(got), std::get<2>(want), relative);
            };
            expect(updated(dev, in_bf16.data(), 0.0f), updated(dev, in_float.data(), 0.0f), 0x1p-20);
            expect(updated(dev, in_bf16.data(), bf16(0.0f)), updated(dev, in_float.data(), bf16(0.0f)), 0x1p-7);
            const auto [p, m, v] = in_blocks(dev, in_bf16.data());
            const auto [want_p, want_m, want_v] = in_blocks(dev, in_float.data());
            expect_close("params", p, want_p, adamw_error(1).params);
            for (size_t i = 0; i < n; i++) {
                ASSERT_LE(std::abs(int(m[i]) - int(want_m[i])), 1) << i;
                ASSERT_LE(std::abs(int(v[i]) - int(want_v[i])), 1) << i;
            }
        });
    }
}
