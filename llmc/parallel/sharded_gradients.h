// The gradients of a rank, and their sums over ranks (zero.h). A gradient is computed in place, or in a buffer of floats if ranks store
// only the sums of their own parts, or if gradients are stored in bf16.
//
// A backward pass makes these calls for each bucket b, the same on all ranks:
//
//     start(ranks, memory, b, buffer)         loads the sum so far into the buffer
//     (adds to the buffer, or to `floats` if gradients are not in buffers)
//     reduce(ranks, b, buffer, last)          starts the sum over ranks. `last`: no more gradients are added to the bucket in this step
//
// The calls also take n consecutive buckets, with their number as an additional argument and a buffer in which the buckets are contiguous, as in the
// flat arrays. finish(ranks) ends the pass. After reduce() the memory of a bucket must not be touched until the next reduce() or finish(), because
// its sum may still be in flight: on GPUs it overlaps with the backward pass. So two buffers alternate. A bucket in a buffer may be started and
// reduced several times in a pass; a tied embedding is, first as head and then as embedding. The communicators must outlive this object.
#pragma once
#include <cmath>
#include <utility>
#include <variant>
#include <vector>

#include "../core/arena.h"
#include "../core/rng.h"
#include "../ops/gradients.h"
#include "../ops/reduce.h"
#include "comm.h"
#include "mesh.h"
#include "sharding.h"

