// Checks of shared memory: sizes, alignment, uninitialised reads, copies that have not landed, races; and the wavefronts of an access.
#pragma once
#include "warp.h"

namespace ptx {

// The place in the block's shared memory of `bytes` at an address, which must be aligned to them.
uint8_t *shared_place(Warp &w, int lane, uint32_t address, uint32_t bytes);

// What a lane does to the bytes at an address that shared_place() has accepted.
void note_read(Warp &w, int lane, uint32_t address, uint32_t bytes);
void note_update(Warp &w, int lane, uint32_t address, uint32_t bytes);  // by an atomic
void note_write(Warp &w, int lane, uint32_t address, uint32_t bytes);
void note_departure(Warp &w, int lane, uint32_t address, uint32_t bytes);  // of a cp.async
void note_landing(Warp &w, int lane, uint32_t address, uint32_t bytes);

// Adds an access to the counts: 32 banks of 4 bytes each deliver one word per wavefront, to all lanes that want it. Accesses of 8 and 16
// bytes are made by half and quarter warps.
void count_wavefronts(Warp &w, const uint32_t *addresses, uint32_t mask, uint32_t bytes);
}  // namespace ptx
