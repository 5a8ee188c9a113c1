// config.json in all published spellings, its unsupported fields, and directories of weights.
#include "../llmc/io/hf.h"

#include "../llmc/core/json.h"
#include "../llmc/model/config.h"
#include "errors.h"

static HostMemory memory;

namespace fs = std::filesystem;
using nlohmann::json;

static std::vector<std::string> notes;  // of the last parse()

static ModelConfig parse(const json &source) {
    notes.clear();
    return parse_config(source, "config.json", notes);
}

static json tiny(const std::string &family = "llama") {
    if (family == "gpt2")
        return {{"model_type", "gpt2"}, {"vocab_size", 100}, {"n_embd", 64}, {"n_layer", 3}, {"n_head", 4}, {"n_positions", 128}};
    return {{"model_type", family},   {"vocab_size", 100},        {"hidden_size", 64},
            {"num_hidden_layers", 4}, {"num_attention_heads", 4}, {"num_key_value_heads", 2},
            {"head_dim", 16},         {"intermediate_size", 96},  {"max_position_embeddings", 128}};
}

static json with(json source, const std::string &more) {
    source.update(json::parse(more));
    return source;
}

// The text {"field": value}.
static std::string one(const std::string &field, const std::string &value) { return "{\"" + field + "\": " + value + "}"; }

// Everything that a configuration says of the model.
static json meaning(const ModelConfig &c) {
    const RopeConfig &r = c.rope;
    const ExpertConfig &e = c.experts;
    return {{"family", c.family},
            {"sizes", {c.V, c.C, c.L, c.H, c.KV, c.D, c.F, c.max_positions}},
            {"eps", format("%g", c.eps)},
            {"tied", c.tied},
            {"biases", {c.qkv_bias, c.o_bias, c.mlp_bias}},
            {"norms", {c.qk_norm, c.wide_qk_norm, c.norm_after}},
            {"local theta", c.local_rope ? c.local_rope->theta : 0},
            {"window", c.window},
            {"unrotated", c.unrotated},
            {"experts", {e.number, e.chosen, e.F, e.shared_F, e.normed}},
            {"layers of experts", e.layers},
            {"delta", {c.delta.Hk, c.delta.Hv, c.delta.Dk, c.delta.Dv}},
            {"layers of delta", c.delta.layers},
            {"aux_loss_coef", e.aux_loss_coef},
            {"initializer_range", c.initializer_range},
            {"eos", c.eos},
            {"bos", c.bos},
            {"reward", c.reward},
            {"gelu", c.gpt2() ? c.gelu == Gelu::erf ? "erf" : "tanh" : ""},
            {"rope", r.type},
            {"theta", r.theta},
            {"factor", r.factor},
            {"original", r.original_max_position},
            {"llama3", {r.low_freq_factor, r.high_freq_factor}},
            {"yarn", {r.beta_fast, r.beta_slow, r.attention_factor, r.mscale, r.mscale_all_dim, r.truncate}},
            {"longrope", {r.rotated, r.short_factor, r.long_factor}}};
}

// Expects these fields, among others, in the meaning of `source`.
static void expect_meaning(const json &source, const char *fields) {
    const json all = meaning(parse(source)), want = json::parse(fields);
    for (const auto &[field, value] : want.items()) EXPECT_EQ(all.at(field), value) << field << " of " << source;
}

static void expect_refused(const json &source, const std::string &words) {
    expect_error([&] { parse(source); }, {"config.json", words, "\n  fix: "});
}

// The tiny model of a family with more fields, and their meaning or the words of the refusal.
struct Reading {
    const char *family;
    std::string more;
    const char *expected;
};

// The defaults of GPT2Config are those of the smallest published model.
TEST(Config, DefaultsOfGpt2) {
    const json source = {{"model_type", "gpt2"}};
    EXPECT_EQ(meaning(parse(source)), meaning(preset("d12")));
    expect_meaning(source, R"({"sizes": [50257, 768, 12, 12, 12, 64, 3072, 1024], "eps": "1e-05", "initializer_range": 0.02,
                               "tied": true, "gelu": "tanh", "eos": [50256], "bos": 50256})");
    expect_meaning(with(source, R"({"eos_token_id": null, "bos_token_id": null})"), R"({"eos": [], "bos": -1})");
}

