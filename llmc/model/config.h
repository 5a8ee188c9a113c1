// The configuration of a model: its family, its sizes and the features of its layers. It is read from config.json with transformers' rules. If we
// cannot compute a model exactly as transformers does, the error names the unsupported field.
#pragma once
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "../io/tensor.h"
#include "../ops/rope_table.h"
#include "../ops/settings.h"

// Adapters of linear layers: LoRA (Hu et al., "LoRA: low-rank adaptation of large language models", 2021, arXiv:2106.09685). The adapters, the
// modules named here and the head of a reward model are trained; the other weights are frozen.
struct LoraConfig {
    size_t rank = 0;  // 0: no adapters
    double alpha = 16, dropout = 0;
    bool rslora = false;  // the scale is alpha / sqrt(rank) (Kalajdzievski, 2023, arXiv:2312.03732) and not alpha / rank
    std::vector<std::string> targets;      // names of modules, such as q_proj
    bool embedding = false, head = false;  // true: trained in full, as a separate tensor (PEFT's modules_to_save)

    double scale() const;
};

// A mixture of experts that replaces the feed-forward, in some or all layers (experts.h).
struct ExpertConfig {
    size_t number = 0, chosen = 0;  // experts, and experts per token; 0: no experts
    size_t F = 0, shared_F = 0;     // sizes of an expert and of the shared expert; 0: no shared expert
    bool normed = false;            // the weights of the chosen experts are divided by their sum
    std::vector<bool> layers;       // (L) which layers have experts
    double aux_loss_coef = 0;       // weight of the auxiliary loss (routing.h)

    // The most rows that n tokens on each of the ranks that divide the experts can have for one rank's experts.
    size_t rows(size_t ranks, size_t n) const { return n * ranks * std::min(chosen, number / ranks); }
};

// Linear attention by the gated delta rule (../ops/gated_delta.h), which replaces attention in some layers (Qwen3.5).
struct DeltaConfig {
    size_t Hk = 0, Hv = 0, Dk = 0, Dv = 0;  // heads of keys and of values, and their sizes; 0: no linear attention
    std::vector<bool> layers;               // (L) which layers have it

    size_t values() const { return Hv * Dv; }              // elements of a token
    size_t row() const { return 2 * Hk * Dk + values(); }  // queries, keys, values
};

// The elements [first, first + count) of `whole` that a rank has under tensor parallelism: heads, channels or tokens of the vocabulary.
struct Share {
    size_t first = 0, count = 0, whole = 0;  // whole 0: nothing is divided

    // The cut of a tensor with `size` rows or columns for each of these elements.
    Cut rows(size_t size = 1) const { return along(0, size); }
    Cut columns(size_t size = 1) const { return along(1, size); }

  private:
    Cut along(int dim, size_t size) const { return whole ? Cut{dim, first * size, whole * size} : Cut(); }
};

// A rank's part of a model under tensor parallelism (Shoeybi et al., "Megatron-LM", 2019, arXiv:1909.08053): whole heads, with the key and value head
// of each group of query heads; key heads of linear attention, with the value heads of each; channels of the feed-forward; and tokens of the vocabulary.
//
// If there are more ranks than key heads, several ranks divide the query heads of a key head. Each then has the matrices of all keys and values whole, and
// uses and changes its own head's rows.
struct ModelPart {
    size_t ranks = 1, rank = 0;
    Share q, kv, hidden, vocabulary, delta = {};

    bool shares_keys() const { return ranks > 1 && ranks > kv.whole; }
};

struct ModelConfig {
    std::string family;           // one of `families` in config.cpp (model_type)
    size_t V, C, L, H, KV, D, F;  // vocabulary, hidden, layers, heads, key/value heads, head size, ffn
    size_t max_positions;         // max_position_embeddings; in GPT-2, the rows of the position table
    float eps;
    bool tied;            // the head is the embedding
    bool untied = false;  // head and embedding are one tensor in the files, but two here (set_lora)
    bool qkv_bias, o_bias, mlp_bias, qk_norm;
    bool norm_before = true, norm_after = false;  // norms on the inputs of attention and feed-forward, and on their outputs
    float norm_w0 = 0;                            // norms multiply by this plus their weights
    bool output_gate = false;    // attention's output is multiplied by the sigmoid of gates, which q_proj computes (Qwen3.5)
    bool wide_qk_norm;           // with qk_norm: a token's query heads are normed as one vector, and so are its key heads
    bool fused;                  // in the files q, k and v are one tensor, and gate and up are another
    bool reward;                 // the head is score.weight (1, C) and not lm_head.weight (V, C); then tied is false
    std::vector<size_t> window;  // (L) the number of keys that a query of the layer sees, including its own; 0: all
    RopeConfig rope;
    std::optional<RopeConfig> local_rope;  // for layers with a window, if they have another rotation
    std::vector<bool> unrotated;           // (L) true for layers without rotation; empty: all layers rotate
    // Granite's factors for the embedding, for the output that each half of a layer adds to the residual stream, and for attention's scores, and its
    // divisor of the logits. Gemma has the first and the third.
    float embedding_multiplier = 1, residual_multiplier = 1, attention_multiplier = 0, logits_scaling = 1;
    Gelu gelu;               // GPT-2's
    Gate gate = Gate::silu;  // for all other families
    double initializer_range;
    std::vector<int32_t> eos;  // from generation_config.json, else config.json
    int32_t bos;               // -1 if none
    ExpertConfig experts;
    DeltaConfig delta;
    LoraConfig lora;
    ModelPart part;       // H, KV, F, V and delta's heads are those of the part (part_of)
    int weight_bits = 0;  // 4 or 8: the layers' matrices are frozen and stored with this number of bits (quantised_layers.h)
    // config.json and generation_config.json (null without one), unchanged; export writes them again, with the fields that training changes
    nlohmann::json source, generation;

