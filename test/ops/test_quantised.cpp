#include "../../llmc/ops/quantised.h"

#include <nlohmann/json.hpp>

#include "../../llmc/core/json.h"
#include "../../llmc/core/rng.h"
#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/quantised.cuh"
#endif

template <class Dev> struct Dequantise : testing::Test {};
TYPED_TEST_SUITE(Dequantise, Devices);

namespace {

template <class T> uint32_t hash(const std::vector<T> &v, size_t from = 0) {
    return stream_of(std::string_view(reinterpret_cast<const char *>(v.data() + from), (v.size() - from) * sizeof(T)));
}

// The numbers of golden/make_nf4.py.
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

template <class Dev>
std::vector<typename Dev::X> dequantised(Dev dev, int bits, const QuantisedArrays &q, size_t n, size_t columns) {
    const auto &map = magnitude_map();
    Array<uint8_t> codes(q.codes), scales(q.scales.empty() ? std::vector<uint8_t>(1) : q.scales);
    Array<float> groups(q.groups), values(std::vector<float>(map.begin(), map.end()));
    Array<typename Dev::X> out(n);
    dequantise(dev, out.data(), Quantised{bits, n, columns, codes.data(), scales.data(), groups.data(), values.data()});
    return out.values();
}

}  // namespace

// Bit for bit what bitsandbytes says; only the mean of the magnitudes, which it sums in another order, may differ in its last bit.
TYPED_TEST(Dequantise, FourBitsEqualBitsandbytes) {
    const auto golden = read_json("test/golden/nf4.json");
    const auto &map = magnitude_map();
    EXPECT_EQ(std::vector<float>(map.begin(), map.end()), golden["map"].template get<std::vector<float>>());
    size_t same_mean = 0;
    for (const auto &[name, want] : golden.items()) {
        if (name == "map") continue;
        SCOPED_TRACE(name);
        const auto x = numbers(name, want);
        const QuantisedArrays q = quantise(4, x, 1);
        const float mean = want["offset"];
        EXPECT_EQ(hash(q.codes), want["codes"].template get<uint32_t>());
        EXPECT_NEAR(q.groups[0], mean, 2e-7 * std::abs(mean));
        if (q.groups[0] != mean) continue;
        same_mean++;
        EXPECT_EQ(hash(q.scales), want["scales"].template get<uint32_t>());
        EXPECT_EQ(hash(q.groups, 1), want["groups"].template get<uint32_t>());
        for_each_order<TypeParam>([&](TypeParam dev) {
            const bool half = sizeof(typename TypeParam::X) == 2;
            EXPECT_EQ(hash(dequantised(dev, 4, q, x.size(), 1)), want[half ? "bf16_values" : "f32"].template get<uint32_t>());
        });
    }
    EXPECT_GE(same_mean, 4u);
}

// A weight is off by half a step of its row at most, and by one rounding.
TYPED_TEST(Dequantise, EightBitsAreNear) {
    using X = typename TypeParam::X;
    const size_t rows = 7, columns = 83;
    auto w = random_values<float>(rows * columns, 1);
    std::fill_n(w.begin() + 2 * columns, columns, 0.0f);
    const QuantisedArrays q = quantise(8, w, columns);
    for_each_order<TypeParam>([&](TypeParam dev) {
        const auto out = dequantised(dev, 8, q, w.size(), columns);
        for (size_t i = 0; i < w.size(); i++) {
            const float step = q.groups[i / columns];
            EXPECT_NEAR(float(out[i]), w[i], 0.501 * step + unit_roundoff<X> * 127 * step);
        }
    });
}
