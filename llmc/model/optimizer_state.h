// A view of the optimizer's state, which checkpoints save and load.
#pragma once
#include <cstddef>
#include <variant>
#include <vector>

#include "../core/memory.h"

// Parameters are of either dtype; moments are float, or bf16 alone. In files all are float.
using AnyFloats = std::variant<Floats<float>, Floats<bf16>, bf16 *>;

// A part of the optimizer's state that a rank holds. Elements are numbered through all tensors of the model in the order of its parameter table,
// without padding, so that an element has the same number whatever the number of ranks is.
struct OptimizerPart {
    size_t global, count;    // elements [global, global + count)
    AnyFloats master, m, v;  // (count), in `memory`; master holds the parameters
};

struct OptimizerState {
    std::vector<OptimizerPart>
        parts;     // of this rank: either all ranks together have each element once, or each rank has them all
    size_t count;  // elements of the model
    Memory *memory;
};
