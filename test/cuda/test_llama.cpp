// Whole models with kernels, in the emulator or on a GPU: against transformers (../golden.h), and many ranks against one (../rank_cases.h). The ranks are
// threads that share the device.
#include "../models.h"

#include "../golden.h"
#include "../modes.h"
#include "../rank_cases.h"
#include "../shared_prompts.h"
#include "check.cuh"
#include "gpu_ranks.cuh"

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define CHECKED_BUILD  // Checks of every access turn seconds into minutes; one family of each kind of layer covers all kernels.
#endif

namespace {

struct Goldens : testing::TestWithParam<const char *> {
    const Golden g{GetParam()};
    std::unique_ptr<CudaContext> ctx = make_cuda_context(2);

    template <class Dev> Dev device() { return {nullptr, ctx.get()}; }
};
struct SlowGoldens : Goldens {};

}  // namespace

TEST_P(Goldens, LossEntropyAccuracy) { expect_loss_entropy_accuracy(device<CudaF32>(), g); }
TEST_P(SlowGoldens, Gradients) { expect_gradients(device<CudaF32>(), g); }
TEST_P(SlowGoldens, LossesOfSteps) { expect_losses(device<CudaF32>(), g, {3}); }
TEST_P(SlowGoldens, Preferences) { expect_preferences(device<CudaF32>(), GetParam()); }
TEST_P(SlowGoldens, RewardModel) { expect_reward_model(device<CudaF32>(), GetParam()); }
TEST_P(SlowGoldens, Bf16AsGoodAsTransformers) { expect_bf16_as_good_as_transformers(device<CudaBf16>(), g); }
TEST_P(SlowGoldens, Bf16GradientAsGoodAsTransformers) {
    expect_bf16_gradient_as_good_as_transformers(device<CudaBf16>(), make_device<CpuF32>(), g);
}

TEST(CudaPairs, EqualTransformers) {
    const auto ctx = make_cuda_context(2);
    expect_preferences(CudaF32{nullptr, ctx.get()}, "qwen3");
    expect_reward_model(CudaF32{nullptr, ctx.get()}, "qwen3");
}

TEST(CudaSharedPrompts, GiveTheValuesOfSeparateOnes) {
    const auto ctx = make_cuda_context(2);
    expect_shared_prompts(CudaF32{nullptr, ctx.get()}, "qwen3", false, 1e-5);
    expect_shared_prompts(CudaBf16{nullptr, ctx.get()}, "gpt2", false, 0.05);
}

TEST(CudaMixtures, EqualTransformersWithAuxiliaryLoss) {
    const auto ctx = make_cuda_context(2);
    const CudaF32 dev{nullptr, ctx.get()};
    const Golden g = Golden("qwen2_moe").balanced();
    expect_auxiliary_loss(dev, g);
    expect_gradients(dev, g);
}

TEST(CudaHybrids, EqualTransformers) {
    const auto ctx = make_cuda_context(2);
    const Golden g("qwen35");
    expect_loss_entropy_accuracy(CudaF32{nullptr, ctx.get()}, g);
    expect_gradients(CudaF32{nullptr, ctx.get()}, g);
    expect_logits_through_the_cache(CudaF32{nullptr, ctx.get()}, g);
}

INSTANTIATE_TEST_SUITE_P(Families, Goldens, testing::ValuesIn(golden_families), family_name);
#ifdef CHECKED_BUILD
INSTANTIATE_TEST_SUITE_P(Families, SlowGoldens, testing::Values("llama_bias", "qwen2_window", "qwen3"), family_name);
#else
INSTANTIATE_TEST_SUITE_P(Families, SlowGoldens, testing::ValuesIn(golden_families), family_name);
#endif

// ---- adapters -------------------------------------------------------------------------------------------------------------------------

struct AdapterGoldens : Goldens {};

TEST_P(AdapterGoldens, EqualPeft) {
    expect_loss_entropy_accuracy(device<CudaF32>(), g);
    expect_gradients(device<CudaF32>(), g);
    expect_losses(device<CudaF32>(), g, {2});
}