template <class Dev> struct ShardedGradients {
    Dev dev;
    const Sharding &sharding;
    const std::vector<Tensor> &table;  // with the offsets of the flat arrays
    const bool own_part_only;          // from stage 2 on: a rank only stores the sums of its own part
    const bool in_bf16;                // gradients are stored in bf16, rounded stochastically
    float *floats = nullptr;           // (count); own part only: (shard_count)
    bf16 *rounded = nullptr;           // the same in bf16, instead of `floats`
    uint64_t rounding_key = 0;         // key of the random bits that round gradients; each pass has its own
    double *norm_scratch = nullptr;    // a sum, and squared_norm_scratch
    size_t sent = 0;                   // bytes

    ShardedGradients(Dev dev, const Sharding &sharding, const std::vector<Tensor> &table, bool in_bf16)
        : dev(dev),
          sharding(sharding),
          table(table),
          own_part_only(sharding.stage >= 2),
          in_bf16(in_bf16),
          shard_runs_(sharding.shard_runs()) {}

    bool in_buffers() const { return in_bf16 || own_part_only; }

    void plan(Plan &plan) {
        if (in_bf16) plan.add(&rounded, "gradients", {stored()});
        else plan.add(&floats, "gradients", {stored()});
    }
    void plan_scratch(Plan &plan) {
        plan.add(&norm_scratch, "gradient norm scratch", {1 + squared_norm_scratch(sharding.largest_part)});
    }

    // Clears all gradients, or only those that the first pass does not overwrite: it overwrites products that are not in buffers.
    void clear(Memory &memory, bool products) {
        if (in_bf16) return memory.fill(rounded, 0, stored() * sizeof(bf16));
        size_t begin = 0;
        const auto clear_up_to = [&](size_t end) { memory.fill(floats + begin, 0, (end - begin) * sizeof(float)); };
        for (const Tensor &t : table)
            if (t.product && !products) clear_up_to(t.offset), begin = t.offset + t.count;
        clear_up_to(stored());
    }

    // buffer: (parts * part). The sum over ranks includes the sum so far once: each rank starts with its stored part, and other ranks' parts are 0.
    void start(const ShardRanks &ranks, Memory &memory, size_t first, float *buffer, size_t n = 1) {
        if (!in_buffers()) return;
        for (const Sum &s : sums_)
            if ((first <= s.bucket && s.bucket < first + n) || s.from == buffer) {
                finish(ranks);
                break;
            }
        for (size_t b = first; b < first + n; b++) {
            const Bucket &bucket = sharding.buckets[b];
            float *const all = in_buffer(buffer, first, b);
            if (own_part_only) memory.fill(all, 0, bucket.padded() * sizeof(float));
            const ShardRun run = own_part_only ? sharding.own_part(b) : sharding.all_parts(b);
            float *const to = all + (run.flat - bucket.begin);
            if (in_bf16) widen_gradients(dev, to, rounded + offset(run), run.count);
            else ranks.group.memory.copy(to, floats + offset(run), run.count * sizeof(float));
        }
    }

    // From stage 2 on each pass is summed over ranks, before only the last pass. From stage 1 on each rank only gets the sum of its own part.
    // Gradients in
    // bf16 belong to one rank before the sum, and are rounded by that rank's random bits.     buffer: padding 0
    void reduce(const ShardRanks &ranks, size_t first, float *buffer, bool last, size_t n = 1) {
        if (own_part_only || last) finish(ranks);
        for (size_t b = first; b < first + n; b++) {
            float *const all = in_buffers() ? in_buffer(buffer, first, b) : floats + sharding.buckets[b].begin;  // (parts * part)
            if (own_part_only || last) start_sum(ranks, b, all, last);
            else if (in_bf16) round(sharding.all_parts(b), all, rounding_key, uint32_t(ranks.rank()) + 1);
        }
    }

    // Waits for the last sums, and rounds them if they are still floats. A pass with buffers must end with this call, because the next pass uses the
    // last bucket's buffer for other arrays.
    void finish(const ShardRanks &ranks) {
        for (Sum &s : sums_) {
            const Bucket &bucket = sharding.buckets[s.bucket];
            ranks.of(bucket.holders).wait(std::move(s.request));
            if (ranks.replicas) ranks.replicas->wait(std::move(s.of_replicas));
            const ShardRun own = sharding.own_part(s.bucket);
            if (in_bf16) round(own, s.from + (own.flat - bucket.begin), s.key, 0);
        }
        sums_.clear();
    }

    // Returns the norm of all summed gradients, with the same bits on every rank. Squares are summed by bucket and then by rank, so
    // worlds only differ by float64's rounding.
    double norm(const ShardRanks &ranks, Memory &memory) {
        finish(ranks);
        const auto sum_of = [&](auto counts) {
            memory.fill(norm_scratch, 0, sizeof(double));
            for (const ShardRun &s : shard_runs_)
                if (counts(sharding.buckets[sharding.bucket_of(s.global)]))
                    std::visit([&](const auto *g) { add_squared_norm(dev, norm_scratch, norm_scratch + 1, g, s.count); }, at(s));
            return read(memory, norm_scratch, 1)[0];
        };
        if (sharding.stage > 0) return std::sqrt(ranks.group.sum(sum_of([](const Bucket &) { return true; })));
        double sum = sum_of([](const Bucket &b) { return b.holders == Holders::all; });
        for (Holders holders : {Holders::same_experts, Holders::same_cut})
            if (Comm *const dividing = ranks.dividing(holders))
                sum += dividing->sum(sum_of([=](const Bucket &b) { return b.holders == holders; }));
        return std::sqrt(sum);
    }
    double squared_norm_of(const ShardRun &s) {
        return std::visit([&](const auto *g) { return squared_norm(dev, norm_scratch, g, s.count); }, at(s));
    }

    std::variant<float *, bf16 *> at(const ShardRun &s) {
        if (in_bf16) return rounded + offset(s);
        return floats + offset(s);
    }

  private:
    size_t stored() const { return own_part_only ? sharding.shard_count : sharding.count; }
    size_t offset(const ShardRun &s) const {
        return own_part_only ? s.shard : s.flat;
    }  // offset of a run in the stored gradients
    float *in_buffer(float *buffer, size_t first, size_t b) const {
        return buffer + (sharding.buckets[b].begin - sharding.buckets[first].begin);
    }
    void start_sum(const ShardRanks &ranks, size_t b, float *all, bool last) {
        const Bucket &bucket = sharding.buckets[b];
        Comm &comm = ranks.of(bucket.holders);
        Sum &s = sums_.emplace_back(Sum{b, all, rounding_key});
        if (sharding.stage == 0) return all_reduce(s.request, comm, {all, bucket.count});
        const ShardRun own = sharding.own_part(b);
        float *const sum = own_part_only && !in_bf16 ? floats + offset(own) : all + (own.flat - bucket.begin);
        sent += (bucket.parts - 1) * own.count * sizeof(float);
        comm.start(s.request, [&] { comm.reduce_scatter_sum({all, bucket.padded()}, {sum, own.count}); });
        if (ranks.replicas && last) all_reduce(s.of_replicas, *ranks.replicas, {sum, own.count});
    }
    void round(const ShardRun &run, const float *from, uint64_t key, uint32_t rank) {
        round_gradients(dev, rounded + offset(run), from, run.count, Random{key, Purpose::gradients, rank}, run.global);
    }
    // Each rank sends the other ranks their parts of the slice, and then the sum of its own part to all.
    void all_reduce(Request &request, Comm &comm, Slice slice) {
        const size_t size = size_t(comm.size), rank = size_t(comm.rank);
        const size_t own = slice.count * (rank + 1) / size - slice.count * rank / size;
        sent += size > 1 ? (slice.count + (size - 2) * own) * sizeof(float) : 0;
        comm.start(request, [&] { comm.all_reduce_sum(slice); });
    }

    const std::vector<ShardRun> shard_runs_;
    struct Sum {
        size_t bucket = 0;
        const float *from = nullptr;
        uint64_t key = 0;  // rounding_key
        Request request = {}, of_replicas = {};
    };
    std::vector<Sum> sums_;  // sums of the last buckets, which may still be in flight
};
