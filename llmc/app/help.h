// Returns the text of --help: the common flags of a task by subject, on one screen; with `--help all` every flag.
#pragma once
#include <string>

#include "../train/options.h"

constexpr size_t shown_samples = 3;  // of the task show, unless --max_samples is given

std::string help(const std::string &program, Task task, bool all);
std::string help_of_show(const std::string &program);
