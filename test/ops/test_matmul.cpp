// The three products of a linear layer against float64. In the emulator they are the CPU's, so that only their callers and the kernel of
// the bias's gradient are new; on a GPU they are cuBLASLt's.
#include "../../llmc/ops/matmul.h"

#include "../reference_matmul.h"
#include "device.h"
#ifdef CUDA_HALF
#include "../cuda/matmul_context.cuh"
#endif

#ifdef __CUDACC__
constexpr int roundings_before_bias = 1;  // of the product, by some of cuBLASLt's kernels
#else
constexpr int roundings_before_bias = 0;
#endif

struct Sizes {
    size_t T, IC, OC;
};
static const std::vector<Sizes> all_sizes = {{1, 5, 3},      {1, 96, 130},  {37, 100, 70},  {37, 104, 72}, {64, 64, 64},
                                             {300, 70, 600}, {70, 530, 33}, {1100, 20, 36}, {300, 72, 40}, {1, 96, 37},
                                             {2, 64, 16},    {5, 160, 50},  {8, 96, 49},    {128, 30, 101}};

// What was in an output before must not matter, not even a NaN, which is in every new array.
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

TYPED_TEST(Matmul, Forward) {
    using X = typename TypeParam::X;
    for (const Sizes &s : all_sizes) {
        this->make(s);
        const Sums plain = product_reference(this->x, s.IC, 1, this->w, 1, s.IC, {}, s.T, s.OC, s.IC);
        const Sums biased = product_reference(this->x, s.IC, 1, this->w, 1, s.IC, widen(this->bias), s.T, s.OC, s.IC);
        SameBits same;
        for_each_order<TypeParam>([&](TypeParam dev) {
            dev = this->context.device(dev);
            Array<X> x(this->x), w(this->w), bias(this->bias), out(s.T * s.OC), with_bias(s.T * s.OC);
            Array<float> wide(s.T * s.OC);  // as the logits are
            matmul_forward(dev, out.data(), x.data(), w.data(), nullptr, s.T, s.IC, s.OC);
            matmul_forward(dev, with_bias.data(), x.data(), w.data(), bias.data(), s.T, s.IC, s.OC);
            matmul_forward(dev, wide.data(), x.data(), w.data(), nullptr, s.T, s.IC, s.OC);
            expect_close("x w^T", out.values(), plain.value, allowed<X>(plain, s.IC));
            expect_close("x w^T + bias", with_bias.values(), biased.value,
                         allowed<X>(biased, s.IC) + roundings_before_bias * unit_roundoff<X> * plain.largest);
            expect_close("x w^T, float", wide.values(), plain.value, allowed<float>(plain, s.IC));
            same(out.values(), with_bias.values(), wide.values());
        });
    }
}

TYPED_TEST(Matmul, BackwardInput) {
    using X = typename TypeParam::X;
    for (const Sizes &s : all_sizes) {
        this->make(s);
        const Sums want = product_reference(this->dout, s.OC, 1, this->w, s.IC, 1, {}, s.T, s.IC, s.OC);
        for_each_order<TypeParam>([&](TypeParam dev) {
            Array<X> dout(this->dout), w(this->w), dx(s.T * s.IC);
            matmul_backward_input(this->context.device(dev), dx.data(), dout.data(), w.data(), s.T, s.IC, s.OC);
            expect_close("dx", dx.values(), want.value, allowed<X>(want, s.OC));
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
        const std::vector<float> ones(s.T, 1.0f), floats(this->dout.begin(), this->dout.end());  // no tensor core sums them
        const Sums bias = product_reference(ones, 0, 1, floats, s.OC, 1, widen(dbias_before), 1, s.OC, s.T);
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
        });
    }
}

// What adapters of a layer add to its output, and to the gradient of its input.
TYPED_TEST(Matmul, ForwardAndBackwardInputAccumulate) {
    using X = typename TypeParam::X;
    for (const Sizes &s : all_sizes) {
        this->make(s);
        const auto out_before = random_values<X>(s.T * s.OC, 5), dx_before = random_values<X>(s.T * s.IC, 6);
        Sums out = product_reference(this->x, s.IC, 1, this->w, 1, s.IC, {}, s.T, s.OC, s.IC);
        Sums dx = product_reference(this->dout, s.OC, 1, this->w, s.IC, 1, {}, s.T, s.IC, s.OC);
        const double out_allowed = allowed<X>(out, s.IC) + 2 * unit_roundoff<X> * largest(widen(out_before)),
                     dx_allowed = allowed<X>(dx, s.OC) + 2 * unit_roundoff<X> * largest(widen(dx_before));
        for (size_t i = 0; i < out_before.size(); i++) out.value[i] += double(out_before[i]);
        for (size_t i = 0; i < dx_before.size(); i++) dx.value[i] += double(dx_before[i]);
        for_each_order<TypeParam>([&](TypeParam dev) {
            dev = this->context.device(dev);
            Array<X> x(this->x), w(this->w), dout(this->dout), got(out_before), got_dx(dx_before);
            matmul_forward(dev, got.data(), x.data(), w.data(), nullptr, s.T, s.IC, s.OC, 0, true);
            matmul_backward_input(dev, got_dx.data(), dout.data(), w.data(), s.T, s.IC, s.OC, 0, true);
            expect_close("out + x w^T", got.values(), out.value, out_allowed);
            expect_close("dx + dout w", got_dx.values(), dx.value, dx_allowed);
        });
    }
}