INSTANTIATE_TEST_SUITE_P(Families, AdapterGoldens, testing::Values("lora_qwen2", "lora_phi3", "lora_gpt2", "lora_mixtral"),
                         family_name);

// ---- ranks ----------------------------------------------------------------------------------------------------------------------------

namespace {

constexpr size_t few_documents = 5;  // 62 tokens

template <class Dev>
RankResult on_device(
    const RankCase &c, RankModel model, Gpus gpus = Gpus::one,
    const std::function<void(ModelLimits &)> &change = [](ModelLimits &) {}) {
    RankResult result = empty_result(model);
    run_threads(int(c.world), {.check = true, .timeout = 120}, [&](Comm &host) {
        const CudaStream stream;
        const auto ctx = make_cuda_context(1);
        with_gpu(gpus, host, Dev{stream, ctx.get()},
                 [&](Dev dev, Comm &comm) { rank_step(dev, comm, c, model, result, change); });
        return 0;
    });
    return result;
}

}  // namespace

// The modes that the test over GPUs omits. Gradients of biases take long in the emulator, so the model has none.
TEST(CudaRanks, EqualOneRank) {
    const RankResult want = on_device<CudaF32>({1, 1, SpMode::ring, 6, 0, 1, few_documents}, untied);
    for (const RankCase &c :
         {RankCase{3, 3, SpMode::gather, 3, 2, 1, few_documents}, {2, 2, SpMode::ulysses, 6, 1, 3, few_documents}})
        check_rank_result(c.name(), on_device<CudaF32>(c, untied), want);
}

// More ranks than key heads share them.
TEST(CudaRanks, DividedTensorsEqualOneRank) {
    const RankResult want = on_device<CudaF32>({1, 1, SpMode::ring, 6, 0, 1, few_documents}, untied);
    for (size_t tp : {2, 12}) {
        RankCase c{tp, 1, SpMode::ring, 1, tp == 2 ? 2 : 0, 1, few_documents};
        c.tp = tp;
        check_rank_result(c.name(), on_device<CudaF32>(c, untied), want);
    }
    for (const RankModel model : {norm_after, adapted_fused}) {
        RankCase one{1, 1, SpMode::ring, 6, 0, 1, few_documents}, two{2, 1, SpMode::ring, 1, 1, 1, few_documents};
        two.tp = 2;
        check_rank_result(two.name(), on_device<CudaF32>(two, model), on_device<CudaF32>(one, model));
    }
}

TEST(CudaRanks, LinearAttentionEqualsOneRank) {
    const RankResult want = on_device<CudaF32>({1, 1, SpMode::ring, 6, 0, 1, few_documents}, hybrid);
    const RankCase c{2, 2, SpMode::ring, 6, 1, 1, few_documents};
    check_rank_result(c.name(), on_device<CudaF32>(c, hybrid), want);
}

// A third of the splits over 3 ranks.
TEST(SlowCudaRanks, EqualOneRank) {
    RankResult want[rank_models];
    for (RankModel model : {untied, tied, gpt2})
        want[model] = on_device<CudaF32>({1, 1, SpMode::ring, 6, 0, 1, few_documents}, model);
    size_t number = 0;
    for (RankCase c : third_of(rank_cases(3))) {
        const RankModel model = rank_model_of(number++);
        c.documents = few_documents;
        check_rank_result(c.name(), on_device<CudaF32>(c, model), want[model]);
    }
}

