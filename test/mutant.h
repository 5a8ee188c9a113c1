// Bugs that a test must notice: MUTANT(7, dw[c] = sum, dw[c] += sum) is the right expression in every build but that of
// `make test-mutants`, where the environment variable LLMC_MUTANT=7 picks the buggy one. The list is test/mutants.txt.
#pragma once

#ifdef LLMC_MUTANTS
#include <cstdlib>
inline const int active_mutant = std::getenv("LLMC_MUTANT") ? std::atoi(std::getenv("LLMC_MUTANT")) : 0;
#define MUTANT(number, buggy, right) (active_mutant == (number) ? (buggy) : (right))
#else
#define MUTANT(number, buggy, right) (right)
#endif
