// Copies of rows with and without vectors, which are exact on every device.
#include "../../llmc/ops/layout.h"

#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/layout.cuh"
#endif

template <class Dev> struct Layout : testing::Test {};
TYPED_TEST_SUITE(Layout, Devices);

TYPED_TEST(Layout, CopiesRows) {
    using X = typename TypeParam::X;
    for (const size_t C : {7, 8, 600}) {
        const size_t n = 5, out_stride = C + 8, x_stride = C + 16;
        const auto x = random_values<X>(n * x_stride, 1);
        std::vector<X> want(n * out_stride, X(3.0f));
        for (size_t r = 0; r < n; r++) std::copy_n(&x[r * x_stride], C, &want[r * out_stride]);
        for_each_order<TypeParam>([&](TypeParam dev) {
            Array<X> d_x(x), out(std::vector<X>(n * out_stride, X(3.0f)));
            copy_rows(dev, out.data(), out_stride, d_x.data(), x_stride, n, C);
            EXPECT_EQ(widen(out.values()), widen(want)) << C;
        });
    }
}

TYPED_TEST(Layout, AddsRows) {
    for (const size_t C : {7, 8, 600}) {  // single values; vectors; more than a block has threads
        const size_t n = 5, out_stride = C + 4, x_stride = C + 8;
        const auto out = random_values<float>(n * out_stride, 1), x = random_values<float>(n * x_stride, 2);
        auto want = out;
        for (size_t r = 0; r < n; r++)
            for (size_t c = 0; c < C; c++) want[r * out_stride + c] += x[r * x_stride + c];
        for_each_order<TypeParam>([&](TypeParam dev) {
            Array<float> d_out(out), d_x(x);
            add_rows(dev, d_out.data(), out_stride, d_x.data(), x_stride, n, C);
            EXPECT_EQ(d_out.values(), want) << C;
        });
    }
}

TYPED_TEST(Layout, RoundsFloats) {
    using X = typename TypeParam::X;
    for (const size_t n : {1, 1027, 4096}) {
        const auto x = random_values<float>(n, 1);
        for_each_order<TypeParam>([&](TypeParam dev) {
            Array<float> d_x(x);
            Array<X> out(n);
            round_floats(dev, out.data(), d_x.data(), n);
            EXPECT_EQ(widen(out.values()), widen(std::vector<X>(x.begin(), x.end()))) << n;
        });
    }
}