    bool freezes() const { return lora.rank > 0 || weight_bits > 0; }  // true if the model's own weights are not trained
    // GPT-2 has layernorms with bias instead of rmsnorms, learned positions instead of rotation, and a feed-forward part of two matrices,
    // without a gate.
    bool rotates(size_t l) const { return unrotated.empty() || !unrotated[l]; }
    bool has_experts(size_t l) const { return experts.number > 0 && experts.layers[l]; }
    bool has_delta(size_t l) const { return delta.Hk > 0 && delta.layers[l]; }
    bool gpt2() const { return family == "gpt2"; }
    size_t whole_H() const { return part.q.whole ? part.q.whole : H; }
    size_t whole_KV() const { return part.kv.whole ? part.kv.whole : KV; }
    bool gemma() const { return family == "gemma3_text"; }
    float attention_scale() const { return attention_multiplier ? attention_multiplier : 1 / std::sqrt(float(D)); }
    // The most positions of a text during generation: in longrope and dynamic the rotation of the whole text changes with its length, and a key cache
    // cannot follow that.
    size_t growing_positions() const;
    const char *growing_positions_name() const {
        return rope.type == "longrope" ? "original_max_position_embeddings" : positions_name();
    }
    const char *positions_name() const { return gpt2() ? "n_positions" : "max_position_embeddings"; }  // in config.json
};

// Returns the configuration of a rank's part of a model, for `ranks` ranks that divide its tensors. The first ranks have the largest parts.
ModelConfig part_of(ModelConfig config, size_t ranks, size_t rank);
Share vocabulary_of(const ModelPart &part, size_t rank);  // of another rank

// The cuts of a layer's matrices, and of their biases. Models that are not divided have none.
struct LayerCuts {
    Cut q, kv, qkv, o;          // qkv: of one tensor with the rows of queries, keys and values
    Cut hidden, gate_up, down;  // hidden: gate, and up; gate_up: of one tensor with the rows of both
    // Of linear attention: queries, keys and values are one tensor, and its filters another; gates of the output; numbers of each value head.
    Cut delta_qkv = {}, delta_z = {}, delta_heads = {}, delta_out = {};
};
LayerCuts cuts_of(const ModelConfig &config);
// Why tensor parallelism cannot divide the model among this number of ranks; "" if it can.
std::string cannot_divide(const ModelConfig &config, size_t ranks);

inline constexpr const char *head_name = "lm_head.weight";
const char *embedding_name(const ModelConfig &config);

// `notes` gets a line for each setting of the file that training ignores (dropout), to show to the user.
ModelConfig read_config(const std::string &dir, std::vector<std::string> &notes);
ModelConfig parse_config(const nlohmann::json &source, const std::string &where, std::vector<std::string> &notes);
ModelConfig preset(const std::string &name);  // a published configuration; an unknown name ends in an error with the list
std::vector<std::string> preset_names();
// Reads the file of a model or an adapter; changes nothing if `dir` has none.
void read_generation_config(ModelConfig &config, const std::string &dir);
// Replaces the base of the rotation unless `theta` is 0, and its scaling (JSON as in config.json) unless `scaling` is empty. Exported models contain
// both.
void set_rope(ModelConfig &config, double theta, const std::string &scaling);
void add_eos(ModelConfig &config, const std::vector<int32_t> &ids);  // adds ids missing from config.eos
size_t parameter_count(const ModelConfig &config);                   // counts tied weights once
size_t active_parameter_count(const ModelConfig &config);            // parameters used for one token: only the chosen experts
void make_reward(ModelConfig &config);  // turns a language model's config into a reward model's on the same backbone
// Returns the name of the reward model class if transformers lacks one, else an empty string.
std::string missing_reward_class(const ModelConfig &config);

// Writes config.json. `dtype` ("F32" or "BF16") is the type of the weights. A reward model's pad_token_id becomes null if it is also an end of
// text.
void write_config(const std::string &dir, const ModelConfig &config, const std::string &dtype);

// Writes generation_config.json with all of config.eos in eos_token_id: readers stop at these tokens, not at config.json's. Tokens that the
// model's files did not have come first. Other fields are copied from the model's file.
void write_generation_config(const std::string &dir, const ModelConfig &config);
