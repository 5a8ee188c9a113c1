// The generation engine: continues many prompts with one model. A decoding pass computes one token of every running sequence, because a pass reads
// all weights for any number of sequences. When a sequence ends, the next prompt takes its place at once (continuous batching; Yu et al., "Orca",
// 2022). Keys and values are stored in pages (attention_decode.h), so no sequence reserves memory for its longest possible answer. Linear attention
// has a state of fixed size in a slot for each sequence (delta_decode.h).
//
// A prompt is computed once: its samples share its full pages, and each has a copy of the last, partial page and of the state. If the cache is full, the
// sequence that was admitted last frees its pages, and is recomputed from its tokens later (preemption).
//
// An answer is one turn, or an episode of several: at the end of a turn its environment is asked (environment.h), and the observation that it replies with is
// appended, several tokens in a pass. Until then the sequence keeps its pages, and other sequences go on.
//
// Random numbers are keyed by (seed, prompt, sample, position). So, apart from the rounding of products of other sizes, an answer does not depend on
// other prompts, on the number of sequences that run together, or on the cache.
#pragma once
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "../model/model.h"
#include "environment.h"
#include "rollouts.h"
#include "stop.h"

struct Prompt {
    std::vector<int32_t> tokens;  // at least one
    uint32_t number;              // key of its random numbers
};

struct Completion {
    std::vector<int32_t> tokens;  // with the token that ended it
    bool ended = false;           // true: an end-of-sequence token or a stop string; false: max_new_tokens was reached
    bool stopped = false;         // true: a stop string
    std::vector<double> logp =
        {};  // with GenerationSettings::logps: log p of each sampled token among all tokens at the temperature, in nats
    std::vector<uint8_t> mask = {};         // (tokens) 1: sampled; 0: observed
    std::vector<double> turn_rewards = {};  // the environment's, or no_reward; empty without one
    size_t calls = 0, failures = 0;         // of tools, by all turns
    std::vector<int32_t> prompt = {};       // of an episode: the asked one, with what the environment has appended

    std::span<const int32_t> answer() const {  // without the end-of-sequence token
        return std::span(tokens).first(tokens.size() - (ended && !stopped));
    }
};

struct GenerationSettings {
    size_t max_new_tokens;  // of an answer; in an episode sampled and observed ones
    Sampling sampling;
    uint64_t seed;
    size_t samples = 1;                  // per prompt
    size_t vocabulary;                   // ids that may be sampled: some models have more rows than tokens
    std::vector<int32_t> eos;            // tokens that end a sequence
    StopStrings stop = {};               // texts that end a sequence
    bool logps = false;                  // true: keep log-probabilities
    Environment *environment = nullptr;  // answers are episodes; the first of this environment is sample 0 of prompt 0
    size_t prompt_growth = 0;            // tokens that it may append to the longest prompt
};

// The sizes of a model for generation. `pages` is initially the maximum need of all concurrent sequences, and may be reduced down to
// `sequence_pages`.
struct GenerationLimits {
    size_t sequences, sequence_pages, pages;        // concurrent sequences; pages of the longest sequence; pages of the cache
    size_t longest_prompt, longest, prompt_tokens;  // tokens of the longest prompt, of the longest sequence, of all prompts
    size_t draws, occurred, appended = 0;           // see ModelLimits

    GenerationLimits() = default;
    GenerationLimits(std::span<const Prompt> prompts, const GenerationSettings &settings, size_t most_sequences);
    size_t row_tokens() const;  // tokens of the longest row: prompts, or a recomputed sequence
    // Answers are episodes: observations are appended many tokens at a time, or with linear attention, whose recurrence takes one token of a
    // sequence, one by one.
    void use_environment(const ModelConfig &config) { appended = config.delta.Hk ? 0 : 256; }
    // sp: the ranks that share a row in training. One rank computes a row of generation alone, in arrays for its part of theirs.
    void use(ModelLimits &limits, size_t sp = 1) const;
};

// Returns a function that calls `tell` every ten seconds with a line on the progress of `total` completions.
std::function<void(size_t finished, size_t tokens)> told_progress(size_t total, std::function<void(const std::string &)> tell);

// Continues the prompts. Returns `samples` completions of prompt 0, of prompt 1, .... `progress` is called after each token, with the
// numbers of finished completions and of tokens so far. The generator belongs to a model with these limits. After a signal
// (../core/signals.h) the result is incomplete.
std::vector<Completion> generate(Generator &generator, const GenerationLimits &limits, std::span<const Prompt> prompts,
                                 const GenerationSettings &settings,
                                 const std::function<void(size_t finished, size_t tokens)> &progress = nullptr);

// Returns the text of an answer up to a stop string, without the special token that ended it.
std::string text_of(const Completion &completion, const Tokenizer &tokenizer, const StopStrings &stop);

// For ranks that continue prompts together: returns this rank's prompts, dealt round-robin and numbered from `first` on; and afterwards the
// completions of all ranks, on every rank, of prompt 0, of prompt 1, ...; dies if the logits of a token were not finite. The tp ranks of a tensor group
// have the same prompts.
std::vector<Prompt> own_prompts(Comm &comm, size_t tp, std::span<const std::vector<int32_t>> prompts, uint32_t first = 0);
std::vector<Completion> share_completions(Comm &comm, size_t tp, std::span<const Completion> own, size_t prompts, size_t samples);
