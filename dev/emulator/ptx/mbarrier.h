// mbarriers: barriers in shared memory at which threads arrive and on which copies complete. PTX ISA, "mbarrier".
#pragma once
#include "warp.h"

namespace ptx {

// Returns the mbarrier at an address. Its initialisation must have happened before the warp's access.
MBarrier &mbarrier_at(Warp &w, int lane, uint32_t address);

// The same for a copy through the async proxy, which also needs a fence after the initialisation.
MBarrier &mbarrier_of_copy(Warp &w, int lane, uint32_t address);

// Counts the bytes of a copy that has landed in `cycle` (timing.h). The phase may end with them.
void complete_bytes(Cluster &cluster, MBarrier &barrier, int64_t bytes, float cycle);
}  // namespace ptx