// <dout, x w^T> = <dx, x> = <dw, w>: the three products belong together, whatever a reference says.
TYPED_TEST(Matmul, ProductsAreAdjoint) {
    using X = typename TypeParam::X;
    this->make({70, 90, 110});
    const Sizes s = this->s;
    const auto dev = this->context.device(any_device<TypeParam>());
    Array<X> d_x(this->x), d_w(this->w), d_dout(this->dout), d_out(s.T * s.OC), d_dx(s.T * s.IC);
    Array<float> d_dw(s.OC * s.IC);
    matmul_forward(dev, d_out.data(), d_x.data(), d_w.data(), nullptr, s.T, s.IC, s.OC);
    matmul_backward_input(dev, d_dx.data(), d_dout.data(), d_w.data(), s.T, s.IC, s.OC);
    matmul_backward_weight(dev, d_dw.data(), nullptr, d_dout.data(), d_x.data(), s.T, s.IC, s.OC, false);
    const auto out = widen(d_out.values()), dx = widen(d_dx.values()), dw = widen(d_dw.values());
    double by_out = 0, by_dx = 0, by_dw = 0, size = 0;
    for (size_t i = 0; i < out.size(); i++) {
        by_out += double(this->dout[i]) * out[i];
        size += std::abs(double(this->dout[i]) * out[i]);
    }
    for (size_t i = 0; i < dx.size(); i++) by_dx += dx[i] * double(this->x[i]);
    for (size_t i = 0; i < dw.size(); i++) by_dw += dw[i] * double(this->w[i]);
    const double allowed =
        4 * size * (unit_roundoff<X> + std::sqrt(double(s.OC)) * 0x1p-24);  // the elements' errors, all of one sign
    expect_close("dx . x = dout . out", std::vector<double>{by_dx}, std::vector<double>{by_out}, allowed);
    expect_close("dw . w = dout . out", std::vector<double>{by_dw}, std::vector<double>{by_out}, allowed);
}

// On every backend: a tile is the work of one thread, and the cut into tiles does not know how many there are.
TYPED_TEST(Matmul, ThreadsDoNotChangeABit) {
    using X = typename TypeParam::X;
    for (const Sizes &s : {Sizes{300, 130, 1100}, Sizes{1100, 33, 40}}) {
        this->make(s);
        SameBits same;
        for_each_order<TypeParam>([&](TypeParam dev) {
            dev = this->context.device(dev);
            Array<X> x(this->x), w(this->w), bias(this->bias), dout(this->dout), out(s.T * s.OC), dx(s.T * s.IC);
            Array<float> dw(std::vector<float>(s.OC * s.IC)), dbias(std::vector<float>(s.OC));
            matmul_forward(dev, out.data(), x.data(), w.data(), bias.data(), s.T, s.IC, s.OC);
            matmul_backward_input(dev, dx.data(), dout.data(), w.data(), s.T, s.IC, s.OC);
            matmul_backward_weight(dev, dw.data(), dbias.data(), dout.data(), x.data(), s.T, s.IC, s.OC, true);
            same(out.values(), dx.values(), dw.values(), dbias.values());
        });
    }
}

// Callers may cut the tokens at any multiple of a run. The sizes put several tiles, and parts of a tile, into the last run.
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
    EXPECT_FALSE(products({0, 64, T}) == whole) << "sums are cut elsewhere, so this test would notice";
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

#ifdef __CUDACC__
// A product that comes again and again keeps its plan, however many others come once.
TYPED_TEST(Matmul, PlansInUseAreKept) {
    using X = typename TypeParam::X;
    const auto dev = this->context.device(any_device<TypeParam>());
    Array<X> ones(std::vector<X>(64, X(1.0f))), out(64 * 64);
    const auto multiply = [&](size_t T, size_t OC) {
        matmul_forward(dev, out.data(), ones.data(), ones.data(), nullptr, T, 1, OC);
    };
    multiply(1, 1);
    const auto *plan = dev.ctx->plans.begin()->second.plan.get();
    for (size_t T = 2; T <= 13; T++)
        for (size_t OC = 1; OC <= 50; OC++) multiply(T, OC), multiply(1, 1);
    EXPECT_EQ(dev.ctx->plans.size(), dev.ctx->most_plans);
    EXPECT_TRUE(
        std::any_of(dev.ctx->plans.begin(), dev.ctx->plans.end(), [&](auto &kept) { return kept.second.plan.get() == plan; }));
}
#endif