// All transfers that overlap with the computation: keys and values of a ring, their gradients, sums of gradients, updated parameters, and the rows of
// divided experts. Each case has its own orders of streams.
static void expect_one_ranks_results_over_gpus(unsigned first_order, unsigned orders) {
    if (ranks_with_gpus() < 2) GTEST_SKIP() << "2 GPUs are needed, and NCCL";
    RankCase divided{2, 1, SpMode::ring, 6, 3, 1, few_documents}, tensors{2, 1, SpMode::ring, 1, 1, 1, few_documents},
        all{8, 2, SpMode::ulysses, 1, 3, 1, few_documents};
    divided.experts = tensors.tp = all.tp = 2, all.group = 4;
    const RankCase one{1, 1, SpMode::ring, 6, 0, 1, few_documents};
    const RankResult untied_want = on_device<CudaF32>(one, untied), experts_want = on_device<CudaF32>(one, experts);
    for (const RankCase &c : {RankCase{2, 2, SpMode::ring, 6, 2, 3, few_documents},
                              {2, 1, SpMode::ring, 6, 1, 3, few_documents},
                              {2, 1, SpMode::ring, 6, 3, 3, few_documents},
                              {4, 4, SpMode::ring, 6, 1, 1, few_documents},
                              divided,
                              tensors,
                              all}) {
        if (int(c.world) > ranks_with_gpus()) continue;
        const RankModel model = c.experts > 1 ? experts : untied;
        const auto check = [&](CudaF32) {
            check_rank_result(c.name(), on_device<CudaF32>(c, model, Gpus::each), model == experts ? experts_want : untied_want);
        };
        for_each_order_of_streams<CudaF32>(check, first_order, first_order + orders);
        first_order += orders;
    }
    // Muon and gradients in bf16 give the bits of the same ranks on one GPU.
    const auto change = [](ModelLimits &limits) { limits.muon = limits.bf16_gradients = true; };
    const RankCase c{2, 1, SpMode::ring, 6, 2, 3, few_documents};
    const RankResult want = on_device<CudaF32>(c, untied, Gpus::one, change);
    const auto check = [&](CudaF32) {
        const RankResult got = on_device<CudaF32>(c, untied, Gpus::each, change);
        EXPECT_EQ(got.gradient, want.gradient);
        EXPECT_EQ(got.moments, want.moments);
        EXPECT_EQ(got.next_loss, want.next_loss);
    };
    for_each_order_of_streams<CudaF32>(check, first_order, first_order + orders);
}
TEST(CudaRanks, EqualOneRankOverGpus) { expect_one_ranks_results_over_gpus(2, 1); }
TEST(SlowCudaRanks, EqualOneRankOverGpus) { expect_one_ranks_results_over_gpus(6, 5); }

static void expect_graphs_change_no_bit(const ModelConfig &config, const std::vector<Row> &rows) {
    size_t T = 0;
    for (const Row &row : rows) T = std::max(T, row.T);
    const auto losses_and_norms = [&](bool graphs) {
        const CudaStream stream;
        const auto ctx = make_cuda_context(1);
        ModelLimits limits;
        limits.row_tokens = T, limits.positions = T, limits.recompute = Recompute::layer, limits.graphs = graphs;
        SelfComm comm;
        Mesh mesh(comm, 1);
        const auto model = make_model(CudaF32{stream, ctx.get()}, config, limits);
        model->allocate(mesh, false, false);
        model->initialise(1);
        std::vector<double> out;
        for (size_t step = 1; step <= 3; step++) {  // launched, recorded, replayed
            model->zero_gradients();
            for (size_t i = 0; i < rows.size(); i++) model->accumulate(rows[i], 0.01f, i + 1 == rows.size());
            out.push_back(model->take_sums().nll), out.push_back(model->gradient_norm());
            model->update({5e-3, 0.9, 0.95, 1e-5, 0.1, 1, step});
        }
        return out;
    };
    EXPECT_EQ(losses_and_norms(true), losses_and_norms(false));
}

// Rows of two lengths in several micro-steps need different recordings.
TEST(CudaGraphs, ChangeNoBit) {
    const std::vector<Row> rows = {rank_rows(1, 3)[0], rank_rows(1, 3)[0], rank_rows(1, 6)[0]};
    ASSERT_NE(rows[1].T, rows[2].T);
    expect_graphs_change_no_bit(rank_model(untied), rows);
}

