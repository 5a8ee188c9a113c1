#include "../llmc/ops/simd.h"

#include "check.h"

TEST(Simd, FastExp) {
    std::vector<float> x, y(1 << 20);
    for (size_t i = 0; i < y.size(); i++) x.push_back(-87.33f + float(i) * (176.05f / float(y.size())));
#pragma omp simd
    for (size_t i = 0; i < y.size(); i++) y[i] = fast_exp(x[i]);
    double worst = 0;  // in units in the last place
    for (size_t i = 0; i < y.size(); i++) {
        const double want = std::exp(double(x[i]));
        worst = std::max(worst, std::abs(y[i] - want) / std::ldexp(1.0, std::ilogb(want) - 23));
    }
    printf("  %-40s %.2g of %.2g allowed\n", "fast_exp, units in the last place", worst, 1.5);
    EXPECT_LE(worst, 1.5);
    EXPECT_EQ(fast_exp(0.0f), 1.0f);
    EXPECT_EQ(fast_exp(-INFINITY), 0.0f);
    EXPECT_EQ(fast_exp(-100.0f), 0.0f);
    EXPECT_EQ(fast_exp(INFINITY), INFINITY);
    EXPECT_EQ(fast_exp(89.0f), INFINITY);
    for (uint32_t bits : {0x7fc00000u, 0xffffffffu, 0x7fffffffu, 0xffc00001u})
        EXPECT_TRUE(std::isnan(fast_exp(std::bit_cast<float>(bits))));
}

// Every upper half of a float with lower halves around a tie, at every place of a vector and in the elements after the last one.
TEST(Simd, StoresTheNearestBf16) {
    std::vector<float> x;
    for (uint32_t upper = 0; upper < 0x10000; upper++)
        for (uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) x.push_back(std::bit_cast<float>(upper << 16 | low));
    for (size_t end : {x.size(), x.size() - 1, x.size() - 5}) {
        std::vector<bf16> y(end), again(end);
        simd::for_each(end, [&]<class V>(size_t i) { simd::store(&y[i], simd::load<V>(&x[i])); });
        simd::for_each(end, [&]<class V>(size_t i) { simd::store(&again[i], simd::load<V>(&y[i])); });
        for (size_t i = 0; i < end; i++) {
            const bf16 want = x[i];
            if (std::isnan(x[i])) {
                EXPECT_TRUE(std::isnan(float(y[i])) && std::isnan(float(again[i])));
            } else if (float(want) == 0 || std::isnormal(x[i])) {
                ASSERT_EQ(y[i].bits, want.bits) << x[i];
            } else {  // the CPU's instruction makes 0 of it
                ASSERT_TRUE(y[i].bits == want.bits || y[i] == 0) << x[i];
            }
            if (y[i] == 0 || std::isnormal(float(y[i]))) {
                ASSERT_EQ(again[i].bits, y[i].bits) << x[i];
            }
        }
    }
}
