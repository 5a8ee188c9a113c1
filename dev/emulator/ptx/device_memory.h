// Checks the order of device memory accesses between the clusters of a launch, in kernels with TMA. A cluster synchronises with another one when its
// ld.acquire reads a value of the other's st.release. Before it accesses bytes that the other cluster has written by a copy, the other must have
// waited for the copy before the st.release. Before it accesses them by TMA, it needs a proxy fence after its ld.acquire. PTX ISA, "Async proxy" and
// "Causality Order"; Lustig et al., "Mixed-Proxy Extensions for the NVIDIA PTX Memory Consistency Model", 2022: the fence belongs to the block of the
// access that is not generic.
#pragma once
#include "warp.h"

namespace ptx {
void note_release(Warp &w, uint64_t address);
void note_acquire(Warp &w, uint64_t address);

// A lane's access to device memory, directly or by a TMA copy. The bytes of a copy are written when end_bulk_write is called.
void note_device_access(Warp &w, int lane, uint64_t address, uint32_t bytes, bool writes);
enum class BulkUse : uint8_t { read, write, add, add_floats };
void note_bulk_access(Warp &w, int lane, uint64_t address, uint32_t bytes, BulkUse use);
void end_bulk_write(Warp &w, uint64_t address, uint32_t bytes);
}  // namespace ptx
