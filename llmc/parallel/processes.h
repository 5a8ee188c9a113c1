// How a run of ranks that are processes ends, over MPI (comm_mpi.cpp) or started by hand (comm_sockets.cpp).
#pragma once
#include "comm.h"

void say_last(const std::string &message);  // prints the message before a process ends

// Runs f on the communicator of all ranks and returns its result when all have come to its end. An error that all ranks agreed on is thrown from
// here on rank 0, while the others return 1 in silence. Any other ends the run on all ranks: end_everywhere prints it, and does not return.
int run_process(Comm &comm, const std::function<int(Comm &)> &f, const std::function<void(const std::string &)> &end_everywhere);
