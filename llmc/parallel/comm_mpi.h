// Ranks as processes started by mpirun. Slices are in host memory.
#pragma once
#include "comm.h"

std::string mpi_library();  // the name and version of the MPI that this program was built with

bool started_by_mpirun();  // or by srun; otherwise this process is the only rank and does not use MPI

// Called by a process that is the only rank. If a launcher has started several processes, each of which would do the whole run, the first one dies and
// the others end silently.
void expect_to_be_alone();

// Runs f as this process's rank and returns its result. If all ranks agreed on an error, rank 0 throws it from here and the others silently
// return 1. Any other error is printed on its rank and ends the run on all ranks, and so does a rank that waits too long.
int run_mpi(const CommOptions &options, const std::function<int(Comm &)> &f);
