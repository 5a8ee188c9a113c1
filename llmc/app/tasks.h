// The tasks pretrain, sft, dpo, rm, grpo, eval, generate, merge, the demo and --plan.
#pragma once
#include "../train/run.h"
#include "command_line.h"

// Runs a task and returns the exit code. Every rank calls it. `program` is "train_llama"; `sharing` counts the ranks,
// this one included, that take their memory from the same pool.
int run_task(const char *program, const Parsed &parsed, Comm &comm, size_t sharing, const ModelFactory &make_model);

int evaluate(Run &run);  // eval.cpp
int merge(Run &run);     // merge.cpp
