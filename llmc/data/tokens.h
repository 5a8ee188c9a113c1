// Prepared data: token ids, which of them are targets, and where documents begin. data/prepare.py writes it; here it is mapped
// and checked, never copied.
//
// One safetensors file:  tokens (N) U16 or I32     loss_mask (N) U8     doc_offsets (documents + 1) I64
//   loss_mask[t] = 1 says that token t is predicted from the tokens before it, so a document's first token never has it;
//   document i holds the tokens doc_offsets[i] .. doc_offsets[i+1]-1.
// Metadata, all strings: kind ("pretrain", "sft", "pref", or "prompts" without targets), vocab_size of the tokenizer, tokenizer_hash
// (tokenizer.h), and what data/prepare.py adds for the record.
//
// Of kind pref, documents are pairs: 2i is the chosen answer of pair i, with its prompt, 2i+1 the rejected one; targets are the answers' tokens.
// margin (pairs) F32, if it is there, says by how much the chosen answer is better.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "../io/safetensors.h"

// The ids of one document, int32 whichever way they are stored: exactly one of the two pointers is set.
struct TokenIds {
    const uint16_t *u16;
    const int32_t *i32;
    size_t count;

    size_t size() const { return count; }
    int32_t operator[](size_t t) const { return i32 ? i32[t] : int32_t(u16[t]); }
};

class PreparedData {
  public:
    // Checks all of the file in one parallel pass and refuses what a model of `vocab` tokens cannot train on. `tokenizer_hash` is
    // that of the model's tokenizer; empty if the model has none, and then it is not compared.
    PreparedData(const std::string &path, size_t vocab, const std::string &tokenizer_hash);

    size_t documents() const { return offsets_.size() - 1; }
    size_t length(size_t i) const { return size_t(offsets_[i + 1] - offsets_[i]); }  // of document i, as what follows
    size_t targets(size_t i) const { return targets_[i]; }
    TokenIds tokens(size_t i) const;
    std::span<const uint8_t> mask(size_t i) const { return mask_.subspan(size_t(offsets_[i]), length(i)); }

    // A sample is a document, or a pair of them: documents first(s) to first(s + 1).
    bool pairs() const { return per_sample_ == 2; }
    size_t size() const { return documents() / per_sample_; }
    size_t first(size_t s) const { return s * per_sample_; }
    size_t sample_length(size_t s) const { return size_t(offsets_[first(s + 1)] - offsets_[first(s)]); }
    size_t sample_targets(size_t s) const;
    bool has_margins() const { return !margins_.empty(); }
    float margin(size_t s) const { return has_margins() ? margins_[s] : 0; }

    size_t total_tokens() const { return mask_.size(); }
    size_t total_targets() const { return total_targets_; }
    const std::string &path() const { return map_.file().path(); }
    const std::string &kind() const { return metadata().at("kind"); }
    const Metadata &metadata() const { return map_.file().metadata(); }

  private:
    void find_arrays();
    void check_metadata(const std::string &tokenizer_hash) const;
    void check_offsets() const;
    void check_documents(size_t vocab);  // and counts their targets
    [[noreturn]] void refuse_document(size_t i, size_t vocab) const;

    SafetensorsMap map_;  // what the spans below point into
    std::span<const uint16_t> u16_;
    std::span<const int32_t> i32_;
    std::span<const uint8_t> mask_;
    std::span<const int64_t> offsets_;
    std::span<const float> margins_;  // (pairs) or empty
    std::vector<size_t> targets_;     // (documents)
    size_t total_targets_ = 0, per_sample_ = 1;
};
