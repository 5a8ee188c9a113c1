// ZeRO, stages 0 to 2 (Rajbhandari et al., 2020, arXiv:1910.02054): ranks that see different data train one model. Gradients are
// summed over them, never averaged: every loss is divided by the targets of all ranks. From stage 1 on each rank updates a part of the
// parameters, and keeps only that part's optimizer state.
//
//   stage   bytes of a parameter on each of W ranks                     sent in a step, by all ranks together
//           params   gradients        m, v, lower halves
//   0       x        4                o          every rank has all     (W - 1) * 2 * 4 * elements
//   1       x        4                o / W      last micro-step        (W - 1) * (4 + x) * padded elements
//   2       x        4 / W + buffers  o / W      every micro-step       (W - 1) * (4 * micro-steps + x) * padded elements
//
//   x: bytes of X     o: 10, in f32 8, since there are no lower halves (floats.h); 4 less with moments in bf16     buffers: two, of consecutive buckets
//
// The flat arrays are divided into buckets, which are summed and gathered one by one, and each bucket into one part per rank. The
// parts that a rank updates are its shard. Parts are of equal size; padding at the end of a bucket fills up the last one.
#pragma once
#include <cmath>
#include <string>
#include <vector>

#include "../core/arena.h"
#include "../ops/adamw.h"
#include "../ops/reduce.h"
#include "comm.h"

// One tensor of the Hugging Face files, and where it lies in the flat arrays of parameters, gradients and moments.
struct Tensor {
    // residual: GPT-2's projections into the residual stream; score: the head of a reward model, whose shape is (1, C)
    enum Init { normal, residual, ones, zeros, score };
    std::string name;
    std::vector<size_t> shape;
    Init init;
    bool decay;  // weight decay applies: matrices yes, norms and biases no
    size_t offset, count;
    bool transposed = false;  // files of weights store it as (shape[1], shape[0]), as GPT-2's Conv1D does; checkpoints do not
    bool product = false;     // its gradient is one matrix product, which can overwrite the array; other ops can only add to it
};

// Whole tensors whose gradients are finished, and therefore summed, together: a layer, for example. A unit consists of elements [begin, end)
// of the table. It is one bucket, however large, unless its gradients can be computed row by row, as an embedding's: then it may be several.
struct Unit {
    size_t begin, end, row_elements = 0;  // row_elements: size of a row; 0: the unit is never divided
};

struct Bucket {
    size_t global;  // number of its first element, counted without padding, which is the same for every world
    size_t begin;   // the same element in the flat arrays
    size_t count;   // elements, without padding
    size_t part;    // elements of a rank's part, padding included
    size_t shard;   // where a rank's part lies in the arrays of its shard
};

// A run of this rank's parameters that is contiguous in every array that holds them: the table, the flat arrays and the shard. It
// never includes padding, so that an op can process it in one call.
struct ShardRun {
    size_t global, flat, shard, count;  // positions of its first element, as in Bucket; elements
};

struct DecayRun : ShardRun {
    bool decay;
};

struct TensorRun : ShardRun {
    size_t tensor, first;  // number of the tensor in the table, and the run's first element, counted within the tensor
};

// Says which rank updates which elements. At stage 0, and with a single rank, there is one part, which every rank has.
struct Sharding {
    static constexpr size_t aligned = 8;  // the size of a part is a multiple of this: 16 bytes of bf16

    const int stage;
    const size_t parts, own;  // own: number of this rank's part
    std::vector<Bucket> buckets;
    size_t elements = 0;     // of the table
    size_t count = 0;        // elements of the flat arrays, padding included
    size_t shard_count = 0;  // elements of a shard, padding included
    size_t largest = 0;      // elements of the largest bucket, padding included

    // The units follow each other from 0 on. A bucket of rows has at most `bucket_bytes` of float gradients, or the fewest rows that
    // are a multiple of multiple() if those are more.
    Sharding(const std::vector<Unit> &units, int stage, int world, int rank, size_t bucket_bytes);

    size_t multiple() const { return parts * aligned; }           // every bucket begins at a multiple of this
    size_t bucket_of(size_t global) const;                        // the number of the bucket that has this element
    size_t flat(size_t global) const;                             // the position of this element in the flat arrays
    std::vector<Tensor> padded(std::vector<Tensor> table) const;  // changes offsets to those of the flat arrays
    std::vector<ShardRun> shard_runs() const;                     // one run per bucket of which this rank has elements
    std::vector<TensorRun> tensor_runs(const std::vector<Tensor> &padded_table) const;  // divided at the borders of tensors
    std::vector<DecayRun> decay_runs(const std::vector<Tensor> &padded_table) const;  // divided where weight decay begins or ends
};

