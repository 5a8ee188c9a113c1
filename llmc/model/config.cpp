#include "config.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <tuple>

#include "../core/common.h"
#include "../core/json.h"
#include "../ops/causal_conv.h"
#include "../ops/dequantise.h"
#include "../ops/gated_delta.h"
#include "../ops/router.h"

using nlohmann::json;
namespace fs = std::filesystem;

static const std::string reward_class = "ForSequenceClassification";  // transformers' class with one label

// The names in config.json of the sizes that check_sizes examines.
struct Names {
    const char *C, *L, *H, *D, *eps;
};
static const Names llama_names = {"hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "rms_norm_eps"},
                   gpt2_names = {"n_embd", "n_layer", "n_head", "n_embd / n_head", "layer_norm_epsilon"};

// The defaults of transformers' configuration class, for missing fields. GPT-2's defaults are in read_gpt2.
struct Family {
    const char *name, *architecture;
    size_t kv_heads, head_dim;  // 0: equal to the number of heads; hidden_size / heads
    size_t positions;
    double eps, theta = 10000;
    bool tied = false, biased = false;  // tie_word_embeddings, attention_bias
    bool has_reward_class = true;       // transformers has a class for its reward models
};
// clang-format off
static const Family families[] = {
    {"llama", "Llama", 0, 0, 2048, 1e-6},
    {"mistral", "Mistral", 8, 0, 131072, 1e-6},
    {"ministral", "Ministral", 8, 0, 131072, 1e-6},
    {"qwen2", "Qwen2", 32, 0, 32768, 1e-6},
    {"qwen3", "Qwen3", 32, 128, 32768, 1e-6},
    {"phi3", "Phi3", 0, 0, 4096, 1e-5},
    {"olmo2", "Olmo2", 0, 0, 2048, 1e-5},
    {"granite", "Granite", 0, 0, 2048, 1e-6, 10000, false, false, false},
    {"exaone4", "Exaone4", 32, 0, 2048, 1e-5},
    {"seed_oss", "SeedOss", 8, 128, 524288, 1e-6, 10000, false, true},
    {"smollm3", "SmolLM3", 4, 0, 32768, 1e-6, 2e6, true},
    {"gemma3_text", "Gemma3", 4, 256, 131072, 1e-6, 1e6, true},
    {"qwen3_5_text", "Qwen3_5", 4, 256, 32768, 1e-6},
    {"qwen3_moe", "Qwen3Moe", 4, 0, 32768, 1e-6},
    {"qwen2_moe", "Qwen2Moe", 16, 0, 32768, 1e-6},
    {"qwen3_5_moe_text", "Qwen3_5Moe", 2, 256, 32768, 1e-6, 10000, false, false, false},
    {"mixtral", "Mixtral", 8, 0, 131072, 1e-5, 1e6},
    {"gpt2", "GPT2", 0, 0, 1024, 1e-5},
};
// clang-format on

// Unsupported features of other families' models.
static const std::pair<const char *, const char *> others[] = {
    {"gemma", "soft caps of its scores or logits, or another layer than gemma3_text"},
    {"cohere", "both halves of a layer in parallel, and norms that subtract the mean"},
    {"glm", "interleaved rotation of a part of each head, and norms after each half of a layer"},
    {"exaone", "other names of its fields and tensors"},
    {"apertus", "another activation"},
    {"arcee", "another activation, without a gate"},
};

static const Family &family_of(std::string_view type, const Fields &fields) {
    std::string supported;
    for (const Family &family : families) {
        if (type == family.name) return family;
        supported += (supported.empty() ? "" : ", ") + std::string(family.name);
    }
    std::string missing;
    for (const auto &[name, what] : others)
        if (missing.empty() && type.starts_with(name)) missing = format("; %s has %s", std::string(type).c_str(), what);
    fields.refuse("model_type", "is \"" + std::string(type) + "\"; the supported types are " + supported + missing +
                                    "\n  fix: use a model of one of these families");
}

// Fields that request a computation that we support in at most one family. With the value `neutral` a field has no effect.
struct Unsupported {
    const char *field;
    double neutral;
    const char *what, *family = "";
};
static const Unsupported unsupported[] = {
    {"quantization_config", 0, "quantized weights"},
    {"compression_config", 0, "quantized weights"},
    {"router_jitter_noise", 0, "noise in the router's input"},
    {"attn_logit_softcapping", 0, "softcapping"},
    {"final_logit_softcapping", 0, "softcapping"},
    {"logits_soft_cap", 0, "softcapping"},
    {"clip_qkv", 0, "clipped projections"},
    {"embedding_multiplier", 1, "multipliers", "granite"},
    {"residual_multiplier", 1, "multipliers", "granite"},
    {"attention_multiplier", 1, "multipliers", "granite"},
    {"lm_head_multiplier", 1, "multipliers"},
    {"logits_scaling", 1, "multipliers", "granite"},
    {"logit_scale", 1, "multipliers"},
    {"query_pre_attn_scalar", 0, "another attention scale", "gemma3_text"},
    {"use_bidirectional_attention", 0, "attention to later tokens"},
    {"scale_attn_by_inverse_layer_idx", 0, "another attention scale"},
    {"no_rope_layers", 0, "layers without rotation", "smollm3"},
    {"no_rope_layer_interval", 0, "layers without rotation", "smollm3"},
    {"rope_interleaved", 0, "interleaved rotation"},
    {"use_mrope", 0, "multimodal rotation"},
    {"alibi", 0, "ALiBi"},
    {"attention_chunk_size", 0, "chunked attention"},
    {"per_layer_config", 0, "sizes that differ between layers"},
    {"is_encoder_decoder", 0, "encoders"},
    {"add_cross_attention", 0, "cross-attention"},
};

static bool is_mixture(const std::string &family) {
    return family == "qwen3_moe" || family == "qwen2_moe" || family == "mixtral" || family == "qwen3_5_moe_text";
}
static bool is_hybrid(const std::string &family) { return family == "qwen3_5_text" || family == "qwen3_5_moe_text"; }
static constexpr const char *of_mixtures[] = {"num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size",
                                              "shared_expert_intermediate_size"};

static void refuse_unsupported(const Fields &fields, const std::string &family) {
    for (const Unsupported &feature : unsupported) {
        const json *value = fields.find(feature.field);
        if (!value || family == feature.family || (value->is_number() && value->get<double>() == feature.neutral) ||
            *value == false)
            continue;
        fields.refuse(feature.field,
                      format("asks for %s, which is not supported\n  fix: use a model without this field", feature.what));
    }
    for (const char *name : of_mixtures)
        if (const json *value = fields.find(name); value && !is_mixture(family) && *value != 0)
            fields.refuse(
                name,
                "asks for a mixture of experts, which is supported only in qwen2_moe, qwen3_moe, qwen3_5_moe and mixtral\n  fix: use a model of these families, or one without experts");
}

static void note_dropouts(const Fields &fields, const std::string &where, std::vector<std::string> &notes) {
    for (const char *name : {"attention_dropout", "hidden_dropout", "resid_dropout", "residual_dropout", "attn_pdrop",
                             "resid_pdrop", "embd_pdrop", "embedding_dropout"}) {
        const double p = fields.number(name, 0);
        if (p != 0) notes.push_back(format("%s: %s %g is left out: training runs without dropout", where.c_str(), name, p));
    }
}

static void read_llama3(RopeConfig &rope, const Fields &dict) {
    rope.low_freq_factor = dict.number("low_freq_factor");
    rope.high_freq_factor = dict.number("high_freq_factor");
    if (!(0 < rope.low_freq_factor && rope.low_freq_factor < rope.high_freq_factor))
        dict.refuse("high_freq_factor", "must be greater than low_freq_factor, and that greater than 0");
}

static void read_yarn(RopeConfig &rope, const Fields &dict) {
    rope.beta_fast = dict.number("beta_fast", rope.beta_fast);
    rope.beta_slow = dict.number("beta_slow", rope.beta_slow);
    rope.attention_factor = dict.number("attention_factor", 0);
    rope.mscale = dict.number("mscale", 0);
    rope.mscale_all_dim = dict.number("mscale_all_dim", 0);
    rope.truncate = dict.boolean("truncate", true);
    if (!(0 < rope.beta_slow && rope.beta_slow <= rope.beta_fast))
        dict.refuse("beta_fast", "must be no less than beta_slow, and that greater than 0");
    if (dict.has("attention_factor") && !(rope.attention_factor > 0)) dict.refuse("attention_factor", "must be greater than 0");
    if (rope.mscale < 0 || rope.mscale_all_dim < 0) dict.refuse("mscale", "and mscale_all_dim must not be negative");
}

static void read_longrope(RopeConfig &rope, const Fields &dict, size_t pairs) {
    for (const auto &[name, factors] : {std::pair("short_factor", &rope.short_factor), {"long_factor", &rope.long_factor}}) {
        const json *list = dict.find(name);
        if (!list || !list->is_array() || list->size() != pairs)
            dict.refuse(name, format("must be a list of %zu numbers, one for each pair of channels that is rotated", pairs));
        for (const json &value : *list) {
            if (!value.is_number() || !(value.get<double>() > 0)) dict.refuse(name, "must have numbers greater than 0");
            factors->push_back(value);
        }
    }
    rope.attention_factor = dict.number("attention_factor", 0);
    if (dict.has("attention_factor") && !(rope.attention_factor > 0)) dict.refuse("attention_factor", "must be greater than 0");
}

// Files of transformers 4 have rope_theta and rope_scaling (with `rope_type` or the older `type`); files of version 5 have both in
// rope_parameters. If both are given, rope_scaling wins, and so does original_max_position_embeddings of the top level, as in transformers.
static RopeConfig read_rope(const Fields &fields, const Family &family, size_t max_positions, size_t D) {
    const bool phi3 = family.name == std::string("phi3"), qwen35 = is_hybrid(family.name);
    RopeConfig rope;
    rope.theta = fields.number("rope_theta", family.theta);
    const json *scaling = fields.find("rope_scaling"), nothing = json::object();
    const std::string name = scaling && !scaling->empty() ? "rope_scaling" : "rope_parameters";
    const Fields dict = fields.has(name) ? fields.object(name) : Fields(nothing, "");
    for (const char *key : {"full_attention", "sliding_attention", "mrope_section"})
        if (dict.has(key) && !qwen35)  // whose axes are those of images: a text has the same position on all of them
            dict.refuse(
                key,
                "makes rotation differ between layers or axes, which is not supported\n  fix: use a model with one rotation for all");
    const Fields &partial = dict.has("partial_rotary_factor") ? dict : fields;
    rope.rotated = partial.number("partial_rotary_factor", qwen35 ? 0.25 : 1);
    if (rope.rotated != 1 && !phi3 && !qwen35)
        partial.refuse("partial_rotary_factor", "is not 1, which is supported only in phi3 and qwen3_5");
    if (qwen35 && rope.channels(D) % 8 != 0)
        partial.refuse("partial_rotary_factor",
                       format("is %g, but must give a multiple of 8 of a head's %zu channels", rope.rotated, D));
    if (!(rope.rotated > 0 && rope.rotated <= 1) || rope.channels(D) == 0 || rope.channels(D) % 2 != 0)
        partial.refuse("partial_rotary_factor",
                       format("is %g, but must give an even number of a head's %zu channels", rope.rotated, D));

    rope.type = dict.text("rope_type", dict.text("type", "default"));
    if (phi3 && (rope.type == "su" || rope.type == "yarn")) rope.type = "longrope";  // its older names
    rope.theta = dict.number("rope_theta", rope.theta);
    if (!(rope.theta > 1)) fields.refuse("rope_theta", format("is %g, but must be greater than 1", rope.theta));
    if (rope.type == "default") return rope;
    if (rope.type == "linear") {
        rope.factor = dict.number("factor");
    } else if (rope.type == "dynamic") {
        rope.factor = dict.number("factor"), rope.original_max_position = max_positions;
    } else if (rope.type == "longrope") {
        rope.original_max_position =
            fields.count("original_max_position_embeddings",
                         dict.count("original_max_position_embeddings", phi3 ? size_t(4096) : max_positions));
        read_longrope(rope, dict, rope.channels(D) / 2);
        rope.factor = dict.number("factor", double(max_positions) / double(rope.original_max_position));
        return rope;
    } else if (rope.type == "llama3" || rope.type == "yarn") {
        rope.original_max_position =
            fields.count("original_max_position_embeddings", dict.count("original_max_position_embeddings", max_positions));
        const double implied = double(max_positions) / double(rope.original_max_position);
        rope.factor = rope.type == "yarn" ? dict.number("factor", implied) : dict.number("factor");
        if (rope.type == "yarn") read_yarn(rope, dict);
        else read_llama3(rope, dict);
    } else {
        dict.refuse("rope_type",
                    "is \"" + rope.type + "\"; the supported types are default, linear, dynamic, llama3, yarn, longrope");
    }
    if (!(rope.factor >= 1)) dict.refuse("factor", format("is %g, but must be 1 or more", rope.factor));
    return rope;
}

// Returns the sliding window of each layer; it counts the query itself. In Mistral every layer has the window (by default 4096), and in Phi-3, if
// the file has one. In Qwen, if use_sliding_window is set, the layers named by layer_types have it, or without layer_types those from
// max_window_layers on. In Ministral layer_types decides, and without it every layer has the window. In SmolLM3, if use_sliding_window is set, the
// layers without rotation have it. In EXAONE-4 and Gemma 3 layer_types decides, and without it all layers except every fourth (or sixth) have it.
// Llama has none.
static std::vector<size_t> read_windows(const Fields &fields, const std::string &family, const std::vector<bool> &unrotated) {
    const size_t L = unrotated.size();
    std::vector<size_t> window(L, 0);
    const bool qwen = family == "qwen2" || family == "qwen3", ministral = family == "ministral", smollm3 = family == "smollm3",
               gemma3 = family == "gemma3_text", patterned = family == "exaone4" || gemma3;
    const bool absent = !fields.source().contains("sliding_window");  // null, in contrast, means none
    const bool used =
        qwen || smollm3 ? fields.boolean("use_sliding_window", false)
                        : family == "mistral" || ministral || patterned || ((family == "phi3" || family == "mixtral") && !absent);
    const size_t size = used && ((absent && !smollm3) || fields.has("sliding_window")) ? fields.count("sliding_window", 4096) : 0;
    const double first = qwen ? fields.number("max_window_layers", 28) : 0;
    for (size_t l = 0; l < L; l++)
        if (double(l) >= first && (!smollm3 || unrotated[l])) window[l] = size;

    const json *types = fields.find("layer_types");
    for (size_t l = 0; patterned && !types && size && l < L; l++)
        if ((l + 1) % fields.count("sliding_window_pattern", gemma3 ? 6 : 4) == 0) window[l] = 0;
    if (!types) return window;
    if (!types->is_array() || types->size() != L)
        fields.refuse("layer_types", format("must be a list of %zu, one for each layer", L));
    for (size_t l = 0; l < L; l++) {
        const bool sliding = (*types)[l] == "sliding_attention";
        if (!sliding && (*types)[l] != "full_attention")
            fields.refuse("layer_types", format("of layer %zu is %s, neither full_attention nor sliding_attention", l,
                                                (*types)[l].dump().c_str()));
        if (sliding && size == 0)
            fields.refuse("layer_types", format("of layer %zu is sliding_attention, but no sliding_window is in use", l));
        if (!qwen && !ministral && !smollm3 && !patterned && !sliding && size != 0)
            fields.refuse("layer_types",
                          format("of layer %zu is full_attention, but transformers gives each %s layer the sliding_window", l,
                                 family.c_str()));
        window[l] = sliding ? size : 0;
    }
    return window;
}

// experts: the number of experts that count. With Number = double the sum cannot overflow.
template <class Number> static Number parameters(const ModelConfig &c, size_t experts) {
    const Number V = Number(c.V), C = Number(c.C), L = Number(c.L), F = Number(c.F), D = Number(c.D);
    const Number q = Number(c.H) * D, kv = Number(c.KV) * D;
    const Number qk_norm = !c.qk_norm ? 0 : c.wide_qk_norm ? q + kv : 2 * D;
    const Number attention =
        (2 + Number(c.output_gate)) * q * C + 2 * kv * C + Number(c.qkv_bias) * (q + 2 * kv) + Number(c.o_bias) * C + qk_norm;
    const Number Hv = Number(c.delta.Hv), values = Number(c.delta.values()), row = Number(c.delta.row());
    const Number linear = (row + 2 * values + 2 * Hv) * C + Number(conv_taps) * row + 2 * Hv + Number(c.delta.Dv);
    const Number linear_layers = Number(std::ranges::count(c.delta.layers, true));
    const Number into_mlp = c.gpt2() ? 1 : 2;  // matrices
    const Number mlp = (into_mlp + 1) * C * F + Number(c.mlp_bias) * (into_mlp * F + C);
    const Number norm = c.gpt2() ? 2 * C : C, positions = c.gpt2() ? Number(c.max_positions) * C : 0;
    const Number norms = 2 * (Number(c.norm_before) + Number(c.norm_after)) * norm;  // of a layer
    const Number head = c.reward ? C : c.tied ? 0 : V * C;
    const ExpertConfig &e = c.experts;
    const Number sparse = Number(std::ranges::count(e.layers, true));  // layers
    const Number mixture =
        Number(experts) * 3 * C * Number(e.F) + Number(e.number) * C + 3 * C * Number(e.shared_F) + Number(e.shared_F > 0) * C;
    return V * C + positions + (L - linear_layers) * attention + linear_layers * linear + L * norms + (L - sparse) * mlp +
           sparse * mixture + norm + head;
}

const char *embedding_name(const ModelConfig &config) {
    return config.gpt2() ? "transformer.wte.weight" : "model.embed_tokens.weight";
}

size_t parameter_count(const ModelConfig &config) { return parameters<size_t>(config, config.experts.number); }
size_t active_parameter_count(const ModelConfig &config) { return parameters<size_t>(config, config.experts.chosen); }

static void check_sizes(const ModelConfig &c, const Fields &fields) {
    const Names &names = c.gpt2() ? gpt2_names : llama_names;
    if (c.H % c.KV != 0) fields.refuse("num_key_value_heads", format("%zu does not divide num_attention_heads %zu", c.KV, c.H));
    if (c.D % 8 != 0 || c.D > 256)
        fields.refuse(names.D,
                      format("is %zu (%s %zu, %s %zu), but must be a multiple of 8 up to 256", c.D, names.C, c.C, names.H, c.H));
    if (c.L > 4096) fields.refuse(names.L, format("is %zu, but must be at most 4096", c.L));
    if (parameters<double>(c, c.experts.number) > 1e13)
        fields.refuse(names.C, format("%zu and the other sizes make %.3g parameters; is there a typing error?", c.C,
                                      parameters<double>(c, c.experts.number)));
    if (!(c.eps > 0 && c.eps < 1)) fields.refuse(names.eps, format("is %g, but must lie between 0 and 1", c.eps));
    if (!(c.initializer_range >= 0 && c.initializer_range <= 1))
        fields.refuse("initializer_range", format("is %g, but must lie between 0 and 1", c.initializer_range));
}

// Returns true if the model is a reward model. The number of labels is the size of id2label if given, else num_labels, else two, as in
// transformers.
static bool read_reward(const Fields &fields) {
    const json *classes = fields.find("architectures");
    if (!classes || !classes->is_array() || classes->empty() || !classes->front().is_string() ||
        !classes->front().get<std::string>().ends_with(reward_class))
        return false;
    const char *name = fields.has("id2label") ? "id2label" : "num_labels";
    const size_t labels = fields.has("id2label") ? fields.object(name).source().size() : fields.count(name, 2);
    if (labels != 1)
        fields.refuse(
            name, format("gives %zu labels, but a reward model has one\n  fix: use a reward model or a language model", labels));
    return true;
}

static void read_token_ids(ModelConfig &config, const Fields &fields) {
    for (const char *name : {"eos_token_id", "bos_token_id"})
        for (const int32_t id : fields.ids(name))
            if (size_t(id) >= config.V) fields.refuse(name, format("is %d, beyond vocab_size %zu", id, config.V));
    if (const auto eos = fields.ids("eos_token_id"); !eos.empty()) config.eos = eos;
    if (const auto bos = fields.ids("bos_token_id"); !bos.empty()) config.bos = bos[0];
}

// Returns the layers without rotation: in SmolLM3 the layers with a 0 in no_rope_layers, or every fourth if this field is missing.
static std::vector<bool> read_unrotated_layers(const Fields &fields, const std::string &family, size_t L) {
    std::vector<bool> out(L, false);
    if (family != "smollm3") return out;
    const size_t interval = fields.count("no_rope_layer_interval", 4);
    const json *list = fields.find("no_rope_layers");
    if (list && (!list->is_array() || list->size() < L))
        fields.refuse("no_rope_layers", format("must be a list of %zu, one for each layer", L));
    for (size_t l = 0; l < L; l++) {
        if (list && !(*list)[l].is_number() && !(*list)[l].is_boolean())
            fields.refuse("no_rope_layers", "must have the numbers 0 and 1");
        out[l] = list ? (*list)[l] == 0 || (*list)[l] == false : (l + 1) % interval == 0;
    }
    return out;
}

size_t ModelConfig::growing_positions() const {
    if (gpt2()) return max_positions;
    return rope.type == "longrope" || rope.type == "dynamic" ? rope.original_max_position : SIZE_MAX;
}

// In mixtral and qwen3_5_moe every layer has experts, and the weights of the chosen experts are divided by their sum. Those of mixtral have the size
// intermediate_size.
static ExpertConfig read_experts(const Fields &fields, const std::string &family, size_t L) {
    const bool mixtral = family == "mixtral", everywhere = mixtral || is_hybrid(family);
    struct Sizes {
        size_t number, chosen, F, shared_F = 0;
    };
    const Sizes defaults = mixtral                 ? Sizes{8, 2, 14336}
                           : is_hybrid(family)     ? Sizes{256, 8, 512, 512}
                           : family == "qwen2_moe" ? Sizes{60, 4, 1408, 5632}
                                                   : Sizes{128, 8, 768};
    ExpertConfig e;
    const char *const number = fields.has("num_local_experts") ? "num_local_experts" : "num_experts";  // names of two versions
    e.number = fields.count(number, defaults.number);
    e.chosen = fields.count("num_experts_per_tok", defaults.chosen);
    e.F = fields.count(mixtral ? "intermediate_size" : "moe_intermediate_size", defaults.F);
    e.shared_F = defaults.shared_F ? fields.count("shared_expert_intermediate_size", defaults.shared_F) : 0;
    e.normed = everywhere || fields.boolean("norm_topk_prob", false);
    if (e.number > router_experts)
        fields.refuse(number,
                      format("is %zu, but must be at most %zu\n  fix: use a model with fewer experts", e.number, router_experts));
    if (e.chosen > e.number)
        fields.refuse("num_experts_per_tok",
                      format("is %zu, but there are %zu experts\n  fix: use the config.json that belongs to the model's files",
                             e.chosen, e.number));
    if (fields.boolean("output_router_logits", false)) e.aux_loss_coef = fields.number("router_aux_loss_coef", 0.001);
    if (!(e.aux_loss_coef >= 0 && std::isfinite(e.aux_loss_coef)))
        fields.refuse("router_aux_loss_coef",
                      format("is %g, but must be 0 or greater\n  fix: 0.001, say, or --router_aux_loss_coef", e.aux_loss_coef));
    if (!mixtral && fields.boolean("use_sliding_window", false))
        fields.refuse(
            "use_sliding_window",
            "is true, but mixtures of experts with a sliding window are not supported\n  fix: set it to false if samples are no longer than the window");
    const size_t step = everywhere ? 1 : fields.count("decoder_sparse_step", 1);
    for (size_t l = 0; l < L; l++) e.layers.push_back((l + 1) % step == 0);
    const json *dense = everywhere ? nullptr : fields.find("mlp_only_layers");
    if (dense && !dense->is_array()) fields.refuse("mlp_only_layers", "must be a list of numbers of layers\n  fix: [0, 1], say");
    for (const json &l : dense ? *dense : json::array()) {
        if (!l.is_number_integer()) fields.refuse("mlp_only_layers", "must be a list of numbers of layers\n  fix: [0, 1], say");
        if (l >= 0 && l < L) e.layers[l.get<size_t>()] = false;
    }
    return e;
}

// In Qwen3.5 the layers that layer_types calls linear_attention have it, and without layer_types all but every fourth.
static DeltaConfig read_delta(const Fields &fields, size_t L) {
    DeltaConfig d;
    d.Hk = fields.count("linear_num_key_heads", 16), d.Hv = fields.count("linear_num_value_heads", 32);
    d.Dk = fields.count("linear_key_head_dim", 128), d.Dv = fields.count("linear_value_head_dim", 128);
    if (d.Hv % d.Hk)
        fields.refuse("linear_num_key_heads", format("is %zu, which does not divide linear_num_value_heads %zu", d.Hk, d.Hv));
    for (const auto &[name, D] : {std::pair("linear_key_head_dim", d.Dk), {"linear_value_head_dim", d.Dv}})
        if (D % 8 || D > delta::max_D)
            fields.refuse(name, format("is %zu, but must be a multiple of 8 up to %zu", D, delta::max_D));
    if (const size_t taps = fields.count("linear_conv_kernel_dim", conv_taps); taps != conv_taps)
        fields.refuse("linear_conv_kernel_dim", format("is %zu, but only %zu is supported", taps, conv_taps));
    for (const auto &[name, supported] : {std::pair("attn_output_gate", true), {"attention_bias", false}})
        if (fields.boolean(name, supported) != supported)
            fields.refuse(name, format("is %s, which is not supported in qwen3_5", supported ? "false" : "true"));
    const size_t interval = fields.count("full_attention_interval", 4);
    const json *types = fields.find("layer_types");
    if (types && (!types->is_array() || types->size() != L))
        fields.refuse("layer_types", format("must be a list of %zu, one for each layer", L));
    for (size_t l = 0; l < L; l++) {
        d.layers.push_back(types ? (*types)[l] == "linear_attention" : (l + 1) % interval != 0);
        if (types && !d.layers[l] && (*types)[l] != "full_attention")
            fields.refuse("layer_types", format("of layer %zu is %s, neither linear_attention nor full_attention", l,
                                                (*types)[l].dump().c_str()));
    }
    return d;
}

static void read_llama(ModelConfig &c, const Fields &fields, const Family &family) {
    const bool llama = c.family == "llama", qwen2 = c.family == "qwen2", qwen3 = c.family == "qwen3",
               seed = c.family == "seed_oss";
    const bool olmo2 = c.family == "olmo2", smollm3 = c.family == "smollm3", granite = c.family == "granite",
               exaone4 = c.family == "exaone4", qwen3_moe = c.family == "qwen3_moe", qwen2_moe = c.family == "qwen2_moe",
               qwen35 = is_hybrid(c.family);
    const std::string act_name = c.gemma() ? "hidden_activation" : "hidden_act",
                      known_act = c.gemma() ? "gelu_pytorch_tanh" : "silu";
    const std::string act = fields.text(act_name, known_act);
    if (act != known_act) fields.refuse(act_name, "is \"" + act + "\"; the supported activation is " + known_act);
    c.gate = c.gemma() ? Gate::gelu : Gate::silu;
    c.V = fields.count("vocab_size");
    c.C = fields.count("hidden_size");
    c.L = fields.count("num_hidden_layers");
    c.H = fields.count("num_attention_heads");
    if (is_mixture(c.family)) c.experts = read_experts(fields, c.family, c.L);
    c.F = qwen35 && c.experts.number ? c.experts.F : fields.count("intermediate_size");  // no layer is dense
    c.KV = family.kv_heads == 0 || fields.source().contains("num_key_value_heads") ? fields.count("num_key_value_heads", c.H)
                                                                                   : family.kv_heads;
    c.D = fields.count("head_dim", family.head_dim ? family.head_dim : c.C / c.H);
    if (!fields.has("head_dim") && !family.head_dim && c.C % c.H != 0)
        fields.refuse("hidden_size",
                      format("%zu is not divisible by num_attention_heads %zu, and there is no head_dim", c.C, c.H));
    c.max_positions = fields.count("max_position_embeddings", family.positions);
    c.eps = float(fields.number("rms_norm_eps", family.eps));
    c.tied = fields.boolean("tie_word_embeddings", family.tied);
    c.qkv_bias = qwen2 || (qwen2_moe && fields.boolean("qkv_bias", true)) ||
                 ((llama || qwen3 || qwen3_moe || seed || smollm3 || granite || olmo2 || c.gemma()) &&
                  fields.boolean("attention_bias", family.biased));
    c.o_bias = seed ? fields.boolean("attention_out_bias", false) : c.qkv_bias && !qwen2 && !qwen2_moe;
    c.mlp_bias = (llama || seed || smollm3 || granite) && fields.boolean("mlp_bias", false);
    c.qk_norm = qwen3 || qwen3_moe || olmo2 || exaone4 || qwen35 || c.gemma();
    c.norm_after = olmo2 || exaone4 || c.gemma();
    c.norm_before = !(olmo2 || exaone4);
    c.wide_qk_norm = olmo2;
    c.fused = c.family == "phi3";
    if (granite)
        for (const auto &[name, factor] : {std::pair("embedding_multiplier", &c.embedding_multiplier),
                                           {"residual_multiplier", &c.residual_multiplier},
                                           {"attention_multiplier", &c.attention_multiplier},
                                           {"logits_scaling", &c.logits_scaling}}) {
            *factor = float(fields.number(name, 1));
            if (!(*factor > 0 && std::isfinite(*factor)))
                fields.refuse(name, format("is %g, but must be greater than 0", double(*factor)));
        }
    if (c.gemma()) {
        c.norm_w0 = 1;
        c.embedding_multiplier = std::sqrt(float(c.C));
        c.attention_multiplier = float(1 / std::sqrt(double(fields.count("query_pre_attn_scalar", 256))));
        c.local_rope = RopeConfig{.theta = fields.number("rope_local_base_freq", 10000)};
        if (!(c.local_rope->theta > 1))
            fields.refuse("rope_local_base_freq", format("is %g, but must be greater than 1", c.local_rope->theta));
    }
    if (qwen35) c.delta = read_delta(fields, c.L), c.output_gate = true, c.norm_w0 = 1;
    c.unrotated = read_unrotated_layers(fields, c.family, c.L);
    c.rope = read_rope(fields, family, c.max_positions, c.D);
}

static Gelu read_gelu(const Fields &fields) {
    const std::string act = fields.text("activation_function", "gelu_new");
    if (act == "gelu") return Gelu::erf;
    if (act != "gelu_new" && act != "gelu_pytorch_tanh" && act != "gelu_fast")  // one formula, in other orders of operations
        fields.refuse("activation_function",
                      "is \"" + act + "\"; the supported activations are gelu, gelu_new, gelu_pytorch_tanh, gelu_fast");
    return Gelu::tanh;
}

// Every field has a default. reorder_and_upcast_attn only affects rounding, and summary_* belong to another head.
static void read_gpt2(ModelConfig &c, const Fields &fields, const Family &family) {
    if (!fields.boolean("scale_attn_weights", true))
        fields.refuse("scale_attn_weights", "is false, but only scaled attention is supported");
    c.V = fields.count("vocab_size", 50257);
    c.C = fields.count("n_embd", 768);
    c.L = fields.count("n_layer", 12);
    c.H = c.KV = fields.count("n_head", 12);
    c.F = fields.count("n_inner", 4 * c.C);
    c.max_positions = fields.count("n_positions", family.positions);
    const std::tuple<const char *, const char *, size_t> other_names[] = {
        {"hidden_size", "n_embd", c.C},
        {"num_hidden_layers", "n_layer", c.L},
        {"num_attention_heads", "n_head", c.H},
        {"max_position_embeddings", "n_positions", c.max_positions}};
    for (const auto &[other, name, value] : other_names)
        if (fields.count(other, value) != value)
            fields.refuse(other, format("is another name of %s, which is %zu\n  fix: use %s alone, as in GPT-2's files", name,
                                        value, name));
    if (c.C % c.H != 0) fields.refuse("n_embd", format("%zu is not divisible by n_head %zu", c.C, c.H));
    c.D = c.C / c.H;
    c.eps = float(fields.number("layer_norm_epsilon", family.eps));
    c.gelu = read_gelu(fields);
    c.tied = fields.boolean("tie_word_embeddings", true);
    c.qkv_bias = c.o_bias = c.mlp_bias = true;
    constexpr int32_t end_of_text = 50256;
    if (size_t(end_of_text) >= c.V) return;
    if (!fields.source().contains("eos_token_id")) c.eos = {end_of_text};  // null, in contrast, means none
    if (!fields.source().contains("bos_token_id")) c.bos = end_of_text;
}

// Qwen3-Next is the mixture of Qwen3.5, except for the order of rows in two matrices (../io/hf.cpp), if all its layers have experts.
static void as_qwen35(json &source, const std::string &where) {
    const Fields fields(source, where);
    for (const auto &[name, of_qwen35] :
         {std::pair("norm_topk_prob", json(true)), {"decoder_sparse_step", 1}, {"mlp_only_layers", json::array()}})
        if (const json *value = fields.find(name); value && *value != of_qwen35)
            fields.refuse(
                name, format("is %s, but in qwen3_next only %s is supported", value->dump().c_str(), of_qwen35.dump().c_str()));
    for (const char *name : {"norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", "intermediate_size"}) source.erase(name);
    source.emplace("num_experts", 512);
    source.emplace("num_experts_per_tok", 10);
}

// Families with their own name and code that equal another family. They are read, and saved, as that other family, which every reader knows.
static json without_own_code(json source, const std::string &where, std::vector<std::string> &notes) {
    const std::string type =
        source.is_object() && source.contains("model_type") && source["model_type"].is_string() ? source["model_type"] : "";
    const std::tuple<const char *, const char *, const char *> other_names[] = {{"Yi", "llama", "Llama"},
                                                                                {"internlm2", "llama", "Llama"},
                                                                                {"mimo", "qwen2", "Qwen2"},
                                                                                {"qwen3_next", "qwen3_5_moe_text", "Qwen3_5Moe"}};
    for (const auto &[name, family, architecture] : other_names) {
        if (type != name) continue;
        source["model_type"] = family;
        if (source.contains("architectures") && source["architectures"].is_array())
            for (json &cls : source["architectures"])
                if (const std::string text = cls.is_string() ? cls : ""; text.find("For") != text.npos)
                    cls = architecture + text.substr(text.find("For"));
        if (source.contains("bias")) source["attention_bias"] = source["bias"], source.erase("bias");
        source.erase("auto_map");
        if (type == "qwen3_next") as_qwen35(source, where);
        notes.push_back(format("%s: %s is read, and saved, as the %s model that it is", where.c_str(), name, family));
        source.erase("num_nextn_predict_layers");
    }
    return source;
}

// Models of texts and images, and the text models in them, which are read and saved: the types and the beginnings of the names of their classes.
static constexpr std::tuple<const char *, const char *, const char *> with_vision[] = {
    {"gemma3", "gemma3_text", "Gemma3"},
    {"qwen3_5", "qwen3_5_text", "Qwen3_5"},
    {"qwen3_5_moe", "qwen3_5_moe_text", "Qwen3_5Moe"}};

// Replaces a model of texts and images by its text model. Converts Gemma 3 to one form, with the defaults of transformers' class and with the rotation
// in the fields of transformers 4, which every version reads.
static json without_vision(json source, const std::string &where, std::vector<std::string> &notes) {
    const auto text = [&](const char *name) {
        return source.is_object() && source.contains(name) && source[name].is_string() ? source[name].get<std::string>() : "";
    };
    for (const auto &[type, text_type, name] : with_vision) {
        if (text("model_type") != type) continue;
        json inner = Fields(source, where).object("text_config").source();
        for (const char *field : {"architectures", "eos_token_id", "bos_token_id", "pad_token_id", "torch_dtype", "dtype",
                                  "transformers_version", "id2label", "label2id", "num_labels", "tie_word_embeddings"})
            if (source.contains(field) && !source[field].is_null()) inner[field] = source[field];
        inner["model_type"] = text_type;
        if (inner.contains("architectures") && inner["architectures"].is_array())
            for (json &cls : inner["architectures"]) {
                if (cls == std::string(name) + "ForConditionalGeneration") cls = std::string(name) + "ForCausalLM";
                if (cls == name + reward_class) cls = name + ("Text" + reward_class);
            }
        notes.push_back(format("%s: the vision tower is left out: %s is read, and saved, as the %s model in it", where.c_str(),
                               type, text_type));
        source = inner;
    }
    if (text("model_type") != "gemma3_text") return source;
    source.emplace("vocab_size", 262208);
    source.emplace("num_attention_heads", 8);
    source.emplace("eos_token_id", 1);
    source.emplace("bos_token_id", 2);
    const json rope = source.value("rope_parameters", json());
    if (!rope.is_object() || !(rope.contains("full_attention") || rope.contains("sliding_attention"))) return source;
    source.erase("rope_parameters");
    const Fields fields(rope, where + ": rope_parameters");
    for (const auto &[layers, theta] :
         {std::pair("full_attention", "rope_theta"), {"sliding_attention", "rope_local_base_freq"}}) {
        if (!fields.has(layers)) continue;
        json of = fields.object(layers).source();
        if (of.contains("rope_theta")) source[theta] = of["rope_theta"], of.erase("rope_theta");
        if (of.value("rope_type", json("default")) == "default") continue;
        if (theta != std::string("rope_theta"))
            fields.refuse(layers, "has a rope_type, but only the default one is supported there");
        source["rope_scaling"] = of;
    }
    return source;
}

ModelConfig parse_config(const json &as_found, const std::string &where, std::vector<std::string> &notes) {
    const json source = without_vision(without_own_code(as_found, where, notes), where, notes);
    const Fields fields(source, where);
    const Family &family = family_of(fields.text("model_type"), fields);
    refuse_unsupported(fields, family.name);
    note_dropouts(fields, where, notes);

    ModelConfig c{};
    c.source = source;
    c.family = family.name;
    c.bos = -1;
    if (c.gpt2()) read_gpt2(c, fields, family);
    else read_llama(c, fields, family);
    c.initializer_range = fields.number("initializer_range", 0.02);
    c.reward = read_reward(fields);
    c.tied = c.tied && !c.reward;
    check_sizes(c, fields);
    c.window =
        c.delta.Hk ? std::vector<size_t>(c.L) : read_windows(fields, c.family, c.gpt2() ? std::vector<bool>(c.L) : c.unrotated);
    // Layers without a window are not rotated if there are layers with one.
    if (c.family == "exaone4" && std::ranges::count(c.window, size_t(0)) < ptrdiff_t(c.L))
        for (size_t l = 0; l < c.L; l++) c.unrotated[l] = c.window[l] == 0;
    read_token_ids(c, fields);
    return c;
}

ModelConfig read_config(const std::string &dir, std::vector<std::string> &notes) {
    std::error_code unreadable;  // unreadable files count as missing
    if (!fs::exists(dir + "/.", unreadable))
        die("%s is not a directory\n  fix: give one with config.json; `hf download NAME --local-dir DIR` fetches one",
            dir.c_str());
    const std::string file = dir + "/config.json";
    ModelConfig config = parse_config(read_json(file), file, notes);
    read_generation_config(config, dir);
    return config;
}

void read_generation_config(ModelConfig &config, const std::string &dir) {
    const std::string file = dir + "/generation_config.json";
    std::error_code unreadable;
    if (!fs::exists(file, unreadable)) return;
    config.generation = read_json(file);
    read_token_ids(config, Fields(config.generation, file));
}

void set_rope(ModelConfig &config, double theta, const std::string &scaling) {
    json &source = config.source;
    if (config.gpt2())
        die("--rope_theta and --rope_scaling are of models with rotary positions, and those of GPT-2 are learned\n  fix: leave them out");
    const json old = source.value("rope_scaling", json()).is_object() && !source["rope_scaling"].empty() ? source["rope_scaling"]
                     : source.value("rope_parameters", json()).is_object() ? source["rope_parameters"]
                                                                           : json::object();
    json rope = old;
    if (!scaling.empty()) {
        rope = json::parse(scaling, nullptr, false);
        if (!rope.is_object() || (!rope.contains("rope_type") && !rope.contains("type")))
            die("--rope_scaling %s is no JSON object with a rope_type\n  fix: --rope_scaling '{\"rope_type\": \"yarn\", \"factor\": 4}'",
                scaling.c_str());
        const Fields dict(rope, "--rope_scaling");
        const std::string type = dict.text("rope_type", dict.text("type", ""));
        const Fields before(old, "config.json"), fields(source, "config.json");
        const size_t original = dict.count("original_max_position_embeddings",
                                           fields.count("original_max_position_embeddings",
                                                        before.count("original_max_position_embeddings", config.max_positions)));
        if (type == "yarn" || type == "llama3" || type == "longrope") rope["original_max_position_embeddings"] = original;
        if (source.contains("original_max_position_embeddings")) source["original_max_position_embeddings"] = original;
        const size_t longer = type == "dynamic" ? 0 : size_t(double(original) * std::clamp(dict.number("factor", 1), 1.0, 1e6));
        source["max_position_embeddings"] = config.max_positions = std::max(config.max_positions, longer);
        for (const char *name : {"rope_theta", "partial_rotary_factor"})
            if (old.contains(name) && !rope.contains(name)) rope[name] = old[name];
    }
    const bool newer = source.contains("rope_parameters");  // the name in files of transformers 5
    if (theta != 0 && (newer || rope.contains("rope_theta"))) rope["rope_theta"] = theta;
    if (theta != 0 && (!newer || source.contains("rope_theta"))) source["rope_theta"] = theta;
    if (newer || !rope.empty()) source[newer ? "rope_parameters" : "rope_scaling"] = rope;
    if (newer) source.erase("rope_scaling");
    const Fields fields(source, "--rope_scaling");
    config.rope = read_rope(fields, family_of(config.family, fields), config.max_positions, config.D);
}

void add_eos(ModelConfig &config, const std::vector<int32_t> &ids) {
    for (int32_t id : ids)
        if (std::ranges::find(config.eos, id) == config.eos.end()) config.eos.push_back(id);
}

// ---- export -------------------------------------------------------------------------------------------------------------------

static std::string architecture(const ModelConfig &config) {
    return family_of(config.family, Fields(config.source, "config.json")).architecture;
}

// The config.json has the fields that transformers writes for num_labels 1.
void make_reward(ModelConfig &config) {
    config.reward = true;
    config.tied = false;
    json &source = config.source;
    source["architectures"] =
        json::array({architecture(config) + (config.gemma() || config.delta.Hk ? "Text" : "") + reward_class});
    source["id2label"] = {{"0", "LABEL_0"}};
    source["label2id"] = {{"LABEL_0", 0}};
    source["tie_word_embeddings"] = false;
    source.erase("num_labels");
}

std::string missing_reward_class(const ModelConfig &config) {
    const Family &family = family_of(config.family, Fields(config.source, "config.json"));
    return family.has_reward_class ? "" : family.architecture + reward_class;
}

// transformers reads the reward at the last position whose id is not pad_token_id. In many models that id also ends a text, and transformers would
// then read the position before the end, where no reward was trained. In this case we write null: transformers then reads the last position of a
// single text, and rejects batches of several. Any other pad_token_id is kept, and batches work.
static void write_pad_token(json &source, const std::vector<int32_t> &eos) {
    const json pad = source.value("pad_token_id", json());
    if (std::any_of(eos.begin(), eos.end(), [&](int32_t id) { return pad == id; })) source["pad_token_id"] = nullptr;
}

void write_config(const std::string &dir, const ModelConfig &config, const std::string &dtype) {
    json source = config.source;
    if (!source.contains("torch_dtype") && !source.contains("dtype"))  // new files say dtype, older ones torch_dtype
        source[source.contains("rope_parameters") ? "dtype" : "torch_dtype"] = nullptr;
    for (const char *key : {"torch_dtype", "dtype"})
        if (source.contains(key)) source[key] = dtype == "BF16" ? "bfloat16" : "float32";
    if (!source.contains("architectures"))
        source["architectures"] = json::array({architecture(config) + (config.gpt2() ? "LMHeadModel" : "ForCausalLM")});
    if (config.reward) write_pad_token(source, config.eos);
    write_json(dir + "/config.json", source);
}

void write_generation_config(const std::string &dir, const ModelConfig &config) {
    json out = config.generation;
    for (const char *name : {"bos_token_id", "pad_token_id"})
        if (const json id = config.source.value(name, json()); config.generation.is_null() && !id.is_null()) out[name] = id;
    const bool has_eos = out.is_object() && out.contains("eos_token_id");
    const std::vector<int32_t> known = Fields(has_eos ? out : config.source, dir).ids("eos_token_id");
    std::vector<int32_t> eos = config.eos;
    std::stable_partition(eos.begin(), eos.end(), [&](int32_t id) { return std::ranges::find(known, id) == known.end(); });
    if (!eos.empty()) out["eos_token_id"] = eos.size() == 1 ? json(eos[0]) : json(eos);
    if (!out.is_null()) write_json(dir + "/generation_config.json", out);
}

// ---- the part of a model on a rank of tensor parallelism ------------------------------------------------------------------------------

// Divides n elements among ranks, in whole units.
static Share share_of(size_t n, size_t ranks, size_t rank, size_t unit = 1) {
    const size_t units = ceil_div(n, unit);
    const auto end = [&](size_t r) { return std::min(n, ceil_div(units * r, ranks) * unit); };
    return {end(rank), end(rank + 1) - end(rank), n};
}

// Channels and tokens are divided in units that keep the rows of a rank's matrices aligned, where there are enough of them.
static Share aligned_share_of(size_t n, size_t ranks, size_t rank) { return share_of(n, ranks, rank, n >= 64 * ranks ? 64 : 1); }

Share vocabulary_of(const ModelPart &part, size_t rank) { return aligned_share_of(part.vocabulary.whole, part.ranks, rank); }

ModelConfig part_of(ModelConfig c, size_t ranks, size_t rank) {
    if (ranks == 1) return c;
    const size_t group = c.H / c.KV, sharers = std::max<size_t>(1, ranks / c.KV);
    const Share kv = ranks <= c.KV ? share_of(c.KV, ranks, rank) : Share{rank / sharers, 1, c.KV},
                F = aligned_share_of(c.F, ranks, rank), V = aligned_share_of(c.V, ranks, rank);
    Share q{kv.first * group, kv.count * group, c.H};
    if (ranks > c.KV) {
        const Share own = share_of(group, sharers, rank % sharers);
        q.first += own.first, q.count = own.count;
    }
    c.part = {ranks, rank, q, kv, F, V};
    c.H = q.count, c.KV = kv.count, c.F = F.count, c.V = V.count;
    if (DeltaConfig &d = c.delta; d.Hk) {
        c.part.delta = share_of(d.Hk, ranks, rank);
        d.Hv = d.Hv / d.Hk * c.part.delta.count, d.Hk = c.part.delta.count;
    }
    return c;
}

LayerCuts cuts_of(const ModelConfig &c) {
    const ModelPart &p = c.part;
    if (p.ranks == 1) return {};
    const size_t D = c.D, group = p.q.whole / p.kv.whole, Q = p.q.whole * D, K = p.kv.whole * D, F = p.hidden.whole;
    LayerCuts cuts{.q = p.q.rows(c.output_gate ? 2 * D : D),
                   .kv = p.kv.rows(D),
                   .qkv = p.kv.rows((group + 2) * D),
                   .o = p.q.columns(D),
                   .hidden = p.hidden.rows(),
                   .gate_up = p.hidden.rows(2),
                   .down = p.hidden.columns()};
    cuts.qkv.sections = {Q, K, K}, cuts.gate_up.sections = {F, F};
    if (const DeltaConfig &d = c.delta; d.Hk) {
        const size_t values = d.Hv / d.Hk, keys = p.delta.whole * d.Dk;  // values: heads of a key head
        cuts.delta_qkv = p.delta.rows(d.row() / d.Hk);
        cuts.delta_qkv.sections = {keys, keys, p.delta.whole * values * d.Dv};
        cuts.delta_z = p.delta.rows(values * d.Dv), cuts.delta_out = p.delta.columns(values * d.Dv);
        cuts.delta_heads = p.delta.rows(values);
    }
    return cuts;
}

std::string cannot_divide(const ModelConfig &c, size_t ranks) {
    if (ranks == 1) return "";
    if (ranks > c.KV && (ranks % c.KV || ranks > c.H))
        return format(
            "it has %zu query and %zu key heads, and ranks have whole heads: use at most %zu ranks, or a multiple up to %zu", c.H,
            c.KV, c.KV, c.H / c.KV * c.KV);
    if (ranks > c.KV && (c.fused || c.wide_qk_norm))
        return format("it has %zu key heads, and each rank needs one of its own, because %s", c.KV,
                      c.fused ? "its files store queries, keys and values as one tensor" : "one norm is over all key heads");
    if (c.delta.Hk % ranks)
        return format("its linear attention has %zu key head%s, and each rank needs the same number of them", c.delta.Hk,
                      c.delta.Hk == 1 ? "" : "s");
    for (size_t rank = 0; c.weight_bits == 4 && rank < ranks; rank++) {
        const ModelConfig part = part_of(c, ranks, rank);
        const LayerCuts cuts = cuts_of(part);
        const auto ends_in_block = [](size_t n) { return n % nf4_block > 0; };
        const auto ends_in = [&](const Cut &cut) { return ends_in_block(cut.first) || ends_in_block(cut.whole); };
        if (ends_in_block(c.C) || ends_in(cuts.o) || ends_in(cuts.down) || ends_in(cuts.delta_out))
            return format(
                "its matrices of 4 bits have blocks of %zu weights, which the ranks' parts would cut: use --load_in 8bit",
                nf4_block);
    }
    return "";
}
