// A step of a model on several ranks, which are threads: loss and gradients equal those of one rank for any split. The test program includes
// models.h first.
#pragma once
#include <array>
#include <functional>

#include "../llmc/train/options.h"
#include "check.h"

struct RankCase {
    size_t world, sp;
    SpMode mode;
    size_t head_stride;
    int stage;
    size_t micro_steps;
    size_t documents = 24;  // of the step
    Task task = SFT;        // dpo, rm, grpo: the loss is a function of each value, by grpo computed within the head
    bool looks = false;     // --debug
    size_t group = 0;       // --zero_group
    size_t experts = 1;     // --expert_parallel
    size_t tp = 1;          // --tensor_parallel

    std::string name() const {
        static const char *const modes[] = {"ring", "gather", "ulysses"};
        return format(
            "%s, %zu ranks in rings of %zu, %s, stride %zu, stage %d, groups of %zu, %zu micro-steps, experts over %zu, tensors over %zu",
            task_name(task), world, sp, modes[size_t(mode)], head_stride, stage, group, micro_steps, experts, tp);
    }
};

// All ring sizes of `world` ranks, with every mode and stage, one micro-step and three.
inline std::vector<RankCase> rank_cases(size_t world) {
    std::vector<RankCase> cases;
    for (size_t sp = 1; sp <= world; sp++)
        for (SpMode mode : {SpMode::ring, SpMode::gather, SpMode::ulysses})
            for (int stage : {0, 1, 2, 3})
                for (size_t micro_steps : {1, 3})
                    if (world % sp == 0 && (sp > 1 || mode == SpMode::ring))
                        cases.push_back(
                            {world, sp, mode, mode == SpMode::gather ? 1 + size_t(stage) % 3 : 6, stage, micro_steps});
    return cases;
}

// Adds cases with groups (0: none) and divided experts, at every stage that allows them, with one micro-step and three.
inline void add_cases(std::vector<RankCase> &cases, size_t world, size_t sp, size_t group, size_t experts) {
    for (int stage : {0, 1, 2, 3})
        for (size_t micro_steps : {1, 3})
            if (stage > 0 || group == 0) {
                cases.push_back({world, sp, SpMode::ring, 6, stage, micro_steps});
                cases.back().group = group, cases.back().experts = experts;
            }
}

// Groups of several ranks that are smaller than the world. Some are rings.
inline std::vector<RankCase> group_cases(size_t world) {
    std::vector<RankCase> cases;
    for (size_t group = 2; group < world; group++)
        if (world % group == 0) add_cases(cases, world, 1, group, 1);
    for (RankCase &c : cases)
        if (c.stage == 2) c.sp = c.group;
    return cases;
}

// Experts divided among all ranks or some, in rings and across them, and in groups.
inline std::vector<RankCase> expert_cases() {
    std::vector<RankCase> cases;
    const std::array<size_t, 4> splits[] = {{2, 1, 0, 2}, {4, 1, 0, 2}, {4, 2, 0, 2}, {4, 4, 0, 2}, {4, 2, 0, 4},
                                            {6, 2, 0, 3}, {6, 1, 0, 6}, {8, 1, 4, 2}, {4, 1, 2, 2}};
    for (const auto &[world, sp, group, experts] : splits) add_cases(cases, world, sp, group, experts);
    return cases;
}

// Tensors divided among 2 to 12 ranks, which are more than the key heads: alone, with data ranks, in rings of every mode, and in groups. The parts are of
// different sizes.
inline std::vector<RankCase> tensor_cases() {
    std::vector<RankCase> cases;
    const std::array<size_t, 4> splits[] = {{2, 1, 0, 2}, {3, 1, 0, 3}, {4, 1, 0, 4}, {4, 1, 0, 2},  {4, 2, 0, 2},
                                            {6, 2, 0, 3}, {6, 1, 0, 6}, {8, 2, 4, 2}, {12, 1, 0, 12}};
    for (const auto &[world, sp, group, tp] : splits) {
        const size_t before = cases.size();
        add_cases(cases, world, sp, group, 1);
        for (size_t i = before; i < cases.size(); i++) {
            cases[i].tp = tp;
            if (sp > 1) cases[i].mode = SpMode(i % 3), cases[i].head_stride = 1;
        }
    }
    return cases;
}

// A third of the cases, with each value of each parameter, and each pair of a mode with a stage or a number of micro-steps.
inline std::vector<RankCase> third_of(std::vector<RankCase> cases) {
    std::erase_if(cases, [](const RankCase &c) { return (size_t(c.mode) + size_t(c.stage) + c.sp + c.micro_steps) % 3; });
    return cases;
}

