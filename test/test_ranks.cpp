// The matrix of splits, ranks being threads: rank_cases.h.
#define LLMC_NO_MAIN
#include "../train_llama.cu"

#include "rank_cases.h"

namespace {

template <class Dev> RankResult on_threads(const RankCase &c, bool tied) {
    RankResult result = empty_result(tied);
    run_threads(int(c.world), {.check = true, .timeout = 60}, [&](Comm &comm) {
        const ContextPtr ctx = make_context(1);
        rank_step(Dev{1, ctx.get()}, comm, c, tied, result);
        return 0;
    });
    return result;
}

}  // namespace

struct Matrix : testing::TestWithParam<size_t> {};

TEST_P(Matrix, EqualsOneRank) {
    const RankResult want[] = {one_rank(make_device<CpuF32>(2), false), one_rank(make_device<CpuF32>(2), true)};
    size_t number = 0;
    for (const RankCase &c : rank_cases(GetParam())) {
        const bool tied = number++ % 2;
        check_rank_result(c.name(), on_threads<CpuF32>(c, tied), want[tied]);
    }
}

TEST_P(Matrix, Bf16LossIsNear) {
    const double want = one_rank(make_device<CpuBf16>(2), true).loss;
    for (const RankCase &c : rank_cases(GetParam()))
        if (c.stage == 2 && c.micro_steps == 3) {
            EXPECT_NEAR(on_threads<CpuBf16>(c, true).loss, want, 2e-3 * want) << c.name();
        }
}

INSTANTIATE_TEST_SUITE_P(Worlds, Matrix, testing::Values(1, 2, 3, 4, 6, 8), testing::PrintToStringParamName());

TEST(Ranks, RunsGiveTheSameBits) {
    for (const RankCase &c : {RankCase{6, 3, SpMode::ring, 6, 2, 3}, RankCase{4, 2, SpMode::gather, 2, 1, 1}}) {
        const RankResult a = on_threads<CpuF32>(c, false), b = on_threads<CpuF32>(c, false);
        EXPECT_EQ(a.loss, b.loss);
        EXPECT_EQ(a.next_loss, b.next_loss);
        EXPECT_EQ(a.gradient, b.gradient);
    }
}
