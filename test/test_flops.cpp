// Model FLOPs, the peak of a GPU, predicted times and the table of --profile, compared with numbers worked out by hand or measured.
#include "models.h"

#include <regex>

#include "../llmc/core/gpu.h"
#include "../llmc/model/prediction.h"
#include "check.h"
#include "errors.h"
#include "golden.h"

namespace {

// Query heads of 2 on one key/value head; the second layer has a window of 2 keys.
ModelConfig tiny_config() {
    ModelConfig c{};
    c.family = "qwen3", c.V = 10, c.C = 4, c.L = 2, c.H = 2, c.KV = 1, c.D = 2, c.F = 6, c.window = {0, 2};
    return c;
}

double model_flops(const ModelConfig &c, const Row &row) { return op_list_of(c).model_flops(c, row); }

// Documents of 3 and 1 tokens and 60 of padding; two targets.
Row tiny_row() { return make_row({{1, 2, 3}, {4}}, {{0, 1, 1}, {0}}); }

}  // namespace

TEST(Flops, WorkOfARow) {
    const Work useful = work_of(tiny_config(), tiny_row(), false), done = work_of(tiny_config(), tiny_row(), true);
    EXPECT_EQ(useful.T, 4u);
    EXPECT_EQ(useful.N, 2u);
    EXPECT_EQ(useful.scores, (std::vector<double>{6 + 1, 5 + 1}));
    EXPECT_EQ(done.T, 64u);
    EXPECT_EQ(done.scores, (std::vector<double>{6 + 1 + 60 * 61 / 2, 5 + 1 + 2 * 60 - 1}));
    for (const Row &row : {tiny_row(), make_row({{1, 2, 3}, {4}})})  // with and without targets
        EXPECT_EQ(model_flops(tiny_config(), row), 5472 + 1872);     // matrices, attention
}

// 6 FLOPs for each parameter and token, without the norms, and without an embedding that is not also the head.
TEST(Flops, SixForEachParameterAndToken) {
    const size_t T = 100;
    const Row row = make_row({std::vector<int32_t>(T, 5)});
    for (const char *name : {"llama3.1-8b", "llama3.2-1b"}) {
        const ModelConfig c = preset(name);
        const size_t norms = (2 * c.L + 1) * c.C, lookup = c.tied ? 0 : c.V * c.C;
        const double attention = 12 * double(c.L) * (100 * 101 / 2) * double(c.H * c.D);
        EXPECT_EQ(model_flops(c, row), 6.0 * double(T * (parameter_count(c) - norms - lookup)) + attention) << name;
    }
}

// The costs of op_list state the FLOPs of each op's matrix products, and a rehearsal counts those of the calls, in rows of one tile or two. Attention
// and Muon have products of their own.
TEST(Flops, AreThoseOfTheRecordedCalls) {
    struct Case {
        std::string name;
        ModelConfig config;
    };
    std::vector<Case> cases;
    for (const char *name : golden_families) cases.push_back({name, Golden(name).config});
    for (const char *name : golden_hybrids) cases.push_back({name, Golden(name).config});
    for (const char *name : golden_adapters) cases.push_back({name, Golden(name).config});
    for (const auto &[name, config] : cases)
        for (Recompute recompute : {Recompute::none, Recompute::cheap, Recompute::layer})
            for (bool tiles : {false, true}) {
                ModelLimits limits;
                limits.row_tokens = limits.positions = tiles ? 2 * matmul_run(CpuF32{}) : row_multiple;
                limits.recompute = recompute;
                const auto model = make_model(make_device<CpuF32>(), config, limits);
                const RehearsedSteps steps = model->rehearse_steps(1);
                Work work = steps.layout;
                work.T = work.N = (tiles && recompute == Recompute::layer ? 2 : 1) * row_multiple, work.scores.resize(config.L);
                std::map<OpKey, double> called;
                size_t rows = 0;
                for (const Event &e : steps.events)
                    if (rows += e.kind == Event::row; rows == 1 && e.kind == Event::op) called[e.key] += e.flops;
                double all = 0;
                for (const auto &[key, flops] : called) {
                    if (key.op == steps.ops.attention || key.op == steps.ops.number(ADAMW)) continue;
                    EXPECT_EQ(flops, steps.ops.cost(config, work, Phase(key.phase), key.op, key.layer).flops)
                        << name << ": " << phase_names[key.phase] << " of " << steps.ops.name(key.op) << ", layer " << key.layer;
                    all += flops;
                }
                EXPECT_GT(all, 0);
            }
}

