// Copies by TMA: cp.async.bulk, cp.async.bulk.tensor and cp.reduce.async.bulk. PTX ISA, "Async proxy", "Bulk copy", "Tensor copy".
#pragma once
#include "warp.h"

namespace ptx {

// 16 bytes of shared memory and the bytes [from, to) of them that device memory has; others are filled with zeros.
struct Piece {
    uint32_t shared;  // an address; of copies to a cluster's blocks, the same in each
    uint64_t global;  // the address of byte `from`; or, between blocks, an address of shared memory
    uint8_t from, to;
};

enum class Sum : uint8_t { none, f32, f16, bf16, s32, u32 };  // how a copy to device memory adds to it

struct BulkCopy {
    // A block of the cluster, the mbarrier there on which the copy completes, and its phase when the copy started.
    struct Target {
        unsigned rank;
        uint32_t mbarrier, phase;
    };
    Warp *warp = nullptr;  // that started it, with its lane
    const Instruction *instruction = nullptr;
    int lane = 0;
    std::vector<Piece> pieces = {};
    std::vector<Target> targets = {};  // to shared memory
    bool between_blocks = false;
    uint32_t group = 0;  // from shared memory: of its lane, counted from the start
    bool has_read = false;
    Sum sum = Sum::none;
    float done = 0;  // the cycle in which it has landed, or read shared memory (timing.h)
};

void land(Cluster &cluster, size_t copy);           // one of those to shared memory
void check_bulk_copies(Warp &w, uint32_t leaving);  // lanes return
void check_inward_copies(Block &block);             // the block ends
}  // namespace ptx
