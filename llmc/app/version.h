// The text of --version: what a report of a bug needs.
#pragma once
#include <string>

#include "program.h"

std::string version(const Program &program);
