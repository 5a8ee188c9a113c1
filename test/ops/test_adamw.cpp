#include "../../llmc/ops/adamw.h"

#include "../reference_adamw.h"
#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/adamw.cuh"
#endif

template <class Dev> struct AdamWUpdate : testing::Test {};
TYPED_TEST_SUITE(AdamWUpdate, Devices);

TYPED_TEST(AdamWUpdate, EqualsReference) {
    using X = typename TypeParam::X;
    const size_t steps = 4;
    for (const size_t n : {size_t(1003), size_t(1100)}) {  // without and with vectors
        const auto start = random_values<X>(n, 1);
        const auto grads = [&](size_t step) { return random_values<float>(n, uint32_t(10 + step)); };
        AdamWState want{widen(start), std::vector<double>(n), std::vector<double>(n)};
        for (size_t step = 1; step <= steps; step++) adamw_reference(want, widen(grads(step)), adamw_setting(step));
        const AdamWError allowed = adamw_error(steps);
        SameBits same;
        for_each_order<TypeParam>([&](TypeParam dev) {
            FloatsArray<X> params(std::vector<float>(start.begin(), start.end()));
            Array<float> m(std::vector<float>(n, 0)), v(std::vector<float>(n, 0));
            for (size_t step = 1; step <= steps; step++) {
                Array<float> d_grads(grads(step));
                adamw_update(dev, params.where(), m.data(), v.data(), d_grads.data(), adamw_setting(step), n);
                expect_nearest(params.rounded.values(), params.values());
            }
            expect_close("params", params.values(), want.master, allowed.params);
            expect_close("m", m.values(), want.m, allowed.m);
            expect_close("v", v.values(), want.v, allowed.v);
            same(params.values(), m.values(), v.values());
        });
    }
}

