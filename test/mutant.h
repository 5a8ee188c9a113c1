// Included by the compiler in front of every file of the copy that scripts/mutants.py makes. Its environment says which known bug of
// test/mutants.txt a program has.
#pragma once
#include <cstdlib>

inline const int active_mutant = std::getenv("LLMC_MUTANT") ? std::atoi(std::getenv("LLMC_MUTANT")) : 0;
inline bool mutant(int number) { return number == active_mutant; }
