// Adapters: adapted models compared with PEFT (golden.h, golden/make_lora.py), frozen weights, files, refusals.
#include "models.h"

#include "../llmc/ops/quantise.h"
#include "check.h"
#include "errors.h"
#include "golden.h"

namespace {

struct AdapterGoldens : TemporaryDirectory, testing::WithParamInterface<const char *> {
    const Golden g{GetParam()};
    Golden with_dropout() const {  // which adapters of experts do not have
        Golden out = g;
        out.config.lora.dropout = g.config.experts.number ? 0 : 0.3;
        return out;
    }
    Trained<CpuF32> trained() const { return {make_device<CpuF32>(), g}; }
};

ModelConfig config_of(const std::string &name) {
    std::vector<std::string> notes;
    return read_config("test/golden/" + name, notes);
}

}  // namespace

INSTANTIATE_TEST_SUITE_P(Families, AdapterGoldens, testing::ValuesIn(golden_adapters), family_name);

TEST_P(AdapterGoldens, LossEntropyAccuracy) { expect_loss_entropy_accuracy(make_device<CpuF32>(), g); }
TEST_P(AdapterGoldens, LogitsThroughTheCache) { expect_logits_through_the_cache(make_device<CpuF32>(), g); }
TEST_P(AdapterGoldens, Gradients) { expect_gradients(make_device<CpuF32>(), g); }
TEST_P(AdapterGoldens, LossesOfTenSteps) { expect_losses(make_device<CpuF32>(), g, {1, 5, 10}); }

// The distance to the gradient in float, relative to that of PEFT in bf16.
TEST_P(AdapterGoldens, Bf16GradientAsGoodAsPeft) {
    expect_bf16_gradient_as_good_as_transformers(make_device<CpuBf16>(), make_device<CpuF32>(), g);
}

TEST_P(AdapterGoldens, RecomputeThreadsGuardsAndPoisonGiveTheSameBits) {
    expect_same_bits_in_every_way(g);
    if (with_dropout().config.lora.dropout > 0) expect_same_bits_in_every_way(with_dropout());
}

// Dropout depends on the step and on the document. Another packing of documents into rows only changes the order of sums.
TEST_P(AdapterGoldens, DropoutBelongsToTokens) {
    if (with_dropout().config.lora.dropout == 0) return;
    Trained<CpuF32> t(make_device<CpuF32>(), with_dropout());
    const auto loss = [&](std::optional<uint64_t> key, size_t per_row) {
        std::vector<Row> rows = g.rows(per_row);
        for (size_t r = 0; r < rows.size(); r++)
            for (size_t i = 0; i < rows[r].documents.size(); i++) rows[r].documents[i] = r * per_row + i;
        t.model->randomise(key);
        return t.loss_and_gradient(g, rows);
    };
    const double plain = loss({}, 6), first = loss(1, 6), norm = t.model->gradient_norm();
    expect_near_relative("loss without dropout", plain, g.expected["loss"], 1e-5);
    EXPECT_GT(std::abs(first - plain), 1e-4);
    EXPECT_NE(loss(2, 6), first);
    for (size_t per_row : {1, 2, 3}) {
        expect_near_relative("loss, other rows", loss(1, per_row), first, 1e-6);
        expect_near_relative("gradient norm, other rows", t.model->gradient_norm(), norm, 1e-5);
    }
}

// The slope of the loss along the gradient, by finite differences: both passes drop the same values.
TEST_P(AdapterGoldens, GradientUnderDropoutIsThatOfItsLoss) {
    Trained<CpuF32> t(make_device<CpuF32>(), with_dropout());
    t.model->randomise(1);
    const auto rows = g.rows(6);
    t.loss_and_gradient(g, rows);
    Zero<CpuF32> &zero = t.model->parameters();
    const std::vector<float> gradient = t.gradient(), weights(zero.params, zero.params + zero.sharding.count);
    const double squares = sum_of_squares(gradient), h = 2e-3 / std::sqrt(squares);
    const auto loss_at = [&](double step) {
        for (size_t i = 0; i < weights.size(); i++) zero.params[i] = float(weights[i] + step * gradient[i]);
        return t.loss(rows);
    };
    expect_near_relative("slope", (loss_at(h) - loss_at(-h)) / (2 * h), squares, 2e-3);
}

