#include "../../llmc/ops/dequantise.h"

#include <array>
#include <limits>

#include "../../llmc/core/json.h"
#include "../../llmc/core/rng.h"
#include "../reference_dequantise.h"
#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/dequantise.cuh"
#endif

namespace {

template <class T> uint32_t hash(const std::vector<T> &v, size_t from = 0) {
    return stream_of(std::string_view(reinterpret_cast<const char *>(v.data() + from), (v.size() - from) * sizeof(T)));
}

// The numbers that golden/make_nf4.py quantises.
std::vector<float> numbers(const std::string &name, const nlohmann::json &golden) {
    const float unit = float(0x1p-31 * golden["scale"].get<double>());
    const Random random{1, Purpose::test, stream_of(name)};
    std::vector<float> out(golden["n"].get<size_t>());
    for (size_t i = 0; i < out.size(); i++) {
        const Counter words = random.block(i);
        const auto number = [&](int k) { return float(int32_t(words[k])) * unit; };
        out[i] = ((number(0) + number(1)) + number(2)) + number(3);
        if (golden["bf16"]) out[i] = float(bf16(out[i]));
    }
    return out;
}

// Calls f(golden, our quantised arrays with the mean of bitsandbytes, our own mean) for each case.
template <class F> void for_each_golden(F f) {
    const auto golden = read_json("test/golden/nf4.json");
    for (const auto &[name, want] : golden.items()) {
        if (name == "map") continue;
        SCOPED_TRACE(name);
        QuantisedArrays q;
        const auto magnitudes = quantise_nf4(q, numbers(name, want));
        quantise_magnitudes(q, magnitudes, want["offset"]);
        f(want, q, mean_of(magnitudes));
    }
}

template <class Dev>
std::vector<typename Dev::X> dequantised(Dev dev, int bits, const QuantisedArrays &q, size_t rows, size_t columns,
                                         BlockNumbers number = {}) {
    const float *const of = fractions(true).of;
    Array<uint8_t> codes(q.codes), magnitudes(bits == 4 ? q.magnitudes : std::vector<uint8_t>(1));
    Array<float> scales(q.scales), on_device(std::vector<float>(of, of + Fractions::count));
    Array<typename Dev::X> out(rows * columns);
    dequantise(dev, out.data(),
               Quantised{bits, rows, columns, codes.data(), magnitudes.data(), scales.data(), on_device.data(), number});
    return out.values();
}

}  // namespace

TEST(Quantise, FourBitsEqualBitsandbytes) {
    const auto map = read_json("test/golden/nf4.json")["map"].get<std::vector<float>>();
    EXPECT_EQ(std::vector<float>(fractions(true).of, fractions(true).of + Fractions::count), map);
    for_each_golden([](const auto &want, const QuantisedArrays &q, float mean) {
        const float of_floats = want["offset"];
        EXPECT_NEAR(mean, of_floats, 4 * unit_roundoff<float> * std::abs(of_floats));
        EXPECT_EQ(hash(q.codes), want["codes"].template get<uint32_t>());
        EXPECT_EQ(hash(q.magnitudes), want["scales"].template get<uint32_t>());
        EXPECT_EQ(hash(q.scales, 1), want["groups"].template get<uint32_t>());
    });
}

TEST(Quantise, ValuesAreExactAndTiesGoToTheLower) {
    std::vector<float> w(nf4_block, 0.0f);
    for (int code = 0; code < 16; code++) w[size_t(code)] = nf4_value(code);
    for (int code = 0; code < 15; code++) w[size_t(16 + code)] = (nf4_value(code) + nf4_value(code + 1)) / 2;
    QuantisedArrays q;
    EXPECT_EQ(quantise_nf4(q, w), std::vector<float>{1});
    for (size_t i = 0; i < 31; i++) EXPECT_EQ(i % 2 ? q.codes[i / 2] & 15 : q.codes[i / 2] >> 4, int(i % 16)) << i;
}

