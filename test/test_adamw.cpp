#include "../llmc/ops/adamw.h"

#include "check.h"

// Made with torch 2.15.0: AdamW([1, -0.5, 0.25, 3, 0], betas (0.9, 0.95), eps 1e-8, weight_decay 0.1), learning rate 0.01 /
// step and gradient (0.5, -0.25 step, 0, 2 - step, 1e-9) at step = 1 .. 10. The last parameter feels eps.
static const size_t torch_n = 5;
struct TorchState {
    size_t step;
    std::vector<float> params;
};
static const TorchState torch_states[] = {
    {1, {0.989000022f, -0.489500016f, 0.249750003f, 2.98699999f, -0.000909090915f}},
    {2, {0.983505487f, -0.484465331f, 0.249625117f, 2.98211336f, -0.00136318186f}},
    {10, {0.967820168f, -0.470239878f, 0.249268636f, 2.98611307f, -0.0026595057f}},
};
static const std::vector<float> torch_m = {0.3256607949733734f, -1.0345264673233032f, 0, -2.835462808609009f,
                                           6.513215522474525e-10f};
static const std::vector<float> torch_v = {0.100315772f, 1.08349538f, 0, 9.43697262f, 4.01262989e-19f};

template <class Dev> struct AdamWUpdate : testing::Test {};
TYPED_TEST_SUITE(AdamWUpdate, CpuDevices);

// Both round the same formula in float. A step has two roundings of the parameter and a dozen of an update of at most 0.02,
// so ten steps are within 20 * 2^-24 * 3 + 10 * 12 * 2^-24 * 0.02; the moments take at most four roundings a step.
TYPED_TEST(AdamWUpdate, EqualsTorch) {
    using X = typename TypeParam::X;
    const double grad_scale = 0.25;  // a power of two: scaling gradients up beforehand changes no bit
    std::vector<float> master = {1, -0.5f, 0.25f, 3, 0}, m(torch_n), v(torch_n);
    std::vector<X> params(master.begin(), master.end());
    float *const p = sizeof(X) == 4 ? reinterpret_cast<float *>(params.data()) : master.data();
    for (size_t step = 1; step <= 10; step++) {
        std::vector<float> grads = {0.5f, -0.25f * float(step), 0, 2 - float(step), 1e-9f};
        for (float &g : grads) g *= 4;
        adamw_update(make_device<TypeParam>(), params.data(), p, m.data(), v.data(), grads.data(),
                     {0.01 / double(step), 0.9, 0.95, 1e-8, 0.1, grad_scale, step}, torch_n);
        for (const TorchState &torch : torch_states)
            if (torch.step == step)
                expect_close("params", std::vector<float>(p, p + torch_n), torch.params, 20 * 0x1p-24 * 3 + 120 * 0x1p-24 * 0.02);
        for (size_t i = 0; i < torch_n; i++) EXPECT_EQ(float(params[i]), float(X(p[i])));
    }
    for (size_t i = 0; i < torch_n; i++) {
        EXPECT_NEAR(m[i], torch_m[i], 40 * 0x1p-24 * std::abs(torch_m[i]) + 0x1p-24) << i;
        EXPECT_NEAR(v[i], torch_v[i], 40 * 0x1p-24 * std::abs(torch_v[i])) << i;
    }
}

struct Reference {
    std::vector<double> master, m, v;
};

static void adamw_reference(Reference &r, const std::vector<double> &grads, AdamW a) {
    for (size_t i = 0; i < grads.size(); i++) {
        const double g = a.grad_scale * grads[i];
        r.m[i] = a.beta1 * r.m[i] + (1 - a.beta1) * g;
        r.v[i] = a.beta2 * r.v[i] + (1 - a.beta2) * g * g;
        const double m_hat = r.m[i] / (1 - std::pow(a.beta1, double(a.step))),
                     v_hat = r.v[i] / (1 - std::pow(a.beta2, double(a.step)));
        r.master[i] -= a.lr * a.weight_decay * r.master[i] + a.lr * m_hat / (std::sqrt(v_hat) + a.eps);
    }
}

TYPED_TEST(AdamWUpdate, EqualsReferenceForAnyThreads) {
    using X = typename TypeParam::X;
    const size_t n = 1003, steps = 4;
    const auto start = widen(random_values<X>(n, 1));
    Reference want{start, std::vector<double>(n), std::vector<double>(n)};
    const auto setting = [](size_t step) { return AdamW{1e-2, 0.9, 0.999, 1e-8, 0.1, 0.37, step}; };
    for (size_t step = 1; step <= steps; step++)
        adamw_reference(want, widen(random_values<float>(n, uint32_t(10 + step))), setting(step));

    std::vector<float> first;
    for (int threads : {1, 2, 3}) {
        std::vector<float> master(start.begin(), start.end()), m(n), v(n);
        std::vector<X> params(start.begin(), start.end());
        float *const p = sizeof(X) == 4 ? reinterpret_cast<float *>(params.data()) : master.data();
        for (size_t step = 1; step <= steps; step++) {
            const auto grads = random_values<float>(n, uint32_t(10 + step));
            adamw_update(make_device<TypeParam>(threads), params.data(), p, m.data(), v.data(), grads.data(), setting(step), n);
        }
        const std::vector<float> got(p, p + n);
        if (first.empty()) {
            first = got;
            // |p| < 5, an update is at most lr * sqrt(steps) (and m may cancel, which its roundings do not)
            expect_close("params", got, want.master, double(steps) * 0x1p-24 * (2 * 5 + 16 * 1e-2 * std::sqrt(double(steps))));
            expect_close("m", m, want.m, 4 * double(steps) * 0x1p-24 * 5);
            expect_close("v", v, want.v, 4 * double(steps) * 0x1p-24 * 25 * 1e-3 * double(steps));
        }
        EXPECT_EQ(got, first) << threads << " threads";
        for (size_t i = 0; i < n; i++) ASSERT_EQ(float(params[i]), float(X(p[i]))) << i;
    }
}

// Updates far below half a unit in the last place of bf16 are lost in bf16 weights, not in the float master.
TEST(AdamWUpdate, SmallUpdatesReachBf16ThroughTheMaster) {
    std::vector<bf16> params = {bf16(1.0f)};
    std::vector<float> master = {1}, m = {0}, v = {0}, grads = {-1};
    for (size_t step = 1; step <= 100; step++)
        adamw_update(make_device<CpuBf16>(), params.data(), master.data(), m.data(), v.data(), grads.data(),
                     {1e-4, 0.9, 0.95, 1e-8, 0, 1, step}, 1);
    EXPECT_NEAR(master[0], 1.01f, 1e-5);
    EXPECT_EQ(float(params[0]), float(bf16(master[0])));
    EXPECT_GT(float(params[0]), 1.0f);
}
