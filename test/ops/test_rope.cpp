#include "../../llmc/ops/rope.h"
#include "../../llmc/ops/rope_table.h"

#include "../finite_difference.h"
#include "../reference_rope.h"
#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/rope.cuh"
#endif

using Vector = std::vector<double>;

TEST(RopeReference, BackwardEqualsFiniteDifferences) {
    const size_t heads = 2, D = 6, R = 4, stride = 14, positions = 5;
    const std::vector<int32_t> doc_pos = {4, 0, 3};
    std::vector<float> table(positions * R);
    rope_table(table.data(), {.type = "yarn", .theta = 100, .factor = 4, .original_max_position = 64}, positions, R);
    const Vector x = widen(random_values<float>(doc_pos.size() * stride, 1)), dout = widen(random_values<float>(x.size(), 2));
    const auto forward = [&](const Vector &v) { return rope_reference(v, table, doc_pos, heads, D, R, stride, 1); };
    expect_close("dx", rope_reference(dout, table, doc_pos, heads, D, R, stride, -1), finite_difference(forward, x, dout), 1e-8);
}

template <class Dev> struct Rope : testing::Test {};
TYPED_TEST_SUITE(Rope, Devices);

TYPED_TEST(Rope, EqualsReference) {
    using X = typename TypeParam::X;
    const size_t positions = 9;
    struct Case {
        size_t heads, D, R, stride;
    };
    // No vectors; vectors of float only; vectors, and a loop over a token's heads; one pair; a part of each head
    for (const auto &[heads, D, R, stride] : {Case{3, 22, 22, 93},
                                              {3, 24, 24, 120},
                                              {21, 128, 128, 23 * 128},
                                              {2, 16, 16, 64},
                                              {1, 2, 2, 2},
                                              {3, 24, 18, 120},
                                              {2, 128, 96, 512}})
        for (const std::vector<int32_t> &doc_pos : {std::vector<int32_t>{8}, {0, 1, 2, 3, 0, 1, 8, 0, 5}}) {
            const size_t T = doc_pos.size();
            const auto x = random_values<X>(T * stride, 1);
            std::vector<float> table(positions * R);
            rope_table(table.data(), {.theta = 100}, positions, R);
            for (double sign : {1.0, -1.0}) {
                const std::vector<double> want = rope_reference(widen(x), table, doc_pos, heads, D, R, stride, sign);
                SameBits same;
                for_each_order<TypeParam>([&, heads = heads, D = D, R = R, stride = stride](TypeParam dev) {
                    Array<X> d_x(x);
                    Array<float> d_table(table);
                    Array<int32_t> d_pos(doc_pos);
                    if (sign > 0) rope_forward(dev, d_x.data(), d_table.data(), d_pos.data(), T, heads, D, R, stride);
                    else rope_backward(dev, d_x.data(), d_table.data(), d_pos.data(), T, heads, D, R, stride);
                    const auto got = d_x.values();
                    expect_close(format("rope T %zu heads %zu D %zu", T, heads, D).c_str(), got, want, rope_error<X>);
                    for (size_t t = 0; t < T; t++)
                        for (size_t i = 0; i < stride; i++) {
                            if (i < heads * D && i % D < R) continue;
                            ASSERT_EQ(float(got[t * stride + i]), float(x[t * stride + i])) << "this element is not rotated";
                        }
                    same(got);
                });
            }
        }
}
