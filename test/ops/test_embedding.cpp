#include "../../llmc/ops/embedding.h"

#include <array>

#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/embedding.cuh"
#endif

template <class Dev> struct Embedding : testing::Test {};
TYPED_TEST_SUITE(Embedding, Devices);

// Few and many different tokens; channels in several slices of a warp, with and without vectors. The contract fixes the order of the sum, so the float sums
// are exact, also for ranges of the vocabulary, some of which have no tokens.
TYPED_TEST(Embedding, CopiesRowsAndAddsInTheOrderOfTokens) {
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
            embedding_forward(dev, out.data(), d_w.data(), d_tokens.data(), T, C, V);
            const auto got = out.values();
            for (size_t t = 0; t < T; t++)
                for (size_t c = 0; c < C; c++)
                    ASSERT_EQ(float(got[t * C + c]), float(w[size_t(tokens[t]) * C + c])) << t << " " << c;
            std::vector<int32_t> moved;  // numbered from the second row on, of which the last one is missing
            for (int32_t token : tokens) moved.push_back(token - 1);
            Array<int32_t> d_moved(moved);
            embedding_forward(dev, out.data(), d_w.data() + C, d_moved.data(), T, C, V - 2);
            const auto of_part = out.values();
            for (size_t t = 0; t < T; t++)
                for (size_t c = 0; c < C; c++) {
                    const bool held = tokens[t] > 0 && size_t(tokens[t]) < V - 1;
                    ASSERT_EQ(float(of_part[t * C + c]), held ? float(w[size_t(tokens[t]) * C + c]) : 0) << t << " " << c;
                }
            Array<X> d_p(p);
            Array<int32_t> d_pos(pos);
            embedding_forward(dev, out.data(), d_w.data(), d_tokens.data(), d_p.data(), d_pos.data(), T, C, V);
            const auto sums = out.values();
            for (size_t t = 0; t < T; t++)
                for (size_t c = 0; c < C; c++) {
                    const X want = float(w[size_t(tokens[t]) * C + c]) + float(p[t % P * C + c]);
                    ASSERT_EQ(float(sums[t * C + c]), float(want)) << t << " " << c;
                }
            embedding_forward(dev, out.data(), d_w.data(), d_tokens.data(), d_p.data(), d_pos.data(), T, C, size_t(0));
            const auto positions = out.values();
            for (size_t t = 0; t < T; t++)
                for (size_t c = 0; c < C; c++) ASSERT_EQ(float(positions[t * C + c]), float(p[t % P * C + c])) << t << " " << c;
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
