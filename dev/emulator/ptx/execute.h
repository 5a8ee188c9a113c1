// Runs the blocks of a cluster, from the start or from where they stopped.
#pragma once
#include <random>

#include "warp.h"

namespace ptx {
// Returns true if all blocks have ended. Otherwise all their warps wait, which is an error unless the cluster may wait for another one.
bool run_cluster(Cluster &cluster, std::mt19937 &random, bool may_wait);
}  // namespace ptx
