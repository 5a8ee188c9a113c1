// Whole models on the CPU, compared with transformers (golden.h).
#include "models.h"

#include "check.h"
#include "golden.h"
#include "modes.h"
#include "shared_prompts.h"

struct Goldens : testing::TestWithParam<const char *> {};

TEST_P(Goldens, LossEntropyAccuracy) { expect_loss_entropy_accuracy(make_device<CpuF32>(), Golden(GetParam())); }
TEST_P(Goldens, Gradients) { expect_gradients(make_device<CpuF32>(), Golden(GetParam())); }
TEST_P(Goldens, LogitsThroughTheCache) { expect_logits_through_the_cache(make_device<CpuF32>(), Golden(GetParam())); }
TEST_P(Goldens, LossesOfTenSteps) { expect_losses(make_device<CpuF32>(), Golden(GetParam()), {5, 10}); }
TEST_P(Goldens, Bf16AsGoodAsTransformers) { expect_bf16_as_good_as_transformers(make_device<CpuBf16>(), Golden(GetParam())); }
TEST_P(Goldens, Bf16GradientAsGoodAsTransformers) {
    expect_bf16_gradient_as_good_as_transformers(make_device<CpuBf16>(), make_device<CpuF32>(), Golden(GetParam()));
}
TEST_P(Goldens, RecomputeThreadsGuardsAndPoisonGiveTheSameBits) { expect_same_bits_in_every_way(Golden(GetParam())); }
TEST_P(Goldens, Preferences) { expect_preferences(make_device<CpuF32>(), GetParam()); }
TEST_P(Goldens, RewardModel) { expect_reward_model(make_device<CpuF32>(), GetParam()); }

struct Mixtures : testing::TestWithParam<const char *> {
    const Golden g = Golden(GetParam()).balanced();
};
TEST_P(Mixtures, AuxiliaryLoss) { expect_auxiliary_loss(make_device<CpuF32>(), g); }
TEST_P(Mixtures, GradientsWithAuxiliaryLoss) { expect_gradients(make_device<CpuF32>(), g); }
TEST_P(Mixtures, LossesOfTenStepsWithAuxiliaryLoss) { expect_losses(make_device<CpuF32>(), g, {5, 10}); }
INSTANTIATE_TEST_SUITE_P(Families, Mixtures, testing::Values("qwen3_moe", "qwen2_moe", "mixtral", "qwen35_moe"), family_name);

// The first products of a step overwrite the old gradients; all other gradients are cleared.
static void expect_nothing_is_left_of_the_last_steps_gradients(const Golden &g) {
    Trained<CpuF32> t(make_device<CpuF32>(), g);
    Zero<CpuF32> &zero = t.model->parameters();
    const auto step = [&](const std::vector<Row> &rows) {
        std::fill_n(zero.gradients.floats, zero.sharding.count, NAN);
        t.loss_and_gradient(g, rows);
        return t.gradient();
    };
    std::vector<Row> rows = g.rows(3);
    const auto gradients = step(rows);
    EXPECT_FALSE(std::isnan(t.model->gradient_norm()));
    rows.insert(rows.begin(), make_row(g.documents));  // a row without targets overwrites nothing
    EXPECT_EQ(step(rows), gradients);
    rows.front() = Row{};  // as on a rank that has fewer rows than others
    EXPECT_EQ(step(rows), gradients);
    EXPECT_EQ(step({Row{}}), std::vector<float>(gradients.size()));
}
TEST_P(Goldens, NothingIsLeftOfTheLastStepsGradients) { expect_nothing_is_left_of_the_last_steps_gradients(Golden(GetParam())); }