// New adapters have B = 0: the adapted model has the bits of its base, and A has no gradient. The reference of dpo is the base of trained adapters.
TEST_P(AdapterGoldens, BeginsAsItsBase) {
    Golden fresh = g;
    fresh.own = fresh.dir;
    const Row row = g.rows(6)[0];
    Trained<CpuF32> t(make_device<CpuF32>(), fresh), base(make_device<CpuF32>(), Golden(g.expected["base"].get<std::string>())),
        filled = trained();
    const auto want = base.model->evaluate(row);
    EXPECT_EQ(t.model->evaluate(row), want);
    t.model->take_sums();
    t.loss_and_gradient(g, g.rows(6));
    for (const Tensor &tensor : t.model->tensors())
        EXPECT_EQ(sum_of_squares(t.gradient(tensor)) > 0, tensor.init != Tensor::lora_a) << tensor.name;
    EXPECT_NE(filled.model->evaluate(row), want);
    filled.model->take_sums();
    EXPECT_EQ(filled.model->evaluate_base(row), want);
    EXPECT_EQ(filled.model->take_sums().targets, 0);
}

// The plan has no gradients and moments of frozen tensors.
TEST_P(AdapterGoldens, OnlyAdaptersAreTrained) {
    const Trained<CpuF32> t = trained();
    size_t parameters = 0;
    for (const Tensor &tensor : t.model->tensors()) parameters += tensor.count;
    EXPECT_EQ(parameters, trained_parameters(g.config));
    for (const Segment &s : t.model->plan().segments())
        for (const char *name : {"gradients", "adamw m", "adamw v"})
            if (s.name == name) {
                EXPECT_LT(s.bytes, 2 * 4 * parameters + 4096) << name;
            }
}

// Adapters written in PEFT's format equal those read, bit for bit.
TEST_P(AdapterGoldens, FilesKeepTheirBits) {
    Trained<CpuF32> t = trained();
    t.model->save(dir, "F32");
    write_lora(dir, g.config, g.dir);
    bool reward;
    std::vector<std::string> notes;
    const LoraConfig lora = read_lora(dir, g.config, reward, notes);
    EXPECT_EQ(lora.scale(), g.config.lora.scale());
    EXPECT_EQ(lora.rank, g.config.lora.rank);
    EXPECT_FALSE(reward);
    const HfWeights ours(dir, adapter_files), theirs(g.own, adapter_files);
    HostMemory host;
    for (const Tensor &tensor : t.model->tensors()) {
        std::vector<float> a(tensor.count), b(tensor.count);
        ours.read(tensor.name, tensor.shape, a.data(), host), theirs.read(tensor.name, tensor.shape, b.data(), host);
        EXPECT_EQ(a, b) << tensor.name;
    }
}

// ---- the reward model -----------------------------------------------------------------------------------------------------------------

TEST(Adapters, RewardModelEqualsPeft) {
    const std::string adapter = "test/golden/lora_reward";
    const auto golden = read_json(adapter + "/golden.json");
    GoldenPairs<CpuF32> t(make_device<CpuF32>(), golden, golden["base"], RM, adapter);
    const std::vector<double> rewards = document_values(t.run, t.run.model, *t.model, *t.data, t.samples),
                              want = golden["rewards"];
    for (size_t i = 0; i < want.size(); i++) EXPECT_NEAR(rewards[i], want[i], 1e-4);
    expect_near_relative("loss", t.step().loss, golden["loss"], 1e-5);
    const double norm = golden["grad_norm"];
    expect_near_relative("gradient norm", t.model->gradient_norm(), norm, 1e-4);
    for (const Tensor &tensor : t.model->tensors())
        EXPECT_NEAR(std::sqrt(sum_of_squares(gradient_of(*t.model, tensor))), golden["gradients"].at(tensor.name)["norm"],
                    1e-4 * norm)
            << tensor.name;
}

// ---- refusals -------------------------------------------------------------------------------------------------------------------------

