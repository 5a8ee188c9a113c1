// The three products of a linear layer against float64. In the emulator they are the CPU's, so that only their callers and the kernel of
// the bias's gradient are new; on a GPU they are cuBLASLt's.
#include "../../llmc/ops/matmul.h"

#include "../reference_matmul.h"
#include "device.h"
#ifdef CUDA_HALF
#include "../cuda/matmul_context.cuh"
#endif

#ifdef __CUDACC__
constexpr int roundings_before_bias = 1;  // some of cuBLASLt's kernels round the product
#else
constexpr int roundings_before_bias = 0;
#endif

struct Sizes {
    size_t T, IC, OC;
};
// Some have tiles for several threads, along each dimension. In the last two, 256 and 512 divide all outputs but one.
static const std::vector<Sizes> all_sizes = {{1, 5, 3},      {1, 96, 130},  {37, 100, 70},  {37, 104, 72},  {64, 64, 64},
                                             {300, 70, 600}, {70, 530, 33}, {1100, 20, 36}, {300, 72, 40},  {1, 96, 37},
                                             {2, 64, 16},    {5, 160, 50},  {8, 96, 49},    {128, 30, 101}, {16, 64, 96},
                                             {50, 96, 80},   {40, 8, 769},  {20, 4, 3585}};

template <class Dev> struct Matmul : testing::Test {
    using X = typename Dev::X;
    MatmulContext context;
    Sizes s;
    std::vector<X> x, w, bias, dout;

    void make(Sizes sizes) {
        s = sizes;
        x = random_values<X>(s.T * s.IC, 1), w = random_values<X>(s.OC * s.IC, 2);
        bias = random_values<X>(s.OC, 3, 10), dout = random_values<X>(s.T * s.OC, 4);
        printf(" T %zu, IC %zu, OC %zu\n", s.T, s.IC, s.OC);
    }
};
TYPED_TEST_SUITE(Matmul, Devices);

// The sums, added to `before`.
template <class X> Sums plus(Sums sums, const std::vector<X> &before) {
    for (size_t i = 0; i < before.size(); i++) sums.value[i] += double(before[i]);
    return sums;
}

// Every new array holds NaN, so the test notices an op that reads the output that it overwrites.
TYPED_TEST(Matmul, Forward) {
    using X = typename TypeParam::X;
    for (const Sizes &s : all_sizes) {
        this->make(s);
        const auto before = random_values<X>(s.T * s.OC, 5);
        const Sums plain = product_reference(this->x, s.IC, 1, this->w, 1, s.IC, {}, s.T, s.OC, s.IC);
        const Sums biased = product_reference(this->x, s.IC, 1, this->w, 1, s.IC, widen(this->bias), s.T, s.OC, s.IC);
        SameBits same;
        for_each_order<TypeParam>([&](TypeParam dev) {
            dev = this->context.device(dev);
            Array<X> x(this->x), w(this->w), bias(this->bias), out(s.T * s.OC), with_bias(s.T * s.OC), added(before);
            Array<float> wide(s.T * s.OC);  // as for logits
            matmul_forward(dev, out.data(), x.data(), w.data(), nullptr, s.T, s.IC, s.OC);
            matmul_forward(dev, with_bias.data(), x.data(), w.data(), bias.data(), s.T, s.IC, s.OC);
            matmul_forward(dev, wide.data(), x.data(), w.data(), nullptr, s.T, s.IC, s.OC);
            matmul_forward(dev, added.data(), x.data(), w.data(), nullptr, s.T, s.IC, s.OC, 0, true);  // as for adapters
            expect_close("x w^T", out.values(), plain.value, allowed<X>(plain, s.IC));
            expect_close("x w^T + bias", with_bias.values(), biased.value,
                         allowed<X>(biased, s.IC) + roundings_before_bias * unit_roundoff<X> * plain.largest);
            expect_close("x w^T, float", wide.values(), plain.value, allowed<float>(plain, s.IC));
            expect_close("out + x w^T", added.values(), plus(plain, before).value,
                         allowed<X>(plain, s.IC) + 2 * unit_roundoff<X> * largest(widen(before)));
            same(out.values(), with_bias.values(), wide.values(), added.values());
        });
    }
}

TYPED_TEST(Matmul, BackwardInput) {
    using X = typename TypeParam::X;
    for (const Sizes &s : all_sizes) {
        this->make(s);
        const auto before = random_values<X>(s.T * s.IC, 6);
        const Sums want = product_reference(this->dout, s.OC, 1, this->w, s.IC, 1, {}, s.T, s.IC, s.OC);
        SameBits same;
        for_each_order<TypeParam>([&](TypeParam dev) {
            dev = this->context.device(dev);
            Array<X> dout(this->dout), w(this->w), dx(s.T * s.IC), added(before);
            matmul_backward_input(dev, dx.data(), dout.data(), w.data(), s.T, s.IC, s.OC);
            matmul_backward_input(dev, added.data(), dout.data(), w.data(), s.T, s.IC, s.OC, 0, true);
            expect_close("dx", dx.values(), want.value, allowed<X>(want, s.OC));
            expect_close("dx + dout w", added.values(), plus(want, before).value,
                         allowed<X>(want, s.OC) + 2 * unit_roundoff<X> * largest(widen(before)));
            same(dx.values(), added.values());
        });
    }
}