struct Hybrids : testing::TestWithParam<const char *> {
    const Golden g = Golden(GetParam());
};
TEST_P(Hybrids, LossEntropyAccuracy) { expect_loss_entropy_accuracy(make_device<CpuF32>(), g); }
TEST_P(Hybrids, Gradients) { expect_gradients(make_device<CpuF32>(), g); }
TEST_P(Hybrids, LogitsThroughTheCache) { expect_logits_through_the_cache(make_device<CpuF32>(), g); }
TEST_P(Hybrids, LossesOfTenSteps) { expect_losses(make_device<CpuF32>(), g, {5, 10}); }
TEST_P(Hybrids, Bf16AsGoodAsTransformers) { expect_bf16_as_good_as_transformers(make_device<CpuBf16>(), g); }
TEST_P(Hybrids, Bf16GradientAsGoodAsTransformers) {
    expect_bf16_gradient_as_good_as_transformers(make_device<CpuBf16>(), make_device<CpuF32>(), g);
}
TEST_P(Hybrids, RecomputeThreadsGuardsAndPoisonGiveTheSameBits) { expect_same_bits_in_every_way(g); }
TEST_P(Hybrids, NothingIsLeftOfTheLastStepsGradients) { expect_nothing_is_left_of_the_last_steps_gradients(g); }

// A document's losses and gradients are those that it has alone, except for rounding: neither convolution nor state reads another one.
TEST_P(Hybrids, DocumentsInARowAreThoseAlone) {
    const auto losses_and_gradient = [&](const std::vector<Row> &rows) {
        Trained<CpuF32> t(make_device<CpuF32>(), g);
        std::vector<double> losses;
        t.model->zero_gradients();
        for (const Row &row : rows) {
            const auto of_row = t.model->evaluate(row);
            losses.insert(losses.end(), of_row.begin(), of_row.end());
            t.model->backward(std::vector<float>(of_row.size(), 1 / float(g.targets())), 0, false);
        }
        return std::pair(losses, t.gradient());
    };
    const auto packed = losses_and_gradient(g.rows(6)), alone = losses_and_gradient(g.rows(1));
    ASSERT_EQ(packed.first.size(), alone.first.size());
    double worst = 0;
    for (size_t i = 0; i < alone.first.size(); i++) worst = std::max(worst, std::abs(packed.first[i] - alone.first[i]));
    expect_at_most("losses, packed and alone", worst, 2e-5 * *std::ranges::max_element(alone.first));
    expect_at_most("gradient, packed and alone, L2", relative_distance(packed.second, alone.second), 1e-5);
}

// A row shorter than the longest one brings back the states at all its tokens, whose number is not proportional to them.
TEST_P(Hybrids, OffloadChangesNoBitOfALongDocument) {
    std::vector<int32_t> tokens(1030);
    for (size_t t = 0; t < tokens.size(); t++) tokens[t] = int32_t((3 * t + t * t / 7) % g.config.V);
    const auto gradient = [&](bool offload) {
        Trained<CpuF32> t(make_device<CpuF32>(), g, {.row_tokens = 2048, .positions = 2048, .poison = true, .offload = offload});
        t.model->zero_gradients();
        t.model->accumulate(make_row({tokens}, {std::vector<uint8_t>(tokens.size(), 1)}), 1e-3f, true);
        return t.gradient();
    };
    EXPECT_TRUE(gradient(true) == gradient(false));
}

// B is 0 at first, so the gradient of an adapter's B is scale * dW A^T, with the gradient dW of its matrix.
TEST_P(Hybrids, AdaptersHaveTheGradientsOfTheirMatrices) {
    Golden adapted = g;
    LoraConfig lora;
    lora.rank = 2, lora.alpha = 3, lora.targets = {"all-linear"};
    set_lora(adapted.config, lora);
    Trained<CpuF32> whole(make_device<CpuF32>(), g), t(make_device<CpuF32>(), adapted);
    whole.loss_and_gradient(g, g.rows(3)), t.loss_and_gradient(adapted, g.rows(3));
    std::map<std::string, std::vector<float>> gradients;
    for (const Tensor &tensor : whole.model->tensors()) gradients[tensor.name] = whole.gradient(tensor);
    const Zero<CpuF32> &zero = t.model->parameters();
    const std::vector<Tensor> &tensors = t.model->tensors();
    size_t modules = 0;
    for (size_t i = 0; i + 1 < tensors.size(); i += 2, modules++) {
        const Tensor &A = tensors[i], &B = tensors[i + 1];
        const std::string module = A.name.substr(0, A.name.find(".lora_A"));
        const size_t IC = A.shape[1], OC = B.shape[0];
        const std::vector<float> a = read(t.model->memory(), zero.params + zero.sharding.flat(A.offset), A.count),
                                 &dw = gradients.at(module + ".weight");
        std::vector<float> want;
        for (size_t o = 0; o < OC; o++)
            for (size_t r = 0; r < lora.rank; r++) {
                double sum = 0;
                for (size_t c = 0; c < IC; c++) sum += double(dw[o * IC + c]) * a[r * IC + c];
                want.push_back(float(lora.scale() * sum));
            }
        EXPECT_LE(relative_distance(t.gradient(B), want), 1e-4) << module;
    }
    const size_t linear = size_t(std::ranges::count(g.config.delta.layers, true));
    const size_t feed_forward = g.config.experts.number ? 0 : 3;
    EXPECT_EQ(modules, (feed_forward + 4) * g.config.L + linear);  // linear attention has one module more than attention
}
INSTANTIATE_TEST_SUITE_P(Families, Hybrids, testing::ValuesIn(golden_hybrids), family_name);

