// ZeRO, stages 0 to 3 (Rajbhandari et al., 2020, arXiv:1910.02054): ranks that see different data train one model. Gradients are
// summed over them, never averaged: every loss is divided by the targets of all ranks. From stage 1 on each rank updates a part of the
// parameters, and keeps only that part's optimizer state. At stage 3 it also keeps only its own parameters: a unit's are gathered before they are read.
//
//   stage   bytes of a parameter on each of W ranks                     sent in a step, by all ranks together
//           params   gradients        m, v, lower halves
//   0       x        4                o          every rank has all     (W - 1) * 2 * 4 * elements
//   1       x        4                o / W      last micro-step        (W - 1) * (4 + x) * padded elements
//   2       x        4 / W + buffers  o / W      every micro-step       (W - 1) * (4 * micro-steps + x) * padded elements
//   3       x / W    as stage 2       o / W      every micro-step       (W - 1) * micro-steps * (4 * padded elements + x * gathered ones)
//           + prefetched units
//
//   x: bytes of X     o: 10, in f32 8, since there are no lower halves (floats.h); 4 less with moments in bf16, 6 in 8 bits     buffers: two, of consecutive buckets
//   prefetched units: gathered, two layers at a time. Each unit is gathered once for the forward pass, layers but the last two once more for the
//   backward pass; an embedding that is also the head is gathered twice (../model/prefetched_units.h).
//
// Parameters may be offloaded to a store (--offload weights, pieces.h). From stage 1 on they are then divided, and sent, as at stage 3.
//
// With groups of ranks (mesh.h) there is one shard per rank of a group, W is their number, and every group sends what the table says, but for
// stage 0. In the last micro-step ranks that have the same part in the R groups sum its gradients, too: (R - 1) * 2 * 4 * padded elements more, by all
// together.
//
// Gradients may be stored in bf16 (../ops/gradients.h), in 2 bytes in place of 4 and with buffers at every stage. What is computed and sent are floats: a
// buffer begins with the sum so far, a pass adds to it, ranks sum it where they would in float, and the sum is rounded stochastically. So a gradient is
// rounded once a micro-step, and twice if its embedding is tied, on any number of ranks.
#pragma once
#include <cmath>
#include <variant>
#include <vector>

#include "../core/arena.h"
#include "../core/floats.h"
#include "../core/rng.h"
#include "../ops/gradients.h"
#include "../ops/reduce.h"
#include "comm.h"
#include "mesh.h"
#include "pieces.h"
#include "sharding.h"