static void expect_modes_of_graphs_leave_nothing_behind(const std::vector<ModeCase> &cases) {
    const CudaStream stream;
    const auto ctx = make_cuda_context(1);
    expect_modes_leave_nothing_behind(CudaBf16{stream, ctx.get()}, cases);
}
TEST(CudaGraphs, ModesLeaveNothingBehind) {
    expect_modes_of_graphs_leave_nothing_behind({{true, false, false, Recompute::none}, {true, true, true, Recompute::layer}});
}
#ifndef CHECKED_BUILD
TEST(SlowCudaGraphs, ModesLeaveNothingBehind) { expect_modes_of_graphs_leave_nothing_behind(mode_cases()); }
#endif

// Launches recorded with one row's cuts of attention's tiles serve rows with other cuts.
TEST(CudaGraphs, ServeOtherDocuments) {
    ModelConfig config = rank_model(untied);
    config.L = 1, config.window = {0}, config.H = 2, config.KV = 1, config.max_positions = 520;
    const auto row_of = [](const std::vector<size_t> &lengths) {
        std::vector<std::vector<int32_t>> documents;
        std::vector<std::vector<uint8_t>> masks;
        for (size_t length : lengths) {
            masks.emplace_back(length, 1);
            for (auto &ids = documents.emplace_back(); ids.size() < length;) ids.push_back(int32_t(ids.size() * ids.size() % 97));
        }
        return make_row(documents, masks);
    };
    expect_graphs_change_no_bit(config, {row_of({260, 260}), row_of({520}), row_of({100, 420})});
}

// Copies overlap with the ops, in any order that events allow. Each case has its own orders of streams.
static void expect_offloading_changes_no_bit(unsigned first_order, unsigned orders) {
    const auto expect_same_bits = [&](const RankCase &c, RankModel model, Recompute recompute, const Offload &offload) {
        const auto run = [&](const Offload &offload) {
            return on_device<CudaF32>(c, model, Gpus::one,
                                      [&](ModelLimits &limits) { limits.recompute = recompute, limits.offload = offload; });
        };
        const RankResult want = run({});
        const auto check = [&](CudaF32) {
            const RankResult got = run(offload);
            EXPECT_EQ(got.loss, want.loss);
            EXPECT_EQ(got.next_loss, want.next_loss);
            EXPECT_EQ(got.gradient, want.gradient);
        };
        for_each_order_of_streams<CudaF32>(check, first_order, first_order + orders);
        first_order += orders;
    };
    const RankCase one{1, 1, SpMode::ring, 6, 1, 2, few_documents}, two{2, 1, SpMode::ring, 6, 3, 2, few_documents};
    expect_same_bits(one, untied, Recompute::none, {.activations = true, .optimizer = true, .piece = 1});
    expect_same_bits(one, untied, Recompute::layer, {.activations = true, .optimizer = true, .weights = true, .piece = 1});
    expect_same_bits(one, adapted, Recompute::none, {.weights = true, .piece = 1});
    expect_same_bits(two, untied, Recompute::layer, {.weights = true, .piece = 1});
}
TEST(CudaRanks, OffloadingChangesNoBit) { expect_offloading_changes_no_bit(2, 1); }
TEST(SlowCudaRanks, OffloadingChangesNoBit) { expect_offloading_changes_no_bit(6, 5); }

TEST(CudaRanks, Bf16IsNear) {
    const RankResult want = on_device<CudaBf16>({1, 1, SpMode::ring, 6, 0, 1, few_documents}, untied);
    for (const RankCase &c :
         {RankCase{2, 2, SpMode::gather, 1, 3, 3, few_documents}, {2, 2, SpMode::ulysses, 6, 2, 1, few_documents}}) {
        const RankResult got = on_device<CudaBf16>(c, untied);
        EXPECT_NEAR(got.loss, want.loss, 2e-3 * want.loss) << c.name();
        EXPECT_NEAR(got.norm, want.norm, 1e-2 * want.norm) << c.name();
    }
}
