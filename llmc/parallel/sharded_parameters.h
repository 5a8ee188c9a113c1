// The parameters of a rank: all of them, or only its shard if they are divided (zero.h); in memory, or in a store (pieces.h). Parameters that a rank
// does not have in memory are fetched into other arrays before use (../model/prefetched_units.h).
#pragma once
#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "../core/arena.h"
#include "../core/floats.h"
#include "comm.h"
#include "mesh.h"
#include "pieces.h"
#include "sharding.h"

template <class Dev> struct ShardedParameters {
    using X = typename Dev::X;

    Dev dev;
    const Sharding sharding;
    ShardPieces pieces;               // of `params` and `lower`, if offloaded
    const std::vector<Tensor> whole;  // the table of the model
    const std::vector<Tensor> table;  // the tensors that the rank has or shares, with the offsets of the flat arrays
    X *params = nullptr;              // (count), with padding that stays 0; divided: (shard_count)
    int16_t *lower = nullptr;         // (shard_count) the low 16 bits of the float weights; null in f32 and for frozen weights
    Payload sent;                     // bytes sent; only its member params is used

    // table: offsets without padding     piece: elements per piece of offloaded parameters; 0: not offloaded
    ShardedParameters(Dev dev, const Sharding &sharding, const std::vector<Tensor> &table, size_t piece = 0)
        : dev(dev), sharding(sharding), pieces(sharding, piece), whole(table), table(this->sharding.padded(table)) {}
    ShardedParameters(const ShardedParameters &) = delete;  // gradients and prefetched units refer to it

    bool prefetched() const { return sharding.divided || pieces.any(); }

    void plan(Plan &plan, const std::string &name, bool trained) {
        const auto add = [&](auto **array, const std::string &of, size_t n) {
            if (pieces.any()) pieces.add(plan, array, of);
            else plan.add(array, of, {n});
        };
        add(&params, name, sharding.divided ? sharding.shard_count : sharding.count);
        if constexpr (Floats<X>::halves)
            if (trained) add(&lower, name + ", lower halves", sharding.shard_count);
        pieces.plan_windows(plan, false);
    }

    // For divided parameters: starts to gather a unit, parameters [begin, end) of the table, to `to` (padded_count(begin, end)). Until ready()
    // neither `to` nor this rank's part may be touched. That part is at `own` if it was read from a store, and otherwise in `params`.
    void fetch(const ShardRanks &ranks, size_t begin, size_t end, X *to, X *own = nullptr) {
        gathers_.resize(sharding.buckets.size());
        const size_t first = sharding.bucket_of(begin), shard = sharding.buckets[first].shard;
        for (size_t b = first; b <= sharding.bucket_of(end - 1); b++) {
            const Bucket &bucket = sharding.buckets[b];
            start_gather(ranks.of(bucket.holders), b, (own ? own : params + shard) + (bucket.shard - shard),
                         to + (bucket.begin - sharding.flat(begin)));
        }
    }

    // Waits until elements [begin, end) of the table have arrived from all ranks.
    void ready(const ShardRanks &ranks, size_t begin, size_t end) {
        if (gathers_.empty() || begin == end) return;
        for (size_t b = sharding.bucket_of(begin); b <= sharding.bucket_of(end - 1); b++)
            ranks.of(sharding.buckets[b].holders).wait(std::move(gathers_[b]));
    }

    // Starts to gather the parameters of all shards on all ranks, bucket by bucket, after they have been updated or loaded. On GPUs the gathers
    // overlap with the beginning of the next forward pass. ready() waits for them.
    void gather(const ShardRanks &ranks) {
        if (sharding.parts == 1 || sharding.divided) return;
        gathers_.resize(sharding.buckets.size());
        for (size_t b = 0; b < sharding.buckets.size(); b++) {
            const Bucket &bucket = sharding.buckets[b];
            X *const all = params + bucket.begin;
            start_gather(ranks.of(bucket.holders), b, all + bucket.own * bucket.part, all);
        }
    }

    size_t elements() const {  // of the model, on all ranks together
        size_t n = 0;
        for (const Tensor &t : whole) n += t.whole_count();
        return n;
    }
    // Calls f(number, at, count) for the parts of the rank's elements [begin, begin + n) that have consecutive numbers (Tensor::number) if ranks with
    // these tables divide the model.
    template <class F> void for_numbers(const std::vector<std::vector<Tensor>> &tables, size_t begin, size_t n, F f) const {
        for (const Tensor &t : whole) {
            const size_t from = std::max(t.offset, begin), to = std::min(t.offset + t.count, begin + n);
            if (from >= to) continue;
            const size_t i = size_t(std::ranges::find(tables[0], t.name, &Tensor::name) - tables[0].begin());
            t.for_runs(from - t.offset, to - from, [&](size_t in_whole, size_t at, size_t run) {
                for (const size_t end = in_whole + run; in_whole < end;) {
                    const auto [number, count] = numbered(tables, i, in_whole);
                    const size_t m = std::min(count, end - in_whole);
                    f(number, from - begin + at, m);
                    in_whole += m, at += m;
                }
            });
        }
    }

    // Returns the addresses of a run's parameters and gradients. With offloaded parameters, the run is in the current piece.
    Floats<X> params_at(const ShardRun &s) {
        const size_t at = s.shard - pieces.begin();
        return {params + (prefetched() ? at : s.flat), lower ? lower + at : nullptr};
    }
    // Calls f(run) for each run of tensors on this rank; f sets its parameters.
    template <class F> void set_runs(F f) {
        for (const TensorRun &r : sharding.tensor_runs(table))
            pieces.in_pieces(r.shard, r.count, [&](size_t piece, size_t first, size_t n) {
                pieces.open(piece);
                f(TensorRun{{r.global + first, r.flat + first, r.shard + first, n}, r.tensor, r.first + first, r.number + first});
                pieces.keep();
            });
    }
    // Calls f(parameters, first, n) for consecutive elements [first, first + n) of this rank's part of bucket b, including padding.
    template <class F> void read_part(size_t b, F f) {
        const Bucket &bucket = sharding.buckets[b];
        const size_t part = bucket.own * bucket.part;
        pieces.in_pieces(bucket.shard, bucket.part, [&](size_t piece, size_t first, size_t n) {
            pieces.open(piece);
            const size_t at = part + first;
            f(params_at({bucket.global + at, bucket.begin + at, bucket.shard + first, n}), first, n);
        });
    }

  private:
    // Returns the number of an element of a whole tensor among these ranks' parts, and how many elements follow one another from there.
    static std::pair<size_t, size_t> numbered(const std::vector<std::vector<Tensor>> &tables, size_t tensor, size_t element) {
        for (const std::vector<Tensor> &table : tables) {
            const Tensor &t = table[tensor];
            size_t number = 0, count = 0;
            const auto look_in = [&](size_t begin, size_t at, size_t run) {
                if (begin <= element && element < begin + run)
                    number = t.number + at + element - begin, count = begin + run - element;
            };
            if (t.cut.dim == 1)
                look_in(element / t.cut.whole * t.cut.whole + t.cut.first, element / t.cut.whole * t.shape[1], t.shape[1]);
            else t.for_runs(0, t.count, look_in);
            if (count) return {number, count};
        }
        die("no rank has element %zu of %s", element, tables[0][tensor].name.c_str());
    }
    void start_gather(Comm &comm, size_t b, X *own, X *all) {  // own: (part), all: (parts * part)
        const Bucket &bucket = sharding.buckets[b];
        sent.params += (bucket.parts - 1) * bucket.part * sizeof(X);
        comm.start(gathers_[b], [&] { comm.all_gather({own, bucket.part}, {all, bucket.padded()}); });
    }

    std::vector<Request> gathers_;  // (buckets) gathers that may be in flight
};
