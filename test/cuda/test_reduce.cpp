#include "../../llmc/ops/reduce.cuh"

#include "check.cuh"

template <class Dev> struct SquaredNorm : testing::Test {};
TYPED_TEST_SUITE(SquaredNorm, CudaDevices);

// n * 2^-53 bounds a double sum of n positive terms, whatever its order; the squares of floats are exact in double.
TYPED_TEST(SquaredNorm, EqualsReference) {
    for (size_t n : {size_t(0), size_t(1), size_t(1003), squared_norm_part * 2, squared_norm_part * 3 + 17}) {
        const auto x = random_values<float>(n, 1);
        long double want = 0;
        for (float v : x) want += (long double)(v)*v;
        SameBits same;
        for_each_order<TypeParam>([&](TypeParam dev) {
            DeviceArray<float> d_x(x);
            DeviceArray<double> scratch(squared_norm_scratch(n));
            const double sum = squared_norm(dev, scratch.data(), d_x.data(), n);
            EXPECT_NEAR(sum, double(want), double(n + 1) * 0x1p-53 * double(want)) << n;
            same(std::vector<double>{sum});
        });
    }
}

TYPED_TEST(SquaredNorm, NeitherOverflowsNorHidesANaN) {
    std::vector<float> x(1000, 1e30f);
    DeviceArray<double> scratch(squared_norm_scratch(x.size()));
    EXPECT_NEAR(squared_norm(TypeParam{}, scratch.data(), DeviceArray<float>(x).data(), x.size()), 1e63, 1e57);
    x[777] = NAN;
    EXPECT_TRUE(std::isnan(squared_norm(TypeParam{}, scratch.data(), DeviceArray<float>(x).data(), x.size())));
}
