// Numbers in blocks of 8 bits: the fractions and codes of bitsandbytes, and what goes into checkpoints and comes back.
#include "../llmc/core/blockwise.h"

#include "../llmc/core/json.h"
#include "check.h"

static std::vector<float> floats(const nlohmann::json &list) {
    const auto values = list.get<std::vector<double>>();
    return {values.begin(), values.end()};
}

TEST(BlocksOf8Bits, AreThoseOfBitsandbytes) {
    const auto golden = read_json("test/golden/blockwise.json");
    for (const bool negative : {true, false}) {
        const auto &want = golden[negative ? "signed" : "unsigned"];
        const float *const of = fractions(negative).of;
        EXPECT_EQ(std::vector<float>(of, of + Fractions::count), floats(want["fractions"]));
        const auto values = floats(want["values"]), scales = floats(want["scales"]);
        for (size_t i = 0; i < values.size(); i++) {
            const int nearest = want["codes"][i], code = code_of(of, scales[i / 256], values[i]);
            const bool loses_its_sign = values[i] < 0 && of[nearest] == 0;
            const double x = values[i] / scales[i / 256];
            if (code == nearest - loses_its_sign) continue;
            ASSERT_NEAR(std::abs(x - double(of[code])), std::abs(x - double(of[nearest])), 0x1p-24 * std::abs(x))
                << "no middle: " << x;
        }
    }
}

namespace {

struct Stored {  // an array that begins within a block
    static constexpr size_t skip = 100, count = 1000, blocks = 5;
    std::vector<uint8_t> codes;
    std::vector<float> scales;
    HostMemory memory;

    Stored() : codes(count), scales(blocks) {}
    Blockwise where(bool negative) { return {codes.data(), scales.data(), skip, count, negative}; }
    std::vector<float> values(bool negative) { return read_floats(memory, where(negative), count); }
};

std::vector<float> some_numbers(bool negative) {
    std::vector<float> out(Stored::count);
    for (size_t i = 0; i < out.size(); i++) {
        const Random random{9, Purpose::test, 0};
        out[i] = float(random.normal(i) * std::pow(10.0, -4 * random.uniform(5000 + i)));
        if (!negative) out[i] = std::abs(out[i]);
    }
    return out;
}

}  // namespace

// A number is off by at most half the distance between two fractions: of the scale, near it, 0.9 / 64 / 2 with signs and half of that without. Where a block is
// written in parts, each part that follows may round a number once more.
TEST(BlocksOf8Bits, AreNearTheNumbers) {
    for (const bool negative : {true, false})
        for (const size_t part : {Stored::count, size_t(37)}) {
            Stored stored;
            const auto numbers = some_numbers(negative);
            in_parts(
                Stored::count,
                [&](size_t first, size_t n) {
                    const auto from = numbers.begin() + ptrdiff_t(first);
                    write(stored.memory, stored.where(negative) + first, std::vector<float>(from, from + ptrdiff_t(n)));
                },
                part);
            const auto got = stored.values(negative);
            const float allowed = (negative ? 0.00704f : 0.00353f) * (part == Stored::count ? 1 : 8);
            for (size_t i = 0; i < numbers.size(); i++)
                ASSERT_NEAR(got[i], numbers[i], stored.scales[(Stored::skip + i) / 256] * allowed) << i;
        }
}

// Every number that was read is written as itself, whether the number with which a block is scaled is positive or negative, and by any parts that end where
// blocks end.
TEST(BlocksOf8Bits, ComeBackBitForBit) {
    for (const bool negative : {true, false})
        for (const float sign : {1.0f, -1.0f}) {
            if (!negative && sign < 0) continue;
            Stored stored, again;
            auto numbers = some_numbers(negative);
            for (float &x : numbers) x *= sign;
            write(stored.memory, stored.where(negative), numbers);
            const auto values = stored.values(negative);
            for (const auto &[first, end] : {std::pair(0, 156), {156, 668}, {668, 1000}})
                write(again.memory, again.where(negative) + size_t(first),
                      std::vector<float>(values.begin() + first, values.begin() + end));
            EXPECT_EQ(again.values(negative), values);
        }
}
