#include "../../llmc/ops/noise.h"

#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/noise.cuh"
#endif

using Vector = std::vector<double>;

// ---- noise in float64, and how far float may be from it.

static double uniform_of(const TokenNoise &noise, int32_t document, int32_t position, size_t c) {
    const Random random{noise.seed, Purpose::noise, uint32_t(c / 4)};
    return double(int32_t(random.block(uint64_t(document) << 32 | uint64_t(position))[int(c % 4)])) / 2147483648.0;
}

static Vector noise_reference(const Vector &x, const TokenNoise &noise, const std::vector<float> &magnitudes,
                              const std::vector<int32_t> &documents, const std::vector<int32_t> &positions, size_t C) {
    Vector out(x.size());
    for (size_t i = 0; i < x.size(); i++)
        out[i] = x[i] + double(magnitudes[i / C]) * uniform_of(noise, documents[i / C], positions[i / C], i % C);
    return out;
}

// The word becomes a float, is multiplied and added: three roundings in float, then one to X.
template <class X> double noise_error(const Vector &x, double magnitude) {
    return (3 * unit_roundoff<float> + unit_roundoff<X>)*(largest(x) + magnitude);
}

// ---- the op

template <class Dev> struct Noise : testing::Test {};
TYPED_TEST_SUITE(Noise, Devices);

TYPED_TEST(Noise, EqualsReference) {
    using X = typename TypeParam::X;
    for (const auto &[T, C] : {std::pair<size_t, size_t>{1, 8}, {11, 83}, {3, 1032}}) {
        const auto x = random_values<X>(T * C, 1);
        std::vector<int32_t> documents, positions;
        std::vector<float> magnitudes;
        for (size_t t = 0; t < T; t++)
            documents.push_back(t < T / 2 ? 7 : 3), positions.push_back(int32_t(t % 5)), magnitudes.push_back(t ? 0.25f : 0.0f);
        const TokenNoise noise{42};
        const auto want = noise_reference(widen(x), noise, magnitudes, documents, positions, C);
        SameBits same;
        for_each_order<TypeParam>([&, T = T, C = C](TypeParam dev) {
            Array<X> d_x(x);
            Array<float> d_magnitudes(magnitudes);
            Array<int32_t> d_documents(documents), d_positions(positions);
            noise_forward(dev, d_x.data(), {noise.seed, d_magnitudes.data(), d_documents.data(), d_positions.data()}, T, C);
            expect_close("noise_forward", d_x.values(), want, noise_error<X>(widen(x), 0.25));
            same(d_x.values());
        });
        EXPECT_EQ(std::vector(want.begin(), want.begin() + ptrdiff_t(C)),
                  widen(std::vector(x.begin(), x.begin() + ptrdiff_t(C))));  // magnitude 0
    }
}

// Its mean is 0 and its variance 1/3, as uniform in [-1, 1]. A token's noise does not depend on its row.
TYPED_TEST(Noise, IsUniformAndBelongsToTheToken) {
    using X = typename TypeParam::X;
    const size_t T = 300, C = 64;
    std::vector<int32_t> numbers(T);
    for (size_t t = 0; t < T; t++) numbers[t] = int32_t(t);
    Array<X> x(std::vector<X>(T * C)), alone{std::vector<X>(C)};
    Array<float> magnitudes(std::vector<float>(T, 1));
    Array<int32_t> documents(std::vector<int32_t>(T, 5)), positions(numbers);
    noise_forward(any_device<TypeParam>(), x.data(), {9, magnitudes.data(), documents.data(), positions.data()}, T, C);
    const auto values = widen(x.values());
    double sum = 0, squares = 0;
    for (const double v : values) sum += v, squares += v * v;
    const double n = double(T * C);
    EXPECT_NEAR(sum / n, 0, 4 * std::sqrt(1 / 3.0 / n));
    EXPECT_NEAR(squares / n, 1 / 3.0, 4 * std::sqrt((1 / 5.0 - 1 / 9.0) / n));
    EXPECT_LE(largest(values), 1);
    noise_forward(any_device<TypeParam>(), alone.data(),
                  {9, magnitudes.data(), documents.data() + T - 1, positions.data() + T - 1}, 1, C);
    EXPECT_EQ(widen(alone.values()), std::vector(values.end() - C, values.end()));
}
