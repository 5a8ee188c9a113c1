#include "../../llmc/ops/adamw.cuh"

#include "../reference_adamw.h"
#include "check.cuh"

// Parameters and what AdamW remembers of them, on the device.
template <class X> struct DeviceParameters {
    DeviceFloats<X> params;
    DeviceArray<float> m, v;
    size_t n;
    explicit DeviceParameters(const std::vector<float> &start)
        : params(start), m(std::vector<float>(start.size(), 0)), v(std::vector<float>(start.size(), 0)), n(start.size()) {}

    void update(Cuda<X> dev, const std::vector<float> &grads, const AdamW &a) {
        DeviceArray<float> d_grads(grads);
        adamw_update(dev, params.where(), m.data(), v.data(), d_grads.data(), a, n);
        expect_nearest(params.rounded.values(), params.values());
    }
};

template <class Dev> struct AdamWUpdate : testing::Test {};
TYPED_TEST_SUITE(AdamWUpdate, CudaDevices);

TYPED_TEST(AdamWUpdate, EqualsTorch) {
    for_each_order<TypeParam>([&](TypeParam dev) {
        const double grad_scale = 0.25;  // a power of two: scaling gradients up beforehand changes no bit
        DeviceParameters<typename TypeParam::X> p({1, -0.5f, 0.25f, 3, 0});
        for (size_t step = 1; step <= 10; step++) {
            std::vector<float> grads = {0.5f, -0.25f * float(step), 0, 2 - float(step), 1e-9f};
            for (float &g : grads) g *= 4;
            p.update(dev, grads, {0.01 / double(step), 0.9, 0.95, 1e-8, 0.1, grad_scale, step});
            for (const TorchState &torch : torch_states)
                if (torch.step == step) expect_close("params", p.params.values(), torch.params, torch_error);
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
            DeviceFloats<X> params(std::vector<float>(start.begin(), start.end()));
            DeviceArray<bf16> m(std::vector<bf16>(n, bf16(0.0f))), v(std::vector<bf16>(n, bf16(0.0f)));
            DeviceArray<float> d_grads(grads);
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
            DeviceParameters<typename TypeParam::X> p(std::vector<float>(start.begin(), start.end()));
            for (size_t step = 1; step <= steps; step++)
                p.update(dev, random_values<float>(n, uint32_t(10 + step)), adamw_setting(step));
            expect_adamw(p.params.values(), p.m.values(), p.v.values(), want, steps);
            same(p.params.values(), p.m.values(), p.v.values());
        });
    }
}
