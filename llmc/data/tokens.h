// Prepared data is a file with token ids, a mask of the targets, and the offsets of documents. data/prepare.py writes it. PreparedData checks the
// whole file at the start of a run, and reads each document when it is used.
//
// The file may change during a run of several weeks. If another file is renamed over it, the run continues to read the old file, which is open. If
// the file is overwritten or truncated in place, the run notices: it reads a document into memory (with a mapping, a truncated file would end the
// program by SIGBUS) and compares its checksum with the one from the initial check.
//
// One safetensors file:  tokens (N) U16 or I32     loss_mask (N) U8     doc_offsets (documents + 1) I64
//   loss_mask[t] = 1 marks token t as a target, predicted from the tokens before it; it is 0 for a document's first token;
//   document i holds the tokens doc_offsets[i] .. doc_offsets[i+1]-1.
// Metadata, all strings: kind ("pretrain", "sft", "pref", "unpaired", "rl", or "prompts" without targets), vocab_size of the tokenizer, tokenizer_hash
// (tokenizer.h; empty if there was none), and optionally end_of_turn (ids with commas between), chat_template and read_as (ChatFormat in samples.h), and
// further entries that data/prepare.py adds for information.
//
// The optional entry `checksums` detects damage and edits: numbers separated by spaces, the first decimal, the others with 16 hex digits. A checksum
// is XXH3 with 64 bits (../core/hash.h), with the previous checksum as seed where several arrays are combined:
//   LEAST     a block is the shortest run of documents with at least this many tokens; the last block has the rest
//   ARRAYS    checksum of doc_offsets, and then of margin, of label, or of column_offsets and columns, if there are any
//   BLOCK...  checksum of each block: of its tokens, as I32, and then of its loss_mask
//
// In data of kind pref, documents form pairs: document 2i is the prompt of pair i with the chosen answer, and 2i+1 the prompt with the rejected
// answer; targets are the tokens of the answers. The optional array margin (pairs) F32 is the amount by which the chosen answer is better.
// In data of kind unpaired, a document is a prompt with an answer, whose tokens are the targets. The array label (documents) F32 is 1 if the answer
// is desirable, else 0.
// In data of kind rl, bytes column_offsets[i] .. column_offsets[i+1]-1 of the optional array columns U8 are the record's other fields, a JSON object.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "../io/safetensors.h"
#include "samples.h"

class PreparedData final : public Samples {
  public:
    // Checks the whole file in one parallel pass, and dies if a model of `vocab` tokens cannot train on it. `tokenizer_hash` is the hash of the
    // model's tokenizer, and is compared with the file's unless one of the hashes is empty.
    PreparedData(const std::string &path, size_t vocab, const std::string &tokenizer_hash);

    size_t documents() const override { return offsets_.size() - 1; }
    size_t length(size_t i) const override { return size_t(offsets_[i + 1] - offsets_[i]); }
    size_t targets(size_t i) const override { return targets_[i]; }
    Document document(size_t i) const override;  // dies if it has changed since the check
    const InputFile &file() const override { return file_.file(); }
    std::string fingerprint() const override;  // of the arrays, without the metadata
    ChatFormat chat_format() const override { return chat_format_; }
    bool pairs() const override { return pairs_; }
    bool judged() const override { return kind() == "unpaired"; }
    bool desirable(size_t s) const override { return !judged() || labels_[s] == 1; }
    bool has_margins() const override { return !margins_.empty(); }
    float margin(size_t s) const override { return has_margins() ? margins_[s] : 0; }
    std::string columns(size_t s) const override;
    std::string name() const override;  // includes its source
    const std::string &kind() const { return metadata().at("kind"); }
    const Metadata &metadata() const { return file_.metadata(); }

  private:
    using Blocks = std::vector<size_t>;  // the first document of each block, and the number of all documents

    Document read_tokens(size_t begin, size_t n) const;
    Document read_document(size_t i) const { return read_tokens(size_t(offsets_[i]), length(i)); }
    void read_arrays();
    void read_checksums();
    uint64_t checksum_of_arrays() const;
    Blocks blocks() const;
    void check_metadata(const std::string &tokenizer_hash) const;
    void read_chat_format(size_t vocab);
    void check_offsets() const;
    void check_documents(size_t vocab);  // also checks their blocks, and counts their targets
    [[noreturn]] void refuse_block(size_t first, size_t last) const;
    [[noreturn]] void refuse_document(size_t i, size_t vocab) const;

    SafetensorsFile file_;
    ChatFormat chat_format_;
    std::vector<int64_t> offsets_;         // (documents + 1)
    std::vector<float> margins_;           // (pairs) or empty
    std::vector<float> labels_;            // (documents) or empty
    std::vector<int64_t> column_offsets_;  // (documents + 1) or empty
    std::vector<uint8_t> columns_;
    std::vector<size_t> targets_;      // (documents)
    std::vector<uint64_t> checksums_;  // (documents)
    size_t block_tokens_ = size_t(1) << 19;
    std::vector<uint64_t> stored_;  // (1 + blocks) checksums of the arrays and of the blocks, or empty
    bool pairs_ = false;
};
