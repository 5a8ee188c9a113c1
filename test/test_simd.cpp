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
    for (const auto &[in, want] : {std::pair(0.0f, 1.0f), {-INFINITY, 0}, {-100, 0}, {INFINITY, INFINITY}, {89, INFINITY}})
        EXPECT_EQ(fast_exp(in), want);
    for (uint32_t bits : {0x7fc00000u, 0xffffffffu, 0x7fffffffu, 0xffc00001u})
        EXPECT_TRUE(std::isnan(fast_exp(std::bit_cast<float>(bits))));
}

// All upper halves of a float, with lower halves around a tie, at all places of a vector and in the incomplete last vector.
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
            const bool subnormal = float(want) != 0 && !std::isnormal(x[i]);  // the CPU's instruction stores 0
            if (std::isnan(x[i])) EXPECT_TRUE(std::isnan(float(y[i])) && std::isnan(float(again[i])));
            else ASSERT_TRUE(y[i].bits == want.bits || (subnormal && y[i] == 0)) << x[i];
            const bool exact = y[i] == 0 || std::isnormal(float(y[i]));
            ASSERT_TRUE(!exact || again[i].bits == y[i].bits) << x[i];
        }
    }
}
