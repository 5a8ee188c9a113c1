// The source of a step's samples: a prepared file (tokens.h), or memory (rollouts). A sample is one document or a pair of documents. The same code
// packs, splits and deals samples from both sources.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "../core/common.h"
#include "../core/file.h"

struct Document {
    std::vector<int32_t> tokens;
    std::vector<uint8_t> mask;  // (tokens) mask[t] = 1: token t is a target, predicted from the tokens before it. mask[0] = 0
};

// The chat format of a data set: the template and the end-of-turn tokens that a model trained on it must be used with.
struct ChatFormat {
    std::vector<int32_t> end_of_turn = {};  // the special tokens that end an answer
    std::string chat_template = {};         // the template that rendered the chats; empty without chats
    std::string read_as = {};  // the class by which transformers reads the tokenizer, if it makes other ids of some texts
};

// Returns the number of tokens before the first target: of a chat or a rollout, its prompt. A document without targets is all prompt.
inline size_t prompt_length(const Document &document) {
    return size_t(std::ranges::find(document.mask, uint8_t(1)) - document.mask.begin());
}

class Samples {
  public:
    virtual ~Samples() = default;

    virtual size_t documents() const = 0;
    virtual size_t length(size_t i) const = 0;                                 // tokens of document i
    virtual size_t targets(size_t i) const = 0;                                // number of targets among them
    virtual Document document(size_t i) const = 0;                             // thread-safe
    virtual const InputFile &file() const = 0;                                 // the source of the samples
    virtual std::string fingerprint() const { return ::fingerprint(file()); }  // hash of all contents
    virtual ChatFormat chat_format() const { return {}; }
    virtual bool pairs() const { return false; }   // true: a sample is two documents
    virtual bool judged() const { return false; }  // true: each sample has a label, which desirable() returns
    virtual bool desirable(size_t /*sample*/) const { return true; }
    virtual bool has_margins() const { return false; }
    virtual float margin(size_t /*sample*/) const { return 0; }  // of a pair: the amount by which its chosen answer is better

    virtual std::string columns(size_t /*sample*/) const {
        return "{}";
    }  // the other fields of its record, as JSON, for reward functions

    virtual std::string name() const { return path(); }  // for messages

    const std::string &path() const { return file().path(); }
    size_t size() const { return documents() / per_sample(); }
    size_t first(size_t s) const { return s * per_sample(); }  // sample s is documents first(s) up to, but without, first(s + 1)
    size_t sample_length(size_t s) const { return sum(s, &Samples::length); }
    size_t sample_targets(size_t s) const { return sum(s, &Samples::targets); }
    size_t total_tokens() const { return total(&Samples::length); }
    size_t total_targets() const { return total(&Samples::targets); }

  private:
    size_t per_sample() const { return pairs() ? 2 : 1; }
    size_t sum(size_t s, size_t (Samples::*of)(size_t) const) const {
        size_t n = 0;
        for (size_t i = first(s); i < first(s + 1); i++) n += (this->*of)(i);
        return n;
    }
    size_t total(size_t (Samples::*of)(size_t) const) const {
        size_t n = 0;
        for (size_t i = 0; i < documents(); i++) n += (this->*of)(i);
        return n;
    }
};

// Returns the numbers of the first n samples: 0, 1, ..., n - 1.
inline std::vector<size_t> first_samples(size_t n) {
    std::vector<size_t> numbers(n);
    std::iota(numbers.begin(), numbers.end(), size_t(0));
    return numbers;
}

// Sequences to evaluate as a whole, without targets.
class Sequences final : public Samples {
  public:
    explicit Sequences(std::vector<std::vector<int32_t>> all) : all_(std::move(all)) {}

    size_t documents() const override { return all_.size(); }
    size_t length(size_t i) const override { return all_[i].size(); }
    size_t targets(size_t) const override { return 0; }
    Document document(size_t i) const override { return {all_[i], std::vector<uint8_t>(all_[i].size())}; }
    const InputFile &file() const override { die("sequences in memory come from no file"); }

  private:
    std::vector<std::vector<int32_t>> all_;
};