// Rows of several tiles of the feed-forward network, the last one incomplete. The second row adds to the gradients of the first.
template <class Dev> void expect_tiles_change_no_bit(Dev dev, const Golden &g, bool fp8 = false) {
    const size_t run = matmul_run(dev), tokens = 2 * run + 192;
    std::vector<std::vector<int32_t>> documents;
    std::vector<std::vector<uint8_t>> masks;
    for (size_t i = 0, n = 0; (n += g.documents[i].size()) <= tokens; i = (i + 1) % g.documents.size())
        documents.push_back(g.documents[i]), masks.push_back(g.masks[i]);
    const Row row = make_row(documents, masks);
    ASSERT_GT(row.T, 2 * run);
    const auto step = [&](TrainedOptions o, bool examined = false) {
        o.row_tokens = tokens, o.fp8 = fp8;
        Trained<Dev> t(dev, g, o);
        if (examined) t.model->trace().detect_anomaly();
        t.model->zero_gradients();
        for (bool last : {false, true}) t.model->accumulate(row, 1e-3f, last);
        t.model->arena().check_guards();
        EXPECT_EQ(t.model->trace().anomaly().what, "");
        return std::pair(t.mean_loss(), t.gradient());
    };
    const auto whole = step({});
    for (size_t tile : {4 * run, size_t(0), run + 1})  // one tile, tiles of one run, of two
        EXPECT_TRUE(step({.recompute = Recompute::layer, .tile_tokens = tile, .poison = true}) == whole) << tile;
    EXPECT_TRUE(step({.recompute = Recompute::layer, .guards = true}) == whole) << "guards";
    EXPECT_TRUE(step({.recompute = Recompute::layer}, true) == whole) << "with a search for anomalies";
    EXPECT_TRUE(step({.recompute = Recompute::cheap, .poison = true}) == whole) << "cheap";
    Trained<Dev> evaluated(dev, g, {.mode = Mode::evaluate, .row_tokens = tokens, .fp8 = fp8, .poison = true});
    EXPECT_EQ(evaluated.loss({row, row}), whole.first);
}

TEST(Tiles, ChangeNoBit) {
    expect_tiles_change_no_bit(make_device<CpuF32>(), Golden("llama_bias"));
    expect_tiles_change_no_bit(make_device<CpuBf16>(), Golden("gpt2"));
    expect_tiles_change_no_bit(make_device<CpuF32>(), Golden("qwen2_moe"));
    expect_tiles_change_no_bit(make_device<CpuBf16>(), Golden("llama_bias"), true);
}

// To first order, errors are proportional to roundings. Roundings to e4m3 are 16 times those to bf16. FP8 rounds the same operands as
// transformers in bf16, which also rounds other values.
TEST(Modes, LeaveNothingBehind) { expect_modes_leave_nothing_behind(make_device<CpuBf16>(), mode_cases()); }

