// dropout, and noise on embeddings: the random numbers depend on a token's document and position alone.
#include <array>

#include "../../llmc/ops/dropout.h"
#include "../../llmc/ops/noise.h"

#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/dropout.cuh"
#include "../../llmc/ops/noise.cuh"
#endif

using Vector = std::vector<double>;

// Tokens in two documents.
struct Tokens {
    size_t T, C;
    size_t first = 0;  // channel
    std::vector<int32_t> documents, positions;
    Tokens(size_t T, size_t C, size_t first = 0) : T(T), C(C), first(first) {
        for (size_t t = 0; t < T; t++) documents.push_back(t < T / 2 ? 7 : 3), positions.push_back(int32_t(t % 5));
    }
    // before + f(x, token, random word); an empty `before` is 0.
    template <class F> Vector reference(const Vector &before, const Vector &x, uint64_t seed, Purpose purpose, F f) const {
        Vector out(T * C);
        for (size_t i = 0; i < out.size(); i++) {
            const size_t t = i / C, c = first + i % C;
            const Random random{seed, purpose, uint32_t(c / 4)};
            const uint32_t word = random.block(uint64_t(documents[t]) << 32 | uint64_t(positions[t]))[int(c % 4)];
            out[i] = (before.empty() ? 0 : before[i]) + f(x[i], t, word);
        }
        return out;
    }
};
static const std::pair<size_t, size_t> token_sizes[] = {{1, 8}, {11, 83}, {3, 1032}};  // T, C

template <class Dev> struct Dropout : testing::Test {};
TYPED_TEST_SUITE(Dropout, Devices);

TYPED_TEST(Dropout, EqualsReferenceAlsoInPlace) {
    using X = typename TypeParam::X;
    for (const uint32_t threshold : {0u, 1u << 30})
        for (const auto &[T, C, first] : {std::array<size_t, 3>{1, 8, 0},
                                          {11, 83, 0},
                                          {3, 1032, 0},
                                          {11, 83, 5},
                                          {3, 1032, 8},
                                          {7, 2, 2},
                                          {5, 1, 3},
                                          {3, 510, 7}}) {
            const auto x = random_values<X>(T * C, 1), before = random_values<X>(T * C, 2);
            const Tokens tokens(T, C, first);
            const DropoutMask mask{1.5f, threshold, 42};
            const auto kept = [&](double v, size_t, uint32_t word) {
                return word >= mask.threshold ? double(mask.scale) * v : 0;
            };
            const Vector want = tokens.reference({}, widen(x), mask.seed, Purpose::dropout, kept),
                         want_d = tokens.reference(widen(before), widen(x), mask.seed, Purpose::dropout, kept);
            // A product and a sum in float, and a rounding to X.
            const double error = 2 * unit_roundoff<float> + unit_roundoff<X>, most = mask.scale * largest(widen(x));
            SameBits same;
            for_each_order<TypeParam>([&, T = T, C = C, first = first](TypeParam dev) {
                Array<X> d_x(x), out(T * C), dx(before);
                Array<int32_t> documents(tokens.documents), positions(tokens.positions);
                const DropoutMask own{mask.scale, threshold, mask.seed, documents.data(), positions.data(), first};
                dropout_forward(dev, out.data(), d_x.data(), own, T, C);
                dropout_backward(dev, dx.data(), d_x.data(), own, T, C);
                expect_close("dropout_forward", out.values(), want, error * most);
                expect_close("dropout_backward", dx.values(), want_d, error * (most + largest(widen(before))));
                dropout_forward(dev, d_x.data(), d_x.data(), own, T, C);
                same(out.values(), dx.values());
                same(d_x.values(), dx.values());
            });
        }
}

template <class Dev> struct Noise : testing::Test {};
TYPED_TEST_SUITE(Noise, Devices);

TYPED_TEST(Noise, EqualsReference) {
    using X = typename TypeParam::X;
    for (const auto &[T, C] : token_sizes) {
        const auto x = random_values<X>(T * C, 1);
        const Tokens tokens(T, C);
        std::vector<float> magnitudes(T, 0.25f);
        magnitudes[0] = 0;
        const TokenNoise noise{42};
        const Vector want =
            tokens.reference(widen(x), widen(x), noise.seed, Purpose::noise, [&](double, size_t t, uint32_t word) {
                return double(magnitudes[t]) * double(int32_t(word)) / 2147483648.0;  // uniform in [-1, 1]
            });
        // Three roundings in float (conversion, product, sum) and one to X.
        const double allowed = (3 * unit_roundoff<float> + unit_roundoff<X>)*(largest(widen(x)) + 0.25);
        SameBits same;
        for_each_order<TypeParam>([&, T = T, C = C](TypeParam dev) {
            Array<X> d_x(x);
            Array<float> d_magnitudes(magnitudes);
            Array<int32_t> d_documents(tokens.documents), d_positions(tokens.positions);
            noise_forward(dev, d_x.data(), {noise.seed, d_magnitudes.data(), d_documents.data(), d_positions.data()}, T, C);
            expect_close("noise_forward", d_x.values(), want, allowed);
            for (size_t c = 0; c < C; c++) EXPECT_EQ(float(d_x.values()[c]), float(x[c]));  // its magnitude is 0
            same(d_x.values());
        });
    }
}
