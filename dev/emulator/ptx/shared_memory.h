// Checks of shared memory: sizes, alignment, uninitialised reads, copies that have not landed, races, proxies; and the wavefronts of an access.
#pragma once
#include "warp.h"

namespace ptx {

// The location of an address in shared memory: in the own block or in another block of the cluster.
struct SharedPlace {
    Block &block;
    uint32_t offset;
};
SharedPlace place_of(Warp &w, int lane, uint32_t address);
std::string shared_text(uint32_t address);  // "shared memory + 16"

// Returns the host address of `bytes` bytes of shared memory. The address must be aligned to `bytes`.
uint8_t *shared_place(Warp &w, int lane, uint32_t address, uint32_t bytes);

// Record a lane's access to the bytes at an address that shared_place() has accepted.
void note_read(Warp &w, int lane, uint32_t address, uint32_t bytes);
void note_update(Warp &w, int lane, uint32_t address, uint32_t bytes);  // an atomic
void note_write(Warp &w, int lane, uint32_t address, uint32_t bytes);
void note_departure(Warp &w, int lane, uint32_t address, uint32_t bytes);  // a cp.async starts
void note_landing(Warp &w, int lane, uint32_t address, uint32_t bytes);

// The same for TMA and wgmma, in the async proxy. They mark the bytes until the operation has ended.
void note_async_read(Warp &w, int lane, uint32_t address, uint32_t bytes);
void end_async_read(Warp &w, uint32_t address, uint32_t bytes, size_t reader, uint32_t time);  // later waits learn of it
void note_async_departure(Warp &w, int lane, uint32_t address, uint32_t bytes);
void note_async_landing(Block &block, uint32_t offset, uint32_t bytes, size_t mbarrier, uint32_t phase);
void note_mbarrier(Warp &w, int lane, uint32_t address, bool exists);

// Called when a block ends: checks that the other blocks of the cluster have ended their accesses to its shared memory.
void check_end(Block &block);

// Counts an access: each of 32 banks delivers one word of 4 bytes per wavefront, to all lanes that need it. Accesses of 8 and 16 bytes are split into
// half and quarter warps.
void count_wavefronts(Warp &w, const uint32_t *addresses, uint32_t mask, uint32_t bytes);
// Counts loads of consecutive words. ptxas knows the alignment to 16 bytes if it is the same in all lanes.
void count_joined(Warp &w, const uint32_t *addresses, uint32_t mask, uint32_t bytes, uint32_t words);
void count_looped(Warp &w, LoopedLoad &load, const uint32_t *addresses, uint32_t mask, uint32_t words);
}  // namespace ptx
