// The names of instructions and special registers.
#pragma once
#include "kernel.h"

namespace ptx {

const Forms &all_forms();                  // of every instruction
bool is_special(const std::string &name);  // "%tid.x"

// Number of sm_90 instructions that nvcc 13 generates for a PTX instruction, on the path that usual arguments take.
uint8_t machine_instructions(const std::string &name);

// Removes the modifiers that change neither the value nor the counts of an instruction: cache hints, "::cta", and memory orders with their scopes
// (blocks run one after another, and only barriers order the warps of a block).
std::string plain(const std::string &name);
}  // namespace ptx