TEST(Gpu, PeakByTheNameOfTheDriver) {
    const struct {
        const char *name, *dtype;
        double peak;
    } gpus[] = {{"NVIDIA H100 80GB HBM3", "bf16", 989.4e12},
                {"NVIDIA H100 PCIe", "bf16", 756e12},
                {"NVIDIA A100-SXM4-80GB", "bf16", 312e12},
                {"NVIDIA H100 80GB HBM3", "f32", 0},
                {"cpu", "bf16", 0},
                {"the emulator", "bf16", 0},
                {"", "bf16", 0},
                {"NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", 0},
                {"NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", 0}};
    for (const auto &[name, dtype, peak] : gpus) EXPECT_EQ(gpu_peak(name, dtype), peak) << name;
}

// ---- predictions ----------------------------------------------------------------------------------------------------------------------

namespace {

struct Predicted {
    ModelConfig config = preset("qwen2.5-0.5b");
    ModelLimits limits;

    Predicted(size_t world, size_t sp, int stage, size_t tokens = 4096) {
        limits.row_tokens = limits.positions = tokens;
        limits.ranks.world = world, limits.ranks.sp = sp, limits.ranks.zero_stage = stage;
    }
    std::unique_ptr<Model> model() const { return make_model(make_device<CpuBf16>(1), config, limits); }
    StepSeconds seconds(const GpuRates &rates) const { return predict_step(*model(), config, limits, rates, 1); }
};

}  // namespace

// docs/benchmarks.md, "GPUs": rows of 8192 tokens on an H200.
TEST(Prediction, IsNearTheTimesOfAnH200) {
    const struct {
        const char *model;
        size_t document;
        Recompute recompute;
        double seconds;
    } measured[] = {{"qwen2.5-0.5b", 1024, Recompute::none, 0.0605},
                    {"qwen2.5-0.5b", 8192, Recompute::none, 0.0800},
                    {"qwen2.5-1.5b", 1024, Recompute::cheap, 0.158}};
    const GpuRates h200 = *gpu_rates("h200");
    for (const auto &m : measured) {
        Predicted p(1, 1, 0, 8192);
        p.config = preset(m.model), p.limits.positions = m.document, p.limits.recompute = m.recompute;
        EXPECT_NEAR(p.seconds(h200).all() / m.seconds, 1, h200.spread) << m.model << ", documents of " << m.document;
    }
}

// If ops take longer than messages, a step only waits for the embedding, the first layer and, at its end, the gradients of both. From stage 2
// on it also waits for the gradient of a tied head, which has a sum of its own: the sum of the final norm's gradient follows it.
TEST(Prediction, OpsHideMessages) {
    const Predicted p(8, 1, 3), ring(8, 8, 0);
    const auto planned = p.model();
    const auto units = planned->rehearse_steps(1).trained.units;
    const double embedding = double(units[0].end), layer = double(units[1].end - units[1].begin), fast = 1e300;
    const GpuRates slow{1e9, 1e9, 1e9, 1e9, fast, 1e9, fast, fast};
    const double want = 7.0 / 8 * ((2 + 4) * (embedding + layer) + 4 * embedding) / 1e9;
    EXPECT_NEAR(p.seconds(slow).messages, want, 1e-4 * want);
    const double sums = 7.0 / 8 * 2 * 4 * (embedding + layer) / 1e9;  // attention hides the ring's keys and values
    EXPECT_GT(predict_messages(*ring.model(), ring.config, ring.limits, 1).kv, 0u);
    EXPECT_NEAR(ring.seconds(slow).messages, sums, 1e-4 * sums);
    // Tensor parallelism sends each token ten times for a layer and four times for embedding and head. Ops hide the gathers of both halves' inputs in the
    // backward pass. Statistics of the head and gradients of norms, less than a thousandth, are left out.
    Predicted tensors(2, 1, 0);
    tensors.limits.ranks.tp = 2;
    const ModelConfig &c = tensors.config;
    const double tokens = double(8 * c.L + 4) * double(tensors.limits.row_tokens * c.C) * 2 / 2 / 1e9;
    EXPECT_NEAR(tensors.seconds(slow).messages, tokens, 1e-3 * tokens);
}

