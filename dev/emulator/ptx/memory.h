// Memory as functions of the system read it.
#pragma once
#include "warp.h"

namespace ptx {

// The host's address of `bytes` at a generic address in device or local memory.
const uint8_t *readable(Warp &w, int lane, uint64_t address, uint32_t bytes);
}  // namespace ptx
