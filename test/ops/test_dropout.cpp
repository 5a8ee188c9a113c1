#include "../../llmc/ops/dropout.h"

#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/dropout.cuh"
#endif

using Vector = std::vector<double>;

// ---- dropout in float64, and how far float may be from it.

static bool dropout_keeps(const DropoutMask &mask, int32_t document, int32_t position, size_t c) {
    const Random random{mask.seed, Purpose::dropout, uint32_t(c / 4)};
    return random.block(uint64_t(document) << 32 | uint64_t(position))[int(c % 4)] >= mask.threshold;
}

static Vector dropout_reference(const Vector &before, const Vector &x, const DropoutMask &mask,
                                const std::vector<int32_t> &documents, const std::vector<int32_t> &positions, size_t C) {
    Vector out(x.size());
    for (size_t i = 0; i < x.size(); i++)
        out[i] = (before.empty() ? 0 : before[i]) +
                 (dropout_keeps(mask, documents[i / C], positions[i / C], i % C) ? double(mask.scale) * x[i] : 0);
    return out;
}

// A product and a sum in float, then one rounding to X.
template <class X> double dropout_error(const Vector &before, const Vector &x, const DropoutMask &mask) {
    const double most = (before.empty() ? 0 : largest(before)) + mask.scale * largest(x);
    return (2 * unit_roundoff<float> + unit_roundoff<X>)*most;
}

// ---- the op

template <class Dev> struct Dropout : testing::Test {};
TYPED_TEST_SUITE(Dropout, Devices);

// Tokens of two documents, whose masks are the same wherever they lie.
struct Tokens {
    std::vector<int32_t> documents, positions;
    explicit Tokens(size_t T) {
        for (size_t t = 0; t < T; t++) documents.push_back(t < T / 2 ? 7 : 3), positions.push_back(int32_t(t % 5));
    }
};

TYPED_TEST(Dropout, EqualsReferenceAlsoInPlace) {
    using X = typename TypeParam::X;
    for (const uint32_t threshold : {0u, 1u << 30})
        for (const auto &[T, C] : {std::pair<size_t, size_t>{1, 8}, {11, 83}, {3, 1032}}) {
            const auto x = random_values<X>(T * C, 1), before = random_values<X>(T * C, 2);
            const Tokens tokens(T);
            const DropoutMask mask{1.5f, threshold, 42};
            const auto want = dropout_reference({}, widen(x), mask, tokens.documents, tokens.positions, C),
                       want_d = dropout_reference(widen(before), widen(x), mask, tokens.documents, tokens.positions, C);
            SameBits same;
            for_each_order<TypeParam>([&, T = T, C = C](TypeParam dev) {
                Array<X> d_x(x), out(T * C), dx(before);
                Array<int32_t> documents(tokens.documents), positions(tokens.positions);
                const DropoutMask own{mask.scale, threshold, mask.seed, documents.data(), positions.data()};
                dropout_forward(dev, out.data(), d_x.data(), own, T, C);
                dropout_backward(dev, dx.data(), d_x.data(), own, T, C);
                expect_close("dropout_forward", out.values(), want, dropout_error<X>({}, widen(x), mask));
                expect_close("dropout_backward", dx.values(), want_d, dropout_error<X>(widen(before), widen(x), mask));
                dropout_forward(dev, d_x.data(), d_x.data(), own, T, C);
                same(out.values(), dx.values());
                same(d_x.values(), dx.values());
            });
        }
}

// A quarter is dropped, and the mask of a token does not depend on its row.
TYPED_TEST(Dropout, MaskBelongsToTheToken) {
    const size_t T = 200, C = 64;
    std::vector<float> ones(T * C, 1.0f);
    std::vector<typename TypeParam::X> x(ones.begin(), ones.end());
    Array<typename TypeParam::X> d_x(x), out(T * C), last(C);
    std::vector<int32_t> numbers(T);
    for (size_t t = 0; t < T; t++) numbers[t] = int32_t(t);
    Array<int32_t> documents(std::vector<int32_t>(T, 5)), positions(numbers);
    const DropoutMask mask{1, 1u << 30, 9, documents.data(), positions.data()};
    dropout_forward(any_device<TypeParam>(), out.data(), d_x.data(), mask, T, C);
    dropout_forward(any_device<TypeParam>(), last.data(), d_x.data(), mask.from(T - 1), 1, C);
    double kept = 0;
    const auto values = out.values();
    for (const auto v : values) kept += double(float(v)) / double(values.size());
    EXPECT_NEAR(kept, 0.75, 4 * std::sqrt(0.75 * 0.25 / double(T * C)));
    EXPECT_EQ(widen(last.values()), widen(std::vector(values.end() - C, values.end())));
}
