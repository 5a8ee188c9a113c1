// The text of --help: the common flags of a task by subject, which fit on one screen, or with `--help all` every flag.
#pragma once
#include <string>

#include "../train/options.h"

std::string help(const std::string &program, Task task, bool all);
