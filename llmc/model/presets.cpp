// Published configurations, for --preset.
#include "../core/common.h"
#include "config.h"

using nlohmann::json;

struct Preset {
    const char *name, *family;
    size_t C, F, L, H, KV, D, V, positions;
    double theta, factor;  // factor: of llama3 scaling from 8192 positions, in Gemma of linear scaling; 0 without
    double eps;
    bool tied;
    int bos, eos;
    size_t window = 0;
    double init = 0.02;
    size_t experts = 0, chosen = 0, expert_F = 0, shared_F = 0;  // for a mixture of experts
    bool normed = false;
    size_t value_heads = 0;  // of linear attention in three of four layers, with 16 key heads of 128 channels
};

// clang-format off
static const Preset presets[] = {
    //                             C     F      L   H   KV  D    V       positions  theta   factor eps   tied   bos     eos
    {"llama2-7b",       "llama",   4096, 11008, 32, 32, 32, 128, 32000,  4096,      10000,  0,     1e-5, false, 1,      2},
    {"llama2-13b",      "llama",   5120, 13824, 40, 40, 40, 128, 32000,  4096,      10000,  0,     1e-5, false, 1,      2},
    {"llama3-8b",       "llama",   4096, 14336, 32, 32, 8,  128, 128256, 8192,      500000, 0,     1e-5, false, 128000, 128001},
    {"llama3.1-8b",     "llama",   4096, 14336, 32, 32, 8,  128, 128256, 131072,    500000, 8,     1e-5, false, 128000, 128001},
    {"llama3.1-70b",    "llama",   8192, 28672, 80, 64, 8,  128, 128256, 131072,    500000, 8,     1e-5, false, 128000, 128001},
    {"llama3.2-1b",     "llama",   2048, 8192,  16, 32, 8,  64,  128256, 131072,    500000, 32,    1e-5, true,  128000, 128001},
    {"llama3.2-3b",     "llama",   3072, 8192,  28, 24, 8,  128, 128256, 131072,    500000, 32,    1e-5, true,  128000, 128001},
    {"tinyllama-1.1b",  "llama",   2048, 5632,  22, 32, 4,  64,  32000,  2048,      10000,  0,     1e-5, false, 1,      2},
    {"mistral-7b-v0.1", "mistral", 4096, 14336, 32, 32, 8,  128, 32000,  32768,     10000,  0,     1e-5, false, 1,      2, 4096},
    {"mistral-7b-v0.3", "mistral", 4096, 14336, 32, 32, 8,  128, 32768,  32768,     1e6,    0,     1e-5, false, 1,      2},
    {"qwen2.5-0.5b",    "qwen2",   896,  4864,  24, 14, 2,  64,  151936, 32768,     1e6,    0,     1e-6, true,  151643, 151643},
    {"qwen2.5-1.5b",    "qwen2",   1536, 8960,  28, 12, 2,  128, 151936, 131072,    1e6,    0,     1e-6, true,  151643, 151643},
    {"qwen2.5-3b",      "qwen2",   2048, 11008, 36, 16, 2,  128, 151936, 32768,     1e6,    0,     1e-6, true,  151643, 151643},
    {"qwen2.5-7b",      "qwen2",   3584, 18944, 28, 28, 4,  128, 152064, 131072,    1e6,    0,     1e-6, false, 151643, 151643},
    {"qwen2.5-14b",     "qwen2",   5120, 13824, 48, 40, 8,  128, 152064, 131072,    1e6,    0,     1e-5, false, 151643, 151643},
    {"qwen3-0.6b",      "qwen3",   1024, 3072,  28, 16, 8,  128, 151936, 40960,     1e6,    0,     1e-6, true,  151643, 151645},
    {"qwen3-1.7b",      "qwen3",   2048, 6144,  28, 16, 8,  128, 151936, 40960,     1e6,    0,     1e-6, true,  151643, 151645},
    {"qwen3-4b",        "qwen3",   2560, 9728,  36, 32, 8,  128, 151936, 40960,     1e6,    0,     1e-6, true,  151643, 151645},
    {"qwen3-8b",        "qwen3",   4096, 12288, 36, 32, 8,  128, 151936, 40960,     1e6,    0,     1e-6, false, 151643, 151645},
    {"qwen3-30b-a3b",   "qwen3_moe", 2048, 6144, 48, 32, 4, 128, 151936, 40960, 1e6, 0, 1e-6, false, 151643, 151645, 0, 0.02, 128, 8, 768, 0, true},
    {"qwen3-235b-a22b", "qwen3_moe", 4096, 12288, 94, 64, 4, 128, 151936, 40960, 1e6, 0, 1e-6, false, 151643, 151645, 0, 0.02, 128, 8, 1536, 0, true},
    {"qwen1.5-moe-a2.7b", "qwen2_moe", 2048, 5632, 24, 16, 16, 128, 151936, 8192, 1e6, 0, 1e-6, false, 151643, 151643, 0, 0.02, 60, 4, 1408, 5632},
    {"qwen3.5-0.8b",    "qwen3_5_text", 1024, 3584, 24, 8, 2, 256, 248320, 262144,  1e7,    0,     1e-6, true,  248044, 248044, 0, 0.02, 0, 0, 0, 0, false, 16},
    {"qwen3.5-4b",      "qwen3_5_text", 2560, 9216, 32, 16, 4, 256, 248320, 262144, 1e7,    0,     1e-6, true,  248044, 248044, 0, 0.02, 0, 0, 0, 0, false, 32},
    {"qwen3.5-9b",      "qwen3_5_text", 4096, 12288, 32, 16, 4, 256, 248320, 262144, 1e7,   0,     1e-6, false, 248044, 248044, 0, 0.02, 0, 0, 0, 0, false, 32},
    {"qwen3.5-27b",     "qwen3_5_text", 5120, 17408, 64, 24, 4, 256, 248320, 262144, 1e7,   0,     1e-6, false, 248044, 248044, 0, 0.02, 0, 0, 0, 0, false, 48},
    {"qwen3.5-35b-a3b", "qwen3_5_moe_text", 2048, 512, 40, 16, 2, 256, 248320, 262144, 1e7, 0,     1e-6, false, 248044, 248044, 0, 0.02, 256, 8, 512, 512, true, 32},
    {"mixtral-8x7b",    "mixtral", 4096, 14336, 32, 32, 8, 128, 32000,  32768,     1e6,    0,     1e-5, false, 1,      2, 0, 0.02, 8, 2},
    {"phi3-mini-4k",    "phi3",    3072, 8192,  32, 32, 32, 96,  32064,  4096,      10000,  0,     1e-5, false, 1,      32000, 2047},
    {"smollm2-135m",    "llama",   576,  1536,  30, 9,  3,  64,  49152,  8192,      100000, 0,     1e-5, true,  0, 0, 0, 1. / 24},
    {"smollm2-360m",    "llama",   960,  2560,  32, 15, 5,  64,  49152,  8192,      100000, 0,     1e-5, true,  0,      0},
    {"smollm2-1.7b",    "llama",   2048, 8192,  24, 32, 32, 64,  49152,  8192,      130000, 0,     1e-5, true,  0,      0},
    {"olmo2-1b",        "olmo2",   2048, 8192,  16, 16, 16, 128, 100352, 4096,      500000, 0,     1e-6, false, 100257, 100257},
    {"olmo2-7b",        "olmo2",   4096, 11008, 32, 32, 32, 128, 100352, 4096,      500000, 0,     1e-6, false, 100257, 100257},
    {"gemma3-270m",     "gemma3_text", 640, 2048, 18, 4, 1,  256, 262144, 32768,    1e6,    0,     1e-6, true,  2, 1, 512},
    {"gemma3-1b",       "gemma3_text", 1152, 6912, 26, 4, 1, 256, 262144, 32768,    1e6,    0,     1e-6, true,  2, 1, 512},
    {"gemma3-4b",       "gemma3_text", 2560, 10240, 34, 8, 4, 256, 262208, 131072,  1e6,    8,     1e-6, true,  2, 1, 1024},
    {"gemma3-12b",      "gemma3_text", 3840, 15360, 48, 16, 8, 256, 262208, 131072, 1e6,    8,     1e-6, true,  2, 1, 1024},
    {"gemma3-27b",      "gemma3_text", 5376, 21504, 62, 32, 16, 128, 262208, 131072, 1e6,   8,     1e-6, true,  2, 1, 1024},
    {"d12",             "gpt2",    768,  3072,  12, 12, 12, 64,  50257,  1024,      0,      0,     1e-5, true,  50256,  50256},
    {"d24",             "gpt2",    1024, 4096,  24, 16, 16, 64,  50257,  1024,      0,      0,     1e-5, true,  50256,  50256},
    {"d36",             "gpt2",    1280, 5120,  36, 20, 20, 64,  50257,  1024,      0,      0,     1e-5, true,  50256,  50256},
    {"d48",             "gpt2",    1600, 6400,  48, 25, 25, 64,  50257,  1024,      0,      0,     1e-5, true,  50256,  50256},
};
// clang-format on

