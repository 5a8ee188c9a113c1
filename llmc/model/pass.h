// How a row passes through a model. Each function that starts a pass (Decoder::accumulate, evaluate, next_logits, ...) makes one of these values and
// hands it down to the ops; nothing else tells an op which pass it belongs to.
#pragma once
#include <cstdint>
#include <optional>

#include "op_list.h"

// Where the queries of a pass find keys and values.
enum class Keys {
    ring,     // in the row, which the ranks of a ring share
    prompts,  // in the row, which this rank computes alone and stores in the cache (generation_arrays.h)
    cache,    // in the cache, which gets the row's own ones first
};

struct Pass {
    Phase phase = Phase::forward;
    Keys keys = Keys::ring;
    bool adapters = true;              // false: only the base model
    bool fp8 = false;                  // the layers' products are in FP8
    std::optional<uint64_t> key = {};  // of dropout and of noise on embeddings; without a key there are none

    bool generates() const { return keys != Keys::ring; }
    Pass in(Phase other) const {  // the same pass in another phase
        Pass pass = *this;
        pass.phase = other;
        return pass;
    }
};
