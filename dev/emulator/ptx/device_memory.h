// Checks of device memory between the clusters of a launch, in kernels with TMA. A cluster learns of what another one has done when it reads by
// ld.acquire what that one has stored by st.release. If it then accesses bytes that the other one has written, a copy that wrote them must have been
// waited for, and in front of an access by TMA stands a fence of proxies, behind the ld.acquire. PTX ISA, "Async proxy" and "Causality Order";
// Lustig et al., "Mixed-Proxy Extensions for the NVIDIA PTX Memory Consistency Model", 2022: the fence is in the block of the access that is not
// generic.
#pragma once
#include "warp.h"

namespace ptx {
void note_release(Warp &w, uint64_t address);
void note_acquire(Warp &w, uint64_t address);

// What a lane does to bytes that lie in device memory; by TMA, a copy has written them when end_bulk_write says so.
void note_device_access(Warp &w, int lane, uint64_t address, uint32_t bytes, bool writes);
enum class BulkUse : uint8_t { read, write, add, add_floats };
void note_bulk_access(Warp &w, int lane, uint64_t address, uint32_t bytes, BulkUse use);
void end_bulk_write(Warp &w, uint64_t address, uint32_t bytes);
}  // namespace ptx