// The defaults of each family, and fields that change them.
TEST(Config, Families) {
    const std::string biased = R"({"attention_bias": true, "mlp_bias": true})";
    const std::string types =
        R"({"sliding_window": 8, "use_sliding_window": true,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]})";
    const Reading readings[] = {
        {"llama",
         R"({"rms_norm_eps": 1e-5, "tie_word_embeddings": true, "eos_token_id": [1, 2], "bos_token_id": 0,
             "initializer_range": 0.5, "rope_theta": 500000.0, "some_new_field": {"x": 1}})",
         R"({"family": "llama", "sizes": [100, 64, 4, 4, 2, 16, 96, 128], "eps": "1e-05", "tied": true,
             "biases": [false, false, false], "norms": [false, false, false], "window": [0, 0, 0, 0], "rope": "default",
             "theta": 500000, "eos": [1, 2], "bos": 0, "initializer_range": 0.5})"},
        {"llama",
         R"({"bos_token_id": [], "eos_token_id": [], "embedding_multiplier": 1.0, "num_experts": null, "use_mrope": false})",
         R"({"bos": -1, "eos": []})"},
        {"gpt2",
         R"({"n_inner": 96, "layer_norm_epsilon": 1e-6, "initializer_range": 0.5, "eos_token_id": 7, "bos_token_id": 8,
             "activation_function": "gelu", "tie_word_embeddings": false, "reorder_and_upcast_attn": true,
             "scale_attn_weights": true, "scale_attn_by_inverse_layer_idx": false, "add_cross_attention": false,
             "summary_type": "last", "hidden_act": "relu", "hidden_size": 64, "num_hidden_layers": 3})",
         R"({"family": "gpt2", "sizes": [100, 64, 3, 4, 4, 16, 96, 128], "eps": "1e-06", "initializer_range": 0.5,
             "tied": false, "biases": [true, true, true], "norms": [false, false, false], "reward": false,
             "window": [0, 0, 0], "gelu": "erf", "eos": [7], "bos": 8})"},
        {"gpt2", "{}", R"({"gelu": "tanh", "eos": [], "bos": -1})"},  // the default, 50256, is not in this vocabulary
        {"gpt2", R"({"activation_function": "gelu_pytorch_tanh"})", R"({"gelu": "tanh"})"},
        {"gpt2", R"({"activation_function": "gelu_fast"})", R"({"gelu": "tanh"})"},
        {"llama", biased, R"({"biases": [true, true, true], "norms": [false, false, false]})"},
        {"llama", R"({"head_dim": null, "num_key_value_heads": null})", R"({"sizes": [100, 64, 4, 4, 4, 16, 96, 128]})"},
        {"llama", R"({"head_dim": 24})", R"({"sizes": [100, 64, 4, 4, 2, 24, 96, 128]})"},
        {"llama", R"({"sliding_window": 8})", R"({"window": [0, 0, 0, 0]})"},
        {"qwen2", "{}", R"({"biases": [true, false, false], "norms": [false, false, false]})"},
        {"qwen3", biased, R"({"biases": [true, true, false], "norms": [true, false, false]})"},
        {"qwen3", R"({"head_dim": null, "num_key_value_heads": null})",
         R"({"sizes": [100, 64, 4, 4, 4, 128, 96, 128], "biases": [false, false, false]})"},
        {"qwen3", R"({"sliding_window": 8, "max_window_layers": 0})", R"({"window": [0, 0, 0, 0]})"},
        {"qwen3", R"({"sliding_window": 8, "use_sliding_window": true, "max_window_layers": 3})", R"({"window": [0, 0, 0, 8]})"},
        {"qwen2", R"({"sliding_window": 8, "use_sliding_window": true})", R"({"window": [0, 0, 0, 0]})"},  // from layer 28 on
        {"qwen2", R"({"sliding_window": null, "use_sliding_window": true, "max_window_layers": 0})",
         R"({"window": [0, 0, 0, 0]})"},
        {"qwen2", types, R"({"window": [0, 8, 8, 0]})"},
        {"qwen3_5_text",
         R"({"head_dim": null, "num_key_value_heads": null, "full_attention_interval": 2, "linear_num_key_heads": 2})",
         R"({"sizes": [100, 64, 4, 4, 4, 256, 96, 128], "norms": [true, false, false], "window": [0, 0, 0, 0], "delta": [2, 32, 128, 128],
             "layers of delta": [true, false, true, false], "longrope": [0.25, [], []], "theta": 10000})"},
        {"qwen3_5_text",
         R"({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": true},
             "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"]})",
         R"({"delta": [16, 32, 128, 128], "layers of delta": [true, false, false, true], "longrope": [0.5, [], []], "theta": 10000000.0})"},
        {"qwen3_5_moe_text",
         R"({"head_dim": null, "num_experts": 12, "moe_intermediate_size": 24, "norm_topk_prob": false, "mlp_only_layers": [0]})",
         R"({"sizes": [100, 64, 4, 4, 2, 256, 24, 128], "delta": [16, 32, 128, 128], "layers of delta": [true, true, true, false],
             "experts": [12, 8, 24, 512, true], "layers of experts": [true, true, true, true], "aux_loss_coef": 0})"},
        {"qwen3_next", R"({"head_dim": null, "norm_topk_prob": true, "mlp_only_layers": [], "linear_num_key_heads": 4})",
         R"({"family": "qwen3_5_moe_text", "sizes": [100, 64, 4, 4, 2, 256, 512, 128], "delta": [4, 32, 128, 128],
             "experts": [512, 10, 512, 512, true], "longrope": [0.25, [], []]})"},
        {"mistral", R"({"sliding_window": 8, "use_sliding_window": false})", R"({"window": [8, 8, 8, 8]})"},
        {"mistral", R"({"sliding_window": null})", R"({"window": [0, 0, 0, 0]})"},
        {"mistral", "{}", R"({"window": [4096, 4096, 4096, 4096], "biases": [false, false, false]})"},
        {"phi3", R"({"sliding_window": 8})", R"({"window": [8, 8, 8, 8]})"},
        {"phi3", "{}", R"({"window": [0, 0, 0, 0]})"},
        {"ministral", types, R"({"window": [0, 8, 8, 0]})"},
        {"ministral", R"({"sliding_window": 8})", R"({"window": [8, 8, 8, 8]})"},
        {"olmo2", biased, R"({"biases": [true, true, false], "norms": [true, true, true]})"},
        {"smollm3", biased, R"({"biases": [true, true, true]})"},
        {"smollm3", "{}",
         R"({"biases": [false, false, false], "unrotated": [false, false, false, true], "tied": true, "theta": 2e6})"},
        {"smollm3", R"({"no_rope_layer_interval": 2})", R"({"unrotated": [false, true, false, true]})"},
        {"smollm3", R"({"no_rope_layers": [0, 1, 1, 1]})", R"({"unrotated": [true, false, false, false]})"},
        {"smollm3", R"({"use_sliding_window": true, "sliding_window": 8})", R"({"window": [0, 0, 0, 8]})"},
        {"smollm3", R"({"sliding_window": 8})", R"({"window": [0, 0, 0, 0]})"},
        {"granite", biased, R"({"biases": [true, true, true]})"},
        {"granite", "{}", R"({"biases": [false, false, false]})"},
        {"seed_oss", "{}", R"({"biases": [true, false, false]})"},
        {"seed_oss", R"({"attention_out_bias": true, "attention_bias": false})", R"({"biases": [false, true, false]})"},
        {"exaone4", R"({"sliding_window": 8})", R"({"window": [8, 8, 8, 0]})"},
        {"exaone4", R"({"sliding_window": 8, "sliding_window_pattern": 2})", R"({"unrotated": [false, true, false, true]})"},
        {"exaone4", R"({"sliding_window": null})", R"({"unrotated": [false, false, false, false]})"},
        {"exaone4", types, R"({"unrotated": [true, false, false, true]})"},
        {"gemma3_text", R"({"head_dim": null, "rope_theta": 5e5, "rope_local_base_freq": 500, "sliding_window": 8})",
         R"({"sizes": [100, 64, 4, 4, 2, 256, 96, 128], "norms": [true, false, true], "tied": true, "theta": 5e5,
             "local theta": 500, "eos": [1], "bos": 2, "window": [8, 8, 8, 8], "rope": "default"})"},
        {"gemma3_text", R"({"sliding_window": 8, "sliding_window_pattern": 3})", R"({"window": [8, 8, 0, 8]})"},
        {"gemma3_text", types, R"({"window": [0, 8, 8, 0]})"},
        {"gemma3_text",
         R"({"sliding_window": 8, "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8, "rope_theta": 5e5},
             "sliding_attention": {"rope_type": "default", "rope_theta": 500}}})",
         R"({"rope": "linear", "factor": 8, "theta": 5e5, "local theta": 500})"},
        {"qwen3_moe",
         R"({"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": true, "mlp_only_layers": [3, 7]})",
         R"({"experts": [6, 3, 24, 0, true], "layers of experts": [true, true, true, false]})"},
        {"qwen2_moe", R"({"num_local_experts": 9, "decoder_sparse_step": 2})",
         R"({"experts": [9, 4, 1408, 5632, false], "layers of experts": [false, true, false, true]})"},
        {"mixtral", R"({"router_aux_loss_coef": 0.02})",  // F is intermediate_size
         R"({"experts": [8, 2, 96, 0, true], "layers of experts": [true, true, true, true], "aux_loss_coef": 0})"},
        {"mixtral", R"({"router_aux_loss_coef": 0.02, "output_router_logits": true})", R"({"aux_loss_coef": 0.02})"},
        {"qwen3_moe", R"({"output_router_logits": true})", R"({"aux_loss_coef": 0.001})"},
    };
    for (const auto &[family, more, fields] : readings) expect_meaning(with(tiny(family), more), fields);
}

