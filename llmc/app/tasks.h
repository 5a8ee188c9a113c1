// The tasks pretrain, sft, dpo, rm, distill, grpo, ppo, eval, generate, merge, the demo and --plan.
#pragma once
#include "../train/run.h"
#include "command_line.h"

// Runs a task and returns the exit code. Every rank calls it. `program` is "train_llama"; `sharing` is the number of ranks that share the device's
// memory, including this one.
int run_task(const char *program, const Parsed &parsed, Comm &comm, size_t sharing, const Device &device);

int evaluate(Run &run);  // eval.cpp
int merge(Run &run);     // merge.cpp
