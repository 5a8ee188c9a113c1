// A batch of rollouts. An iteration of reinforcement learning samples it, prepares it, and takes its steps on it:
//
//   RolloutSource::next()   samples rollouts and their rewards (rollout_source.h); with --rollouts they come from a file
//   Policy::measure()       adds log-probabilities by the current policy, the reference and the teacher, and the critic's values
//   Policy::estimate()      adds rewards, advantages and returns, which follow from the other members
//   steps                   read the batch, and only change the policy and the critic
#pragma once
#include <nlohmann/json.hpp>

#include "rollouts.h"

// Arrays are indexed [i][t]: token t of the answer of rollout i.
struct Batch {
    using OfTokens = std::vector<std::vector<double>>;

    Rollouts rollouts;
    size_t begin = 0;                                               // number of prompts drawn before this batch
    int64_t written_at = 0;                                         // policy updates of the weights that wrote the answers
    nlohmann::ordered_json log = nlohmann::ordered_json::object();  // for the log line of its first step

    bool is_measured = false;
    OfTokens old_logps = {};        // by the policy before the first step on the batch; empty without --is_correction
    OfTokens reference_logps = {};  // empty without a reference
    OfTokens teacher_logps = {};    // empty without a teacher
    OfTokens values = {};           // by the critic before the first step on the batch; empty unless ppo

    std::vector<double> rewards = {};  // shaped
    OfTokens advantages = {};
    OfTokens returns = {};           // the critic's targets
    std::vector<bool> clipped = {};  // (rollouts) true: --reward_clip_range has changed the reward after its baseline

    const std::vector<double> &old_logp(size_t i) const { return old_logps.empty() ? rollouts[i].logp : old_logps[i]; }
};

// Write and read a batch in a checkpoint: name.jsonl has the answers, name.safetensors the measured values, and the returned state the rest. The reader
// estimates the rewards again. updates: policy updates so far, which a resumed run counts from 0.
nlohmann::json save_batch(const Batch &batch, const std::string &dir, const std::string &name, int64_t updates);
Batch load_batch(const nlohmann::json &state, const std::string &dir, const std::string &name, size_t vocab);