// Larger models of Gemma 3 also have a vision tower. The trained part is the text model, whose configuration may only contain its sizes.
TEST(Config, TextModelOfGemma3) {
    const ModelConfig c = parse(json::parse(
        R"({"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106],
            "torch_dtype": "bfloat16", "vision_config": {},
            "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
                            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}})"));
    EXPECT_EQ(parameter_count(c), 3880263168u);
    EXPECT_EQ(c.eos, (std::vector<int32_t>{1, 106}));
    EXPECT_EQ(c.rope.factor, 8);
}

TEST(Config, LongRopeAndPartialRotation) {
    const json phi = with(tiny("phi3"), R"({"max_position_embeddings": 256, "original_max_position_embeddings": 64,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "su", "short_factor": [1, 1, 1, 1, 1, 1], "long_factor": [2, 2, 3, 3, 4, 4.5]}})");
    expect_meaning(phi, R"({"rope": "longrope", "factor": 4, "longrope": [0.75, [1, 1, 1, 1, 1, 1], [2, 2, 3, 3, 4, 4.5]]})");
    const ModelConfig c = parse(phi);
    EXPECT_EQ(c.rope.channels(c.D), 12u);
    EXPECT_EQ(c.growing_positions(), 64u);
    EXPECT_EQ(c.rope.rows(64), 64u);
    EXPECT_EQ(c.rope.rows(65), 130u);
    expect_refused(with(phi, R"({"partial_rotary_factor": 1})"), "short_factor must be a list of 8 numbers");
    EXPECT_EQ(parse(with(tiny(), R"({"rope_scaling": {"type": "dynamic", "factor": 4}})")).growing_positions(), 128u);
}

TEST(Config, FlagsOfRope) {
    const auto set = [](const char *more, double theta, const char *scaling) {
        ModelConfig c = parse(with(tiny(), more));
        set_rope(c, theta, scaling);
        EXPECT_EQ(meaning(parse(c.source)), meaning(c)) << "the saved configuration differs";
        return c;
    };
    for (const char *more :
         {R"({"rope_theta": 5e5})", R"({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})", "{}"}) {
        EXPECT_EQ(set(more, 1e6, "").rope.theta, 1e6);
        expect_meaning(
            set(more, 7e5, R"({"rope_type": "yarn", "factor": 4})").source,
            R"({"rope": "yarn", "theta": 7e5, "factor": 4, "original": 128, "sizes": [100, 64, 4, 4, 2, 16, 96, 512]})");
    }
    const ModelConfig dynamic =
        set(R"({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}})", 0, R"({"type": "dynamic", "factor": 3})");
    EXPECT_EQ(dynamic.rope.theta, 5e5);
    EXPECT_EQ(dynamic.max_positions, 128u);
    expect_error([&] { set("{}", 0, "yarn"); }, {"--rope_scaling", "no JSON object with a rope_type\n  fix: "});
    expect_error([&] { set("{}", 0, R"({"rope_type": "yarn", "factor": 0.5})"); }, {"--rope_scaling", "factor is 0.5"});
}

// The fields rope_scaling and rope_theta of transformers 4, and rope_parameters of transformers 5.
TEST(Config, BothSpellingsOfRope) {
    const std::pair<const char *, const char *> scalings[] = {
        {"null", R"({"rope": "default"})"},
        {R"({"type": "linear", "factor": 2})", R"({"rope": "linear", "factor": 2})"},
        {R"({"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4})",
         R"({"original": 128, "llama3": [1, 4]})"},
        {R"({"rope_type": "yarn", "factor": null, "original_max_position_embeddings": 32})",
         R"({"factor": 4, "yarn": [32, 1, 0, 0, 0, true], "original": 32})"},  // 128 / 32
        {R"({"type": "yarn", "factor": 4, "original_max_position_embeddings": 32, "truncate": false, "beta_fast": 16,
             "beta_slow": 2, "mscale": 1, "mscale_all_dim": 0.5, "attention_factor": 1.25})",
         R"({"yarn": [16, 2, 1.25, 1, 0.5, false], "original": 32})"},
        {"{}", R"({"rope": "default"})"}};
    for (const auto &[scaling, fields] : scalings) {
        const json v4 = with(tiny(), one("rope_scaling", scaling)), parameters = json::parse(scaling);
        json v5 = tiny();
        v5["rope_parameters"] = parameters.empty() ? json{{"rope_type", "default"}} : parameters;
        v5["rope_parameters"]["rope_theta"] = 5e5;
        expect_meaning(v4, fields);
        EXPECT_EQ(meaning(parse(with(v4, R"({"rope_theta": 5e5})"))), meaning(parse(v5))) << scaling;
    }
}

