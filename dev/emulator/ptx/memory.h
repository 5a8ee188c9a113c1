// Memory access for system calls and TMA copies.
#pragma once
#include "warp.h"

namespace ptx {

// Returns the host address of `bytes` readable bytes at a generic address in device or local memory.
const uint8_t *readable(Warp &w, int lane, uint64_t address, uint32_t bytes);

// "byte 4096 of the 4096 bytes of argument 2, float const*"
std::string describe(const Warp &w, uint64_t address);

// Counts one request for the sectors of device memory that contain these addresses.
void count_bulk(Warp &w, const std::vector<uint64_t> &addresses, bool writes);
}  // namespace ptx
