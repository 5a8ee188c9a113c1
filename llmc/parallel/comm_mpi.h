// Ranks that are processes started by mpirun. Slices are in host memory.
#pragma once
#include "comm.h"

bool started_by_mpirun();  // or by srun; else this process is alone, and MPI is left alone

// Runs f as this process's rank and returns its result. An error that all ranks agreed on is thrown from here on rank 0, while the others
// return 1 in silence; any other is printed where it happened and ends the run on all ranks, as does a rank that waits too long.
int run_mpi(const CommOptions &options, const std::function<int(Comm &)> &f);