// A value head of 128 channels has two blocks. In the forward pass the documents of a row occupy others, 128 in all; in the backward pass chunks do.
TEST(Prediction, BlocksLimitTheDeltaRule) {
    constexpr double fast = 1e300, of_block = 1e9;
    const GpuRates rates{fast, fast, of_block, fast, fast, fast, fast, fast};
    for (const auto &[document, parts] : {std::array<size_t, 2>{8192, 1}, {4096, 2}, {1024, 4}, {512, 4}}) {
        Predicted p(1, 1, 0, 8192);
        p.config = preset("qwen3.5-0.8b"), p.limits.positions = document;
        const DeltaConfig &d = p.config.delta;
        ASSERT_EQ(d.Hv, 16u);
        const DeltaShape shape{8192, d.Hk, d.Hv, d.Dk, d.Dv, 0};
        const double heads = double(std::ranges::count(d.layers, true)) * double(shape.T * shape.Hv),
                     one = gated_delta_flops(shape) / of_block;
        const double want = heads * one * (1 / double(32 * parts) + 2.2 / 32 + 2.2 / (2 * 128));
        EXPECT_NEAR(p.seconds(rates).attention, want, 1e-6 * want) << document;
    }
}

// ---- the table ------------------------------------------------------------------------------------------------------------------------

namespace {

struct ScriptedTimeline final : Timeline {
    std::vector<double> seconds;      // between the marks of the next step
    std::vector<std::string> *names;  // of the marks
    explicit ScriptedTimeline(std::vector<std::string> *names) : names(names) {}
    void mark(const char *next) override { names->push_back(next ? next : ""); }
    std::vector<double> take() override { return seconds; }
};

}  // namespace

TEST(Profiler, TableByHand) {
    std::vector<std::string> names;
    auto owned = std::make_unique<ScriptedTimeline>(&names);
    ScriptedTimeline *timeline = owned.get();
    const OpList ops = op_list_of(tiny_config());
    const auto number = [&](const std::string &name) {
        return size_t(std::ranges::find(ops.layer, name, &LayerOp::name) - ops.layer.begin());
    };
    Profiler profiler(std::move(owned), Peaks{1e6, 1e6}, ops, tiny_config(), Work{});
    EXPECT_EQ(profiler.table(), "profile: no step was measured");
    const auto step = [&](std::vector<double> seconds) {
        timeline->seconds = std::move(seconds);
        profiler.begin_step();
        profiler.begin_row(tiny_row(), 1);
        for (size_t layer : {0, 1}) profiler.begin(Phase::forward, number("qkv"), layer);
        profiler.begin(Phase::backward, number("norm 1"), 1);
        profiler.begin(Phase::step, ops.number(COPY), 0);
        profiler.end_step();
    };
    step({100, 100, 100, 100});  // the warm-up is not measured
    profiler.begin_row(tiny_row(), 1);
    profiler.begin(Phase::forward, number("qkv"), 0);  // an evaluation
    EXPECT_EQ(names, (std::vector<std::string>{"qkv forward 0", "qkv forward 1", "norm 1 backward 1", "copies", ""}));
    step({0.005, 0.007, 0.006, 0.001});
    step({0.003, 0.001, 0.002, 0.007});

    // qkv: 2 * 64 * 4 * 8 = 4096 FLOPs and 3200 bytes an op, so its roofline is 4.096 ms, twice a step. norm 1: 4096 bytes.
    const std::string table = std::regex_replace(profiler.table(), std::regex(" +"), " ");
    expect_contains(table, {"profile of 2 steps;", "\nqkv forward 2.0 8.000 50.0% 0.000 0.0 102%\n",
                            "\ncopies 1.0 4.000 25.0% \n", "\nnorm 1 backward 1.0 4.000 25.0% 0.0 102%\n",
                            "\nall 4.0 16.000 100.0% 0.000 0.0 77%\n", " 7.344e-09 model TFLOP"});
}
