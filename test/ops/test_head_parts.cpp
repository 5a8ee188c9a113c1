#include "../../llmc/ops/head_parts.h"

#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/head_parts.cuh"
#endif

template <class Dev> struct HeadParts : testing::Test {};
TYPED_TEST_SUITE(HeadParts, Devices);

// The statistics of a vocabulary in parts of several sizes, one of a single token, are those of the whole. Some rows have equal maxima in two parts, logits
// far below the maximum, and targets in every part. A float sum of V terms, in the order of the tokens, may be off by V roundings.
TYPED_TEST(HeadParts, MergedAreThoseOfTheWholeVocabulary) {
    constexpr size_t n = 37, V = 101, fields = 5;
    for (const std::vector<size_t> &ends : {std::vector<size_t>{101}, {51, 101}, {40, 41, 101}, {1, 2, 3, 101}}) {
        auto logits = random_values<float>(n * V, 5, 3);
        std::vector<int32_t> targets;
        const Random random{1, Purpose::test, 2};
        for (size_t i = 0; i < n; i++) {
            targets.push_back(int32_t(random.below(i, V)));
            float *row = &logits[i * V];
            if (i % 4 == 1) row[0] = row[100] = 20, targets.back() = i % 8 == 1 ? 0 : 100;
            if (i % 4 == 2) std::fill_n(row + 50, 51, -200.0f);
        }
        const size_t R = ends.size();
        std::vector<float> stats(fields * n), parts;
        const auto in = [](std::vector<float> &of, size_t at) {
            return HeadStats{&of[at], &of[at + n], &of[at + 2 * n], &of[at + 3 * n], &of[at + 4 * n]};
        };
        const auto statistics = [&](size_t begin, size_t end, std::vector<float> &of) {
            for (size_t i = 0; i < n; i++) {
                std::vector<float> row(&logits[i * V + begin], &logits[i * V + end]);
                softmax_row<Left::logits>(in(of, 0), i, row.data(), size_t(targets[i]) - begin, end - begin, 1.25f);
            }
        };
        statistics(0, V, stats);
        for_each_order<TypeParam>([&](TypeParam dev) {
            Array<float> all(R * fields * n);
            for (size_t r = 0; r < R; r++) {
                std::vector<float> own(fields * n);
                statistics(r ? ends[r - 1] : 0, ends[r], own);
                Array<float> packed(own);
                float *const at = packed.data();
                pack_head_stats(dev, all.data() + r * fields * n, {at, at + n, at + 2 * n, at + 3 * n, at + 4 * n}, n);
            }
            for (float x : all.values()) EXPECT_TRUE(std::isfinite(x));
            Array<float> merged(fields * n);
            float *const at = merged.data();
            merge_head_stats(dev, {at, at + n, at + 2 * n, at + 3 * n, at + 4 * n}, all.data(), R, n);
            const auto got = merged.values();
            for (size_t i = 0; i < fields * n; i++) {
                const double want = stats[i];
                if (i / n == 2) EXPECT_EQ(got[i], want) << i;  // correct
                else EXPECT_NEAR(got[i], want, V * unit_roundoff<float> * std::max(1.0, std::abs(want))) << R << " parts, " << i;
            }
        });
    }
}