// untied, tied: a Llama-like model; adapted: untied with adapters and dropout; norm_after: untied with the norms of OLMo 2; experts: untied with
// experts; hybrid: untied with linear attention in two of its layers; sparse_hybrid: with experts, too; fused: untied with q, k and v in one tensor, and
// gate and up in another; adapted_fused: both; wide: untied with matrices that 2, 3 or 6 ranks divide into multiples of 16
enum RankModel {
    untied,
    tied,
    gpt2,
    rank_models,
    adapted,
    norm_after,
    experts,
    hybrid,
    sparse_hybrid,
    fused,
    adapted_fused,
    wide
};

// Successive numbers give each model every stage with every number of micro-steps.
inline RankModel rank_model_of(size_t number) { return RankModel((number + number / rank_models) % rank_models); }

// Grouped query heads, a sliding window, norms of queries and keys, biases. The head is the embedding, a separate matrix, or that of a reward
// model.
inline ModelConfig rank_model(RankModel model, Task task = SFT) {
    ModelConfig c{};
    c.V = 97, c.H = 24, c.D = 8, c.F = 40, c.max_positions = 128;
    if (model == gpt2) {
        c.family = "gpt2", c.C = 192, c.L = 2, c.KV = c.H, c.eps = 1e-5f, c.gelu = Gelu::tanh;
        c.tied = c.qkv_bias = c.o_bias = c.mlp_bias = true;
        c.window = {0, 0}, c.initializer_range = 0.1;
        return c;
    }
    c.family = "qwen3", c.C = 32, c.L = 3, c.KV = 6, c.eps = 1e-6f, c.qk_norm = true;
    c.tied = model == tied && task != RM, c.qkv_bias = c.o_bias = c.mlp_bias = model == tied, c.reward = task == RM;
    c.window = {0, 7, 0}, c.rope.theta = 10000, c.initializer_range = 0.2;
    c.norm_after = c.wide_qk_norm = model == norm_after, c.norm_before = model != norm_after;
    // The first layer has no experts, so at stage 3 it gathers fewer weights than the third, which uses the same buffer.
    if (model == experts || model == sparse_hybrid)
        c.experts = {.number = 12,
                     .chosen = 3,
                     .F = 24,
                     .shared_F = 16,
                     .normed = true,
                     .layers = {false, true, true},
                     .aux_loss_coef = 0.5};
    if (model == hybrid || model == sparse_hybrid) {
        c.window = {0, 0, 0}, c.output_gate = true;
        c.eps =
            1e-3f;  // outputs near 0, as of a first token whose query and key are nearly orthogonal, amplify roundings in their norm
        c.delta = {.Hk = 2, .Hv = 4, .Dk = 16, .Dv = 8, .layers = {true, false, true}};
    }
    if (model == wide) c.F = 96;
    c.fused = model == fused || model == adapted_fused;
    if (model == adapted || model == adapted_fused)
        c.lora = {.rank = 3, .alpha = 4.5, .dropout = 0.25, .targets = {"all-linear"}};
    return c;
}

inline constexpr size_t rank_documents[] = {1, 40, 3, 17, 1, 90, 29, 5, 64, 12, 2, 33, 8, 1, 50, 21, 70, 4, 19, 1, 44, 6, 11, 27};

// The first `count` documents, dealt to `rows` rows.
inline std::vector<Row> rank_rows(size_t rows, size_t count) {
    std::vector<std::vector<std::vector<int32_t>>> documents(rows);
    std::vector<std::vector<std::vector<uint8_t>>> masks(rows);
    for (size_t d = 0; d < count; d++) {
        const Random random{1, Purpose::test, uint32_t(d)};
        auto &ids = documents[d % rows].emplace_back(rank_documents[d]);
        auto &mask = masks[d % rows].emplace_back(rank_documents[d]);
        for (size_t t = 0; t < ids.size(); t++)
            ids[t] = int32_t(random.block(t)[0] % 97), mask[t] = t > 0 && random.block(t)[1] % 3 > 0;
    }
    std::vector<Row> out;
    for (size_t r = 0; r < rows; r++) {
        out.push_back(make_row(documents[r], masks[r]));
        for (size_t i = 0; i < out[r].documents.size(); i++) out[r].documents[i] = r + i * rows;
    }
    return out;
}

// Copies the values of elements with consecutive numbers (Tensor::number) to their places in the whole model's table.
inline void place(const std::vector<Tensor> &own, const std::vector<Tensor> &whole, size_t number,
                  const std::vector<float> &values, std::vector<float> &to) {
    for (const Tensor &t : own) {
        const size_t from = std::max(t.number, number), end = std::min(t.number + t.count, number + values.size());
        if (from < end)
            t.for_runs(from - t.number, end - from, [&](size_t begin, size_t at, size_t run) {
                std::copy_n(&values[from - number + at], run,
                            &to[std::ranges::find(whole, t.name, &Tensor::name)->offset + begin]);
            });
    }
}