TEST(Config, Refusals) {
    const char *mixed =
        R"({"sliding_window": 8, "layer_types": ["full_attention", "full_attention", "full_attention", "sliding_attention"]})";
    const Reading readings[] = {
        {"gemma2", "{}",
         "model_type is \"gemma2\"; the supported types are llama, mistral, ministral, qwen2, qwen3, phi3, olmo2, granite, exaone4, seed_oss, smollm3, gemma3_text, qwen3_5_text, qwen3_moe, qwen2_moe, qwen3_5_moe_text, mixtral, gpt2; gemma2 has soft caps"},
        {"qwen3_next", R"({"norm_topk_prob": false})", "norm_topk_prob is false, but in qwen3_next only true is supported"},
        {"qwen3_next", R"({"mlp_only_layers": [0]})", "mlp_only_layers is [0]"},
        {"qwen3_next", R"({"decoder_sparse_step": 2})", "decoder_sparse_step is 2"},
        {"llama", R"({"model_type": 3})", "model_type is 3"},
        {"llama", R"({"model_type": "a\u0000b"})", "\n  fix: "},
        {"llama", R"({"model_type": null})", "model_type is missing"},
        {"llama", R"({"model_type": "gemma3"})", "text_config is missing"},
        {"llama", R"({"quantization_config": {"quant_method": "awq"}})", "quantization_config asks for quantized weights"},
        {"llama", R"({"is_encoder_decoder": true})", "is_encoder_decoder"},
        {"llama", R"({"hidden_act": "gelu"})", "hidden_act is \"gelu\""},
        {"llama", R"({"rope_scaling": {"factor": 2.0, "type": "su"}})", "rope_type is \"su"},
        {"llama", R"({"rope_parameters": {"factor": 2.0, "rope_type": "proportional"}})", "rope_type is \"proportional"},
        {"llama", R"({"rope_parameters": {"partial_rotary_factor": 0.5}})", "rope_parameters.partial_rotary_factor"},
        {"llama", R"({"rope_parameters": {"full_attention": {"rope_type": "default"}}})", "rope_parameters.full_attention"},
        {"llama", R"({"rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]}})", "rope_scaling.mrope_section"},
        {"llama", R"({"rope_scaling": "linear"})", "rope_scaling must be an object"},
        {"llama", R"({"rope_scaling": {"type": "linear"}})", "rope_scaling.factor is missing"},
        {"llama", R"({"rope_scaling": {"type": "linear", "factor": 0.5}})", "rope_scaling.factor is 0.5"},
        {"llama", R"({"rope_scaling": {"type": "llama3", "factor": 8}})", "rope_scaling.low_freq_factor is missing"},
        {"llama", R"({"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}})",
         "high_freq_factor"},
        {"llama", R"({"rope_scaling": {"type": "yarn", "factor": 8, "beta_fast": 1, "beta_slow": 2}})", "beta_fast"},
        {"llama", R"({"rope_scaling": {"type": "yarn", "factor": 8, "attention_factor": 0}})", "attention_factor"},
        {"llama", R"({"rope_theta": 0})", "rope_theta is 0"},
        {"llama", R"({"num_key_value_heads": 3})", "num_key_value_heads 3 does not divide"},
        {"llama", R"({"head_dim": 20})", "head_dim is 20"},
        {"llama", R"({"head_dim": 264})", "head_dim is 264"},
        {"llama", R"({"head_dim": null, "num_attention_heads": 6})", "hidden_size 64 is not divisible"},
        {"llama", R"({"hidden_size": 2000000000, "intermediate_size": 2000000000, "vocab_size": 2000000000})",
         "parameters; is there a typing error?"},
        {"llama", R"({"num_hidden_layers": 2000000000})", "num_hidden_layers is 2000000000"},
        {"llama", R"({"rms_norm_eps": 0})", "rms_norm_eps is 0"},
        {"llama", R"({"initializer_range": -1})", "initializer_range is -1"},
        {"llama", R"({"tie_word_embeddings": "true"})", "tie_word_embeddings"},
        {"llama", R"({"eos_token_id": 100})", "eos_token_id is 100, beyond vocab_size 100"},
        {"llama", R"({"bos_token_id": 100})", "bos_token_id is 100"},
        {"llama", mixed, "layer_types of layer 3 is sliding_attention, but no sliding_window is in use"},
        {"mistral", mixed, "layer_types of layer 0 is full_attention"},
        {"mistral", R"({"sliding_window": 0})", "sliding_window is 0"},
        {"qwen2", mixed, "layer_types of layer 3"},  // use_sliding_window is not set
        {"qwen2", R"({"layer_types": ["full_attention"]})", "layer_types must be a list of 4"},
        {"qwen2", R"({"layer_types": ["full_attention", "linear_attention", 3, 4]})", "layer_types of layer 1"},
        {"phi3", R"({"partial_rotary_factor": 0.05})",
         "config.json: partial_rotary_factor is 0.05, but must give an even number"},
        {"smollm3", R"({"no_rope_layers": [0, 1]})", "no_rope_layers must be a list of 4"},
        {"gemma3_text", R"({"hidden_activation": "silu"})",
         "hidden_activation is \"silu\"; the supported activation is gelu_pytorch_tanh"},
        {"gemma3_text", R"({"use_bidirectional_attention": true})", "attention to later tokens"},
        {"gemma3_text", R"({"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}})",
         "sliding_attention has a rope_type"},
        {"qwen3_5_text", R"({"linear_num_key_heads": 3, "linear_num_value_heads": 4})",
         "linear_num_key_heads is 3, which does not divide linear_num_value_heads 4"},
        {"qwen3_5_text", R"({"linear_key_head_dim": 12})", "linear_key_head_dim is 12, but must be a multiple of 8 up to 128"},
        {"qwen3_5_text", R"({"linear_value_head_dim": 256})", "linear_value_head_dim is 256"},
        {"qwen3_5_text", R"({"linear_conv_kernel_dim": 3})", "linear_conv_kernel_dim is 3, but only 4"},
        {"qwen3_5_text", R"({"attn_output_gate": false})", "attn_output_gate is false"},
        {"qwen3_5_text", R"({"attention_bias": true})", "attention_bias is true"},
        {"qwen3_5_text", R"({"partial_rotary_factor": 0.1})", "partial_rotary_factor is 0.1, but must give"},
        {"qwen3_5_text", R"({"layer_types": ["linear_attention"]})", "layer_types must be a list of 4"},
        {"qwen3_5_text", mixed, "layer_types of layer 3 is \"sliding_attention\", neither linear_attention nor full_attention"},
        {"qwen3_moe", R"({"num_experts": 4, "num_experts_per_tok": 5})", "num_experts_per_tok is 5, but there are 4 experts"},
        {"qwen3_moe", R"({"num_experts": 2000})", "num_experts is 2000, but must be at most 1024"},
        {"qwen3_moe", R"({"mlp_only_layers": 3})", "mlp_only_layers must be a list"},
        {"qwen2_moe", R"({"use_sliding_window": true})", "use_sliding_window"},
        {"mixtral", R"({"output_router_logits": true, "router_aux_loss_coef": -0.1})", "router_aux_loss_coef is -0.1"},
        {"mixtral", R"({"router_jitter_noise": 0.1})", "router_jitter_noise asks for noise"},
        {"gpt2", R"({"activation_function": "relu"})",
         "activation_function is \"relu\"; the supported activations are gelu, gelu_new, gelu_pytorch_tanh, gelu_fast"},
        {"gpt2", R"({"scale_attn_weights": false})", "scale_attn_weights is false, but only scaled attention"},
        {"gpt2", R"({"scale_attn_by_inverse_layer_idx": true})",
         "scale_attn_by_inverse_layer_idx asks for another attention scale"},
        {"gpt2", R"({"n_head": 6})", "n_embd 64 is not divisible by n_head 6"},
        {"gpt2", R"({"n_head": 16})", "n_embd / n_head is 4 (n_embd 64, n_head 16), but must be a multiple of 8"},
        {"gpt2", R"({"n_layer": 5000})", "n_layer is 5000"},
        {"gpt2", R"({"layer_norm_epsilon": 0})", "layer_norm_epsilon is 0"},
        {"gpt2", R"({"hidden_size": 32})", "hidden_size is another name of n_embd, which is 64\n  fix: use n_embd alone"},
        {"gpt2", R"({"num_hidden_layers": 4})", "num_hidden_layers is another name of n_layer"},
        {"gpt2", R"({"num_attention_heads": 8})", "num_attention_heads is another name of n_head"},
        {"gpt2", R"({"max_position_embeddings": 64})", "max_position_embeddings is another name of n_positions"},
    };
    for (const auto &[family, more, words] : readings) expect_refused(with(tiny(family), more), words);
    for (const char *field :
         {"num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size", "attn_logit_softcapping",
          "final_logit_softcapping", "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling",
          "partial_rotary_factor", "query_pre_attn_scalar", "clip_qkv", "attention_chunk_size", "add_cross_attention"})
        expect_refused(with(tiny(), one(field, "8")), field);
    for (const char *value :
         {"0", "-1", "1.5", "\"64\"", "[64]", "true", "1e30", "18446744073709551615", "99999999999999999999999"}) {
        for (const char *field : {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                                  "head_dim", "intermediate_size", "max_position_embeddings"})
            expect_refused(with(tiny(), one(field, value)), field);
        for (const char *field : {"vocab_size", "n_embd", "n_layer", "n_head", "n_inner", "n_positions"})
            expect_refused(with(tiny("gpt2"), one(field, value)), field);
    }
    for (const char *field : {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"})
        expect_refused(with(tiny(), one(field, "null")), std::string(field) + " is missing");
    expect_refused(json::array(), "must be an object");
}

TEST(Config, RewardModels) {
    const std::string classifier = R"({"architectures": ["LlamaForSequenceClassification"], )";
    for (const char *labels :
         {R"("num_labels": 1})", R"("id2label": {"0": "LABEL_0"}})", R"("id2label": {"0": "x"}, "num_labels": 2})"})
        expect_meaning(with(tiny(), classifier + labels), R"({"reward": true})");
    for (const char *other :
         {R"({"architectures": ["LlamaForCausalLM"], "num_labels": 1})", R"({"architectures": ["LlamaModel"]})",
          R"({"architectures": []})", R"({"architectures": null})", R"({"architectures": [1]})", "{}"})
        expect_meaning(with(tiny(), other), R"({"reward": false})");
    for (const char *labels :
         {R"("id2label": null})", R"("num_labels": 3})", R"("num_labels": 1, "id2label": {"0": "a", "1": "b"}})"})
        expect_refused(with(tiny(), classifier + labels), "labels, but a reward model has one");
}

TEST(Config, RewardModelKeepsTheBackbone) {
    const char *const tied = R"({"tie_word_embeddings": true})";
    for (const json &source : {with(tiny("qwen3"), tied), tiny("qwen3"), tiny("gpt2")}) {
        const ModelConfig language = parse(source);
        ModelConfig reward = language;
        make_reward(reward);
        EXPECT_TRUE(reward.reward && !reward.tied);
        EXPECT_EQ(parameter_count(reward), parameter_count(language) - (language.tied ? 0 : 100 * 64) + 64);
        for (const json &saved : {reward.source, with(reward.source, tied)}) EXPECT_EQ(meaning(parse(saved)), meaning(reward));
        reward.reward = false, reward.tied = language.tied;
        EXPECT_EQ(meaning(reward), meaning(language));
    }
}

TEST(Config, NotesOnIgnoredFields) {
    parse(with(tiny("gpt2"), R"({"attn_pdrop": 0.1, "resid_pdrop": 0.0, "embd_pdrop": 0.3, "summary_first_dropout": 0.4})"));
    EXPECT_EQ(notes.size(), 2u);
    EXPECT_EQ(notes[0], "config.json: attn_pdrop 0.1 is left out: training runs without dropout");
}

TEST(Presets, HaveThePublishedNumberOfParameters) {
    using Counts = std::map<std::string, size_t>;
    const Counts published = {{"llama2-7b", 6738415616},
                              {"llama2-13b", 13015864320},
                              {"llama3-8b", 8030261248},
                              {"llama3.1-8b", 8030261248},
                              {"llama3.1-70b", 70553706496},
                              {"llama3.2-1b", 1235814400},
                              {"llama3.2-3b", 3212749824},
                              {"tinyllama-1.1b", 1100048384},
                              {"mistral-7b-v0.1", 7241732096},
                              {"mistral-7b-v0.3", 7248023552},
                              {"qwen2.5-0.5b", 494032768},
                              {"qwen2.5-1.5b", 1543714304},
                              {"qwen2.5-3b", 3085938688},
                              {"qwen2.5-7b", 7615616512},
                              {"qwen2.5-14b", 14770033664},
                              {"qwen3-0.6b", 596049920},
                              {"qwen3-1.7b", 1720574976},
                              {"qwen3-4b", 4022468096},
                              {"qwen3-8b", 8190735360},
                              {"smollm2-135m", 134515008},
                              {"smollm2-360m", 361821120},
                              {"smollm2-1.7b", 1711376384},
                              {"qwen3-30b-a3b", 30532122624},
                              {"qwen3-235b-a22b", 235093634560},
                              {"qwen1.5-moe-a2.7b", 14315784192},
                              {"qwen3.5-0.8b", 752393024},  // of the text part
                              {"qwen3.5-4b", 4205751296},
                              {"qwen3.5-9b", 8953803264},
                              {"qwen3.5-27b", 26895998464},
                              {"qwen3.5-35b-a3b", 34660610688},
                              {"mixtral-8x7b", 46702792704},
                              {"phi3-mini-4k", 3821079552},
                              {"olmo2-1b", 1484916736},
                              {"olmo2-7b", 7298617344},
                              {"gemma3-270m", 268098176},
                              {"gemma3-1b", 999885952},
                              {"gemma3-4b", 3880263168},
                              {"gemma3-12b", 11766034176},
                              {"gemma3-27b", 27009346304},
                              {"d12", 124439808},
                              {"d24", 354823168},
                              {"d36", 774030080},
                              {"d48", 1557611200}};
    EXPECT_EQ(preset_names().size(), published.size());
    for (const auto &[name, count] : published) EXPECT_EQ(parameter_count(preset(name)), count) << name;
    EXPECT_EQ(active_parameter_count(preset("qwen3-30b-a3b")), 3353032704u);
    EXPECT_EQ(active_parameter_count(preset("qwen3-8b")), parameter_count(preset("qwen3-8b")));
    EXPECT_EQ(preset("mistral-7b-v0.1").window[31], 4096u);
    EXPECT_EQ(preset("mistral-7b-v0.3").window[31], 0u);
    EXPECT_EQ(preset("llama3.2-1b").rope.factor, 32);
    expect_error([] { preset("llama9"); }, {"\"llama9\"", "smollm2-1.7b"});
}

struct Hf : TemporaryDirectory {
    const std::string single = dir + "/model.safetensors", index = dir + "/model.safetensors.index.json";

    void write(const std::vector<std::pair<TensorSpec, std::vector<float>>> &tensors, size_t shard_bytes = SIZE_MAX) const {
        std::vector<TensorSpec> specs;
        for (const auto &[spec, values] : tensors) specs.push_back(spec);
        HfWriter writer(dir, specs, model_files, shard_bytes);
        for (const auto &[spec, values] : tensors)  // the first element by itself
            in_parts(
                values.size(), [&](size_t first, size_t n) { writer.write(spec.name, values.data() + first, n, memory); },
                std::max<size_t>(1, values.size() - 1));
        writer.finish();
    }
    void write_abc(size_t shard_bytes) const {
        write({{{"a", {2, 2}, "F32"}, {1, 2, 3, 4}}, {{"b", {2}, "BF16"}, {5, 6}}, {{"c", {1}, "F32"}, {7}}}, shard_bytes);
    }
};

TEST_F(Hf, ReadsGenerationConfig) {
    expect_error([&] { read_config(dir + "/none", notes); }, {dir + "/none", "is not a directory"});
    expect_error([&] { read_config(dir, notes); }, {dir + "/config.json", "No such file"});
    put("config.json", with(tiny(), R"({"eos_token_id": 1, "bos_token_id": 4})").dump());
    EXPECT_EQ(read_config(dir, notes).eos, std::vector<int32_t>({1}));
    put("generation_config.json", R"({"eos_token_id": [2, 3]})");
    const ModelConfig config = read_config(dir, notes);
    EXPECT_EQ(config.eos, std::vector<int32_t>({2, 3}));
    EXPECT_EQ(config.bos, 4);
    put("generation_config.json", R"({"eos_token_id": 1000})");
    expect_error([&] { read_config(dir, notes); }, {dir + "/generation_config.json", "eos_token_id is 1000"});
    put("config.json", "{\n\"hidden_size\": 64,\n}");
    expect_error([&] { read_config(dir, notes); }, {dir + "/config.json", "line 3"});
}

TEST_F(Hf, WrittenConfigEqualsTheOneRead) {
    const auto written = [&](const json &source, const char *dtype) {
        write_config(dir, parse(source), dtype);
        EXPECT_EQ(meaning(read_config(dir, notes)), meaning(parse(source)));
        return read_json(dir + "/config.json");
    };
    const json v4 =
        with(tiny(), R"({"torch_dtype": "float16", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-05, "new": [1]})");
    EXPECT_EQ(written(v4, "BF16"), with(v4, R"({"torch_dtype": "bfloat16"})"));
    const json v5 =
        with(tiny(),
             R"({"dtype": "bfloat16", "architectures": ["X"], "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}})");
    EXPECT_EQ(written(v5, "F32"), with(v5, R"({"dtype": "float32"})"));
    EXPECT_EQ(written(tiny("qwen2"), "F32"),
              with(tiny("qwen2"), R"({"torch_dtype": "float32", "architectures": ["Qwen2ForCausalLM"]})"));
    EXPECT_EQ(written(tiny("gpt2"), "F32")["architectures"][0], "GPT2LMHeadModel");
}

