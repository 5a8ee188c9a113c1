// layout.cuh: copies and sums of rows, exact on every device.
#include "../../llmc/ops/layout.cuh"

#include "check.cuh"

template <class Dev> struct CudaLayout : testing::Test {};
TYPED_TEST_SUITE(CudaLayout, CudaDevices);

TYPED_TEST(CudaLayout, AddsRows) {
    for (const size_t C : {7, 8, 600}) {  // one value at a time, vectors, more than a block takes at once
        const size_t n = 5, out_stride = C + 4, x_stride = C + 8;
        const auto out = random_values<float>(n * out_stride, 1), x = random_values<float>(n * x_stride, 2);
        auto want = out;
        for (size_t r = 0; r < n; r++)
            for (size_t c = 0; c < C; c++) want[r * out_stride + c] += x[r * x_stride + c];
        for_each_order<TypeParam>([&](TypeParam dev) {
            DeviceArray<float> d_out(out), d_x(x);
            add_rows(dev, d_out.data(), out_stride, d_x.data(), x_stride, n, C);
            EXPECT_EQ(d_out.values(), want) << C;
        });
    }
}

TYPED_TEST(CudaLayout, ClearsFloats) {
    for (const size_t n : {1, 1027, 4096}) {
        for_each_order<TypeParam>([&](TypeParam dev) {
            DeviceArray<float> x(std::vector<float>(n + 1, 3));
            clear_floats(dev, x.data(), n);
            auto want = std::vector<float>(n + 1, 0);
            want[n] = 3;
            EXPECT_EQ(x.values(), want) << n;
        });
    }
}
