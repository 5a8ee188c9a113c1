// Barriers in shared memory, on which threads arrive and copies complete: PTX ISA, "mbarrier".
#pragma once
#include "warp.h"

namespace ptx {

// The mbarrier at an address, which the warp must know to be initialised.
MBarrier &mbarrier_at(Warp &w, int lane, uint32_t address);

// The same for a copy through the async proxy, which needs a fence behind the initialisation.
MBarrier &mbarrier_of_copy(Warp &w, int lane, uint32_t address);

// The bytes of a copy have landed, in a cycle of timing.h, by which the phase may end.
void complete_bytes(Cluster &cluster, MBarrier &barrier, int64_t bytes, float cycle);
}  // namespace ptx
