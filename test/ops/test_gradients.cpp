#include "../../llmc/ops/gradients.h"

#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/gradients.cuh"
#endif

// ---- stochastic rounding to bf16 in float64

struct BetweenBf16 {
    double lower;  // the neighbour towards 0
    double unit;   // distance to the other neighbour, with the sign of x
    double up;     // probability of the other neighbour
};

static BetweenBf16 between_bf16(float x) {
    const double unit = std::ldexp(1.0, std::max(std::ilogb(x), -126) - 7);  // 8 significant bits
    const double lower = std::trunc(double(x) / unit) * unit;
    return {lower, std::copysign(unit, x), std::abs(double(x) - lower) / unit};
}

// ---- the op

template <class Dev> struct Gradients : testing::Test {};
TYPED_TEST_SUITE(Gradients, Devices);

static const Random key{42, Purpose::gradients, 0};

template <class Dev> std::vector<bf16> rounded(Dev dev, const std::vector<float> &x, Random random, size_t first = 0) {
    Array<float> d_x(x);
    Array<bf16> stored(x.size());
    round_gradients(dev, stored.data(), d_x.data(), x.size(), random, first);
    return stored.values();
}

TYPED_TEST(Gradients, WideningIsExact) {
    for (const size_t n : {1, 1003, 4096}) {
        const auto x = random_values<bf16>(n, 1);
        for_each_order<TypeParam>([&](TypeParam dev) {
            Array<bf16> stored(x);
            Array<float> out(n);
            widen_gradients(dev, out.data(), stored.data(), n);
            EXPECT_EQ(widen(out.values()), widen(x));
        });
    }
}

// Every number becomes one of its two neighbours; values of bf16 stay.
TYPED_TEST(Gradients, RoundsToANeighbour) {
    for (const size_t n : {1, 1003, 4096})
        for (const size_t first : {0, 5, 800}) {
            auto x = random_values<float>(n, 1);
            for (size_t i = 0; i < n; i += 3) x[i] = bf16(x[i]);
            SameBits same;
            for_each_order<TypeParam>([&](TypeParam dev) {
                const auto got = widen(rounded(dev, x, key, first));
                for (size_t i = 0; i < n; i++) {
                    const auto [lower, unit, up] = between_bf16(x[i]);
                    ASSERT_TRUE(got[i] == lower || (up > 0 && got[i] == lower + unit)) << x[i] << " became " << got[i];
                }
                same(got);
            });
        }
}

TYPED_TEST(Gradients, ZerosInfinitiesAndNaNsStay) {
    const auto got = rounded(any_device<TypeParam>(), {0.0f, -0.0f, INFINITY, -INFINITY, NAN, 3.4e38f}, key);
    EXPECT_EQ(float(got[0]), 0);
    EXPECT_TRUE(std::signbit(float(got[1])));
    EXPECT_EQ(float(got[2]), INFINITY);
    EXPECT_EQ(float(got[3]), -INFINITY);
    EXPECT_TRUE(std::isnan(float(got[4])));
    EXPECT_GE(float(got[5]), 3.3e38f);
}

// The mean over many elements is the number itself, within five standard deviations.
TYPED_TEST(Gradients, AreRightOnAverage) {
    const size_t n = 40000;
    for (const float x : {1.001f, -3.0049f, 0.7001e-8f, 6.9999e20f, -1.999f}) {
        double sum = 0;
        for (const double g : widen(rounded(any_device<TypeParam>(), std::vector<float>(n, x), key))) sum += g / double(n);
        const auto [lower, unit, up] = between_bf16(x);
        EXPECT_NEAR(sum, double(x), 5 * std::abs(unit) * std::sqrt(up * (1 - up) / double(n)) + 0x1p-16 * std::abs(unit)) << x;
    }
}

// The random bits depend only on the key and the element's number; elements that share a block of Philox are independent.
TYPED_TEST(Gradients, BitsBelongToTheElement) {
    const size_t n = 4099, first = 77;
    const auto x = random_values<float>(n, 1);
    const TypeParam dev = any_device<TypeParam>();
    const auto whole = widen(rounded(dev, x, key, first));
    for (size_t begin = 0; begin < n;) {
        const size_t end = std::min(n, begin + 1 + begin / 2);
        const auto part = widen(rounded(dev, {x.begin() + ptrdiff_t(begin), x.begin() + ptrdiff_t(end)}, key, first + begin));
        EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + ptrdiff_t(begin))) << begin;
        begin = end;
    }
    EXPECT_NE(widen(rounded(dev, x, {43, Purpose::gradients, 0}, first)), whole);
    EXPECT_NE(widen(rounded(dev, x, {42, Purpose::gradients, 1}, first)), whole);
    EXPECT_NE(widen(rounded(dev, x, key, first + 1)), whole);

    const size_t groups = 4000;
    const auto coins = widen(rounded(dev, std::vector<float>(groups * 8, 1 + 0x1p-8f), key));  // half way
    for (size_t a = 0; a < 8; a++)
        for (size_t b = 0; b < a; b++) {
            size_t equal = 0;
            for (size_t g = 0; g < groups; g++) equal += coins[g * 8 + a] == coins[g * 8 + b];
            EXPECT_NEAR(double(equal), groups / 2.0, 5 * std::sqrt(groups / 4.0)) << a << " and " << b;
        }
}
