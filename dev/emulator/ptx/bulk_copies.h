// Copies by TMA: cp.async.bulk, cp.async.bulk.tensor and cp.reduce.async.bulk. PTX ISA, "Async proxy", "Bulk copy", "Tensor copy".
#pragma once
#include "warp.h"

namespace ptx {

// 16 bytes of shared memory, of which the bytes [from, to) exist in device memory; the others are filled with zeros.
struct Piece {
    uint32_t shared;  // its address; the same in each block of a multicast
    uint64_t global;  // the address of byte `from`; between blocks, an address in shared memory
    uint8_t from, to;
};

enum class Sum : uint8_t { none, f32, f16, bf16, s32, u32 };  // how a copy to device memory adds to it

struct BulkCopy {
    // A destination block, its mbarrier on which the copy completes, and the mbarrier's phase when the copy started.
    struct Target {
        unsigned rank;
        uint32_t mbarrier, phase;
    };
    Warp *warp = nullptr;  // the warp and lane that started the copy
    const Instruction *instruction = nullptr;
    int lane = 0;
    std::vector<Piece> pieces = {};
    std::vector<Target> targets = {};  // for a copy to shared memory
    bool between_blocks = false;
    uint32_t group = 0;  // for a copy from shared memory: the lane's bulk group, counted from the start
    bool has_read = false;
    Sum sum = Sum::none;
    float done = 0;  // the cycle in which it has landed, or has read shared memory (timing.h)
};

void land(Cluster &cluster, size_t copy);           // a copy to shared memory
void check_bulk_copies(Warp &w, uint32_t leaving);  // called when lanes return
void check_inward_copies(Block &block);             // called when the block ends
}  // namespace ptx
