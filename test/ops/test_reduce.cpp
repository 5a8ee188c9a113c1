#include "../../llmc/ops/reduce.h"

#include <map>

#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/reduce.cuh"
#endif

template <class Dev> struct SquaredNorm : testing::Test {};
TYPED_TEST_SUITE(SquaredNorm, Devices);

static std::map<size_t, SameBits> same_for;  // by n, for both storage types

// n * 2^-53 bounds the error of a double sum of n positive terms in any order; double holds squares of floats exactly.
TYPED_TEST(SquaredNorm, EqualsReference) {
    for (size_t n : {size_t(0), size_t(1), size_t(1003), squared_norm_part * 2, squared_norm_part * 3 + 17}) {
        const auto x = random_values<float>(n, 1);
        long double want = 0;
        for (float v : x) want += (long double)(v)*v;
        for_each_order<TypeParam>([&](TypeParam dev) {
            Array<float> d_x(x);
            Array<double> scratch(squared_norm_scratch(n));
            const double sum = squared_norm(dev, scratch.data(), d_x.data(), n);
            EXPECT_NEAR(sum, double(want), double(n + 1) * 0x1p-53 * double(want)) << n;
            same_for[n](std::vector<double>{sum});
            const std::vector<bf16> rounded(x.begin(), x.end());
            double of_rounded = 0;
            for (double v : widen(rounded)) of_rounded += v * v;
            EXPECT_NEAR(squared_norm(dev, scratch.data(), Array<bf16>(rounded).data(), n), of_rounded,
                        double(2 * n) * 0x1p-53 * of_rounded)
                << n;  // two sums in different orders
            Array<double> total(std::vector<double>{3});
            add_squared_norm(dev, total.data(), scratch.data(), d_x.data(), n);
            EXPECT_EQ(total.values()[0], 3 + sum);
        });
    }
}

TYPED_TEST(SquaredNorm, NeitherOverflowsNorHidesANaN) {
    std::vector<float> x(1000, 1e30f);
    Array<double> scratch(squared_norm_scratch(x.size()));
    EXPECT_NEAR(squared_norm(any_device<TypeParam>(), scratch.data(), Array<float>(x).data(), x.size()), 1e63, 1e57);
    x[777] = NAN;
    EXPECT_TRUE(std::isnan(squared_norm(any_device<TypeParam>(), scratch.data(), Array<float>(x).data(), x.size())));
}