namespace {

struct AdapterFiles : TemporaryDirectory {
    // The error for the adapter_config.json of lora_llama3 with these changes, or "no error".
    std::string refusal_of(const nlohmann::json &changes, const std::string &base = "llama3") const {
        nlohmann::json config = read_json("test/golden/lora_llama3/adapter_config.json");
        config.update(changes);
        write_json(dir + "/adapter_config.json", config);
        bool reward;
        return error_of([&] { read_lora(dir, config_of(base), reward, notes); });
    }
    mutable std::vector<std::string> notes;
    // The adapter_config.json written for these targets. Expects the same modules when it is read.
    nlohmann::json written(const std::string &base, const std::vector<std::string> &targets, size_t modules) const {
        ModelConfig config = config_of(base);
        config.lora = {.rank = 2, .alpha = 3, .targets = targets};
        write_lora(dir, config, "base");
        bool reward;
        ModelConfig again = config;
        std::vector<std::string> none;
        again.lora = read_lora(dir, config, reward, none);
        const auto want = adapted_modules(config);
        EXPECT_EQ(want.size(), modules);
        EXPECT_TRUE(std::ranges::equal(adapted_modules(again), want, {}, &LinearModule::name, &LinearModule::name));
        return read_json(dir + "/adapter_config.json");
    }
};

}  // namespace

TEST_F(AdapterFiles, UnsupportedFieldsAreRefused) {
    EXPECT_EQ(refusal_of(nlohmann::json::object()), "no error");
    const std::pair<nlohmann::json, const char *> wrong[] = {
        {{{"peft_type", "IA3"}}, "peft_type is \"IA3\", but only LORA is supported"},
        {{{"use_dora", true}}, "use_dora is true"},
        {{{"bias", "all"}}, "bias is \"all\""},
        {{{"init_lora_weights", "pissa_niter_16"}}, "init_lora_weights is \"pissa_niter_16\""},
        {{{"rank_pattern", {{"q_proj", 2}}}}, "rank_pattern is"},
        {{{"layers_to_transform", {0}}}, "layers_to_transform is"},
        {{{"modules_to_save", {"embed_tokens", "model.norm"}}}, "modules_to_save has \"model.norm\""},
        {{{"modules_to_save", {"lm_head"}}, {"task_type", "SEQ_CLS"}}, "has lm_head, but a reward model has none"},
        {{{"ensure_weight_tying", true}}, "ensure_weight_tying is true"},
        {{{"task_type", "SEQ_2_SEQ_LM"}}, "task_type is"},
        {{{"target_modules", {"lm_head"}}},
         "adapter_config.json: target_modules has \"lm_head\", but the model has no linear layer"},
        {{{"target_modules", nlohmann::json::array()}}, "adapter_config.json: target_modules is empty"},
        {{{"use_mora", true}}, "use_mora is no setting of LoRA"},
        {{{"lora_alfa", 32}}, "lora_alfa is no setting of LoRA"},
        {{{"layer_scales", {{"q_proj", 2}}}}, "layer_scales is no setting of LoRA"},
        {{{"target_modules", {"model.layers.0.mlp.up_proj"}}}, "has mlp.up_proj of 1 layers"},
        {{{"target_modules", "model.layers.0.mlp.(up|down)_proj"}}, "matches mlp.up_proj of 1 layers"},
        {{{"target_modules", ".*lm_head"}}, "matches no linear layer"},
        {{{"target_modules", ".*(q_proj"}}, "is not a regular expression"},
        {{{"fan_in_fan_out", true}}, "fan_in_fan_out is true, but weights of a llama model"},
        {{{"r", 33}}, "adapter_config.json: r 33 is larger than"}};
    for (const auto &[changes, message] : wrong) expect_contains(refusal_of(changes), {message});
    const std::pair<nlohmann::json, const char *> wrong_of_experts[] = {
        {{{"target_modules", {"w1"}}}, "one of the experts' gate and up projections"},
        {{{"target_modules", {"model.layers.1.block_sparse_moe.experts.2.w2"}}}, "has w2 of 1 experts, but the model has 6"},
        {{{"target_modules", R"(.*\.experts\.[01]\.w2)"}}, "matches w2 of 4 experts, but the model has 6"},
        {{{"target_modules", {"w1", "w2", "w3"}}, {"lora_dropout", 0.1}}, "lora_dropout is 0.1, but in a mixture of experts"},
        {{{"target_modules", {"q_proj"}}, {"target_parameters", {"gate_up_proj"}}},
         "target_parameters has \"gate_up_proj\", one tensor"},
        {{{"target_modules", {"q_proj"}}, {"target_parameters", {"mlp.experts.down_proj"}}},
         "one tensor with the adapters of all"},
        {{{"target_modules", {"gate_proj"}}}, "all-linear, q_proj, k_proj, v_proj, o_proj, w1, w3, w2"}};
    for (const auto &[changes, message] : wrong_of_experts) expect_contains(refusal_of(changes, "mixtral"), {message});
}