// As transformers writes it, but without a pad_token_id that also ends texts. Fields that a trainer adds to the source are written.
TEST_F(Hf, WrittenRewardConfigIsForTransformers) {
    const char *labels = R"({"torch_dtype": "float32", "architectures": ["Qwen2ForSequenceClassification"], "mean": 0.5,
                             "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "tie_word_embeddings": false})";
    const auto written = [&](const char *family, const char *more) {
        ModelConfig config = parse(with(tiny(family), more));
        make_reward(config);
        config.source["mean"] = 0.5;
        write_config(dir, config, "F32");
        return read_json(dir + "/config.json");
    };
    EXPECT_EQ(written("qwen2", R"({"num_labels": 2, "tie_word_embeddings": true})"), with(tiny("qwen2"), labels));
    EXPECT_EQ(written("mistral", "{}")["architectures"][0], "MistralForSequenceClassification");
    EXPECT_EQ(written("gemma3_text", "{}")["architectures"][0], "Gemma3TextForSequenceClassification");
    EXPECT_EQ(written("llama", R"({"eos_token_id": 7, "pad_token_id": 7})")["pad_token_id"], nullptr);
    EXPECT_EQ(written("llama", R"({"eos_token_id": [7, 8], "pad_token_id": 8})")["pad_token_id"], nullptr);
    EXPECT_EQ(written("llama", R"({"eos_token_id": [7, 8], "pad_token_id": 0})")["pad_token_id"], 0);
    EXPECT_FALSE(written("llama", R"({"eos_token_id": [7, 8]})").contains("pad_token_id"));
    write_config(dir, parse(with(tiny(), R"({"eos_token_id": 7, "pad_token_id": 7})")), "F32");
    EXPECT_EQ(read_json(dir + "/config.json")["pad_token_id"], 7) << "language model";
}

