// Reads and writes a model as Hugging Face stores it: a directory with config.json, model.safetensors (or shards with an index) and tokenizer
// files. A model that we cannot compute exactly as transformers does is refused, by the name of the field or tensor that asks for more.
#pragma once
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "../ops/gelu_form.h"
#include "../ops/rope.h"
#include "safetensors.h"

struct ModelConfig {
    std::string family;           // "llama" | "mistral" | "qwen2" | "qwen3" | "gpt2"   (model_type)
    size_t V, C, L, H, KV, D, F;  // vocabulary, hidden, layers, heads, key/value heads, head size, ffn
    size_t max_positions;         // max_position_embeddings; in GPT-2, the rows of its table of positions
    float eps;
    bool tied, qkv_bias, o_bias, mlp_bias, qk_norm;
    bool reward;                 // the head is score.weight (1, C) and not lm_head.weight (V, C); then tied is false
    std::vector<size_t> window;  // (L) how many keys a query of the layer sees, its own included; 0: all
    RopeConfig rope;
    Gelu gelu;  // GPT-2's
    double initializer_range;
    std::vector<int32_t> eos;  // from generation_config.json, else config.json
    int32_t bos;               // -1 if none
    nlohmann::json source;     // config.json as it was read; export writes it again, with the fields that training changes

    // GPT-2 has layernorms with bias in place of rmsnorms, learned positions in place of rotation, and a feed-forward part of two matrices,
    // without a gate.
    bool gpt2() const { return family == "gpt2"; }
    const char *positions_name() const { return gpt2() ? "n_positions" : "max_position_embeddings"; }  // in config.json
};

// `notes` gets a line for each setting of the file that training leaves out (dropout), to be shown to the user.
ModelConfig read_config(const std::string &dir, std::vector<std::string> &notes);
ModelConfig parse_config(const nlohmann::json &source, const std::string &where, std::vector<std::string> &notes);
ModelConfig preset(const std::string &name);  // a published configuration; an unknown name is answered with the list
std::vector<std::string> preset_names();
size_t parameter_count(const ModelConfig &config);  // tied weights once
void make_reward(ModelConfig &config);              // makes a language model's config that of a reward model on the same backbone

// Writes config.json, in which `dtype` ("F32" or "BF16") is the type of the weights. A reward model's pad_token_id becomes null if it also ends
// texts.
void write_config(const std::string &dir, const ModelConfig &config, const std::string &dtype);
// Copies the files of tokenizer, chat template and generation settings that exist.
void copy_tokenizer(const std::string &from_dir, const std::string &to_dir);

// The weights of a directory, in one file or in shards. A tensor "transformer.X" may be called X there, as in the files of GPT-2 itself.
class HfWeights {
  public:
    static bool present(const std::string &dir);  // false if there is only config.json: training then starts from random weights
    explicit HfWeights(const std::string &dir);

    const TensorInfo *find(const std::string &name) const;  // null where there is none
    // Reads a tensor into dst, which lies in `memory`, as X, float or bf16. Dies at a NaN or an infinity.
    template <class X> void read(const std::string &name, const Shape &shape, X *dst, Memory &memory) const;
    // The same for elements [first, first + count) of the tensor in row-major order.
    template <class X>
    void read_part(const std::string &name, const Shape &shape, size_t first, size_t count, X *dst, Memory &memory) const;
    void expect_only(const std::vector<std::string> &known) const;  // dies if there is another tensor, buffers excepted

  private:
    using FileOfTensor = std::map<std::string, const SafetensorsFile *>;

    void open_shards(const std::string &dir);
    FileOfTensor::const_iterator entry_of(const std::string &name) const;

    std::string listing_;                           // the index, or the only file
    std::map<std::string, SafetensorsFile> files_;  // by file name
    FileOfTensor where_;                            // by tensor
};

// Writes weights in the order of `specs`, in shards if they exceed `shard_bytes`, and then removes the weights that were there before.
class HfWriter {
  public:
    HfWriter(const std::string &dir, const std::vector<TensorSpec> &specs, size_t shard_bytes = 5'000'000'000);

    // Writes the next `count` elements of a tensor. X is float or bf16.
    template <class X> void write(const std::string &name, const X *data, size_t count, Memory &memory);
    void finish();

  private:
    void open_shard();
    std::string file_name(size_t shard) const;
    void write_index() const;
    void remove_others() const;

    std::string dir_;
    std::vector<std::vector<TensorSpec>> shards_;
    size_t shard_ = 0;  // the open one
    std::unique_ptr<SafetensorsWriter> file_;
};
