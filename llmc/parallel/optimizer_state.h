// The optimizer's state for checkpoints (../train/checkpoint.h): the elements of the model that a rank holds, and their addresses.
#pragma once
#include <cstddef>
#include <functional>
#include <variant>
#include <vector>

#include "../core/blockwise.h"
#include "../core/floats.h"
#include "../core/memory.h"

// Parameters have either dtype; moments are float, bf16, or blocks of 8 bits. In files all are float.
using AnyFloats = std::variant<Floats<float>, Floats<bf16>, bf16 *, Blockwise>;

// A part of a rank's optimizer state. Elements are numbered through all tensors of the model in the order of its parameter table, without padding, so
// an element has the same number with any number of ranks.
struct OptimizerPart {
    size_t global, count;       // elements [global, global + count)
    AnyFloats master, m, v;     // (count), in `memory`; master holds the parameters
    size_t piece = 0;           // the piece of offloaded arrays
    bool has_v = true;          // false if Muon updates these elements
    size_t writers = SIZE_MAX;  // the part is written by these first ranks of the world, if they write files
};

struct OptimizerState {
    std::vector<OptimizerPart> parts;  // of this rank
    size_t count;                      // elements of the model
    size_t writers;                    // the first `writers` ranks of the world together have each element, and write files
    size_t tensor_ranks;               // that divide tensors, on which the numbers of elements depend (Tensor::number)
    Memory *memory;
    // Arrays in a store (pieces.h) have one piece in `memory` at a time: call open() before every access to a part, and keep() after every
    // write.
    std::function<void(const OptimizerPart &)> open = [](const OptimizerPart &) {}, keep = open;
};