struct RankResult {
    double loss = 0, norm = 0, next_loss = 0;  // next_loss: after the updates
    std::vector<float> gradient, moments;      // (elements) in the order of the table; moments: m of AdamW or Muon
    std::vector<Tensor> table;                 // without padding
    Payload sent;                              // by all ranks in the first step
};

// Fills B with random values, because A has no gradient if B is 0.
template <class Dev> void fill_adapters(Decoder<Dev> &model, const ShardRanks &ranks) {
    auto &zero = model.parameters();
    for (const TensorRun &s : zero.sharding.tensor_runs(zero.table)) {
        const Tensor &t = zero.table[s.tensor];
        if (t.init != Tensor::lora_b) continue;
        const Random random{1, Purpose::test, stream_of(t.name)};
        std::vector<float> values(s.count);
        t.for_runs(s.first, s.count, [&](size_t begin, size_t at, size_t run) {
            for (size_t i = 0; i < run; i++) values[at + i] = float(0.1 * random.normal(begin + i));
        });
        write(model.memory(), zero.params_at(s), values);
    }
    zero.gather(ranks);
}

// The step of one rank. Each rank writes its part of `result`, which the threads share. change(limits) sets options that must not change a bit.
template <class Dev>
void rank_step(
    Dev dev, Comm &comm, const RankCase &c, RankModel model_of_case, RankResult &result,
    const std::function<void(ModelLimits &)> &change = [](ModelLimits &) {}) {
    const ModelConfig config = rank_model(model_of_case, c.task);
    const size_t dp = c.world / c.sp / c.tp,
                 row_count = std::max<size_t>(1, dp * c.micro_steps - (dp > 1));  // one ring has an empty row
    const auto rows = rank_rows(row_count, c.documents);
    std::vector<double> costs;
    size_t targets = 0, longest = 0;
    for (const Row &row : rows) costs.push_back(double(row.T)), targets += row.targets.size(), longest = std::max(longest, row.T);

    ModelLimits limits;
    limits.row_tokens = round_up(longest + 1, row_multiple), limits.positions = 128;
    limits.recompute = c.stage % 2 ? Recompute::layer : Recompute::none;
    limits.ranks.world = c.world, limits.ranks.rank = size_t(comm.rank), limits.ranks.sp = c.sp, limits.ranks.sp_mode = c.mode;
    limits.ranks.head_stride = c.head_stride, limits.ranks.zero_stage = c.stage, limits.ranks.zero_group = c.group;
    limits.ranks.expert_parallel = c.experts, limits.ranks.tp = c.tp;
    limits.ranks.flops = 1e8,
    limits.ranks.bandwidth = 1e6;  // for these rates rows of this size also get other layouts than contiguous
    limits.neftune_alpha = 5;
    limits.ranks.bucket_bytes = 4096;  // the head has several buckets
    change(limits);
    Mesh mesh(comm, int(c.sp), int(c.group), int(c.experts), int(c.tp));
    const std::unique_ptr<Decoder<Dev>> own_model = make_model(dev, config, limits);
    Decoder<Dev> &model = *own_model;
    model.allocate(mesh, false, true);
    model.initialise(1);
    model.randomise(7);
    if (config.lora.rank) fill_adapters(model, mesh.shards);
    if (c.looks) model.trace().detect_anomaly();

    const auto own = deal_rows(costs, dp)[size_t(mesh.dp_rank)];
    // The mean over the documents of log(1 + (value - c)^2), where c depends on the target. The derivatives are all different and not 0.
    const auto loss_of_value = [&](const Row &row, size_t number, double value, double &sum) {
        const double v = value - 5 + double(row.targets[number] % 5) / 5;
        sum += std::log1p(v * v) / double(c.documents);
        return float(2 * v / (1 + v * v) / double(c.documents));
    };
    const auto loss_of_values = [&] {
        const float entropy_weight = c.task == RM ? 0 : 1e-3f;
        double sum = 0, elsewhere = 0;  // what the other ranks of a row have, too
        for (size_t i = 0; i < own.size(); i++) {
            const Row row = own[i] == no_row ? Row{} : rows[own[i]];
            const auto loss = [&](std::span<const size_t> numbers, std::span<const float> values) {
                std::vector<float> weights;
                for (size_t n = 0; n < numbers.size(); n++)
                    weights.push_back(loss_of_value(row, numbers[n], values[n], mesh.tp_rank == 0 ? sum : elsewhere));
                return weights;
            };
            if (c.task == GRPO) {
                model.accumulate(row, loss, entropy_weight, i + 1 == own.size());
                continue;
            }
            std::vector<float> weights;
            for (double value : model.evaluate(row))
                weights.push_back(loss_of_value(row, weights.size(), value, mesh.is_first_of_row() ? sum : elsewhere));
            model.backward(weights, entropy_weight, i + 1 == own.size());
        }
        return comm.sum(sum);
    };
    const auto loss = [&] {
        model.zero_gradients();
        for (size_t i = 0; config.experts.number && own.size() > 1 && i < own.size(); i++)
            model.count_routing(own[i] == no_row ? Row{} : rows[own[i]], i + 1 == own.size());
        if (c.task != SFT) return loss_of_values();
        for (size_t i = 0; i < own.size(); i++)
            model.accumulate(own[i] == no_row ? Row{} : rows[own[i]], 1 / float(targets), i + 1 == own.size());
        LossSums sums;
        for (const LossSums &s : comm.gather(model.take_sums())) sums += s;
        EXPECT_EQ(sums.targets, double(targets));
        return sums.nll / sums.targets;
    };
    const double first = loss(), norm = model.gradient_norm();
    EXPECT_EQ(model.trace().anomaly().what, "") << c.name();
    Payload sent;
    for (const Payload &p : comm.gather(model.take_sent())) sent += p;
    auto &zero = model.parameters();
    for (const TensorRun &s : zero.sharding.tensor_runs(zero.table))
        if (const size_t bucket = zero.sharding.bucket_of(s.global);
            c.stage > 0 || comm.rank == 0 ||
            (zero.sharding.buckets[bucket].holders != Holders::all && size_t(comm.rank) < c.experts * c.tp)) {
            const auto copy = [&](const auto *grads) {
                const auto stored = read(model.memory(), grads, s.count);
                place(zero.whole, result.table, s.number, {stored.begin(), stored.end()}, result.gradient);
            };
            std::visit(copy, zero.gradients.at(s));
        }
    // An epsilon far above the rounding of gradients makes the update a smooth function of them, even of sums that cancel to about 0. The second
    // update begins with moments other than 0.
    for (size_t step : {1, 2}) {
        model.update({5e-3, 0.9, 0.95, 1e-5, 0.1, 1 / norm, step});
        const OptimizerState state = model.optimizer_state();  // checkpoints read it after an update
        for (const OptimizerPart &part : state.parts) {
            state.open(part);
            const auto m = std::visit([&](auto m) { return read_floats(model.memory(), m, part.count); }, part.m);
            if (size_t(comm.rank) < std::min(part.writers, state.writers))
                place(zero.whole, result.table, part.global, m, result.moments);
        }
    }
    const double next = loss();
    if (comm.rank == 0) result.loss = first, result.norm = norm, result.next_loss = next, result.sent = sent;
}

