// The products of the linear layer on CUDA against float64. In the emulator they are the CPU's, so that only what is around them and
// the kernel of the bias's gradient are new; on a GPU they are cuBLASLt's.
#include "../reference_matmul.h"
#include "matmul_context.cuh"

template <class Dev> struct CudaMatmul : testing::Test {};
TYPED_TEST_SUITE(CudaMatmul, CudaDevices);

TYPED_TEST(CudaMatmul, ForwardAndBackward) {
    using X = typename TypeParam::X;
    const MatmulContext context;
    for (const auto [T, IC, OC] : {std::array<size_t, 3>{1, 96, 130}, {37, 104, 72}, {300, 72, 40}}) {
        printf(" T %zu, IC %zu, OC %zu\n", T, IC, OC);
        const auto x = random_values<X>(T * IC, 1), w = random_values<X>(OC * IC, 2);
        const auto bias = random_values<X>(OC, 3, 10), dout = random_values<X>(T * OC, 4);
        const auto dw_before = random_values<float>(OC * IC, 5), dbias_before = random_values<float>(OC, 6);
        const Sums plain = product_reference(x, IC, 1, w, 1, IC, {}, T, OC, IC);
        const Sums biased = product_reference(x, IC, 1, w, 1, IC, widen(bias), T, OC, IC);
        const Sums want_dx = product_reference(dout, OC, 1, w, IC, 1, {}, T, IC, OC);
        const Sums want_dw = product_reference(dout, 1, OC, x, IC, 1, widen(dw_before), OC, IC, T);
        const Sums want_dw_alone = product_reference(dout, 1, OC, x, IC, 1, {}, OC, IC, T);
        const std::vector<float> ones(T, 1.0f), dout_floats(dout.begin(), dout.end());  // no tensor core sums them
        const Sums want_dbias = product_reference(ones, 0, 1, dout_floats, OC, 1, widen(dbias_before), 1, OC, T);
        for_each_order<TypeParam>([&](TypeParam dev) {
            dev.ctx = context.get();
            DeviceArray<X> d_x(x), d_w(w), d_bias(bias), d_dout(dout), out(T * OC), dx(T * IC);
            DeviceArray<float> logits(T * OC), dw(dw_before), dbias(dbias_before), dw_again(dw_before);
            matmul_forward(dev, out.data(), d_x.data(), d_w.data(), nullptr, T, IC, OC);
            expect_close("x w^T", out.values(), plain.value, allowed<X>(plain, IC));
            matmul_forward(dev, out.data(), d_x.data(), d_w.data(), d_bias.data(), T, IC, OC);
            expect_close("x w^T + bias", out.values(), biased.value, allowed<X>(biased, IC));
            matmul_forward(dev, logits.data(), d_x.data(), d_w.data(), nullptr, T, IC, OC);
            expect_close("x w^T, float", logits.values(), plain.value, allowed<float>(plain, IC));
            matmul_backward_input(dev, dx.data(), d_dout.data(), d_w.data(), T, IC, OC);
            expect_close("dx", dx.values(), want_dx.value, allowed<X>(want_dx, OC));
            matmul_backward_weight(dev, dw.data(), dbias.data(), d_dout.data(), d_x.data(), T, IC, OC, true);
            expect_close("dw", dw.values(), want_dw.value, allowed<float>(want_dw, T));
            expect_close("dbias", dbias.values(), want_dbias.value, allowed<float>(want_dbias, T));
            matmul_backward_weight(dev, dw_again.data(), nullptr, d_dout.data(), d_x.data(), T, IC, OC, true);
            EXPECT_EQ(dw.values(), dw_again.values());
            DeviceArray<float> dw_alone(std::vector<float>(OC * IC, NAN));
            matmul_backward_weight(dev, dw_alone.data(), nullptr, d_dout.data(), d_x.data(), T, IC, OC, false);
            expect_close("dw, overwritten", dw_alone.values(), want_dw_alone.value, allowed<float>(want_dw_alone, T));
        });
    }
}
