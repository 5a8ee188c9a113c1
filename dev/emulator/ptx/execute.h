// Runs the blocks of a cluster, whose state is as at their start.
#pragma once
#include <random>

#include "warp.h"

namespace ptx {
void run_cluster(Cluster &cluster, std::mt19937 &random);
}  // namespace ptx