TYPED_TEST(Matmul, BackwardWeightAccumulatesOrOverwrites) {
    using X = typename TypeParam::X;
    for (const Sizes &s : all_sizes) {
        this->make(s);
        const auto dw_before = random_values<float>(s.OC * s.IC, 5), dbias_before = random_values<float>(s.OC, 6);
        const Sums want = product_reference(this->dout, 1, s.OC, this->x, s.IC, 1, widen(dw_before), s.OC, s.IC, s.T);
        const Sums want_alone = product_reference(this->dout, 1, s.OC, this->x, s.IC, 1, {}, s.OC, s.IC, s.T);
        const std::vector<float> ones(s.T, 1.0f), floats(this->dout.begin(), this->dout.end());  // tensor cores do not add them
        const Sums bias = product_reference(ones, 0, 1, floats, s.OC, 1, widen(dbias_before), 1, s.OC, s.T);
        SameBits same;
        for_each_order<TypeParam>([&](TypeParam dev) {
            dev = this->context.device(dev);
            Array<X> dout(this->dout), x(this->x);
            Array<float> dw(dw_before), dbias(dbias_before), without_bias(dw_before), alone(s.OC * s.IC);
            matmul_backward_weight(dev, dw.data(), dbias.data(), dout.data(), x.data(), s.T, s.IC, s.OC, true);
            matmul_backward_weight(dev, without_bias.data(), nullptr, dout.data(), x.data(), s.T, s.IC, s.OC, true);
            matmul_backward_weight(dev, alone.data(), nullptr, dout.data(), x.data(), s.T, s.IC, s.OC, false);
            expect_close("dw", dw.values(), want.value, allowed<float>(want, s.T));
            expect_close("dbias", dbias.values(), bias.value, allowed<float>(bias, s.T));
            EXPECT_EQ(without_bias.values(), dw.values());
            expect_close("dw, overwritten", alone.values(), want_alone.value, allowed<float>(want_alone, s.T));
            same(dw.values(), dbias.values(), alone.values());
        });
    }
}

// Callers may split the tokens at any multiple of a run. The last run has several tiles and a partial one.
TYPED_TEST(Matmul, CutsBetweenRunsDoNotChangeABit) {
    using X = typename TypeParam::X;
    const auto dev = this->context.device(any_device<TypeParam>());
    const size_t run = matmul_run(dev), T = 3 * run + 192, IC = 24, OC = 40;
    this->make({T, IC, OC});
    Array<X> x(this->x), w(this->w), bias(this->bias), dout(this->dout);
    const std::vector<float> no_dw(OC * IC), no_dbias(OC);
    const auto products = [&](const std::vector<size_t> &cuts) {
        Array<X> out(T * OC), dx(T * IC);
        Array<float> dw(no_dw), dbias(no_dbias);
        for (size_t i = 0; i + 1 < cuts.size(); i++) {
            const size_t t = cuts[i], n = cuts[i + 1] - t;
            matmul_forward(dev, out.data() + t * OC, x.data() + t * IC, w.data(), bias.data(), n, IC, OC);
            matmul_backward_input(dev, dx.data() + t * IC, dout.data() + t * OC, w.data(), n, IC, OC);
            matmul_backward_weight(dev, dw.data(), dbias.data(), dout.data() + t * OC, x.data() + t * IC, n, IC, OC, t > 0);
        }
        return std::tuple(out.values(), dx.values(), dw.values(), dbias.values());
    };
    const auto whole = products({0, T});
    EXPECT_TRUE(products({0, run, 2 * run, 3 * run, T}) == whole);
    EXPECT_TRUE(products({0, 2 * run, T}) == whole);
    EXPECT_FALSE(products({0, 64, T}) == whole) << "another split gives other bits, so the test can fail";
}

// More shapes than a context keeps (512).
TYPED_TEST(Matmul, ShapesThatNeverRepeat) {
    using X = typename TypeParam::X;
    const auto dev = this->context.device(any_device<TypeParam>());
    Array<X> ones(std::vector<X>(64 * 64, X(1.0f))), out(64 * 64);
    for (size_t T = 1; T <= 4; T++)
        for (size_t IC = 1; IC <= 8; IC++)
            for (size_t OC = 1; OC <= 17; OC++) {
                matmul_forward(dev, out.data(), ones.data(), ones.data(), nullptr, T, IC, OC);
                ASSERT_EQ(float(out.values()[T * OC - 1]), float(IC));
            }
}