inline RankResult empty_result(RankModel model, Task task = SFT) {
    RankResult result;
    const ModelConfig config = rank_model(model, task);
    result.table = trained_table(config, table_of(config)).tensors;
    result.gradient.resize(result.table.back().offset + result.table.back().count);
    result.moments.resize(result.gradient.size());
    return result;
}

template <class Dev> RankResult one_rank(Dev dev, RankModel model, Task task = SFT) {
    SelfComm comm;
    RankResult result = empty_result(model, task);
    rank_step(dev, comm, {1, 1, SpMode::ring, 6, 0, 1, 24, task}, model, result);
    return result;
}

// Bounds for float: loss 1e-6, gradient of a tensor 1e-5 of its norm, or of 1e-3 of the global norm if that is larger.
inline void check_rank_result(const std::string &what, const RankResult &got, const RankResult &want) {
    SCOPED_TRACE(what);
    EXPECT_NEAR(got.loss, want.loss, 1e-6 * want.loss);
    EXPECT_NEAR(got.norm, want.norm, 1e-5 * want.norm);
    EXPECT_NEAR(got.next_loss, want.next_loss, 1e-5 * want.next_loss);
    EXPECT_LT(want.next_loss, want.loss);
    for (const Tensor &t : want.table) {
        double error = 0, squares = 0;
        for (size_t i = t.offset; i < t.offset + t.count; i++)
            error += std::pow(double(got.gradient[i]) - want.gradient[i], 2), squares += std::pow(double(want.gradient[i]), 2);
        EXPECT_LE(std::sqrt(error), 1e-5 * std::max(std::sqrt(squares), 1e-3 * want.norm)) << t.name;
    }
}
