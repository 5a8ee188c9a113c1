// Floats in two halves: every float comes back bit for bit, and its upper half is the nearest bf16.
#include "../llmc/core/floats.h"

#include <bit>

#include "check.h"

static uint32_t bits_of(float f) { return std::bit_cast<uint32_t>(f); }
static float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }

// All lower halves below this upper one, which is no NaN's: between two bf16, or between the largest and infinity.
static void expect_all_below(uint16_t upper) {
    for (uint32_t low = 0; low < 0x10000; low++) {
        HostFloats<bf16> f({float_of(uint32_t(upper) << 16 | low)});
        ASSERT_EQ(bits_of(f.values()[0]), uint32_t(upper) << 16 | low);
        ASSERT_EQ(f.rounded[0].bits, low < 0x8000 ? upper : upper + 1) << low;  // ties away from zero
    }
}

// Exponent 0: denormal. The last of 254 are rounded to infinity.
TEST(Floats, HalvesAreExact) {
    for (const uint32_t sign : {0, 0x8000})
        for (const uint32_t exponent : {0, 1, 2, 100, 126, 127, 128, 253, 254})
            for (const uint32_t fraction : {0, 1, 0x2a, 0x55, 0x7e, 0x7f})
                expect_all_below(uint16_t(sign | exponent << 7 | fraction));
}

TEST(Floats, SpecialOnes) {
    const float largest = float_of(0x7f7fffff);
    for (const float f : {0.0f, -0.0f, INFINITY, -INFINITY, largest, -largest, float_of(1), float_of(0x80000001)}) {
        HostFloats<bf16> halves({f});
        EXPECT_EQ(bits_of(halves.values()[0]), bits_of(f));
        EXPECT_EQ(std::signbit(float(halves.rounded[0])), std::signbit(f));
    }
    EXPECT_EQ(float(Floats<bf16>::round(largest)), INFINITY);
    EXPECT_EQ(float(Floats<bf16>::round(-largest)), -INFINITY);
    EXPECT_EQ(float(Floats<bf16>::round(INFINITY)), INFINITY);
}

TEST(Floats, EveryNaNIsOne) {
    for (const uint32_t bits :
         {0x7fc00000u, 0xffc00000u, 0x7fffffffu, 0xffffffffu, 0x7f800001u, 0xff800001u, 0x7f80ffffu, 0x7fff8000u}) {
        HostFloats<bf16> halves({float_of(bits)});
        EXPECT_EQ(bits_of(halves.values()[0]), 0x7fc00000u) << std::hex << bits;
        EXPECT_TRUE(std::isnan(float(halves.rounded[0]))) << std::hex << bits;
    }
}