// One update of a random state whose first and last block are partial. Every type of moments and gradients gives the parameters that the CPU computes
// with the same floats, and these moments rounded to a neighbour; a fused multiply-add may make the next one nearest.
TYPED_TEST(AdamWUpdate, EveryTypeOfMomentsAndGradients) {
    using X = typename TypeParam::X;
    const Random random{5, Purpose::test, 0};
    const float *const of_m = fractions(true).of, *const of_v = fractions(false).of;
    for (const auto &[skip, n] : {std::pair<size_t, size_t>{0, 1100}, {100, 1003}, {100, 50}}) {
        const size_t blocks = ceil_div(skip + n, Blockwise::size);
        const auto start = random_values<X>(n, 1);
        const auto rounded_grads = random_values<bf16>(n, 2);
        const std::vector<float> grads(rounded_grads.begin(), rounded_grads.end());
        std::vector<uint8_t> codes_m(n), codes_v(n);
        std::vector<float> scales_m(blocks), scales_v(blocks), m(n), v(n);
        for (size_t b = 0; b < blocks; b++) scales_m[b] = 0.1f * float(b + 1), scales_v[b] = 0.02f * float(b + 1);
        for (size_t i = 0; i < n; i++) {
            codes_m[i] = uint8_t(random.block(i)[0]), codes_v[i] = uint8_t(random.block(i)[1]);
            m[i] = of_m[codes_m[i]] * scales_m[(skip + i) / Blockwise::size];
            v[i] = of_v[codes_v[i]] * scales_v[(skip + i) / Blockwise::size];
        }
        // update(dev, params, gradients, want_m, want_v) calls the op with m and v in its type, and compares them with the CPU's moments.
        const auto expect = [&, n = n](const std::vector<float> &before_m, const std::vector<float> &before_v, auto update) {
            HostFloats<X> want(std::vector<float>(start.begin(), start.end()));
            auto want_m = before_m, want_v = before_v;
            adamw_update(Cpu<X>{1}, want.where(), want_m.data(), want_v.data(), grads.data(), adamw_setting(3), n);
            SameBits same;
            for_each_order<TypeParam>([&](TypeParam dev) {
                Array<float> floats(grads);
                Array<bf16> halves(rounded_grads);
                const auto with = [&](const auto *gradients) {
                    FloatsArray<X> params(std::vector<float>(start.begin(), start.end()));
                    update(dev, params.where(), gradients, want_m, want_v);
                    expect_close("params", params.values(), widen(want.values()), adamw_error(1).params);
                    return params.values();
                };
                same(with(floats.data()), with(halves.data()));
            });
        };
        const auto unblocked = [&, n = n]<class M>(M, double relative) {
            const std::vector<M> stored_m(m.begin(), m.end()), stored_v(v.begin(), v.end());
            expect({stored_m.begin(), stored_m.end()}, {stored_v.begin(), stored_v.end()},
                   [&](TypeParam dev, Floats<X> params, const auto *gradients, const auto &want_m, const auto &want_v) {
                       Array<M> got_m(stored_m), got_v(stored_v);
                       adamw_update(dev, params, got_m.data(), got_v.data(), gradients, adamw_setting(3), n);
                       for (size_t i = 0; i < n; i++) {
                           ASSERT_NEAR(float(got_m.values()[i]), want_m[i], relative * std::abs(want_m[i]) + 0x1p-24) << i;
                           ASSERT_NEAR(float(got_v.values()[i]), want_v[i], relative * want_v[i] + 0x1p-24) << i;
                       }
                   });
        };
        unblocked(float(), 0x1p-20), unblocked(bf16(), 0x1p-7);
        expect(m, v,
               [&, skip = skip, n = n](TypeParam dev, Floats<X> params, const auto *gradients, const auto &want_m,
                                       const auto &want_v) {
                   Array<uint8_t> d_m(codes_m), d_v(codes_v);
                   Array<float> d_scales_m(scales_m), d_scales_v(scales_v);
                   adamw_update(dev, params, Blockwise{d_m.data(), d_scales_m.data(), skip, n, true},
                                Blockwise{d_v.data(), d_scales_v.data(), skip, n, false}, gradients, adamw_setting(3), n);
                   const auto got_m = d_m.values(), got_v = d_v.values();
                   for (size_t b = 0; b < blocks; b++) {
                       const size_t first = std::max(b * Blockwise::size, skip) - skip,
                                    end = std::min((b + 1) * Blockwise::size - skip, n);
                       const auto magnitude = [](float a, float b) { return std::abs(a) < std::abs(b); };
                       const float most_m = std::abs(*std::max_element(&want_m[first], &want_m[0] + end, magnitude)),
                                   most_v = *std::max_element(&want_v[first], &want_v[0] + end);
                       EXPECT_NEAR(d_scales_m.values()[b], most_m, 0x1p-22 * most_m);
                       EXPECT_NEAR(d_scales_v.values()[b], most_v, 0x1p-22 * most_v);
                       for (size_t i = first; i < end; i++) {
                           ASSERT_LE(std::abs(int(got_m[i]) - int(code_of(of_m, most_m, want_m[i]))), 1) << i;
                           ASSERT_LE(std::abs(int(got_v[i]) - int(code_of(of_v, most_v, want_v[i]))), 1) << i;
                       }
                   }
               });
    }
}

// The mean of rounded moments is the moment in float64. Their bits depend only on the seed, the step and the element's number.
TYPED_TEST(AdamWUpdate, Bf16MomentsAreRightOnAverage) {
    using X = typename TypeParam::X;
    const size_t n = 20000, steps = 50;
    const float g = 0.3f;  // of every element: only the rounding differs
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
        // The error of a rounding is at most 2^-7 of the value, its root mean square at most 2^-8, and it decays with the moment.
        const double deviation = want * 0x1p-8 / std::sqrt(1 - decay * decay) / std::sqrt(double(n));
        expect_close(what, std::vector<double>{sum / double(n)}, std::vector<double>{want}, 5 * deviation);
    };
    expect_mean("mean of m", m, want.m[0], 0.9);
    expect_mean("mean of v", v, want.v[0], 0.999);
#ifdef CUDA_HALF
    const size_t parts = 4;  // each begins at a vector: nvcc fuses other products and sums in the kernel without vectors
#else
    const size_t parts = 3;
#endif
    for_each_order<TypeParam>([&, m = m, v = v](TypeParam dev) { EXPECT_EQ(run(dev, parts, 1), std::pair(m, v)); });
    EXPECT_NE(run(any_device<TypeParam>(), 1, 2), std::pair(m, v));
}
