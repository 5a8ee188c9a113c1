// The compiler includes this file before every file of the copy that scripts/mutants.py makes. The environment variable LLMC_MUTANT is the number
// of the known bug of test/mutants.txt that a program has.
#pragma once
#include <cstdlib>

inline const int active_mutant = std::getenv("LLMC_MUTANT") ? std::atoi(std::getenv("LLMC_MUTANT")) : 0;
inline bool mutant(int number) { return number == active_mutant; }