// PEFT's merge_and_unload adds an adapter of a tied head twice, so it is no remedy for a tied model.
TEST_F(AdapterFiles, RemediesForTiedMatrices) {
    for (const nlohmann::json &changes : {nlohmann::json{{"ensure_weight_tying", true}},
                                          {{"target_modules", {"lm_head"}}},
                                          {{"target_modules", {"q_proj", "model.embed_tokens"}}}}) {
        expect_contains(refusal_of(changes, "qwen3"),
                        {"fix: train another adapter, with embed_tokens and lm_head in modules_to_save"});
        expect_contains(refusal_of(changes, "llama3"), {"fix: merge the adapter with PEFT"});
    }
}

TEST_F(AdapterFiles, UnknownSettingsWithoutEffectAreNoted) {
    const nlohmann::json off = {
        {"use_later", false}, {"later_config", nullptr}, {"later_pattern", nlohmann::json::object()}, {"later", ""}};
    EXPECT_EQ(refusal_of(off), "no error");
    EXPECT_TRUE(notes.empty());
    EXPECT_EQ(refusal_of({{"author", "me"}, {"comment", "good"}, {"lora_dtype", "float32"}}), "no error");
    ASSERT_EQ(notes.size(), 1u);
    expect_contains(notes[0], {"adapter_config.json: not read, because LoRA has no such setting: author, comment"});
}

