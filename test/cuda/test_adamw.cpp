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
