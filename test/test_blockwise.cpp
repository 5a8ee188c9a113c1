// Values in blocks of 8-bit codes: the fractions and codes equal those of bitsandbytes, and values written and read back are close.
#include "../llmc/core/blockwise.h"

#include "../llmc/core/json.h"
#include "check.h"

static std::vector<float> floats(const nlohmann::json &list) {
    const auto values = list.get<std::vector<double>>();
    return {values.begin(), values.end()};
}

TEST(BlocksOf8Bits, CodesEqualThoseOfBitsandbytes) {
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
                << "not halfway between two fractions: " << x;
        }
    }
}

namespace {

struct Stored {  // an array that begins within a block
    static constexpr size_t skip = 100, count = 1000, blocks = 5;
    const bool negative;  // values may be negative
    std::vector<uint8_t> codes = std::vector<uint8_t>(count);
    std::vector<float> scales = std::vector<float>(blocks);
    HostMemory memory{};

    // Writes values in parts that end at these positions.
    void write_parts(const std::vector<float> &values, const std::vector<ptrdiff_t> &ends) {
        for (ptrdiff_t begin = 0; const ptrdiff_t end : ends) {
            write(memory, where() + size_t(begin), std::vector<float>(values.begin() + begin, values.begin() + end));
            begin = end;
        }
    }
    std::vector<float> values() { return read_floats(memory, where(), count); }

  private:
    Blockwise where() { return {codes.data(), scales.data(), skip, count, negative}; }
};

}  // namespace

// A value is off by at most half the distance between two fractions: near the scale, 0.9 / 64 / 2 of it for signed values, half of that for
// unsigned ones. If a block is written in parts, each later part may round its values once more. The values read are fixed points: written
// again in parts that end where blocks end, they keep their bits.
TEST(BlocksOf8Bits, ValuesAreCloseAndThoseReadKeepTheirBits) {
    const Random random{9, Purpose::test, 0};
    for (const auto &[negative, sign] : {std::pair(true, 1), {true, -1}, {false, 1}}) {
        std::vector<float> values(Stored::count);
        for (size_t i = 0; i < values.size(); i++) {
            const double x = random.normal(i) * std::pow(10.0, -4 * random.uniform(5000 + i));
            values[i] = float(negative ? sign * x : std::abs(x));
        }
        for (const ptrdiff_t part : {1000, 37}) {
            std::vector<ptrdiff_t> ends;
            for (ptrdiff_t end = part; end < 1000; end += part) ends.push_back(end);
            ends.push_back(1000);
            Stored stored{negative}, again{negative};
            stored.write_parts(values, ends);
            const auto got = stored.values();
            const float allowed = (negative ? 0.00704f : 0.00353f) * (part == 1000 ? 1 : 8);
            for (size_t i = 0; i < values.size(); i++)
                ASSERT_NEAR(got[i], values[i], stored.scales[(Stored::skip + i) / 256] * allowed) << i;
            again.write_parts(got, {156, 668, 1000});
            EXPECT_EQ(again.values(), got);
        }
    }
}
