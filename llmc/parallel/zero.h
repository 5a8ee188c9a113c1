// ZeRO, stages 0 to 3 (Rajbhandari et al., 2020, arXiv:1910.02054): ranks with different data train one model. Gradients are summed over ranks, never
// averaged: every loss is divided by the targets of all ranks. From stage 1 on each rank updates a part of the parameters, and keeps only that part's
// optimizer state. At stage 3 it also keeps only its own part of the parameters: a unit's parameters are gathered before they are read.
//
//   stage   bytes of a parameter on each of W ranks                     sent in a step, by all ranks together
//           params   gradients        m, v, lower halves
//   0       x        4                o          every rank has all     (W - 1) * 2 * 4 * elements
//   1       x        4                o / W      last micro-step        (W - 1) * (4 + x) * padded elements
//   2       x        4 / W + buffers  o / W      every micro-step       (W - 1) * (4 * micro-steps + x) * padded elements
//   3       x / W    as stage 2       o / W      every micro-step       (W - 1) * micro-steps * (4 * padded elements + x * gathered ones)
//           + prefetched units
//
//   x: bytes of X     o: 10, or 8 in f32 without lower halves (floats.h); 4 less with moments in bf16, 6 in 8 bits     buffers: two, of consecutive buckets
//   prefetched units: gathered, two layers at a time. Each unit is gathered once for the forward pass, and all layers but the last two again for the
//   backward pass; an embedding that is also the head is gathered twice (../model/prefetched_units.h).
//
// Parameters may be offloaded to a store (--offload weights, pieces.h). From stage 1 on they are then divided, and sent, as at stage 3.
//
// With groups of ranks (mesh.h) there is one shard per rank of a group, W is the size of a group, and every group sends the bytes of the table,
// except at stage 0. In the last micro-step the ranks with the same part in the R groups also sum its gradients: all ranks together send
// (R - 1) * 2 * 4 * padded elements more.
//
// Gradients may be stored in bf16 (../ops/gradients.h), in 2 bytes instead of 4 and with buffers at every stage. They are still computed and sent as
// floats: a buffer starts with the sum so far, a pass adds to it, ranks sum it as usual, and the sum is rounded stochastically. So a gradient is
// rounded once per micro-step, or twice in a tied embedding, on any number of ranks.
#pragma once
#include "sharded_gradients.h"
#include "sharded_parameters.h"

// The parameters that a rank trains, and their gradients. A step consists of these calls, the same on all ranks:
//
//     gradients.clear(memory, true), after which every backward pass adds; or with false, if the first one overwrites the products
//     in every backward pass, for all buckets: gradients.start() and reduce(); at its end gradients.finish()
//     gradients.norm(ranks, memory); then Optimizer::update (optimizer.h), which calls ready() and gather()
//     fetch() early, if parameters are divided; then ready(ranks, begin, end) before reading
template <class Dev> struct Zero : ShardedParameters<Dev> {
    ShardedGradients<Dev> gradients;

    Zero(Dev dev, const Sharding &sharding, const std::vector<Tensor> &table, bool bf16_gradients = false, size_t piece = 0)
        : ShardedParameters<Dev>(dev, sharding, table, piece), gradients(dev, this->sharding, this->table, bf16_gradients) {}

    void plan(Plan &plan, bool training) {
        ShardedParameters<Dev>::plan(plan, "params", training);
        if (training) gradients.plan(plan);
    }
};
