// Returns the text of --help: the common flags of a task by subject, on one screen; with `--help all` every flag.
#pragma once
#include <string>

#include "../train/options.h"

std::string help(const std::string &program, Task task, bool all);
