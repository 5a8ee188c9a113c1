// ZeRO, stages 0 to 3 (Rajbhandari et al., 2020, arXiv:1910.02054): ranks that see different data train one model. Gradients are
// summed over them, never averaged: every loss is divided by the targets of all ranks. From stage 1 on each rank updates a part of the
// parameters, and keeps only that part's optimizer state. At stage 3 it has no other parameters either: those of a unit are gathered before they are read.
//
//   stage   bytes of a parameter on each of W ranks                     sent in a step, by all ranks together
//           params   gradients        m, v, lower halves
//   0       x        4                o          every rank has all     (W - 1) * 2 * 4 * elements
//   1       x        4                o / W      last micro-step        (W - 1) * (4 + x) * padded elements
//   2       x        4 / W + buffers  o / W      every micro-step       (W - 1) * (4 * micro-steps + x) * padded elements
//   3       x / W    as stage 2       o / W      every micro-step       (W - 1) * micro-steps * (4 * padded elements + x * gathered ones)
//           + guests
//
//   x: bytes of X     o: 10, in f32 8, since there are no lower halves (floats.h); 4 less with moments in bf16, 6 in 8 bits     buffers: two, of consecutive buckets
//   guests: gathered units, two layers at a time. Each unit is gathered once for the forward pass, layers but the last two once more for the
//   backward pass; an embedding that is also the head is gathered twice (decoder.h).
#pragma once
#include <cmath>
#include <vector>

#include "../core/arena.h"
#include "../core/floats.h"
#include "../ops/reduce.h"
#include "comm.h"
#include "sharding.h"

