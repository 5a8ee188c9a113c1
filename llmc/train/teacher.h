// The models of --teacher_model: frozen ones whose probabilities the trained model learns. distill has one, and compares the distributions of both
// (distillation.h); grpo and ppo add the log-ratio of a sampled token's two probabilities to its advantage (advantages.h), and may have several.
#pragma once
#include "run.h"

// True if the teacher in this directory is the trained model without its adapters, which needs no second model.
bool teacher_is_base(const Run &run, const std::string &dir);

// Returns the teacher in this directory, without adapters. All ranks call it. Dies if it cannot teach the trained model.
ModelSpec teacher_spec(const Run &run, const std::string &dir);
