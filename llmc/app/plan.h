// For --plan: prints the needs of a run without starting it. Both functions return the exit code.
#pragma once
#include <optional>

#include "../train/continuation.h"
#include "../train/run.h"

int print_plan(const Run &run, const std::optional<Continuation> &continuation);
int print_fit(const Run &run);  // --fit: the longest sample for more ranks
