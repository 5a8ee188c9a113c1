// The optimizer's state as checkpoints see it (../train/checkpoint.h): which elements of the model a rank holds, and where.
#pragma once
#include <cstddef>
#include <functional>
#include <variant>
#include <vector>

#include "../core/blockwise.h"
#include "../core/floats.h"
#include "../core/memory.h"

// Parameters are of either dtype; moments are float, bf16 alone, or in blocks of 8 bits. In files all are float.
using AnyFloats = std::variant<Floats<float>, Floats<bf16>, bf16 *, Blockwise>;

// A part of the optimizer's state that a rank holds. Elements are numbered through all tensors of the model in the order of its parameter table,
// without padding, so that an element has the same number whatever the number of ranks is.
struct OptimizerPart {
    size_t global, count;    // elements [global, global + count)
    AnyFloats master, m, v;  // (count), in `memory`; master holds the parameters
    size_t piece = 0;        // of offloaded arrays
    bool has_v = true;       // AdamW updates these elements
    bool written = true;     // by this rank, if it writes a file
};

struct OptimizerState {
    std::vector<OptimizerPart> parts;  // of this rank
    size_t count;                      // elements of the model
    size_t writers;                    // the first `writers` ranks of the world have each element once, and write files
    Memory *memory;
    // Of arrays in a store (pieces.h) one piece is in `memory` at a time: open() precedes every access to a part, and keep() follows every
    // write.
    std::function<void(const OptimizerPart &)> open = [](const OptimizerPart &) {}, keep = open;
};