TEST(Quantise, EightBitsAreNear) {
    const size_t rows = 7, columns = 83;
    auto w = random_values<float>(rows * columns, 1);
    std::fill_n(w.begin() + 2 * columns, columns, 0.0f);
    std::fill_n(w.begin() + 3 * columns, columns, 190 * std::numeric_limits<float>::denorm_min());
    const QuantisedArrays q = quantise(8, w, columns);
    const auto values = dequantise_reference(8, q, rows, columns);
    for (size_t i = 0; i < w.size(); i++) {
        double largest = 0;
        for (size_t c = 0; c < columns; c++) largest = std::max(largest, std::abs(double(w[i / columns * columns + c])));
        const bool exact = i / columns != 3;
        EXPECT_NEAR(values[i], w[i], exact ? largest / 127 * (0.5 + 127 * unit_roundoff<float>) : largest) << i;
        if (std::abs(w[i]) == largest && largest > 0) {
            EXPECT_EQ(std::abs(int8_t(q.codes[i])), 127);
        }
    }
}

template <class Dev> struct Dequantise : testing::Test {};
TYPED_TEST_SUITE(Dequantise, Devices);

TYPED_TEST(Dequantise, FourBitsHaveTheBitsOfBitsandbytes) {
    for_each_golden([](const auto &want, const QuantisedArrays &q, float) {
        const size_t n = want["n"];
        for_each_order<TypeParam>([&](TypeParam dev) {
            const bool half = sizeof(typename TypeParam::X) == 2;
            EXPECT_EQ(hash(dequantised(dev, 4, q, 1, n)), want[half ? "bf16_values" : "f32"].template get<uint32_t>());
        });
    });
}

TYPED_TEST(Dequantise, EqualsReference) {
    using X = typename TypeParam::X;
    for (const int bits : {4, 8})
        for (const auto &[rows, columns] : {std::array<size_t, 2>{1, 1}, {1, 8}, {3, 21}, {7, 83}, {5, 1032}, {130, 256}}) {
            const QuantisedArrays q = quantise(bits, random_values<X>(rows * columns, 1), columns);
            const auto want = dequantise_reference(bits, q, rows, columns);
            const QuantisedSizes sizes(bits, rows, columns);
            EXPECT_EQ(q.codes.size(), sizes.codes);
            EXPECT_EQ(q.magnitudes.size(), sizes.magnitudes);
            EXPECT_EQ(q.scales.size(), sizes.scales);
            SameBits same;
            for_each_order<TypeParam>([&, rows = rows, columns = columns](TypeParam dev) {
                const auto out = dequantised(dev, bits, q, rows, columns);
                expect_close(format("%d bits, %zu x %zu", bits, rows, columns).c_str(), out, want,
                             dequantise_error<X>(bits, q, want));
                same(out);
            });
        }
}

// The values of a part, of rows or columns of whole blocks, are those of the whole tensor. The tensor has more than one group.
TYPED_TEST(Dequantise, PartsHaveTheBitsOfTheWhole) {
    using X = typename TypeParam::X;
    constexpr size_t rows = 90, columns = 5 * nf4_block;
    const QuantisedArrays q = quantise(4, random_values<X>(rows * columns, 1), columns);
    for_each_order<TypeParam>([&](TypeParam dev) {
        const std::vector<X> whole = dequantised(dev, 4, q, rows, columns);
        for (const auto &[row, n, column, width] : {std::array<size_t, 4>{0, 40, 0, columns},
                                                    {77, 13, 0, columns},
                                                    {0, rows, nf4_block, 3 * nf4_block},
                                                    {0, rows, 0, nf4_block}}) {
            QuantisedArrays part;
            part.scales = q.scales;
            std::vector<X> want;
            for (size_t r = row; r < row + n; r++) {
                const size_t begin = r * columns + column;
                const auto append = [&, width = width](auto &to, const auto &from, size_t per) {
                    to.insert(to.end(), from.begin() + ptrdiff_t(begin / per), from.begin() + ptrdiff_t((begin + width) / per));
                };
                append(part.codes, q.codes, 2), append(part.magnitudes, q.magnitudes, nf4_block), append(want, whole, 1);
            }
            const size_t of_row = columns / nf4_block;
            const BlockNumbers number{row * of_row + column / nf4_block, width < columns ? width / nf4_block : 0, of_row};
            EXPECT_EQ(widen(dequantised(dev, 4, part, n, width, number)), widen(want)) << row << " " << column;
        }
    });
}
