// Agreement among ranks that are processes, each started by hand: TCP through rank 0. Slices go from GPU to GPU by NCCL (comm_nccl.h), whose id
// is agreed on here; this communicator refuses them.
#pragma once
#include "comm.h"
#include "rendezvous.h"

// Finds the other ranks, runs f as this process's rank and returns its result. An error that all ranks agreed on is thrown from here on
// rank 0, while the others return 1 in silence; so is one on the way to the others, where it happens. Any other is printed where it
// happened and ends the run on all ranks, as does a rank that waits too long or whose process dies.
int run_sockets(const Rendezvous &rendezvous, const CommOptions &options, const std::function<int(Comm &)> &f);
