// Prepared data: token ids, which of them are targets, and where documents begin. data/prepare.py writes it; here it is checked, and
// its documents are read when they are used.
//
// The file may change while a run goes on for weeks. One that another was renamed over stays what it was, as it is open. One that is
// overwritten or cut off in place is noticed: a document is read (a mapping of it would end the program by SIGBUS), and the copy, not
// the file, is compared with the checksum of what was checked, so that nothing can come in between.
//
// One safetensors file:  tokens (N) U16 or I32     loss_mask (N) U8     doc_offsets (documents + 1) I64
//   loss_mask[t] = 1 says that token t is predicted from the tokens before it, so a document's first token never has it;
//   document i holds the tokens doc_offsets[i] .. doc_offsets[i+1]-1.
// Metadata, all strings: kind ("pretrain", "sft", "pref", or "prompts" without targets), vocab_size of the tokenizer, tokenizer_hash
// (tokenizer.h; empty if there was none), and what data/prepare.py adds for the record.
//
// Of kind pref, documents are pairs: 2i is the chosen answer of pair i, with its prompt, 2i+1 the rejected one; targets are the answers' tokens.
// margin (pairs) F32, if it is there, says by how much the chosen answer is better.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "../io/safetensors.h"

struct Document {
    std::vector<int32_t> tokens;  // whichever way they are stored
    std::vector<uint8_t> mask;    // as long
};

class PreparedData {
  public:
    // Checks all of the file in one parallel pass and refuses what a model of `vocab` tokens cannot train on. `tokenizer_hash` is
    // that of the model's tokenizer; where it or the file's is empty, they are not compared.
    PreparedData(const std::string &path, size_t vocab, const std::string &tokenizer_hash);

    size_t documents() const { return offsets_.size() - 1; }
    size_t length(size_t i) const { return size_t(offsets_[i + 1] - offsets_[i]); }  // of document i, as what follows
    size_t targets(size_t i) const { return targets_[i]; }
    Document document(size_t i) const;  // as it was checked, or die; safe from several threads

    // A sample is a document, or a pair of them: documents first(s) to first(s + 1).
    bool pairs() const { return per_sample_ == 2; }
    size_t size() const { return documents() / per_sample_; }
    size_t first(size_t s) const { return s * per_sample_; }
    size_t sample_length(size_t s) const { return size_t(offsets_[first(s + 1)] - offsets_[first(s)]); }
    size_t sample_targets(size_t s) const;
    bool has_margins() const { return !margins_.empty(); }
    float margin(size_t s) const { return has_margins() ? margins_[s] : 0; }

    size_t total_tokens() const { return size_t(offsets_.back()); }
    size_t total_targets() const { return total_targets_; }
    const InputFile &file() const { return file_.file(); }
    const std::string &path() const { return file_.path(); }
    const std::string &kind() const { return metadata().at("kind"); }
    const Metadata &metadata() const { return file_.metadata(); }

  private:
    Document read_document(size_t i) const;
    void read_arrays();
    void check_metadata(const std::string &tokenizer_hash) const;
    void check_offsets() const;
    void check_documents(size_t vocab);  // and counts their targets
    [[noreturn]] void refuse_document(size_t i, size_t vocab) const;

    SafetensorsFile file_;
    std::vector<int64_t> offsets_;     // (documents + 1)
    std::vector<float> margins_;       // (pairs) or empty
    std::vector<size_t> targets_;      // (documents)
    std::vector<uint64_t> checksums_;  // (documents)
    size_t total_targets_ = 0, per_sample_ = 1;
};
