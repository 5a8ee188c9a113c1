// A batch of rollouts: an iteration of reinforcement learning makes it, prepares it, and takes its steps on it.
//
//   RolloutSource::next()   rollouts with their rewards (rollout_source.h); or a file has them (--rollouts)
//   Policy::prepare()       log-probabilities by the reference and by the policy now, the critic's values, and from all of them advantages
//   steps                   read it, and change only the policy and the critic
#pragma once
#include <nlohmann/json.hpp>

#include "rollouts.h"

// Arrays are indexed [i][t]: token t of the answer of rollout i.
struct Batch {
    using OfTokens = std::vector<std::vector<double>>;

    Rollouts rollouts;
    size_t begin = 0;                                               // prompts drawn before the last draw
    int64_t written_at = 0;                                         // updates of the policy before its weights wrote the answers
    nlohmann::ordered_json log = nlohmann::ordered_json::object();  // for the line of its first step

    std::vector<double> rewards = {};  // shaped
    OfTokens advantages = {};
    OfTokens old_logps = {};        // by the policy before the first step; empty without --is_correction
    OfTokens reference_logps = {};  // empty without a reference
    OfTokens values = {};           // by the critic before it learnt from any of these rollouts; empty unless ppo
    OfTokens returns = {};          // the critic's targets

    const std::vector<double> &old_logp(size_t i) const { return old_logps.empty() ? rollouts[i].logp : old_logps[i]; }
};
