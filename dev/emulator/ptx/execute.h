// Runs the blocks of a cluster, from their start or from where they stood.
#pragma once
#include <random>

#include "warp.h"

namespace ptx {
// Returns whether they have ended. Otherwise all their warps wait: that is an error, unless the cluster may wait for another one.
bool run_cluster(Cluster &cluster, std::mt19937 &random, bool may_wait);
}  // namespace ptx