TEST_F(Hf, OneFileOrShards) {
    for (const size_t shard_bytes : {1000, 20, 1}) {
        fs::remove_all(dir), fs::create_directory(dir);
        write_abc(shard_bytes);
        EXPECT_EQ(fs::exists(single), shard_bytes == 1000);
        EXPECT_EQ(fs::exists(index), shard_bytes != 1000);
        const HfWeights weights(dir);
        float a[4];
        bf16 b[2], c[1];
        weights.read("a", {2, 2}, a, memory), weights.read("b", {2}, b, memory), weights.read("c", {1}, c, memory);
        EXPECT_EQ(a[3], 4);
        EXPECT_EQ(float(b[1]), 6);
        EXPECT_EQ(float(c[0]), 7);
        float part[2];
        weights.read_part("a", {2, 2}, 1, 2, part, memory);  // across rows
        EXPECT_EQ(part[0], 2);
        EXPECT_EQ(part[1], 3);
        EXPECT_EQ(weights.find("b")->dtype, "BF16");
        EXPECT_EQ(weights.find("d"), nullptr);
        weights.expect_only({"a", "b", "c", "d"});
        const std::string file = shard_bytes == 1000 ? single : index;
        expect_error([&] { weights.read("d", {1}, a, memory); }, {file, "no tensor \"d\""});
        expect_error([&] { weights.read("a", {4}, a, memory); }, {dir, "\"a\" has shape (2, 2), but (4) is needed"});
        expect_error([&] { weights.read_part("a", {2, 2}, 3, 2, part, memory); }, {dir, "\"a\" has 4 elements, not 2 from 3 on"});
        expect_error([&] { weights.expect_only({"a", "b"}); }, {dir, "tensor \"c\" (1) is not part of the model"});
    }
    EXPECT_EQ(read_json(index)["metadata"]["total_size"], 24);
    EXPECT_EQ(read_json(index)["weight_map"]["b"], "model-00002-of-00003.safetensors");
    EXPECT_EQ(std::distance(fs::directory_iterator(dir), {}), 4);
}

