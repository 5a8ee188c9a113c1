// What the flags of grpo and ppo say to the functions that compute rewards, advantages and losses.
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

PolicyOptions policy_options(const Options &o, Task task);  // dies if a value has no meaning, or two contradict each other
