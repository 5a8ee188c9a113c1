// Checks of shared memory: sizes, alignment, uninitialised reads, copies that have not landed, races, proxies; and the wavefronts of an access.
#pragma once
#include "warp.h"

namespace ptx {

// Where an address of shared memory lies: in the own block, or in another one of the cluster.
struct SharedPlace {
    Block &block;
    uint32_t offset;
};
SharedPlace place_of(Warp &w, int lane, uint32_t address);
std::string shared_text(uint32_t address);  // "shared memory + 16"

// The place in shared memory of `bytes` at an address, which must be aligned to them.
uint8_t *shared_place(Warp &w, int lane, uint32_t address, uint32_t bytes);

// What a lane does to the bytes at an address that shared_place() has accepted.
void note_read(Warp &w, int lane, uint32_t address, uint32_t bytes);
void note_update(Warp &w, int lane, uint32_t address, uint32_t bytes);  // by an atomic
void note_write(Warp &w, int lane, uint32_t address, uint32_t bytes);
void note_departure(Warp &w, int lane, uint32_t address, uint32_t bytes);  // of a cp.async
void note_landing(Warp &w, int lane, uint32_t address, uint32_t bytes);

// The same in the async proxy, of TMA and wgmma. Both mark the bytes until the operation has ended.
void note_async_read(Warp &w, int lane, uint32_t address, uint32_t bytes);
void end_async_read(Warp &w, uint32_t address, uint32_t bytes, size_t reader, uint32_t time);  // waits then know of it
void note_async_departure(Warp &w, int lane, uint32_t address, uint32_t bytes);
void note_async_landing(Block &block, uint32_t offset, uint32_t bytes, size_t mbarrier, uint32_t phase);
void note_mbarrier(Warp &w, int lane, uint32_t address, bool exists);

// A block ends: the other blocks of the cluster must have ended their accesses to its shared memory.
void check_end(Block &block);

// Adds an access to the counts: 32 banks of 4 bytes each deliver one word per wavefront, to all lanes that want it. Accesses of 8 and 16
// bytes are made by half and quarter warps.
void count_wavefronts(Warp &w, const uint32_t *addresses, uint32_t mask, uint32_t bytes);
// Of the loads of words that follow one another: ptxas knows where a group of 16 bytes begins if that is the same in all lanes.
void count_joined(Warp &w, const uint32_t *addresses, uint32_t mask, uint32_t bytes, uint32_t words);
void count_looped(Warp &w, LoopedLoad &load, const uint32_t *addresses, uint32_t mask, uint32_t words);
}  // namespace ptx