TEST_F(Hf, BrokenDirectories) {
    const auto refused = [&](const std::string &where, const char *words) {
        expect_error([&] { HfWeights weights(dir); }, {where, words});
    };
    EXPECT_FALSE(HfWeights::present(dir));
    refused(dir, "neither model.safetensors nor");
    put("pytorch_model.bin", "");
    refused(dir, "pytorch_model.bin");
    put("model.safetensors.index.json", "{}");
    refused(index, "weight_map is missing");
    put("model.safetensors.index.json", R"({"weight_map": {"a": 3}})");
    refused(index, "weight_map \"a\" is not the name of a file");
    put("model.safetensors.index.json", R"({"weight_map": {"a": "../x.safetensors"}})");
    refused(index, "weight_map \"a\" is not the name of a file");
    put("model.safetensors.index.json", R"({"weight_map": {"a": "x.safetensors"}})");
    refused(index, "x.safetensors is missing");
    write_abc(20);
    json broken = read_json(index);
    broken["weight_map"]["c"] = "model-00001-of-00002.safetensors";
    write_json(index, broken);
    refused(index, "model-00001-of-00002.safetensors: has no tensor \"c\"");
    HfWriter writer(dir, {{"a", {1}, "F32"}, {"b", {1}, "F32"}}, model_files, 4);
    const float x = 1;
    writer.write("a", &x, 1, memory);
    expect_error([&] { writer.finish(); }, {dir, "model-00002-of-00002.safetensors was not written"});
}

TEST_F(Hf, BuffersAreNoWeights) {
    for (const char *buffer : {"model.layers.0.self_attn.rotary_emb.inv_freq", "h.11.attn.bias", "h.11.attn.masked_bias",
                               "transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"}) {
        write({{{buffer, {1}, "F32"}, {1}}});
        HfWeights(dir).expect_only({});
    }
    for (const std::string weight : {"h.0.attn.c_attn.bias", "bias"}) {
        write({{{weight, {1}, "F32"}, {1}}});
        expect_error([&] { HfWeights(dir).expect_only({}); }, {dir, "\"" + weight + "\" (1) is not part of the model"});
    }
    const auto check = [&](const std::string &name, const Shape &shape, const std::vector<float> &values) {
        write({{{name, shape, "F32"}, values}});
        HfWeights(dir).expect_buffers({{1, 0.5f}, {1, 0.25f}});
    };
    check("model.rotary_emb.inv_freq", {2}, {1, 0.5f}), check("model.rotary_emb.inv_freq", {2}, {1.002f, 0.25f});
    check("h.0.attn.bias", {1, 1, 2, 2}, {1, 0, 1, 1}), check("h.0.attn.masked_bias", {}, {-1e4f});
    for (const auto &values : {std::vector<float>{1, 0.3f}, {1, 0.5f, 0.2f}})
        expect_error([&] { check("model.rotary_emb.inv_freq", {values.size()}, values); },
                     {dir, "has other frequencies than config.json"});
    for (const auto &values : {std::vector<float>{1, 1, 1, 1}, {1, 0, 0, 1}})
        expect_error([&] { check("h.0.attn.bias", {1, 1, 2, 2}, values); }, {dir, "is not the causal mask"});
    expect_error([&] { check("h.0.attn.bias", {4}, {1, 0, 1, 1}); }, {dir, "is not the causal mask"});
}

TEST_F(Hf, Gpt2WithAndWithoutPrefix) {
    for (const std::string prefix : {"", "transformer."}) {
        SCOPED_TRACE("prefix: " + prefix);
        write({{{prefix + "wte.weight", {2, 1}, "F32"}, {1, 2}}, {{"lm_head.weight", {1}, "F32"}, {3}}});
        const HfWeights weights(dir);
        float got[2];
        weights.read("transformer.wte.weight", {2, 1}, got, memory);
        EXPECT_EQ(got[1], 2);
        EXPECT_EQ(weights.find("transformer.wte.weight")->shape, Shape({2, 1}));
        weights.expect_only({"transformer.wte.weight", "lm_head.weight"});
        expect_error([&] { weights.read("transformer.wte.weight", {2}, got, memory); },
                     {dir, "\"" + prefix + "wte.weight\" has shape (2, 1), but (2) is needed"});
        const std::string wpe = "transformer.wpe.weight";
        expect_error([&] { weights.read(wpe, {2, 1}, got, memory); }, {dir, "no tensor \"transformer.wpe.weight\""});
        expect_error([&] { weights.expect_only({wpe, "lm_head.weight"}); }, {dir, "wte.weight\" (2, 1) is not"});
        EXPECT_EQ(weights.find("model.wte.weight"), nullptr);
    }
}

