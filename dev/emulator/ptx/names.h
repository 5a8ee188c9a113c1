// The names of instructions and special registers.
#pragma once
#include "kernel.h"

namespace ptx {

const Forms &all_forms();                  // of every instruction
bool is_special(const std::string &name);  // "%tid.x"

// How many instructions of sm_90 nvcc 13 makes of one of PTX that has none of its own, on the way that usual arguments take.
uint8_t machine_instructions(const std::string &name);

// A name without what changes neither the value nor the counts of an instruction: hints to caches, memory orders and their scopes (blocks
// run one after the other, and only barriers order the warps of one), and "::cta".
std::string plain(const std::string &name);
}  // namespace ptx
