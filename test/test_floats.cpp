// Floats in two halves: the upper half is the nearest bf16, and both halves together give every float bit for bit.
#include "../llmc/core/floats.h"

#include <bit>

#include "check.h"

static float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }

// Exponent 0 is that of subnormal numbers. Exponent 254 ends with the largest float, which rounds to infinity.
TEST(Floats, HalvesAreExact) {
    for (const uint32_t sign : {0, 0x8000})
        for (const uint32_t exponent : {0, 1, 2, 100, 126, 127, 128, 253, 254})
            for (const uint32_t fraction : {0, 1, 0x2a, 0x55, 0x7e, 0x7f})
                for (uint32_t low = 0; low < 0x10000; low++) {
                    const uint32_t upper = sign | exponent << 7 | fraction, bits = upper << 16 | low;
                    HostFloats<bf16> f({float_of(bits)});
                    ASSERT_EQ(std::bit_cast<uint32_t>(f.values()[0]), bits);
                    ASSERT_EQ(f.rounded[0].bits, low < 0x8000 ? upper : upper + 1) << bits;  // ties away from zero
                }
    for (const uint32_t infinity : {0x7f80, 0xff80}) {
        HostFloats<bf16> f({float_of(infinity << 16)});
        EXPECT_EQ(std::bit_cast<uint32_t>(f.values()[0]), infinity << 16);
        EXPECT_EQ(f.rounded[0].bits, infinity);
    }
    for (const uint32_t nan :
         {0x7fc00000u, 0xffc00000u, 0x7fffffffu, 0xffffffffu, 0x7f800001u, 0xff800001u, 0x7f80ffffu, 0x7fff8000u}) {
        HostFloats<bf16> f({float_of(nan)});
        EXPECT_EQ(std::bit_cast<uint32_t>(f.values()[0]), 0x7fc00000u) << std::hex << nan;
        EXPECT_TRUE(std::isnan(float(f.rounded[0]))) << std::hex << nan;
    }
}