// Tensors that are rows of one tensor in the files. Each value is the number of its row.
TEST_F(Hf, RowsOfLargerTensors) {
    const auto store = [&](const std::string &name, const Shape &shape) {
        std::vector<float> values(elements(shape));
        for (size_t i = 0; i < values.size(); i++) values[i] = float(i / shape.back());
        write({{{name, shape, "F32"}, values}});
    };
    const auto read = [&](const std::string &name, const Shape &shape) {
        std::vector<float> values(elements(shape)), part(values.size() - 3);
        const HfWeights weights(dir);
        weights.read(name, shape, values.data(), memory);
        weights.read_part(name, shape, 3, part.size(), part.data(), memory);
        EXPECT_TRUE(std::equal(part.begin(), part.end(), values.begin() + 3));
        std::vector<int> rows;
        for (size_t i = 0; i < values.size(); i += shape[1]) rows.push_back(int(values[i]));
        return rows;
    };
    using Rows = std::vector<int>;
    const std::string delta = "model.layers.0.linear_attn.", experts = "model.layers.0.mlp.experts.";
    put("config.json",
        R"({"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 1, "linear_value_head_dim": 2})");
    store(delta + "in_proj_qkvz.weight", {20, 2});
    EXPECT_EQ(read(delta + "in_proj_qkv.weight", {12, 2}), (Rows{0, 10, 1, 11, 2, 3, 4, 5, 12, 13, 14, 15}));
    EXPECT_EQ(read(delta + "in_proj_z.weight", {8, 2}), (Rows{6, 7, 8, 9, 16, 17, 18, 19}));
    expect_error(
        [&] {
            read(delta + "in_proj_z.weight", {9, 2});
        },
        {"in_proj_z.weight (9, 2) is not among the rows of", "(20, 2)"});
    store(delta + "in_proj_ba.weight", {8, 2});
    EXPECT_EQ(read(delta + "in_proj_b.weight", {4, 2}), (Rows{0, 1, 4, 5}));
    EXPECT_EQ(read(delta + "in_proj_a.weight", {4, 2}), (Rows{2, 3, 6, 7}));
    store(experts + "gate_up_proj", {3, 4, 5});
    EXPECT_EQ(read(experts + "2.gate_proj.weight", {2, 5}), (Rows{8, 9}));
    EXPECT_EQ(read(experts + "1.up_proj.weight", {2, 5}), (Rows{6, 7}));
    expect_error([&] { read(experts + "3.up_proj.weight", {2, 5}); }, {"3.up_proj.weight (2, 5) is not among the rows of"});
    const auto known = [&](size_t number) {
        std::vector<std::string> names;
        for (size_t e = 0; e < number; e++)
            for (const char *half : {".gate_proj.weight", ".up_proj.weight"}) names.push_back(experts + std::to_string(e) + half);
        return names;
    };
    HfWeights(dir).expect_only(known(3));
    expect_error([&] { HfWeights(dir).expect_only(known(2)); }, {"gate_up_proj\" (3, 4, 5) is not part of the model"});
    store("model.language_model.layers.0.mlp.experts.down_proj", {3, 4, 5});
    EXPECT_EQ(read(experts + "1.down_proj.weight", {4, 5}), (Rows{4, 5, 6, 7}));
}

// ---- end of answers and chat template in a saved model

TEST_F(Hf, GenerationConfigBeginsWithTheNewEnd) {
    const auto written = [&](const char *config, const char *generation, const std::vector<int32_t> &ends) {
        put("config.json", with(tiny(), config).dump());
        fs::remove(dir + "/generation_config.json");
        if (*generation) put("generation_config.json", generation);
        ModelConfig read = read_config(dir, notes);
        add_eos(read, ends);
        fs::create_directory(dir + "/out");
        fs::remove(dir + "/out/generation_config.json");
        write_generation_config(dir + "/out", read);
        return fs::exists(dir + "/out/generation_config.json") ? read_json(dir + "/out/generation_config.json") : json();
    };
    EXPECT_EQ(written("{}", "", {}), json());
    EXPECT_EQ(written("{}", "", {5}), json::parse(R"({"eos_token_id": 5})"));
    EXPECT_EQ(written(R"({"eos_token_id": 7, "bos_token_id": null, "pad_token_id": 7})", "", {5, 7}),
              json::parse(R"({"eos_token_id": [5, 7], "pad_token_id": 7})"));
    EXPECT_EQ(written(R"({"eos_token_id": 7, "pad_token_id": 7})", R"({"eos_token_id": [8, 7], "top_k": 3})", {5, 7}),
              json::parse(R"({"eos_token_id": [5, 8, 7], "top_k": 3})"));
    EXPECT_EQ(written(R"({"eos_token_id": 7})", R"({"top_k": 3})", {5}), json::parse(R"({"eos_token_id": [5, 7], "top_k": 3})"));
}

TEST_F(Hf, TrainedTemplateReplacesOthers) {
    const auto copied = [&](const char *file, const char *field, const std::string &trained) {
        const std::string to = dir + "/out";
        for (const char *name : {"out", "chat_template.jinja"}) fs::remove_all(dir + "/" + name);
        fs::create_directories(to), fs::create_directories(dir + "/additional_chat_templates");
        put("tokenizer.json", "{}"), put("additional_chat_templates/rag.jinja", "rag");
        put("tokenizer_config.json", field), put("optimizer.bin", "not of a tokenizer");
        if (*file) put("chat_template.jinja", file);
        copy_tokenizer(dir, dir), copy_tokenizer(dir, to, trained);
        EXPECT_TRUE(fs::exists(to + "/tokenizer.json") && !fs::exists(to + "/optimizer.bin"));
        std::ifstream in(to + "/chat_template.jinja");
        const std::string text{std::istreambuf_iterator<char>(in), {}};
        return json{text, read_json(to + "/tokenizer_config.json").value("chat_template", json()),
                    fs::exists(to + "/additional_chat_templates/rag.jinja")};
    };
    const char *named = R"({"chat_template": [{"name": "rag", "template": "b"}, {"name": "default", "template": "a"}]})";
    EXPECT_EQ(copied("a", "{}", "a"), json({"a", nullptr, true}));
    EXPECT_EQ(copied("a", "{}", ""), json({"a", nullptr, true}));
    EXPECT_EQ(copied("", R"({"chat_template": "a"})", "a"), json({"", "a", true}));
    EXPECT_EQ(copied("", named, "a"), json({"", json::parse(named)["chat_template"], true}));
    EXPECT_EQ(copied("a", R"({"chat_template": "b"})", "a"), json({"a", "a", false})) << "the two differ";
    EXPECT_EQ(copied("a", "{}", "c"), json({"c", "c", false}));
    EXPECT_EQ(copied("", named, "c"), json({"c", "c", false}));
    EXPECT_EQ(copied("", "{}", "c"), json({"c", "c", false}));
}