// The parameters of a rank and, for training, its part of the optimizer's state. A step consists of these calls, the same on all ranks:
//
//     zero_gradients(memory, true), after which every backward pass adds to grads; or with false, if the first one overwrites the products
//     stages 0, 1: after the last one reduce(comm, b, grads + buckets[b].begin) for all b
//     stage 2:     in every backward pass, for all b: start(comm, memory, b, buffer), add to the buffer, reduce(comm, b, buffer)
//     gradient_norm(comm); update(comm, adamw)
//     before parameters are read: ready(comm, their first element, the one behind their last)
//
// After reduce() the memory of a bucket must not be touched until the next reduce() or gradient_norm(), because its sum may still be under way:
// on GPUs it runs beside the backward pass. Stage 2 therefore takes two buffers in turn. At stage 2 a bucket may be started and reduced several
// times in a pass, as a tied embedding is: first as head, then as embedding. The communicator must outlive this object.
template <class Dev> struct Zero {
    using X = typename Dev::X;

    Dev dev;
    const Sharding sharding;
    const std::vector<Tensor> table;   // with the offsets of the flat arrays
    X *params = nullptr;               // (count), whose padding stays 0
    float *grads = nullptr;            // stages 0 and 1: (count), stage 2: (shard_count)
    int16_t *lower = nullptr;          // (shard_count) the low 16 bits of the float weights; null in f32
    float *m = nullptr, *v = nullptr;  // (shard_count), null if the moments are bf16
    bf16 *m16 = nullptr, *v16 = nullptr;
    double *norm_scratch = nullptr;  // squared_norm_scratch
    Payload sent;                    // bytes sent; only its members grads and params are used

    // table: offsets without padding
    Zero(Dev dev, const Sharding &sharding, const std::vector<Tensor> &table)
        : dev(dev),
          sharding(sharding),
          table(sharding.padded(table)),
          shard_runs_(sharding.shard_runs()),
          decay_runs_(sharding.decay_runs(this->table)) {}

    void plan(Plan &plan, bool training, bool bf16_moments = false) {
        const size_t all = sharding.count, shard = sharding.shard_count;
        plan.add(&params, "params", {all});
        if (!training) return plan.end_state();
        plan.add(&grads, "gradients", {sharding.stage == 2 ? shard : all});
        if constexpr (Floats<X>::halves) plan.add(&lower, "params, lower halves", {shard});
        if (bf16_moments) plan.add(&m16, "adamw m", {shard}), plan.add(&v16, "adamw v", {shard});
        else plan.add(&m, "adamw m", {shard}), plan.add(&v, "adamw v", {shard});
        plan.end_state();
        plan.add(&norm_scratch, "gradient norm scratch", {squared_norm_scratch(sharding.largest / sharding.parts)});
    }

    void zero_gradients(Memory &memory, bool products) {
        size_t begin = 0;
        const auto clear_up_to = [&](size_t end) { memory.fill(grads + begin, 0, (end - begin) * sizeof(float)); };
        for (const Tensor &t : table)
            if (t.product && !products) clear_up_to(t.offset), begin = t.offset + t.count;
        clear_up_to(sharding.stage == 2 ? sharding.shard_count : sharding.count);
    }

    // At stage 2, prepares the buffer (parts * part), to which gradients are then added. This rank's part of it begins with the sum so
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
        float *const sum = sharding.stage == 2 ? grads + bucket.shard : bucket_grads + sharding.own * part;
        comm.wait(std::move(sum_.request));
        sum_ = {b, bucket_grads, comm.start([&] {
                    if (sharding.stage == 0) comm.all_reduce_sum({bucket_grads, bucket.count});
                    else comm.reduce_scatter_sum({bucket_grads, sharding.parts * part}, {sum, part});
                })};
    }

    // Returns the norm of all summed gradients, with the same bits on every rank. Squares are summed by bucket and then by rank, so that
    // worlds differ only by float64's rounding.
    double gradient_norm(Comm &comm) {
        comm.wait(std::move(sum_.request));
        double sum = 0;
        for (const ShardRun &s : shard_runs_) sum += squared_norm(dev, norm_scratch, grads_at(s), s.count);
        return std::sqrt(sharding.parts == 1 ? sum : comm.sum(sum));
    }

    // Updates all parameters; the table says which of them decay. The parameters that other ranks update arrive bucket by bucket, on GPUs
    // while the next forward pass begins; ready() waits for them.
    void update(Comm &comm, const AdamW &adamw) {
        ready(comm, 0, sharding.elements);  // waits for the gathers of the last step, if no forward pass has
        for (const DecayRun &r : decay_runs_) {
            AdamW a = adamw;
            if (!r.decay) a.weight_decay = 0;
            a.first = r.global;
            if (m16) adamw_update(dev, params_at(r), m16 + r.shard, v16 + r.shard, grads_at(r), a, r.count);
            else adamw_update(dev, params_at(r), m + r.shard, v + r.shard, grads_at(r), a, r.count);
        }
        gather(comm);
    }

    // Waits until elements [begin, end) of the table have arrived from all ranks.
    void ready(Comm &comm, size_t begin, size_t end) {
        if (gathers_.empty() || begin == end) return;
        for (size_t b = sharding.bucket_of(begin); b <= sharding.bucket_of(end - 1); b++) comm.wait(std::move(gathers_[b]));
    }

    // Starts to gather the parameters of all shards, which have just been updated or loaded, on all ranks; ready() waits for them.
    void gather(Comm &comm) {
        if (sharding.parts == 1) return;
        gathers_.clear();
        for (const Bucket &b : sharding.buckets) {
            sent.params += (sharding.parts - 1) * b.part * sizeof(X);
            X *const all = params + b.begin, *const own = all + sharding.own * b.part;
            gathers_.push_back(comm.start([&] { comm.all_gather({own, b.part}, {all, sharding.parts * b.part}); }));
        }
    }

    // The addresses of a run's parameters and gradients.
    Floats<X> params_at(const ShardRun &s) { return {params + s.flat, Floats<X>::halves ? lower + s.shard : nullptr}; }
    float *grads_at(const ShardRun &s) { return grads + (sharding.stage == 2 ? s.shard : s.flat); }

  private:
    const std::vector<ShardRun> shard_runs_;
    const std::vector<DecayRun> decay_runs_;
    struct {
        size_t bucket = 0;
        const float *from = nullptr;
        Request request = {};
    } sum_;                         // the last sum, which may still be under way
    std::vector<Request> gathers_;  // (buckets) the gathers of updated parameters
};