// The parameters of a rank and their gradients. A step consists of these calls, the same on all ranks:
//
//     zero_gradients(memory, true), after which every backward pass adds to grads; or with false, if the first one overwrites the products
//     in every backward pass, for all b: start(ranks, memory, b, buffer), add to the buffer, or to grads if there are no buffers, and
//     reduce(ranks, b, buffer, last); at its end, with buffers, finish(ranks). `last`: nothing more is added to the bucket in this step
//     gradient_norm(ranks, memory); then Optimizer::update (optimizer.h), which calls ready() and gather()
//     call fetch() early (sharded weights), then ready(ranks, begin, end) before reading
//
// After reduce() the memory of a bucket must not be touched until the next reduce() or finish(), because its sum may still be under way:
// on GPUs it overlaps with the backward pass. So two buffers alternate. A bucket that has one may be started and reduced several
// times in a pass, as a tied embedding is: first as head, then as embedding. The communicators must outlive this object.
template <class Dev> struct Zero {
    using X = typename Dev::X;

    Dev dev;
    const Sharding sharding;
    ShardPieces pieces;               // of `params` and `lower`, if offloaded
    const std::vector<Tensor> table;  // with the offsets of the flat arrays
    X *params = nullptr;              // (count), whose padding stays 0; divided: (shard_count)
    const bool rounds;                // gradients are stored in bf16
    float *grads = nullptr;           // stages 0 and 1: (count), from stage 2 on: (shard_count)
    bf16 *rounded_grads = nullptr;    // the same in bf16, in place of grads
    uint64_t rounding_key = 0;        // of the random bits that round gradients. Each pass has its own
    int16_t *lower = nullptr;         // (shard_count) the low 16 bits of the float weights; null in f32
    double *norm_scratch = nullptr;   // a sum, and squared_norm_scratch
    Payload sent;                     // bytes sent; only its members grads and params are used

    // table: offsets without padding     piece: elements per piece of offloaded parameters; 0: not offloaded
    Zero(Dev dev, const Sharding &sharding, const std::vector<Tensor> &table, bool rounds = false, size_t piece = 0)
        : dev(dev),
          sharding(sharding),
          pieces(sharding, piece),
          table(sharding.padded(table)),
          rounds(rounds),
          shard_runs_(sharding.shard_runs()) {}

    bool buffers() const { return rounds || sharding.stage >= 2; }  // gradients are computed in buffers
    bool trained() const { return grads || rounded_grads; }
    bool halves() const { return trained() && Floats<X>::halves; }  // the parameters are floats in two halves
    // Whether parameters are brought to other arrays before they are read (../model/prefetched_units.h).
    bool prefetched() const { return sharding.divided || pieces.any(); }

    void plan(Plan &plan, bool training, const std::string &name = "params") {
        const auto add = [&](auto **array, const std::string &of, size_t n) {
            if (pieces.any()) pieces.add(plan, array, of);
            else plan.add(array, of, {n});
        };
        add(&params, name, sharding.divided ? sharding.shard_count : sharding.count);
        if (training) {
            const size_t n = sharding.stage >= 2 ? sharding.shard_count : sharding.count;
            if (rounds) plan.add(&rounded_grads, "gradients", {n});
            else plan.add(&grads, "gradients", {n});
            if constexpr (Floats<X>::halves) add(&lower, name + ", lower halves", sharding.shard_count);
        }
        pieces.plan_windows(plan, false);
    }
    void plan_scratch(Plan &plan) {
        plan.add(&norm_scratch, "gradient norm scratch", {1 + squared_norm_scratch(sharding.largest / sharding.parts)});
    }

    void zero_gradients(Memory &memory, bool products) {
        const size_t all = sharding.stage >= 2 ? sharding.shard_count : sharding.count;
        if (rounds) return memory.fill(rounded_grads, 0, all * sizeof(bf16));
        size_t begin = 0;
        const auto clear_up_to = [&](size_t end) { memory.fill(grads + begin, 0, (end - begin) * sizeof(float)); };
        for (const Tensor &t : table)
            if (t.product && !products) clear_up_to(t.offset), begin = t.offset + t.count;
        clear_up_to(all);
    }

    // Prepares the buffer (parts * part), to which gradients are then added. It begins with the sum so far that this rank has, so that the sum over ranks
    // includes it: from stage 2 on only in the rank's part, and the other parts are 0.
    void start(const ShardRanks &ranks, Memory &memory, size_t b, float *buffer) {
        if (!buffers()) return;
        if (sum_.bucket == b || sum_.from == buffer) finish(ranks);
        const Bucket &bucket = sharding.buckets[b];
        const bool part = sharding.stage >= 2;
        if (part) memory.fill(buffer, 0, sharding.parts * bucket.part * sizeof(float));
        const size_t n = (part ? 1 : sharding.parts) * bucket.part, at = part ? bucket.shard : bucket.begin;
        float *const own = buffer + (part ? sharding.own * bucket.part : 0);
        if (rounds) widen_gradients(dev, own, rounded_grads + at, n);
        else ranks.group.memory.copy(own, grads + at, n * sizeof(float));
    }

    // Sums bucket b's gradients over ranks: from stage 2 on in every pass, else in the last one. From stage 1 on each rank gets only its part. Before the sum
    // a buffer's gradients in bf16 are a rank's own, rounded by random bits of its own.     buffer (parts * part), padding 0
    void reduce(const ShardRanks &ranks, size_t b, float *buffer, bool last) {
        const Bucket &bucket = sharding.buckets[b];
        const size_t part = bucket.part;
        float *const bucket_grads = buffers() ? buffer : grads + bucket.begin;
        if (sharding.stage < 2 && !last) {
            if (rounds)
                round_gradients(dev, rounded_grads + bucket.begin, buffer, sharding.parts * part,
                                Random{rounding_key, Purpose::gradients, uint32_t(ranks.rank()) + 1}, bucket.global);
            return;
        }
        float *const sum = sharding.stage >= 2 && !rounds ? grads + bucket.shard : bucket_grads + sharding.own * part;
        finish(ranks);
        sum_ = {b, bucket_grads, rounding_key};
        if (sharding.stage == 0) return all_reduce(sum_.request, ranks.group, {bucket_grads, bucket.count});
        sent.grads += (sharding.parts - 1) * part * sizeof(float);
        begin(sum_.request, ranks.group, [&] {
            ranks.group.reduce_scatter_sum({bucket_grads, sharding.parts * part}, {sum, part});
        });
        if (ranks.replicas && last) all_reduce(sum_.of_replicas, *ranks.replicas, {sum, part});
    }

    // Waits for the last sum, and stores it if it is still in its buffer. With buffers it comes after the last bucket of a pass, because the next pass uses
    // that bucket's buffer for other arrays.
    void finish(const ShardRanks &ranks) {
        ranks.group.wait(std::move(sum_.request));
        if (ranks.replicas) ranks.replicas->wait(std::move(sum_.of_replicas));
        if (!rounds || !sum_.from) return;
        const Bucket &bucket = sharding.buckets[sum_.bucket];
        const size_t own = sharding.own * bucket.part, at = sharding.stage >= 2 ? bucket.shard : bucket.begin + own;
        round_gradients(dev, rounded_grads + at, sum_.from + own, bucket.part, Random{sum_.key, Purpose::gradients, 0},
                        bucket.global + own);
        sum_.from = nullptr;
    }

    // Returns the norm of all summed gradients, with the same bits on every rank. Squares are summed by bucket and then by rank, so that
    // worlds differ only by float64's rounding.
    double gradient_norm(const ShardRanks &ranks, Memory &memory) {
        finish(ranks);
        memory.fill(norm_scratch, 0, sizeof(double));
        for (const ShardRun &s : shard_runs_)
            std::visit([&](const auto *g) { add_squared_norm(dev, norm_scratch, norm_scratch + 1, g, s.count); }, grads_at(s));
        const double sum = read(memory, norm_scratch, 1)[0];
        return std::sqrt(sharding.parts == 1 ? sum : ranks.group.sum(sum));
    }

    // Divided: starts to gather parameters [begin, end) of the table, which are a unit, to `to` (padded_count(begin, end)). Until ready() neither `to` nor
    // this rank's part of them may be touched, which is at `own` if it has come from a store, and else in `params`.
    void fetch(const ShardRanks &ranks, size_t begin, size_t end, X *to, X *own = nullptr) {
        gathers_.resize(sharding.buckets.size());
        const size_t first = sharding.bucket_of(begin), shard = sharding.buckets[first].shard;
        for (size_t b = first; b <= sharding.bucket_of(end - 1); b++) {
            const Bucket &bucket = sharding.buckets[b];
            start_gather(ranks.group, b, (own ? own : params + shard) + (bucket.shard - shard),
                         to + (bucket.begin - sharding.flat(begin)));
        }
    }

    // Waits until elements [begin, end) of the table have arrived from all ranks.
    void ready(const ShardRanks &ranks, size_t begin, size_t end) {
        if (gathers_.empty() || begin == end) return;
        for (size_t b = sharding.bucket_of(begin); b <= sharding.bucket_of(end - 1); b++)
            ranks.group.wait(std::move(gathers_[b]));
    }

    // Starts to gather the parameters of all shards, which have just been updated or loaded, on all ranks, bucket by bucket: on GPUs while the next
    // forward pass begins. ready() waits for them.
    void gather(const ShardRanks &ranks) {
        if (sharding.parts == 1 || sharding.divided) return;
        gathers_.resize(sharding.buckets.size());
        for (size_t b = 0; b < sharding.buckets.size(); b++) {
            X *const all = params + sharding.buckets[b].begin;
            start_gather(ranks.group, b, all + sharding.own * sharding.buckets[b].part, all);
        }
    }

    // The addresses of a run's parameters and gradients. With offloaded parameters, the run is in the current piece.
    Floats<X> params_at(const ShardRun &s) {
        const size_t at = s.shard - pieces.begin();
        return {params + (prefetched() ? at : s.flat), lower ? lower + at : nullptr};
    }
    std::variant<float *, bf16 *> grads_at(const ShardRun &s) {
        const size_t at = sharding.stage >= 2 ? s.shard : s.flat;
        if (rounds) return rounded_grads + at;
        return grads + at;
    }
    // Calls f(run) for the runs of tensors that this rank has, for f to set their parameters.
    template <class F> void set_runs(F f) {
        for (const TensorRun &r : sharding.tensor_runs(table))
            pieces.in_pieces(r.shard, r.count, [&](size_t piece, size_t first, size_t n) {
                pieces.open(piece);
                f(TensorRun{{r.global + first, r.flat + first, r.shard + first, n}, r.tensor, r.first + first});
                pieces.keep();
            });
    }
    // Calls f(parameters, first, n) for elements [first, first + n) of this rank's part of bucket b, until they are all of it, padding included.
    template <class F> void read_part(size_t b, F f) {
        const Bucket &bucket = sharding.buckets[b];
        const size_t part = sharding.own * bucket.part;
        pieces.in_pieces(bucket.shard, bucket.part, [&](size_t piece, size_t first, size_t n) {
            pieces.open(piece);
            const size_t at = part + first;
            f(params_at({bucket.global + at, bucket.begin + at, bucket.shard + first, n}), first, n);
        });
    }
    double squared_norm_at(const ShardRun &s) {
        return std::visit([&](const auto *g) { return squared_norm(dev, norm_scratch, g, s.count); }, grads_at(s));
    }

  private:
    // Each rank sends the others' parts of the slice, and then the sum of its own part to all.
    void all_reduce(Request &request, Comm &comm, Slice slice) {
        const size_t size = size_t(comm.size), rank = size_t(comm.rank);
        const size_t own = slice.count * (rank + 1) / size - slice.count * rank / size;
        sent.grads += size > 1 ? (slice.count + (size - 2) * own) * sizeof(float) : 0;
        begin(request, comm, [&] { comm.all_reduce_sum(slice); });
    }
    void start_gather(Comm &comm, size_t b, X *own, X *all) {  // own: (part), all: (parts * part)
        const size_t part = sharding.buckets[b].part;
        sent.params += (sharding.parts - 1) * part * sizeof(X);
        begin(gathers_[b], comm, [&] { comm.all_gather({own, part}, {all, sharding.parts * part}); });
    }
    static void begin(Request &request, Comm &comm, const std::function<void()> &f) {
        Request begun = comm.start(f);
        std::swap(request, begun);  // nvcc takes an assignment for a request that is dropped
    }

    const std::vector<ShardRun> shard_runs_;
    struct {
        size_t bucket = 0;
        const float *from = nullptr;
        uint64_t key = 0;  // rounding_key
        Request request = {}, of_replicas = {};
    } sum_;                         // the last sum, which may still be under way
    std::vector<Request> gathers_;  // (buckets) the gathers of parameters that may be under way
};
