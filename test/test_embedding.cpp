#include "../llmc/ops/embedding.h"

#include "check.h"

template <class Dev> struct Embedding : testing::Test {};
TYPED_TEST_SUITE(Embedding, CpuDevices);

static const std::vector<int32_t> tokens = {3, 0, 6, 3, 3, 1, 6, 0, 3};  // of 7; 2, 4 and 5 do not occur
static const size_t V = 7, C = 139;                                      // two slices of channels and a rest

TYPED_TEST(Embedding, ForwardCopiesRows) {
    using X = typename TypeParam::X;
    const auto w = random_values<X>(V * C, 1);
    std::vector<X> out(tokens.size() * C);
    embedding_forward(make_device<TypeParam>(), out.data(), w.data(), tokens.data(), tokens.size(), C);
    for (size_t t = 0; t < tokens.size(); t++)
        for (size_t c = 0; c < C; c++) ASSERT_EQ(float(out[t * C + c]), float(w[size_t(tokens[t]) * C + c])) << t << " " << c;
}

// The sum is rounded once.
TYPED_TEST(Embedding, ForwardAddsPositions) {
    using X = typename TypeParam::X;
    const std::vector<int32_t> pos = {0, 1, 2, 0, 1, 0, 1, 2, 3};
    const auto w = random_values<X>(V * C, 1), p = random_values<X>(4 * C, 4);
    std::vector<X> out(tokens.size() * C);
    embedding_forward(make_device<TypeParam>(), out.data(), w.data(), tokens.data(), p.data(), pos.data(), tokens.size(), C);
    for (size_t t = 0; t < tokens.size(); t++)
        for (size_t c = 0; c < C; c++) {
            const X want = float(w[size_t(tokens[t]) * C + c]) + float(p[size_t(pos[t]) * C + c]);
            ASSERT_EQ(float(out[t * C + c]), float(want)) << t << " " << c;
        }
}

// Twice into the same gradient, which is not zero before, as a whole and by ranges of tokens, of which 2 to 3 is empty. The order
// of the sum is part of the contract, so the float sums are equal.
TYPED_TEST(Embedding, BackwardAddsInTheOrderOfTheText) {
    using X = typename TypeParam::X;
    const size_t T = tokens.size();
    const auto dout = random_values<X>(T * C, 2);
    const auto before = random_values<float>(V * C, 3);
    auto want = before;
    for (int pass = 0; pass < 2; pass++)
        for (size_t t = 0; t < T; t++)
            for (size_t c = 0; c < C; c++) want[size_t(tokens[t]) * C + c] += float(dout[t * C + c]);
    for (int threads : {1, 2, 3})
        for (const std::vector<size_t> &ends : {std::vector<size_t>{V}, {2, 3, 6, V}}) {
            std::vector<float> dw;
            for (size_t i = 0, first = 0; i < ends.size(); first = ends[i++]) {
                std::vector<float> part(before.begin() + ptrdiff_t(first * C), before.begin() + ptrdiff_t(ends[i] * C));
                for (int pass = 0; pass < 2; pass++)
                    embedding_backward(make_device<TypeParam>(threads), part.data(), dout.data(), tokens.data(), T, C, first,
                                       ends[i] - first);
                dw.insert(dw.end(), part.begin(), part.end());
            }
            EXPECT_EQ(dw, want) << threads << " threads, " << ends.size() << " ranges";
        }
}

// The backward pass is the transposed map: <dout, forward(w)> = <backward(dout), w>. Small integers make both sides exact.
TYPED_TEST(Embedding, BackwardIsTheTransposeOfForward) {
    using X = typename TypeParam::X;
    const size_t T = tokens.size();
    std::vector<X> w(V * C), dout(T * C), out(T * C);
    for (size_t i = 0; i < w.size(); i++) w[i] = float(i % 11) - 5;
    for (size_t i = 0; i < dout.size(); i++) dout[i] = float(i % 7) - 3;
    std::vector<float> dw(V * C, 0);
    embedding_forward(make_device<TypeParam>(), out.data(), w.data(), tokens.data(), T, C);
    embedding_backward(make_device<TypeParam>(), dw.data(), dout.data(), tokens.data(), T, C, 0, V);
    double left = 0, right = 0;
    for (size_t i = 0; i < out.size(); i++) left += double(float(dout[i])) * double(float(out[i]));
    for (size_t i = 0; i < w.size(); i++) right += double(dw[i]) * double(float(w[i]));
    EXPECT_EQ(left, right);
}