// The parameters of a rank and their gradients. A step consists of these calls, the same on all ranks:
//
//     zero_gradients(memory, true), after which every backward pass adds to grads; or with false, if the first one overwrites the products
//     stages 0, 1: after the last one reduce(comm, b, grads + buckets[b].begin) for all b
//     from 2 on:   in every backward pass, for all b: start(comm, memory, b, buffer), add to the buffer, reduce(comm, b, buffer); at its end finish(comm)
//     gradient_norm(comm, memory); then Optimizer::update (optimizer.h), which calls ready() and gather()
//     before parameters are read: ready(comm, their first element, the one behind their last); at stage 3 a fetch() of them some time before
//
// After reduce() the memory of a bucket must not be touched until the next reduce() or finish(), because its sum may still be under way:
// on GPUs it runs beside the backward pass. Stage 2 therefore takes two buffers in turn. There a bucket may be started and reduced several
// times in a pass, as a tied embedding is: first as head, then as embedding. The communicator must outlive this object.
template <class Dev> struct Zero {
    using X = typename Dev::X;

    Dev dev;
    const Sharding sharding;
    const std::vector<Tensor> table;  // with the offsets of the flat arrays
    X *params = nullptr;              // (count), whose padding stays 0; stage 3: (shard_count)
    float *grads = nullptr;           // stages 0 and 1: (count), from stage 2 on: (shard_count)
    int16_t *lower = nullptr;         // (shard_count) the low 16 bits of the float weights; null in f32
    double *norm_scratch = nullptr;   // a sum, and squared_norm_scratch
    Payload sent;                     // bytes sent; only its members grads and params are used

    // table: offsets without padding
    Zero(Dev dev, const Sharding &sharding, const std::vector<Tensor> &table)
        : dev(dev), sharding(sharding), table(sharding.padded(table)), shard_runs_(sharding.shard_runs()) {}

    void plan(Plan &plan, bool training) {
        plan.add(&params, "params", {sharding.stage == 3 ? sharding.shard_count : sharding.count});
        if (!training) return;
        plan.add(&grads, "gradients", {sharding.stage >= 2 ? sharding.shard_count : sharding.count});
        if constexpr (Floats<X>::halves) plan.add(&lower, "params, lower halves", {sharding.shard_count});
    }
    void plan_scratch(Plan &plan) {
        plan.add(&norm_scratch, "gradient norm scratch", {1 + squared_norm_scratch(sharding.largest / sharding.parts)});
    }

    void zero_gradients(Memory &memory, bool products) {
        size_t begin = 0;
        const auto clear_up_to = [&](size_t end) { memory.fill(grads + begin, 0, (end - begin) * sizeof(float)); };
        for (const Tensor &t : table)
            if (t.product && !products) clear_up_to(t.offset), begin = t.offset + t.count;
        clear_up_to(sharding.stage >= 2 ? sharding.shard_count : sharding.count);
    }

    // From stage 2 on, prepares the buffer (parts * part), to which gradients are then added. This rank's part of it begins with the sum so
    // far, so that the sum over ranks includes it; the other parts are 0.
    void start(Comm &comm, Memory &memory, size_t b, float *buffer) {
        if (sum_.bucket == b || sum_.from == buffer) comm.wait(std::move(sum_.request));
        const Bucket &bucket = sharding.buckets[b];
        memory.fill(buffer, 0, sharding.parts * bucket.part * sizeof(float));
        comm.memory.copy(buffer + sharding.own * bucket.part, grads + bucket.shard, bucket.part * sizeof(float));
    }

    // Sums bucket b's gradients over ranks; from stage 1 on each rank gets only its part.     bucket_grads (parts * part), padding 0
    void reduce(Comm &comm, size_t b, float *bucket_grads) {
        const Bucket &bucket = sharding.buckets[b];
        const size_t part = bucket.part, world = size_t(comm.size), rank = size_t(comm.rank);
        if (sharding.stage == 0) {  // a rank sends the others' parts, and then the sum of its own part to all
            const size_t own = bucket.count * (rank + 1) / world - bucket.count * rank / world;
            sent.grads += world > 1 ? (bucket.count + (world - 2) * own) * sizeof(float) : 0;
        } else {
            sent.grads += (world - 1) * part * sizeof(float);
        }
        float *const sum = sharding.stage >= 2 ? grads + bucket.shard : bucket_grads + sharding.own * part;
        comm.wait(std::move(sum_.request));
        sum_ = {b, bucket_grads, comm.start([&] {
                    if (sharding.stage == 0) comm.all_reduce_sum({bucket_grads, bucket.count});
                    else comm.reduce_scatter_sum({bucket_grads, sharding.parts * part}, {sum, part});
                })};
    }

    // Waits for the last sum. From stage 2 on it comes after the last bucket of a pass, because the next pass uses that bucket's buffer for other arrays.
    void finish(Comm &comm) { comm.wait(std::move(sum_.request)); }

    // Returns the norm of all summed gradients, with the same bits on every rank. Squares are summed by bucket and then by rank, so that
    // worlds differ only by float64's rounding.
    double gradient_norm(Comm &comm, Memory &memory) {
        finish(comm);
        memory.fill(norm_scratch, 0, sizeof(double));
        for (const ShardRun &s : shard_runs_) add_squared_norm(dev, norm_scratch, norm_scratch + 1, grads_at(s), s.count);
        const double sum = read(memory, norm_scratch, 1)[0];
        return std::sqrt(sharding.parts == 1 ? sum : comm.sum(sum));
    }

    // Stage 3: starts to gather parameters [begin, end) of the table, which are a unit, to `to` (padded_count(begin, end)). Until ready() neither `to` nor
    // this rank's part of them may be touched.
    void fetch(Comm &comm, size_t begin, size_t end, X *to) {
        gathers_.resize(sharding.buckets.size());
        for (size_t b = sharding.bucket_of(begin); b <= sharding.bucket_of(end - 1); b++) {
            const Bucket &bucket = sharding.buckets[b];
            start_gather(comm, b, params + bucket.shard, to + (bucket.begin - sharding.flat(begin)));
        }
    }

    // Waits until elements [begin, end) of the table have arrived from all ranks.
    void ready(Comm &comm, size_t begin, size_t end) {
        if (gathers_.empty() || begin == end) return;
        for (size_t b = sharding.bucket_of(begin); b <= sharding.bucket_of(end - 1); b++) comm.wait(std::move(gathers_[b]));
    }

    // Starts to gather the parameters of all shards, which have just been updated or loaded, on all ranks, bucket by bucket: on GPUs while the next
    // forward pass begins. ready() waits for them.
    void gather(Comm &comm) {
        if (sharding.parts == 1 || sharding.stage == 3) return;
        gathers_.resize(sharding.buckets.size());
        for (size_t b = 0; b < sharding.buckets.size(); b++) {
            X *const all = params + sharding.buckets[b].begin;
            start_gather(comm, b, all + sharding.own * sharding.buckets[b].part, all);
        }
    }

    // The addresses of a run's parameters and gradients.
    Floats<X> params_at(const ShardRun &s) {
        return {params + (sharding.stage == 3 ? s.shard : s.flat), Floats<X>::halves ? lower + s.shard : nullptr};
    }
    float *grads_at(const ShardRun &s) { return grads + (sharding.stage >= 2 ? s.shard : s.flat); }

  private:
    void start_gather(Comm &comm, size_t b, X *own, X *all) {  // own: (part), all: (parts * part)
        const size_t part = sharding.buckets[b].part;
        sent.params += (sharding.parts - 1) * part * sizeof(X);
        Request gather = comm.start([&] { comm.all_gather({own, part}, {all, sharding.parts * part}); });
        std::swap(gathers_[b], gather);  // nvcc takes an assignment for a request that is dropped
    }

    const std::vector<ShardRun> shard_runs_;
    struct {
        size_t bucket = 0;
        const float *from = nullptr;
        Request request = {};
    } sum_;                         // the last sum, which may still be under way
    std::vector<Request> gathers_;  // (buckets) the gathers of parameters that may be under way
};
