#include "../../llmc/ops/fp8.h"

#include "../reference_matmul.h"
#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/fp8.cuh"
#include "../cuda/matmul_context.cuh"
#endif

using Vector = std::vector<double>;

TEST(Fp8, NumbersAndTheirNeighbours) {
    double before = -1;
    for (int code = 0; code < 0x7f; code++) {
        const double number = fp8_number(uint8_t(code));
        ASSERT_GT(number, before);
        EXPECT_EQ(fp8_code(float(number)), code);
        EXPECT_EQ(fp8_code(-float(number)), code | 0x80);
        EXPECT_EQ(fp8_nearest(float(number)), number);
        if (code > 0) {
            const float middle = float((number + before) / 2), even = float(code % 2 ? before : number);
            EXPECT_EQ(fp8_nearest(middle), even) << middle;
            EXPECT_EQ(fp8_nearest(-middle), -even);
            EXPECT_EQ(fp8_nearest(std::nextafter(middle, 0.0f)), before);
            EXPECT_EQ(fp8_nearest(std::nextafter(middle, INFINITY)), number);
        }
        before = number;
    }
    EXPECT_EQ(fp8_number(1), 0x1p-9f);
    EXPECT_EQ(before, fp8_largest);
    EXPECT_EQ(fp8_nearest(1e30f), fp8_largest);
    EXPECT_EQ(fp8_nearest(-INFINITY), -fp8_largest);
    for (float zero : {-0.0f, -1e-5f, -0x1p-10f}) EXPECT_EQ(fp8_code(fp8_nearest(zero)), 0x80) << zero;
    EXPECT_TRUE(std::isnan(fp8_nearest(NAN)) && std::isnan(fp8_number(fp8_code(NAN))));
}

// The factor is the largest power of two that keeps the largest magnitude within the format.
TEST(Fp8, TheFactorFillsTheFormat) {
    for (const float largest : {1e-30f, 0.1f, 1.0f, 1.74f, 1.75f, 1.76f, 448.0f, 449.0f, 57345.0f, 3e38f}) {
        const float factor = fp8_factor(largest);
        int exponent;
        EXPECT_EQ(std::frexp(factor, &exponent), 0.5f);
        EXPECT_LE(factor * largest, fp8_largest) << largest;
        EXPECT_GT(factor * largest * 2, fp8_largest) << largest;
    }
    EXPECT_EQ(fp8_factor(0), 1);
    EXPECT_EQ(fp8_factor(1e-45f), 0x1p126f);
    for (const float bad : {INFINITY, NAN}) EXPECT_TRUE(std::isnan(fp8_factor(bad)));
}

// Returns x after rounding, in float64.
template <class X> Vector rounded(const std::vector<X> &x) {
    const double factor = fp8_factor(float(largest(widen(x))));
    Vector out;
    for (const X v : x) out.push_back(double(fp8_nearest(float(factor * double(float(v))))) / factor);
    return out;
}
inline Vector transposed(const Vector &x, size_t rows, size_t columns) {
    Vector out(x.size());
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < columns; c++) out[c * rows + r] = x[r * columns + c];
    return out;
}

template <class Dev> struct Fp8Arrays {
    using X = typename Dev::X;
    Dev dev;
    size_t n;
    Array<X> bytes;  // the size that the CPU needs
    Array<float> scale = Array<float>(2);

    Fp8Arrays(Dev dev, size_t n) : dev(dev), n(n), bytes(n) {}
    Fp8Matrix matrix() { return {reinterpret_cast<std::byte *>(bytes.data()), scale.data()}; }
    void round(const X *x, size_t rows, size_t columns, bool transposed = false) {
        fp8_scale(dev, matrix(), x, rows, columns);
        fp8_round(dev, matrix(), x, rows, columns, transposed);
    }
    Vector values() {
        const std::vector<X> stored = bytes.values();
        if (fp8_bytes(dev) > 1) return widen(stored);
        Vector out(n);
        for (size_t i = 0; i < n; i++)
            out[i] = double(fp8_number(reinterpret_cast<const uint8_t *>(stored.data())[i])) * double(scale.values()[0]);
        return out;
    }
};

template <class Dev> struct Fp8Matrices : testing::Test {};
TYPED_TEST_SUITE(Fp8Matrices, Devices);

