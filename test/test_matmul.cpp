// The three products of a linear layer against float64.
#include "check.h"

#include <array>

#include "../llmc/core/common.h"
#include "../llmc/ops/matmul.h"
#include "../llmc/ops/sgemm.h"
#include "reference_matmul.h"

struct Sizes {
    size_t T, IC, OC;
};
static const std::vector<Sizes> all_sizes = {{1, 5, 3},      {1, 96, 130},  {37, 100, 70}, {64, 64, 64},
                                             {300, 70, 600}, {70, 530, 33}, {1100, 20, 36}};

template <class Dev> struct Matmul : testing::Test {
    using X = typename Dev::X;
    Sizes s;
    std::vector<X> x, w, bias, dout;
    void make(Sizes sizes) {
        s = sizes;
        x = random_values<X>(s.T * s.IC, 1), w = random_values<X>(s.OC * s.IC, 2);
        bias = random_values<X>(s.OC, 3, 10), dout = random_values<X>(s.T * s.OC, 4);
        printf(" T %zu, IC %zu, OC %zu\n", s.T, s.IC, s.OC);
    }
};
TYPED_TEST_SUITE(Matmul, CpuDevices);

TYPED_TEST(Matmul, Forward) {
    using X = typename TypeParam::X;
    const auto dev = make_device<TypeParam>();
    for (Sizes s : all_sizes) {
        this->make(s);
        std::vector<X> out(s.T * s.OC, X(NAN));  // what was there before must not matter, not even a NaN
        matmul_forward(dev, out.data(), this->x.data(), this->w.data(), nullptr, s.T, s.IC, s.OC);
        const Sums plain = product_reference(this->x, s.IC, 1, this->w, 1, s.IC, {}, s.T, s.OC, s.IC);
        expect_close("x w^T", out, plain.value, allowed<X>(plain, s.IC));

        std::fill(out.begin(), out.end(), X(NAN));
        matmul_forward(dev, out.data(), this->x.data(), this->w.data(), this->bias.data(), s.T, s.IC, s.OC);
        const Sums biased = product_reference(this->x, s.IC, 1, this->w, 1, s.IC, widen(this->bias), s.T, s.OC, s.IC);
        expect_close("x w^T + bias", out, biased.value, allowed<X>(biased, s.IC));

        std::vector<float> wide(s.T * s.OC, NAN);  // as the logits are
        matmul_forward(dev, wide.data(), this->x.data(), this->w.data(), nullptr, s.T, s.IC, s.OC);
        expect_close("x w^T, float", wide, plain.value, allowed<float>(plain, s.IC));
    }
}

TYPED_TEST(Matmul, BackwardInput) {
    using X = typename TypeParam::X;
    for (Sizes s : all_sizes) {
        this->make(s);
        std::vector<X> dx(s.T * s.IC, X(NAN));
        matmul_backward_input(make_device<TypeParam>(), dx.data(), this->dout.data(), this->w.data(), s.T, s.IC, s.OC);
        const Sums want = product_reference(this->dout, s.OC, 1, this->w, s.IC, 1, {}, s.T, s.IC, s.OC);
        expect_close("dx", dx, want.value, allowed<X>(want, s.OC));
    }
}

TYPED_TEST(Matmul, BackwardWeightAccumulates) {
    using X = typename TypeParam::X;
    for (Sizes s : all_sizes) {
        this->make(s);
        auto dw = random_values<float>(s.OC * s.IC, 5), dbias = random_values<float>(s.OC, 6);
        const Sums want = product_reference(this->dout, 1, s.OC, this->x, s.IC, 1, widen(dw), s.OC, s.IC, s.T);
        const Sums bias = product_reference(std::vector<X>(s.T, X(1.0f)), 0, 1, this->dout, s.OC, 1, widen(dbias), 1, s.OC, s.T);
        matmul_backward_weight(make_device<TypeParam>(), dw.data(), dbias.data(), this->dout.data(), this->x.data(), s.T, s.IC,
                               s.OC, true);
        expect_close("dw", dw, want.value, allowed<float>(want, s.T));
        expect_close("dbias", dbias, bias.value, allowed<float>(bias, s.T));

        auto again = random_values<float>(s.OC * s.IC, 5);
        matmul_backward_weight(make_device<TypeParam>(), again.data(), nullptr, this->dout.data(), this->x.data(), s.T, s.IC,
                               s.OC, true);
        EXPECT_EQ(dw, again);
    }
}

TYPED_TEST(Matmul, BackwardWeightOverwrites) {
    for (Sizes s : all_sizes) {
        this->make(s);
        std::vector<float> dw(s.OC * s.IC, NAN);
        const Sums want = product_reference(this->dout, 1, s.OC, this->x, s.IC, 1, {}, s.OC, s.IC, s.T);
        matmul_backward_weight(make_device<TypeParam>(), dw.data(), nullptr, this->dout.data(), this->x.data(), s.T, s.IC, s.OC,
                               false);
        expect_close("dw", dw, want.value, allowed<float>(want, s.T));
    }
}

