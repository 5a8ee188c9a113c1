// The model of --teacher_model: a frozen one whose probabilities the trained model learns. distill compares the distributions of both (distillation.h);
// grpo and ppo add the log-ratio of a sampled token's two probabilities to its advantage (advantages.h).
#pragma once
#include "run.h"

// True if the teacher is the trained model without its adapters, which needs no second model.
bool teacher_is_base(const Run &run);

// Returns the teacher, without adapters. All ranks call it. Dies if it cannot teach the trained model.
ModelSpec teacher_spec(const Run &run);