TYPED_TEST(Fp8Matrices, AreRoundedAndTransposed) {
    using X = typename TypeParam::X;
    for (const auto &[rows, columns] : {std::array<size_t, 2>{16, 16}, {48, 80}, {144, 64}, {208, 144}}) {
        const auto x = random_values<X>(rows * columns, 1, 3);
        const Vector want = rounded(x);
        SameBits same;
        for_each_order<TypeParam>([&, rows = rows, columns = columns](TypeParam dev) {
            Array<X> d_x(x);
            Fp8Arrays<TypeParam> plain(dev, rows * columns), across(dev, rows * columns);
            plain.round(d_x.data(), rows, columns);
            across.round(d_x.data(), rows, columns, true);
            EXPECT_EQ(plain.values(), want);
            EXPECT_EQ(across.values(), transposed(want, rows, columns));
            same(plain.scale.values());
        });
    }
}

TYPED_TEST(Fp8Matrices, OfZerosInfinitiesAndNaN) {
    using X = typename TypeParam::X;
    for (const float bad : {0.0f, INFINITY, -INFINITY, NAN}) {
        std::vector<X> x(32 * 16, X(bad == 0 ? 0.0f : 1.0f));
        x[77] = bad;
        Array<X> d_x(x);
        Fp8Arrays<TypeParam> q(any_device<TypeParam>(), x.size());
        q.round(d_x.data(), 32, 16);
        for (const double v : q.values()) ASSERT_EQ(std::isnan(v), bad != 0);
    }
}

// Hopper's tensor cores shift 32 products of FP8 and the running sum to their largest exponent, add them, and keep 13 bits of fraction (DeepSeek-V3 technical report, 2024, section 3.3.2).
double sum_error([[maybe_unused]] size_t n, [[maybe_unused]] double largest_product, [[maybe_unused]] double largest_sum) {
#if defined(CUDA_HALF) && !defined(LLMC_EMULATE)
    return 0x1p-13 * (double(n) * largest_product + double(ceil_div(n, 32)) * largest_sum);
#else
    return 0;
#endif
}

TYPED_TEST(Fp8Matrices, ProductsEqualReference) {
    using X = typename TypeParam::X;
    MatmulContext context;
    std::vector<std::array<size_t, 3>> sizes = {{16, 32, 16}, {64, 80, 48}, {128, 16, 208}};
    if (std::is_same_v<X, float> && fp8_bytes(TypeParam{}) == 1) sizes.clear();  // on a GPU the other arrays are bf16
    for (const auto &[T, IC, OC] : sizes) {
        const auto x = random_values<X>(T * IC, 1, 2), w = random_values<X>(OC * IC, 2, 0.2), bias = random_values<X>(OC, 3);
        const Vector a = rounded(x), b = rounded(w);
        const Sums want = product_reference(a, IC, 1, b, 1, IC, {}, T, OC, IC);
        const double in_float = double(IC + 4) * unit_roundoff<float> * (want.largest_absolute + largest(widen(bias)));
        const double allowed = in_float + sum_error(IC, largest(a) * largest(b), want.largest_absolute);
        for_each_order<TypeParam>([&, T = T, IC = IC, OC = OC](TypeParam dev) {
            dev = context.device(dev);
            Array<X> d_x(x), d_w(w), d_bias(bias), out(T * OC);
            Array<float> sum(std::vector<float>(T * OC, 1));
            Fp8Arrays<TypeParam> q(dev, T * IC), of_w(dev, OC * IC);
            q.round(d_x.data(), T, IC), of_w.round(d_w.data(), OC, IC);
            const X *const none = nullptr, *const with_bias = d_bias.data();
            fp8_product(dev, out.data(), q.matrix(), of_w.matrix(), with_bias, T, IC, OC, false);
            fp8_product(dev, sum.data(), q.matrix(), of_w.matrix(), none, T, IC, OC, true);
            Vector biased = want.value, added = want.value;
            for (size_t i = 0; i < biased.size(); i++) biased[i] += double(float(bias[i % OC])), added[i] += 1;
            expect_close("fp8_product", out.values(), biased, allowed + unit_roundoff<X> * largest(biased));
            expect_close("fp8_product, added", sum.values(), added, allowed + 4 * unit_roundoff<float> * largest(added));
        });
    }
}
