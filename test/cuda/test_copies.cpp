// Copies whose rows do not fit vectors, and those that do: what they move is exact.
#include "../../llmc/ops/layout.cuh"
#include "../../llmc/ops/loss.cuh"
#include "check.cuh"

template <class Dev> struct CudaCopies : testing::Test {};
TYPED_TEST_SUITE(CudaCopies, CudaDevices);

TYPED_TEST(CudaCopies, Rows) {
    using X = typename TypeParam::X;
    for (const size_t C : {7, 8, 600}) {
        const size_t n = 5, out_stride = C + 8, x_stride = C + 16;
        const auto x = random_values<X>(n * x_stride, 1);
        for_each_order<TypeParam>([&](TypeParam dev) {
            DeviceArray<X> d_x(x), out(n * out_stride);
            copy_rows(dev, out.data(), out_stride, d_x.data(), x_stride, n, C);
            const auto got = out.values();
            for (size_t i = 0; i < n * out_stride; i++) {
                const size_t r = i / out_stride, c = i % out_stride;
                if (c < C) EXPECT_EQ(float(got[i]), float(x[r * x_stride + c])) << i;
                else EXPECT_TRUE(std::isnan(float(got[i]))) << i;
            }
        });
    }
}

TYPED_TEST(CudaCopies, GatheredAndScatteredRows) {
    using X = typename TypeParam::X;
    const std::vector<int32_t> rows = {4, 0, 3};
    for (const size_t C : {7, 8, 600}) {
        const size_t T = 6, n = rows.size(), padded = 4;
        const auto x = random_values<X>(T * C, 1);
        for_each_order<TypeParam>([&](TypeParam dev) {
            DeviceArray<X> d_x(x), gathered(padded * C), scattered(T * C);
            DeviceArray<int32_t> d_rows(rows);
            gather_rows(dev, gathered.data(), d_x.data(), d_rows.data(), n, padded, C);
            scatter_rows(dev, scattered.data(), gathered.data(), d_rows.data(), n, C);
            const auto got = gathered.values(), back = scattered.values();
            for (size_t i = 0; i < padded * C; i++)
                EXPECT_EQ(float(got[i]), i < n * C ? float(x[size_t(rows[i / C]) * C + i % C]) : 0) << i;
            for (size_t t = 0; t < T; t++) {
                const bool moved = std::find(rows.begin(), rows.end(), int32_t(t)) != rows.end();
                for (size_t i = t * C; i < (t + 1) * C; i++)
                    if (moved) EXPECT_EQ(float(back[i]), float(x[i])) << i;
                    else EXPECT_TRUE(std::isnan(float(back[i]))) << i;
            }
        });
    }
}

TYPED_TEST(CudaCopies, RoundedFloats) {
    using X = typename TypeParam::X;
    for (const size_t n : {1, 1027, 4096}) {
        const auto x = random_values<float>(n, 1);
        for_each_order<TypeParam>([&](TypeParam dev) {
            DeviceArray<float> d_x(x);
            DeviceArray<X> out(n);
            round_floats(dev, out.data(), d_x.data(), n);
            const auto got = out.values();
            for (size_t i = 0; i < n; i++) EXPECT_EQ(float(got[i]), float(X(x[i]))) << i;
        });
    }
}
