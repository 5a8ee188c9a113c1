// The generation engine: continues many prompts with one model. Decoding computes one token of every running sequence in one pass, because a pass
// reads all weights, however many sequences share it. A sequence that ends makes room for the next prompt at once (continuous batching; Yu et al.,
// "Orca", 2022), and keys and values are stored in pages (attention_decode.h), so that no sequence reserves room for its longest end.
//
// A prompt is computed once: its samples share its full pages, and each has a copy of the last, partial one. If the cache is full, the sequence that was
// admitted last gives its pages back, and is computed anew from its tokens later (preemption).
//
// Random numbers are keyed by (seed, prompt, sample, position). So an answer depends neither on the other prompts, nor on the number of sequences that run
// together, nor on the cache, but for the rounding of products of other sizes.
#pragma once
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "../model/model.h"
#include "stop.h"

struct Prompt {
    std::vector<int32_t> tokens;  // at least one
    uint32_t number;              // the key of its random numbers
};

struct Completion {
    std::vector<int32_t> tokens;    // with the token that ended it
    bool ended = false;             // by an end-of-sequence token or a stop string; else max_new_tokens was reached
    bool stopped = false;           // by a stop string
    std::vector<double> logp = {};  // GenerationSettings::logps: of each token, in nats, among all tokens at the temperature

    std::span<const int32_t> answer() const {  // without the end-of-sequence token
        return std::span(tokens).first(tokens.size() - (ended && !stopped));
    }
};

struct GenerationSettings {
    size_t max_new_tokens;
    Sampling sampling;
    uint64_t seed;
    size_t samples = 1;        // of each prompt
    size_t vocabulary;         // ids that may be sampled: some models have more rows than their tokenizer has tokens
    std::vector<int32_t> eos;  // tokens that end a sequence
    StopStrings stop = {};     // texts that end it
    bool logps = false;        // whether log-probabilities are kept
};

// The sizes that generation needs of a model. `pages` begins as what all sequences that run together need at most, and may be made less, but no less
// than `sequence_pages`.
struct GenerationLimits {
    size_t sequences, sequence_pages, pages;        // sequences that run together; pages of the longest, and of the cache
    size_t longest_prompt, longest, prompt_tokens;  // tokens of the longest prompt, of the longest sequence, and of all prompts
    size_t draws, occurred;                         // ModelLimits

    GenerationLimits() = default;
    GenerationLimits(std::span<const Prompt> prompts, const GenerationSettings &settings, size_t most_sequences);
    size_t row_tokens() const;  // of the longest row: prompts, or a sequence that is computed again
    void use(ModelLimits &limits) const;
};

// Continues the prompts. Returns the completions of prompt 0, of prompt 1, ..., each `samples` in number. `progress` is told of each that is finished, and
// how many tokens were generated so far. The generator belongs to a model with these limits.
std::vector<Completion> generate(Generator &generator, const GenerationLimits &limits, std::span<const Prompt> prompts,
                                 const GenerationSettings &settings,
                                 const std::function<void(size_t finished, size_t tokens)> &progress = nullptr);

// The text of an answer: up to a stop string, and without the special token that ended it.
std::string text_of(const Completion &completion, const Tokenizer &tokenizer, const StopStrings &stop);

// Where ranks continue prompts together: this rank's prompts, dealt round-robin, each numbered by its place from `first` on;
// and then the completions of all, which every rank gets, of prompt 0, of prompt 1, ...
std::vector<Prompt> own_prompts(Comm &comm, std::span<const std::vector<int32_t>> prompts, uint32_t first = 0);
std::vector<Completion> share_completions(Comm &comm, std::span<const Completion> own, size_t prompts, size_t samples);
