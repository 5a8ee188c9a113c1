// Philox and its random numbers, and the rounding of floats to bf16.
#include "../llmc/core/rng.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <set>

#include "../llmc/core/dtype.h"

// kat_vectors of the Random123 distribution, philox4x32 with 10 rounds; the last one has the digits of pi.
TEST(Philox, KnownAnswers) {
    EXPECT_EQ(philox4x32({{0, 0, 0, 0}}, 0, 0), (Counter{{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}));
    EXPECT_EQ(philox4x32({{~0u, ~0u, ~0u, ~0u}}, ~0u, ~0u), (Counter{{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}));
    EXPECT_EQ(philox4x32({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822, 0x299f31d0),
              (Counter{{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}));
}

TEST(Random, EveryKeyGivesOtherNumbers) {
    const uint64_t big = uint64_t(1) << 40;
    std::set<uint64_t> seen;
    for (uint64_t seed : {uint64_t(1), uint64_t(2), big})
        for (Purpose purpose : {Purpose::init, Purpose::shuffle})
            for (uint32_t stream : {0u, 1u})
                for (uint64_t index : {uint64_t(0), uint64_t(1), big}) seen.insert(Random{seed, purpose, stream}.bits(index));
    EXPECT_EQ(seen.size(), 36u);
}

TEST(Random, MomentsOfUniformNormalAndBelow) {
    const Random random{42, Purpose::test, 0};
    const size_t n = 100000;
    const uint64_t large = uint64_t(1) << 63;
    double uniform = 0, normal = 0, square = 0, fourth = 0, of_large = 0;
    std::array<size_t, 7> below{};
    for (size_t i = 0; i < n; i++) {
        const double u = random.uniform(i), z = random.normal(i);
        ASSERT_TRUE(u >= 0 && u < 1 && std::isfinite(z) && random.below(i, large) < large && random.below(i, 1) == 0);
        uniform += u, normal += z, square += z * z, fourth += z * z * z * z;
        below.at(random.below(i, 7))++, of_large += double(random.below(i, large)) / double(large);
    }
    const double sigma = 1 / std::sqrt(double(n)), wide = 5;  // five standard deviations of each mean
    for (double sum : {uniform, of_large}) EXPECT_NEAR(sum / double(n), 0.5, wide * sigma * std::sqrt(1.0 / 12));
    EXPECT_NEAR(normal / double(n), 0, wide * sigma);
    EXPECT_NEAR(square / double(n), 1, wide * sigma * std::sqrt(2.0));
    EXPECT_NEAR(fourth / double(n), 3, wide * sigma * std::sqrt(96.0));
    for (size_t count : below) EXPECT_NEAR(double(count) / double(n), 1.0 / 7, wide * sigma * std::sqrt(6.0 / 49));
}

TEST(Random, StreamOfIsFnv1a) {  // test vectors of the FNV reference
    EXPECT_EQ(stream_of(""), 0x811c9dc5u);
    EXPECT_EQ(stream_of("a"), 0xe40c292cu);
    EXPECT_EQ(stream_of("foobar"), 0xbf9cf968u);
}

// Round to nearest, ties to even, by its definition: the nearer neighbour, or of two equally near ones the one with an even last bit. The
// neighbour above the largest value is 2^128, stored as infinity. Only the comparison of the lower half with one half matters, so six lower
// halves stand for all 65536; the upper half takes every value.
TEST(Bf16, RoundsEveryFloatByTheDefinition) {
    for (uint32_t upper = 0; upper < 0x10000; upper++)
        for (uint32_t lower : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
            const float f = std::bit_cast<float>(upper << 16 | lower);
            const bf16 rounded(f);
            if (!std::isfinite(f)) {
                ASSERT_TRUE(std::isnan(f) ? std::isnan(float(rounded)) : float(rounded) == f) << std::hex << upper << lower;
                ASSERT_EQ(std::signbit(float(rounded)), std::signbit(f));
                continue;
            }
            const auto magnitude = [&](uint32_t bits) {
                return bits == 0x7f80 ? 0x1p128 : double(std::bit_cast<float>(bits << 16));
            };
            const uint32_t below = upper & 0x7fff, above = below + 1;
            const double to_below = std::abs(f) - magnitude(below), to_above = magnitude(above) - std::abs(f);
            const bool up = to_above < to_below || (to_above == to_below && (below & 1));
            ASSERT_EQ(rounded.bits, (upper & 0x8000) | (up ? above : below)) << std::hex << upper << " " << lower;
        }
}
