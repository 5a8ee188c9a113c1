// Reads and writes the weights of a Hugging Face directory: model.safetensors, or shards with an index.
#pragma once
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "safetensors.h"

// The names of weight files, and the prefixes of tensor names.
struct WeightFiles {
    const char *single, *index, *prefix;
};
inline constexpr WeightFiles model_files = {"model.safetensors", "model.safetensors.index.json", ""};
inline constexpr WeightFiles adapter_files = {"adapter_model.safetensors", "", "base_model.model."};  // PEFT's; it has no shards

// The weights of a directory, in one file or in shards. A tensor "transformer.X" may have the name X, as in GPT-2's own files.
class HfWeights {
  public:
    static bool present(const std::string &dir);  // false if there is only config.json: training then starts from random weights
    explicit HfWeights(const std::string &dir, const WeightFiles &files = model_files);

    std::vector<std::string> paths() const;                 // of the files
    std::vector<TensorSpec> tensors() const;                // all tensors in their stored form, without buffers
    const TensorInfo *find(const std::string &name) const;  // null if there is none
    // Reads a tensor into dst in `memory`, as X (float or bf16). Dies at a NaN or an infinity.
    template <class X> void read(const std::string &name, const Shape &shape, X *dst, Memory &memory) const;
    // The same for elements [first, first + count) of the tensor in row-major order.
    template <class X>
    void read_part(const std::string &name, const Shape &shape, size_t first, size_t count, X *dst, Memory &memory) const;
    // Lets reads of a missing tensor return another one: the head of a tied model.
    void read_as(const std::string &name, const std::string &other) { others_[name] = other; }
    // Lets a matrix of `from` rows appear to have `to` rows: each missing row is the mean of the rows in the files.
    void extend(const std::string &name, size_t from, size_t to);
    // Names parts of a larger model that are not read. expect_only() accepts them, and its caller prints notes.
    std::set<std::string> left_out() const;
    void expect_only(const std::vector<std::string> &known) const;  // dies if there is any other tensor, except buffers
    // Dies if a saved buffer contradicts the model: rotary frequencies that are not near one of `frequencies`, or a mask that is not causal.
    void expect_buffers(const std::vector<std::vector<float>> &frequencies) const;
    // True if shape and values are the same. Both must have the tensor.
    bool same(const std::string &name, const HfWeights &other, const std::string &its_name) const;

  private:
    using FileOfTensor = std::map<std::string, const SafetensorsFile *>;

    void open_single(const std::string &path);
    void open_shards(const std::string &dir);
    FileOfTensor::const_iterator entry_of(const std::string &name) const;
    const char *other_part(const std::string &name) const;
    bool is_causal_mask(const std::string &name) const;

    const WeightFiles kind_;
    std::string listing_;                              // the index, or the only file
    std::map<std::string, SafetensorsFile> files_;     // by file name
    FileOfTensor where_;                               // by tensor
    std::map<std::string, std::string> others_;        // set by read_as()
    std::map<std::string, std::vector<float>> means_;  // set by extend(), by the name in the file
};

// Writes weights in the order of `specs`, in shards if they exceed `shard_bytes`. Adapters are saved in one file.
class HfWriter {
  public:
    HfWriter(const std::string &dir, std::vector<TensorSpec> specs, const WeightFiles &files = model_files,
             size_t shard_bytes = 5'000'000'000);

    // Writes the next `count` elements of a tensor. X is float or bf16.
    template <class X> void write(const std::string &name, const X *data, size_t count, Memory &memory);
    void finish();

  private:
    void open_shard();
    std::string file_name(size_t shard) const;
    void write_index() const;

    std::string dir_;
    const WeightFiles kind_;
    std::vector<std::vector<TensorSpec>> shards_;
    size_t shard_ = 0;  // the open shard
    std::unique_ptr<SafetensorsWriter> file_;
};

// True if saved models and adapters have files of this name: configuration, weights, or the files of copy_tokenizer.
bool is_model_file(const std::string &name);

// Copies the existing files of tokenizer and chat template. If `chat_template` is given and differs from the template in any of these files, the copy
// has this template instead.
void copy_tokenizer(const std::string &from_dir, const std::string &to_dir, const std::string &chat_template = "");

// Copies missing older forms of a vocabulary, which other programs read and adapters lack.
void copy_vocabulary(const std::string &from_dir, const std::string &to_dir);
