#include "../../llmc/ops/embedding.h"

#include <array>

#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/embedding.cuh"
#endif

template <class Dev> struct Embedding : testing::Test {};
TYPED_TEST_SUITE(Embedding, Devices);

// Few different tokens and many, channels in several slices of a warp with and without vectors. Copies are exact, and the order
// of the sum is part of the contract, so the float sums are equal, also for ranges of tokens, some of which do not occur.
TYPED_TEST(Embedding, CopiesRowsAndAddsInTheOrderOfTheText) {
    using X = typename TypeParam::X;
    for (const auto &[T, V, C] : {std::array<size_t, 3>{1, 7, 8}, {9, 7, 139}, {33, 3, 139}, {100, 7, 520}, {700, 600, 40}}) {
        SCOPED_TRACE(format("T %zu, V %zu, C %zu", T, V, C));
        std::vector<int32_t> tokens(T);
        const Random random{1, Purpose::test, 1};
        for (size_t t = 0; t < T; t++) tokens[t] = int32_t(random.below(t, V));
        const auto w = random_values<X>(V * C, 2), dout = random_values<X>(T * C, 3);
        const auto before = random_values<float>(V * C, 4);
        const size_t P = 5;
        const auto p = random_values<X>(P * C, 5);
        std::vector<int32_t> pos(T);
        for (size_t t = 0; t < T; t++) pos[t] = int32_t(t % P);
        auto want = before;
        for (int pass = 0; pass < 2; pass++)
            for (size_t t = 0; t < T; t++)
                for (size_t c = 0; c < C; c++) want[size_t(tokens[t]) * C + c] += float(dout[t * C + c]);
        for_each_order<TypeParam>([&, T = T, V = V, C = C](TypeParam dev) {
            Array<X> d_w(w), d_dout(dout), out(T * C);
            Array<int32_t> d_tokens(tokens);
            embedding_forward(dev, out.data(), d_w.data(), d_tokens.data(), T, C);
            const auto got = out.values();
            for (size_t t = 0; t < T; t++)
                for (size_t c = 0; c < C; c++)
                    ASSERT_EQ(float(got[t * C + c]), float(w[size_t(tokens[t]) * C + c])) << t << " " << c;
            Array<X> d_p(p);
            Array<int32_t> d_pos(pos);
            embedding_forward(dev, out.data(), d_w.data(), d_tokens.data(), d_p.data(), d_pos.data(), T, C);
            const auto sums = out.values();
            for (size_t t = 0; t < T; t++)
                for (size_t c = 0; c < C; c++) {
                    const X want = float(w[size_t(tokens[t]) * C + c]) + float(p[t % P * C + c]);
                    ASSERT_EQ(float(sums[t * C + c]), float(want)) << t << " " << c;
                }
            for (const std::vector<size_t> &ends : {std::vector<size_t>{V}, {V / 3, V / 3 + 1, V - 1, V}}) {
                std::vector<float> dw;
                for (size_t i = 0, first = 0; i < ends.size(); first = ends[i++]) {
                    Array<float> part(
                        std::vector<float>(before.begin() + ptrdiff_t(first * C), before.begin() + ptrdiff_t(ends[i] * C)));
                    for (int pass = 0; pass < 2; pass++)
                        embedding_backward(dev, part.data(), d_dout.data(), d_tokens.data(), T, C, first, ends[i] - first);
                    std::ranges::copy(part.values(), std::back_inserter(dw));
                }
                EXPECT_EQ(dw, want) << ends.size() << " ranges";
            }
        });
    }
}

// The backward pass is the transposed map: <dout, forward(w)> = <backward(dout), w>. Small integers make both sides exact.
TYPED_TEST(Embedding, BackwardIsTheTransposeOfForward) {
    using X = typename TypeParam::X;
    const std::vector<int32_t> tokens = {3, 0, 6, 3, 3, 1, 6, 0, 3};  // of 7; 2, 4 and 5 do not occur
    const size_t V = 7, C = 139, T = tokens.size();
    std::vector<X> w(V * C), dout(T * C);
    for (size_t i = 0; i < w.size(); i++) w[i] = float(i % 11) - 5;
    for (size_t i = 0; i < dout.size(); i++) dout[i] = float(i % 7) - 3;
    Array<int32_t> d_tokens(tokens);
    Array<X> d_w(w), d_dout(dout), d_out(T * C);
    Array<float> d_dw(std::vector<float>(V * C, 0));
    embedding_forward(any_device<TypeParam>(), d_out.data(), d_w.data(), d_tokens.data(), T, C);
    embedding_backward(any_device<TypeParam>(), d_dw.data(), d_dout.data(), d_tokens.data(), T, C, 0, V);
    const auto out = d_out.values();
    const auto dw = d_dw.values();
    double left = 0, right = 0;
    for (size_t i = 0; i < out.size(); i++) left += double(float(dout[i])) * double(float(out[i]));
    for (size_t i = 0; i < w.size(); i++) right += double(dw[i]) * double(float(w[i]));
    EXPECT_EQ(left, right);
}
