// wgmma: matrix products of a warpgroup (four warps) on tensor cores. PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate".
#pragma once
#include "warp.h"

namespace ptx {

// A warp's part of an operation: 16 of the 64 rows. It is computed when a warp waits for its group, from the contents of shared memory at that time.
struct Wgmma {
    const Instruction *instruction = nullptr;
    uint64_t group = 0;                 // the warp's group number, counted from the start
    uint64_t a = 0, b = 0;              // descriptors
    uint32_t registers[4][lanes] = {};  // A, unless it is in shared memory
    bool keep = false;                  // add to the accumulators' values, rather than to 0
    bool from_registers = false, negative = false, a_turned = false, b_turned = false;
    bool computed = false;
    float done = 0;                    // the cycle in which it ends (timing.h)
    std::vector<uint32_t> words = {};  // 16-byte words of shared memory that this warp has marked as being read
};

// Records the registers that an instruction other than wgmma uses, and refuses registers of an operation that is still in flight.
void note_registers(Warp &w, const Instruction &i);
}  // namespace ptx
