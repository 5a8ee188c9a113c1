#include "../llmc/ops/reduce.h"

#include <limits>

#include "check.h"

// n * 2^-53 bounds a double sum of n positive terms, whatever its order; the squares of floats are exact in double.
TEST(SquaredNorm, EqualsReferenceForAnyThreads) {
    for (size_t n : {size_t(0), size_t(1), size_t(1003), (size_t(3) << 16) + 17}) {
        const auto x = random_values<float>(n, 1);
        long double want = 0;
        for (float v : x) want += (long double)(v)*v;
        std::vector<double> scratch(squared_norm_scratch(n));
        const double once = squared_norm(make_device<CpuF32>(1), scratch.data(), x.data(), n);
        EXPECT_NEAR(once, double(want), double(n + 1) * 0x1p-53 * double(want)) << n;
        for (int threads : {2, 3})
            EXPECT_EQ(squared_norm(make_device<CpuBf16>(threads), scratch.data(), x.data(), n), once) << n << " " << threads;
    }
}

TEST(SquaredNorm, NeitherOverflowsNorHidesANaN) {
    std::vector<float> x(1000, 1e30f);
    double scratch[squared_norm_scratch(1000)];
    EXPECT_NEAR(squared_norm(make_device<CpuF32>(), scratch, x.data(), x.size()), 1e63, 1e57);
    x[777] = std::numeric_limits<float>::quiet_NaN();
    EXPECT_TRUE(std::isnan(squared_norm(make_device<CpuF32>(), scratch, x.data(), x.size())));
}
