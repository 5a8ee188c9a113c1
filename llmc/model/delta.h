// A layer's linear attention by the gated delta rule (../ops/gated_delta.h), with Hk heads of queries and keys of size Dk, and Hv heads of values of
// size Dv: its weights and arrays, besides those that it shares with attention.
#pragma once
#include "../parallel/delta_ring.h"
#include "lora.h"

// S: the storage type of weights, or float for their gradients.
template <class S> struct DeltaWeights {
    LinearWeights<S> z;   // (Hv*Dv, C)           gates of the output
    LinearWeights<S> ba;  // (2*Hv, C)            inputs of the gates of the delta rule
    S *conv;              // (2*Hk*Dk+Hv*Dv, 4)
    S *A_log, *dt_bias;   // (Hv)
    S *norm;              // (Dv)
};

template <class X> struct DeltaActs {
    X *ba;                    // (T, 2*Hv)   becomes its gradient
    DeltaGates<float> gates;  // (T, Hv) each
    float *states;            // gated_delta_states
    X *dqkv;                  // (T, 2*Hk*Dk+Hv*Dv)
    DeltaGates<float> dgates;
    X *dinput;  // (own, C)    gradient of the layer's normed input
    float *scratch;
    DeltaPieceActs<X> pieces;
};

// What a layer knows of earlier tokens during generation, in a slot for each sequence (../ops/delta_decode.h).
template <class X> struct DeltaCache {
    float *states = nullptr;         // (slots, Hv, Dk, Dv)
    X *columns = nullptr;            // (slots, 3, 2*Hk*Dk+Hv*Dv)
    const int32_t *slots = nullptr;  // (T) the slot to which a token's sequence is stored; -1: none
};