// <dout, x w^T> = <dx, x> = <dw, w>: the three products belong together, whatever a reference says.
TYPED_TEST(Matmul, ProductsAreAdjoint) {
    using X = typename TypeParam::X;
    this->make({70, 90, 110});
    const Sizes s = this->s;
    const auto dev = make_device<TypeParam>();
    std::vector<X> out(s.T * s.OC), dx(s.T * s.IC);
    std::vector<float> dw(s.OC * s.IC);
    matmul_forward(dev, out.data(), this->x.data(), this->w.data(), nullptr, s.T, s.IC, s.OC);
    matmul_backward_input(dev, dx.data(), this->dout.data(), this->w.data(), s.T, s.IC, s.OC);
    matmul_backward_weight(dev, dw.data(), nullptr, this->dout.data(), this->x.data(), s.T, s.IC, s.OC, false);
    double by_out = 0, by_dx = 0, by_dw = 0, size = 0;
    for (size_t i = 0; i < out.size(); i++) {
        by_out += double(this->dout[i]) * double(out[i]);
        size += std::abs(double(this->dout[i]) * double(out[i]));
    }
    for (size_t i = 0; i < dx.size(); i++) by_dx += double(dx[i]) * double(this->x[i]);
    for (size_t i = 0; i < dw.size(); i++) by_dw += double(dw[i]) * double(this->w[i]);
    const double allowed =
        4 * size * (unit_roundoff<X> + std::sqrt(double(s.OC)) * 0x1p-24);  // the elements' errors, all of one sign
    expect_close("dx . x = dout . out", std::vector<double>{by_dx}, std::vector<double>{by_out}, allowed);
    expect_close("dw . w = dout . out", std::vector<double>{by_dw}, std::vector<double>{by_out}, allowed);
}

// On every backend: a tile is the work of one thread, and the cut into tiles does not know how many there are.
TYPED_TEST(Matmul, ThreadsDoNotChangeABit) {
    using X = typename TypeParam::X;
    for (Sizes s : {Sizes{300, 130, 1100}, Sizes{1100, 33, 40}}) {
        this->make(s);
        std::vector<X> out[3], dx[3];
        std::vector<float> dw[3], dbias[3];
        for (int i = 0; i < 3; i++) {
            const auto dev = make_device<TypeParam>(i + 1);
            out[i].resize(s.T * s.OC), dx[i].resize(s.T * s.IC);
            dw[i].resize(s.OC * s.IC), dbias[i].resize(s.OC);
            matmul_forward(dev, out[i].data(), this->x.data(), this->w.data(), this->bias.data(), s.T, s.IC, s.OC);
            matmul_backward_input(dev, dx[i].data(), this->dout.data(), this->w.data(), s.T, s.IC, s.OC);
            matmul_backward_weight(dev, dw[i].data(), dbias[i].data(), this->dout.data(), this->x.data(), s.T, s.IC, s.OC, true);
            EXPECT_EQ(widen(out[i]), widen(out[0]));
            EXPECT_EQ(widen(dx[i]), widen(dx[0]));
            EXPECT_EQ(dw[i], dw[0]);
            EXPECT_EQ(dbias[i], dbias[0]);
        }
    }
}

// More shapes than a context keeps (512).
TYPED_TEST(Matmul, ShapesThatNeverRepeat) {
    using X = typename TypeParam::X;
    const auto dev = make_device<TypeParam>();
    const std::vector<X> ones(64 * 64, X(1.0f));
    std::vector<X> out(64 * 64);
    for (size_t T = 1; T <= 4; T++)
        for (size_t IC = 1; IC <= 8; IC++)
            for (size_t OC = 1; OC <= 17; OC++) {
                matmul_forward(dev, out.data(), ones.data(), ones.data(), nullptr, T, IC, OC);
                ASSERT_EQ(float(out[T * OC - 1]), float(IC));
            }
}

// Our own product, whatever the backend: all layouts, several blocks in each direction.
TYPED_TEST(Matmul, OwnSgemm) {
    using X = typename TypeParam::X;
    std::vector<float> memory(2 * sgemm_scratch + 16);
    float *scratch = reinterpret_cast<float *>(round_up(reinterpret_cast<size_t>(memory.data()), 64));
    for (auto [M, N, K] : {std::array<size_t, 3>{1, 1, 1}, {7, 9, 300}, {203, 390, 520}})
        for (int layout = 0; layout < 4; layout++) {
            const auto a = random_values<X>(M * K, 1), b = random_values<X>(K * N, 2);
            auto c = random_values<float>(M * N, 3);
            const Matrix<X> A = layout & 1 ? Matrix<X>{a.data(), 1, M} : Matrix<X>{a.data(), K, 1};
            const Matrix<X> B = layout & 2 ? Matrix<X>{b.data(), 1, K} : Matrix<X>{b.data(), N, 1};
            const Sums want = product_reference(a, A.row, A.column, b, B.row, B.column, widen(c), M, N, K);
            sgemm(2, scratch, c.data(), N, A, B, static_cast<const X *>(nullptr), M, N, K, true);
            expect_close("C += A B", c, want.value, allowed<float>(want, K));
        }
}
