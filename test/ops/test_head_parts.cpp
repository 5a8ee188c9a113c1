#include "../../llmc/ops/head_parts.h"

#include "../reference_divergence.h"
#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/divergence.cuh"
#include "../../llmc/ops/head_parts.cuh"
#endif

template <class Dev> struct HeadParts : testing::Test {};
TYPED_TEST_SUITE(HeadParts, Devices);

static HeadStats head_stats(float *at, size_t n) { return {at, at + n, at + 2 * n, at + 3 * n, at + 4 * n}; }

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
        const auto statistics = [&](size_t begin, size_t end, std::vector<float> &of) {
            for (size_t i = 0; i < n; i++) {
                std::vector<float> row(&logits[i * V + begin], &logits[i * V + end]);
                softmax_row<Left::logits>(head_stats(of.data(), n), i, row.data(), size_t(targets[i]) - begin, end - begin,
                                          1.25f);
            }
        };
        statistics(0, V, stats);
        for_each_order<TypeParam>([&](TypeParam dev) {
            Array<float> all(R * fields * n);
            for (size_t r = 0; r < R; r++) {
                std::vector<float> own(fields * n);
                statistics(r ? ends[r - 1] : 0, ends[r], own);
                Array<float> packed(own);
                pack_head_stats(dev, all.data() + r * fields * n, head_stats(packed.data(), n), n);
            }
            for (float x : all.values()) EXPECT_TRUE(std::isfinite(x));
            Array<float> merged(fields * n);
            merge_head_stats(dev, head_stats(merged.data(), n), all.data(), R, n);
            const auto got = merged.values();
            for (size_t i = 0; i < fields * n; i++) {
                const double want = stats[i];
                if (i / n == 2) EXPECT_EQ(got[i], want) << i;  // correct
                else EXPECT_NEAR(got[i], want, V * unit_roundoff<float> * std::max(1.0, std::abs(want))) << R << " parts, " << i;
            }
        });
    }
}

// The divergence of a vocabulary in parts, by the two merges of divergence_head, and the gradients of each part's logits are those of the whole. Parts are
// wider and narrower than a vector. Some rows have a maximum in one part with the student and in another with the teacher.
TYPED_TEST(HeadParts, OfADivergenceAreThoseOfTheWholeVocabulary) {
    using X = typename TypeParam::X;
    constexpr size_t n = 21, V = 101, padded = 64;
    const float temperature = 1.25f;
    for (const float beta : {0.0f, 0.3f, 1.0f})
        for (const std::vector<size_t> &ends : {std::vector<size_t>{51, 101}, {40, 41, 101}}) {
            auto student = random_values<float>(n * V, 5, 3), teacher = random_values<float>(n * V, 6, 3);
            std::vector<int32_t> targets;
            for (size_t i = 0; i < n; i++) {
                targets.push_back(int32_t(5 * i % V));
                if (i % 4 == 1) student[i * V + 100] = 20, teacher[i * V] = 20, teacher[i * V + 100] = 15;
                if (i % 4 == 2) student[i * V + 40] = teacher[i * V + 40] = 20;
            }
            const auto weights = random_values<float>(n, 7);
            const size_t R = ends.size();
            for_each_order<TypeParam>([&](TypeParam dev) {
                constexpr size_t fields = fields_of<DivergenceStats>, sums = fields_of<PartsOfDivergence>;
                const auto stats_at = [&](float *at) {
                    return DivergenceStats{head_stats(at, n), head_stats(at + 5 * n, n), at + 11 * n, at + 12 * n, at + 10 * n};
                };
                Array<float> d_weights(weights), parts(R * fields * n), terms(R * sums * n);
                std::vector<std::unique_ptr<Array<float>>> logits, stats;
                std::vector<LogitsOfBoth> both;
                std::vector<std::unique_ptr<Array<int32_t>>> own_targets;
                std::vector<HeadLoss> losses;
                std::vector<size_t> rooms;
                for (size_t r = 0; r < R; r++) {
                    const size_t begin = r ? ends[r - 1] : 0, count = ends[r] - begin, ld = logits_ld(dev, count),
                                 room = dlogits_room(dev, padded, ld) / sizeof(float);
                    std::vector<float> own(room + 2 * padded * ld);
                    std::vector<int32_t> own_target;
                    for (size_t i = 0; i < n; i++) {
                        std::copy_n(&student[i * V + begin], count, &own[room + i * ld]);
                        std::copy_n(&teacher[i * V + begin], count, &own[room + (padded + i) * ld]);
                        own_target.push_back(targets[i] - int32_t(begin));
                    }
                    logits.push_back(std::make_unique<Array<float>>(own));
                    stats.push_back(std::make_unique<Array<float>>(13 * n));
                    own_targets.push_back(std::make_unique<Array<int32_t>>(own_target));
                    float *const at = logits[r]->data() + room;
                    both.push_back({at, at + padded * ld, count, ld});
                    losses.push_back({nullptr, own_targets[r]->data(), d_weights.data(), 0, temperature});
                    rooms.push_back(room);
                    divergence_statistics(dev, stats_at(stats[r]->data()), both[r], losses[r], n);
                    pack_head_stats(dev, parts.data() + r * fields * n, stats_at(stats[r]->data()), n);
                }
                for (float x : parts.values()) EXPECT_TRUE(std::isfinite(x));
                for (size_t r = 0; r < R; r++) {
                    const DivergenceStats own = stats_at(stats[r]->data());
                    merge_head_stats(dev, own, parts.data(), R, n);
                    divergence_terms(dev, own, both[r], losses[r], beta, n);
                    pack_head_stats(dev, terms.data() + r * sums * n, PartsOfDivergence{own.divergence, own.mean}, n);
                }
                std::vector<std::vector<X>> dlogits;
                for (size_t r = 0; r < R; r++) {
                    const DivergenceStats own = stats_at(stats[r]->data());
                    merge_head_stats(dev, PartsOfDivergence{own.divergence, own.mean}, terms.data(), R, n);
                    divergence_range(dev, reinterpret_cast<X *>(logits[r]->data()), both[r], losses[r], own, beta, n, padded);
                    const auto raw = logits[r]->values();
                    dlogits.emplace_back(raw.size() * sizeof(float) / sizeof(X));
                    memcpy(dlogits[r].data(), raw.data(), raw.size() * sizeof(float));
                }
                for (size_t r = 0; r < R; r++) {
                    const size_t begin = r ? ends[r - 1] : 0, dld = dlogits_ld(dev, both[r].ld);
                    const auto got = stats[r]->values();
                    for (size_t i = 0; i < n; i++) {
                        const std::vector<double> a(&student[i * V], &student[(i + 1) * V]),
                            b(&teacher[i * V], &teacher[(i + 1) * V]);
                        const DivergenceRow want = divergence_reference(a, b, weights[i], beta, temperature);
                        const double u = unit_roundoff<float>, error = 32 * u * (1 + want.size) * (1 + want.reach);
                        EXPECT_NEAR(got[11 * n + i], want.divergence, error) << R << " parts, row " << i;
                        EXPECT_EQ(got[10 * n + i], want.agreement) << R << " parts, row " << i;
                        for (size_t v = begin; v < ends[r]; v++)
                            EXPECT_NEAR(float(dlogits[r][i * dld + v - begin]), want.dlogit[v],
                                        std::abs(weights[i]) * 2 * error + unit_roundoff<X> * std::abs(want.dlogit[v]))
                                << R << " parts, row " << i << ", logit " << v;
                    }
                }
            });
        }
}