// Names by which PEFT finds all modules with transformers 5: experts by names of layers or of parameters, the shared expert and dense layers by
// their own names.
TEST_F(AdapterFiles, NamesOfMixtures) {
    const std::vector<std::string> feed_forward = {"gate_proj", "up_proj", "down_proj"};
    const auto qwen3 = written("qwen3_moe", feed_forward, 3), qwen2 = written("qwen2_moe", feed_forward, 9);
    EXPECT_EQ(qwen3["target_modules"], nlohmann::json(feed_forward));
    EXPECT_TRUE(qwen3["target_parameters"].is_null());
    EXPECT_EQ(qwen2["target_modules"], nlohmann::json(feed_forward));
    EXPECT_EQ(qwen2["target_parameters"], (nlohmann::json{"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}));
    EXPECT_EQ(qwen2["rank_pattern"], (nlohmann::json{{R"(.*\.gate_up_proj)", 4}}));
    EXPECT_EQ(qwen2["alpha_pattern"], (nlohmann::json{{R"(.*\.gate_up_proj)", 6}}));
    const auto shared = written("qwen2_moe", {"shared_expert.down_proj", "v_proj"}, 2);
    EXPECT_EQ(shared["target_modules"], (nlohmann::json{"v_proj", "mlp.shared_expert.down_proj"}));
    EXPECT_EQ(shared["rank_pattern"], nlohmann::json::object());
    written("qwen2_moe", {"experts.gate_proj", "experts.up_proj"}, 2), written("mixtral", {"all-linear", "w2"}, 5);
}

TEST_F(AdapterFiles, TargetsByAnExpression) {
    using Names = std::vector<std::string>;
    const ModelConfig config = config_of("llama3");
    EXPECT_EQ(without_expressions(config, {R"(model\.layers\.\d+\.(mlp|self_attn)\.(up|q)_proj)", "o_proj"}),
              (Names{"self_attn.q_proj", "mlp.up_proj", "o_proj"}));
    EXPECT_EQ(refusal_of({{"target_modules", R"(.*\.(q|v)_proj)"}}), "no error");
}

// PEFT's names and layout of GPT-2. It has two modules c_proj; the name alone selects both.
TEST_F(AdapterFiles, NamesOfGpt2) {
    const std::tuple<std::vector<std::string>, size_t, nlohmann::json> rows[] = {
        {{"all-linear"}, 4, {"c_attn", "c_proj", "c_fc"}},
        {{"c_proj"}, 2, nlohmann::json::array({"c_proj"})},
        {{"mlp.c_proj", "c_attn"}, 2, nlohmann::json::array({"c_attn", "mlp.c_proj"})}};
    for (const auto &[targets, modules, names] : rows) {
        const nlohmann::json config = written("gpt2", targets, modules);
        EXPECT_EQ(config["fan_in_fan_out"], true);
        EXPECT_EQ(config["target_modules"], names);
    }
    expect_contains(refusal_of({{"fan_in_fan_out", false}}, "gpt2"), {"fix: use an adapter of this model"});
}

TEST(Adapters, ScaleIsAlphaOverRankOrItsRoot) {
    EXPECT_EQ((LoraConfig{.rank = 16, .alpha = 32, .targets = {}}.scale()), 2);
    EXPECT_EQ((LoraConfig{.rank = 16, .alpha = 32, .rslora = true, .targets = {}}.scale()), 8);
}

// ---- a quantised base -----------------------------------------------------------------------------------------------------------------

// Writes the model in `from` to `to`, with the matrices of its layers quantised to `bits` bits and back.
static void write_quantised_values(const std::string &from, const std::string &to, const ModelConfig &config, int bits) {
    const HfWeights weights(from);
    std::vector<TensorSpec> specs = weights.tensors();
    for (TensorSpec &spec : specs) spec.dtype = "F32";
    HfWriter writer(to, specs);
    HostMemory host;
    for (const TensorSpec &spec : specs) {
        std::vector<float> w(elements(spec.shape));
        weights.read(spec.name, spec.shape, w.data(), host);
        const bool of_layer = std::ranges::any_of(linear_modules(config), [&](const LinearModule &m) {
            bool found = false;
            for (size_t i = 0; i < copies(config, m); i++) found |= spec.name.ends_with("." + copy_name(m, i) + ".weight");
            return found;
        });
        if (of_layer && config.gpt2()) {  // (in, out) in its files
            const size_t IC = spec.shape[0], OC = spec.shape[1];
            w = transposed(w, IC, OC, 0, w.size());
            w = transposed(values_of(bits, quantise(bits, w, IC), OC, IC), OC, IC, 0, w.size());
        } else if (of_layer) {
            w = values_of(bits, quantise(bits, w, spec.shape[1]), spec.shape[0], spec.shape[1]);
        }
        writer.write(spec.name, w.data(), w.size(), host);
    }
    writer.finish();
}

TEST_P(AdapterGoldens, QuantisedBaseHasTheBitsOfItsValues) {
    for (const int bits : {4, 8}) {
        SCOPED_TRACE(format("%d bits", bits));
        Golden quantised = g, plain = g;
        quantised.config.weight_bits = bits;
        plain.dir = dir;
        write_quantised_values(g.dir, plain.dir, g.config, bits);
        Trained<CpuF32> of_floats(make_device<CpuF32>(), plain);
        const double want = of_floats.loss_and_gradient(g, g.rows(3));
        expect_near_relative("loss", want, g.expected["loss"], bits == 4 ? 0.1 : 0.01);
        EXPECT_NE(want, g.expected["loss"].get<double>());
        for (const auto &[recompute, poison] : {std::pair{Recompute::none, false}, {Recompute::layer, true}}) {
            Trained<CpuF32> of_bits(make_device<CpuF32>(), quantised, {.recompute = recompute, .poison = poison});
            EXPECT_EQ(of_bits.loss_and_gradient(g, g.rows(3)), want);
            for (const Tensor &t : of_bits.model->tensors()) EXPECT_EQ(of_bits.gradient(t), of_floats.gradient(t)) << t.name;
        }
    }
}