std::vector<std::string> preset_names() {
    std::vector<std::string> names;
    for (const Preset &p : presets) names.push_back(p.name);
    return names;
}

// Creates the config.json of a preset; the usual parser reads it.
static json preset_source(const Preset &p) {
    // clang-format off
    if (p.family == std::string("gpt2"))
        return {
            {"model_type", p.family}, {"n_embd", p.C}, {"n_inner", p.F}, {"n_layer", p.L}, {"n_head", p.H}, {"vocab_size", p.V},
            {"n_positions", p.positions}, {"layer_norm_epsilon", p.eps}, {"activation_function", "gelu_new"},
            {"tie_word_embeddings", p.tied}, {"bos_token_id", p.bos}, {"eos_token_id", p.eos}, {"initializer_range", p.init},
            {"torch_dtype", "bfloat16"}};
    json source = {
        {"model_type", p.family}, {"hidden_size", p.C}, {"intermediate_size", p.F}, {"num_hidden_layers", p.L},
        {"num_attention_heads", p.H}, {"num_key_value_heads", p.KV}, {"head_dim", p.D}, {"vocab_size", p.V},
        {"max_position_embeddings", p.positions}, {"rope_theta", p.theta}, {"rms_norm_eps", p.eps}, {"hidden_act", "silu"},
        {"tie_word_embeddings", p.tied}, {"bos_token_id", p.bos}, {"eos_token_id", p.eos}, {"initializer_range", p.init},
        {"torch_dtype", "bfloat16"}};
    if (p.family == std::string("gemma3_text")) {
        source.erase("hidden_act");
        source["hidden_activation"] = "gelu_pytorch_tanh";
        source["query_pre_attn_scalar"] = p.D == 128 ? p.C / p.H : p.D;  // 168 in the largest
        source["rope_local_base_freq"] = 10000;
        if (p.factor != 0) source["rope_scaling"] = {{"rope_type", "linear"}, {"factor", p.factor}};
    } else if (p.factor != 0)
        source["rope_scaling"] = {{"rope_type", "llama3"}, {"factor", p.factor}, {"low_freq_factor", 1.0},
                                  {"high_freq_factor", 4.0}, {"original_max_position_embeddings", 8192}};
    // clang-format on
    if (p.family == std::string("mixtral")) source["num_local_experts"] = p.experts;
    else if (p.experts)
        source.update({{"num_experts", p.experts}, {"moe_intermediate_size", p.expert_F}, {"norm_topk_prob", p.normed}});
    if (p.experts) source["num_experts_per_tok"] = p.chosen;
    if (p.value_heads) {
        source["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", p.theta}, {"partial_rotary_factor", 0.25}};
        source.erase("rope_theta");
        source.update({{"linear_num_key_heads", 16},
                       {"linear_num_value_heads", p.value_heads},
                       {"linear_key_head_dim", 128},
                       {"linear_value_head_dim", 128},
                       {"linear_conv_kernel_dim", 4}});
        for (size_t l = 0; l < p.L; l++) source["layer_types"].push_back(l % 4 == 3 ? "full_attention" : "linear_attention");
    }
    if (p.shared_F) source["shared_expert_intermediate_size"] = p.shared_F;
    if (p.window || p.family == std::string("mistral")) source["sliding_window"] = p.window ? json(p.window) : json();
    return source;
}

ModelConfig preset(const std::string &name) {
    std::string known;
    for (const Preset &p : presets) {
        std::vector<std::string> notes;
        if (name == p.name) return parse_config(preset_source(p), "preset " + name, notes);
        known += std::string(" ") + p.name;
    }
    die("there is no preset \"%s\"\n  fix: use one of%s", name.c_str(), known.c_str());
}
