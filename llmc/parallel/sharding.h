// How the flat arrays of parameters, gradients and optimizer state are divided among ranks: into buckets, which are summed and gathered one by one,
// and each bucket into one part per rank. The parts that a rank updates are its shard. Parts are of equal size; padding at the end of a bucket
// fills up the last one. Additional padding before a unit aligns its matrices like arrays, also in bf16.
#pragma once
#include <vector>

#include "../core/device.h"
#include "../io/tensor.h"

// Whole tensors whose gradients are finished, and therefore summed, together: a layer, for example. A unit consists of elements [begin, end)
// of the table. It is one bucket, however large, unless its gradients can be computed row by row, as an embedding's can: then it may be several buckets.
struct Unit {
    size_t begin, end, row_elements = 0;  // row_elements: size of a row; 0: the unit is never divided
    // Ranges at its beginning, by their ends, that hold something of each expert, in the order of the experts. Under expert parallelism each is a bucket, of which
    // a rank has the elements of its experts alone.
    std::vector<size_t> experts = {};
};

struct Bucket {
    size_t global = 0;          // number of its first element, counted without padding, which is the same for every world
    size_t begin = 0;           // the same element in the flat arrays
    size_t count = 0;           // elements, without padding
    size_t part = 0;            // elements of a rank's part, padding included
    size_t shard = 0;           // offset of a rank's part in the arrays of its shard
    size_t parts = 1, own = 0;  // how many parts it has, and the number of this rank's
    bool experts = false;       // under expert parallelism: it is a range's share of this rank's experts
    size_t range = 0;           // number of the first element of the range; of other buckets `global`

    size_t padded() const { return parts * part; }
};

// A run of this rank's parameters that is contiguous in every array that holds them: the table, the flat arrays and the shard. It
// never includes padding, so that an op can process it in one call.
struct ShardRun {
    size_t global, flat, shard, count;  // positions of its first element, as in Bucket; elements
};

struct UpdateRun : ShardRun {
    bool decay, of_layer;  // as Tensor has them
    bool experts;          // as Bucket has it
};

struct TensorRun : ShardRun {
    size_t tensor, first;  // number of the tensor in the table, and the run's first element, counted within the tensor
};

// Says which rank updates which elements. At stage 0, and with a single rank, there is one part, which every rank has.
//
// Under expert parallelism the ranks are rows of expert_ranks neighbours, each with its share of the experts. Ranks of the same column, which have the
// same experts, divide their buckets into parts. So from stage 1 on a rank updates the same number of elements as without it.
struct Sharding {
    static constexpr size_t unit_aligned = array_alignment / 2;  // in the flat arrays, units begin at a multiple of this

    const int stage;
    const size_t parts, own;                // of buckets without experts
    const size_t expert_ranks, expert_own;  // of expert parallelism: the size of a row, and this rank's number in it
    const size_t aligned;  // the size of a part is a multiple of this: 16 bytes of bf16, or a block of moments in 8 bits
    const bool divided;  // a rank has only its parts of the parameters, and a unit's parameters are gathered before they are read
    std::vector<Bucket> buckets;
    size_t elements = 0;              // of the table
    size_t count = 0;                 // elements of the flat arrays, padding included
    size_t shard_count = 0;           // elements of a shard, padding included
    size_t largest = 0;               // elements of the largest bucket, padding included
    size_t largest_part = 0;          // of a bucket
    std::vector<size_t> unit_begins;  // (units + 1) where the units begin in a shard, and its end

    // The units follow each other from 0 on. A bucket of rows has at most `bucket_bytes` of float gradients, or the fewest rows that
    // are a multiple of multiple() if those are more. `away`: the parameters are in a store (pieces.h), and are then also divided at stages 1 and 2.
    Sharding(const std::vector<Unit> &units, int stage, int world, int rank, size_t bucket_bytes, size_t aligned = 8,
             bool away = false, size_t expert_ranks = 1);

    size_t multiple() const { return parts * aligned; }  // every part of a bucket is a multiple of this from the bucket's begin
    size_t bucket_of(size_t global) const;               // the number of the bucket that has this element, or its range
    size_t flat(size_t global) const;  // the position of this element in the flat arrays; of a range's first one, its bucket's
    size_t padded_count(size_t begin, size_t end) const;          // elements of the buckets of [begin, end), padding included
    std::vector<Tensor> padded(std::vector<Tensor> table) const;  // the tensors that a rank has, with offsets in the flat arrays
    // Of bucket b, padding included: this rank's part, and all parts, which have no place in a shard.
    ShardRun own_part(size_t b) const {
        const Bucket &bucket = buckets[b];
        const size_t first = bucket.own * bucket.part;
        return {bucket.global + first, bucket.begin + first, bucket.shard, bucket.part};
    }
    ShardRun all_parts(size_t b) const {
        const Bucket &bucket = buckets[b];
        return {bucket.global, bucket.begin, bucket.shard, bucket.padded()};
    }
    std::vector<ShardRun> shard_runs() const;  // one run per bucket of which this rank has elements
    std::vector<TensorRun> tensor_runs(const std::vector<Tensor> &padded_table) const;  // divided at the borders of tensors
    std::vector<UpdateRun> update_runs(const std::vector<Tensor> &padded_table) const;  // divided where the update is another one
};
