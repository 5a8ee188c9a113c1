// Converts the flags of grpo and ppo to the options of rewards, advantages and losses.
#pragma once
#include "advantages.h"
#include "options.h"
#include "policy_loss.h"
#include "shaping.h"

struct PolicyOptions {
    ShapingOptions shaping;
    AdvantageOptions advantage;
    PolicyLossOptions loss;
};

inline double kl_horizon(const Options &o) { return o.kl_target.size() > 1 ? o.kl_target[1] : 10000; }  // answers
PolicyOptions policy_options(const Options &o,
                             Task task);  // dies if a value is out of range, or two values contradict each other
