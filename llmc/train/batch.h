// A batch of rollouts. An iteration of reinforcement learning samples it, prepares it, and takes its steps on it:
//
//   RolloutSource::next()   samples rollouts and their rewards (rollout_source.h); with --rollouts they come from a file
//   Policy::prepare()       adds log-probabilities by the reference and the current policy, the critic's values, and the advantages
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

    std::vector<double> rewards = {};  // shaped
    OfTokens advantages = {};
    std::vector<bool> clipped = {};  // (rollouts) true: --reward_clip_range has changed the reward after its baseline
    OfTokens old_logps = {};         // by the policy before the first step on the batch; empty without --is_correction
    OfTokens reference_logps = {};   // empty without a reference
    OfTokens values = {};            // by the critic before the first step on the batch; empty unless ppo
    OfTokens returns = {};           // the critic's targets

    const std::vector<double> &old_logp(size_t i) const { return old_logps.empty() ? rollouts[i].logp : old_logps[i]; }
};