TEST(SharedPrompts, RowsHoldEachSampleOnce) {
    const Answers data(false, 9);
    std::vector<size_t> all(data.size());
    std::iota(all.begin(), all.end(), size_t(0));
    const auto shuffled = [&] { return std::ranges::stable_partition(all, [](size_t s) { return s * s % 7 < 3; }), all; }();
    for (size_t row_tokens : {80, 200, 4000}) {
        std::vector<size_t> found;
        for (const auto &samples : pack_samples(data, shuffled, row_tokens, true)) {
            const Row row = make_row(data, samples, true), sketch = outline(data, samples, true);
            EXPECT_LE(row.doc_offsets.back(), row_tokens);
            EXPECT_EQ(row.doc_offsets, sketch.doc_offsets);
            EXPECT_EQ(row.documents, samples);
            EXPECT_EQ(scores_of_row(row, 0, true), scores_of_row(sketch, 0, true));
            found.insert(found.end(), samples.begin(), samples.end());
        }
        std::ranges::sort(found);
        EXPECT_EQ(found, first_samples(data.size()));
    }
}

TEST(SharedPrompts, GiveTheValuesOfSeparateOnes) {
    for (const char *family :
         {"llama3", "qwen3", "olmo2", "gpt2", "granite", "llama_yarn", "lora_qwen3", "qwen3_moe", "mistral", "gemma3"})
        expect_shared_prompts(make_device<CpuF32>(), family, false, 1e-5);
    expect_shared_prompts(make_device<CpuF32>(), "llama3", true, 1e-5);
    expect_shared_prompts(make_device<CpuBf16>(), "qwen3", false, 0.05);
    for (const Recompute level : {Recompute::cheap, Recompute::layer})
        expect_shared_prompts(make_device<CpuF32>(), "smollm2", false, 1e-5, {.recompute = level, .poison = true});
}

TEST(Fp8Model, ErrorsOfGradientsAreProportionalToRoundings) {
    for (const char *family : {"qwen3", "gpt2"}) {
        const Golden g(family);
        const auto gradient = [&](bool fp8) {
            Trained<CpuF32> t(make_device<CpuF32>(), g, {.fp8 = fp8});
            t.loss_and_gradient(g, g.rows(3));
            return t.gradient();
        };
        const double distance = relative_distance(gradient(true), gradient(false)),
                     of_bf16 = g.expected["bf16"]["gradient_error"];
        expect_at_most("fp8, gradient, L2", distance, 16 * of_bf16);
        EXPECT_GT(distance, 2 * of_bf16);
    }
}

TEST(Fp8Model, GenerationDoesNotUseFp8) {
    const Golden g("qwen3");
    const auto logits = [&](bool fp8) {
        Trained<CpuF32> t(make_device<CpuF32>(), g, {.fp8 = fp8});
        const Row row = make_row({g.documents[3]});
        t.model->generator().next_logits(row, {true, std::vector<int32_t>(row.T, -1), {}, {}});
        return t.model->generator().logits();
    };
    EXPECT_EQ(logits(true), logits(false));
}

INSTANTIATE_TEST_SUITE_P(Families, Goldens, testing::ValuesIn(golden_families), family_name);

// A transfer after an op may write over the arrays that this op used last, before the next op begins. The search for anomalies does not see it.
TEST(Trace, AnOpIsInspectedBeforeATransfer) {
    const OpList ops{{{"norm", Recompute::cheap, {}}, {"product", Recompute::layer, {}}}, 0};
    const auto memory = make_memory(make_device<CpuF32>());
    for (const bool is_wrong : {false, true}) {
        Plan plan;
        float *array, *guest;
        plan.transient(&array, "act.0.x", {1}), plan.transient(&guest, "act.0.x again", {1});
        plan.live(0, 0, 0, false), plan.live(1, 1, 1, true);  // ops 0 and 1 have times 0 and 2
        plan.place();
        Arena arena(plan, *memory);
        ASSERT_EQ(array, guest);
        Trace trace(ops);
        trace.use_times({{{size_t(Phase::forward), 0, 0}, 0}, {{size_t(Phase::forward), 1, 0}, 2}});
        trace.watch(arena, false);
        trace.detect_anomaly();
        trace.begin(Phase::forward, 0, 0);
        *array = is_wrong ? NAN : 1;
        trace.pause(Phase::forward, COPY);
        *guest = NAN;
        trace.begin(Phase::forward, 1, 0);
        EXPECT_EQ(trace.anomaly().what, is_wrong ? "forward, layer 0, norm: element 0 of act.0.x" : "");
    }
}
