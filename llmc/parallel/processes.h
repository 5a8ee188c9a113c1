// The end of a run whose ranks are processes, started by MPI (comm_mpi.cpp) or by hand (comm_sockets.cpp).
#pragma once
#include "comm.h"

void say_last(const std::string &message);  // prints the message before a process ends

// Runs f on the communicator of all ranks and returns its result when all ranks have finished. An error on which all ranks agreed is rethrown
// on rank 0, and the other ranks silently return 1. Any other error ends the run on all ranks: end_everywhere prints it and does not return.
int run_process(Comm &comm, const std::function<int(Comm &)> &f, const std::function<void(const std::string &)> &end_everywhere);
