// Divides the flat arrays of parameters, gradients and optimizer state among ranks: first into buckets, which are summed and gathered one by one,
// and then each bucket into one part per rank. The parts that a rank updates are its shard. Parts have equal sizes; padding at the end of a bucket
// fills up the last part. Additional padding before a unit gives its matrices the alignment of arrays, even in bf16.
#pragma once
#include <vector>

#include "../core/device.h"
#include "../io/tensor.h"
#include "mesh.h"

// Whole tensors whose gradients are complete at the same time, and are summed together: for example a layer. A unit has the elements [begin, end) of the
// table. It is one bucket of any size, unless its gradients can be computed row by row, as an embedding's can: then it may be several buckets.
struct Unit {
    size_t begin, end, row_elements = 0;  // row_elements: size of a row; 0: the unit is never divided
    // The ends of the ranges at the unit's beginning that contain one tensor of every expert, expert after expert. Under expert parallelism each range
    // is a bucket, of which a rank has only the elements of its own experts.
    std::vector<size_t> experts = {};
    // Under tensor parallelism the ranges [begin, end) of cut tensors. The table is then the rank's own, with its part of each of them.
    std::vector<std::pair<size_t, size_t>> cut = {};
};

struct Bucket {
    size_t global = 0;          // number of its first element, counted without padding, so it is the same in every world
    size_t begin = 0;           // the same element in the flat arrays
    size_t count = 0;           // elements, without padding
    size_t part = 0;            // elements of a rank's part, including padding
    size_t shard = 0;           // offset of a rank's part in the arrays of its shard
    size_t parts = 1, own = 0;  // number of parts; index of this rank's part
    Holders holders = Holders::all;
    size_t range = 0;  // of experts: number of the range's first element; for other buckets `global`

    size_t padded() const { return parts * part; }
};

// A run of this rank's parameters that is contiguous in every array that holds them: the table, the flat arrays and the shard. It
// never includes padding, so an op can process it in one call.
struct ShardRun {
    size_t global, flat, shard, count;  // positions of its first element, as in Bucket; number of elements
};

struct TensorRun : ShardRun {
    size_t tensor, first;  // number of the tensor in the table, and the run's first element, counted within the tensor
    size_t number;         // of its first element (Tensor::number)
};

struct UpdateRun : ShardRun {
    size_t number;         // of its first element (Tensor::number)
    bool decay, of_layer;  // see Tensor
    Holders holders;       // see Bucket
};

// Defines the elements that each rank updates. At stage 0, and with a single rank, there is one part, which every rank has.
//
// Under expert parallelism expert_ranks neighbouring ranks divide the experts. The ranks that hold the same experts divide the buckets of these
// experts into parts. So from stage 1 on a rank updates the same number of elements as without expert parallelism. Under tensor parallelism the same
// holds for the tensor_ranks neighbouring ranks that cut tensors, and for the buckets of these.
struct Sharding {
    static constexpr size_t unit_aligned = array_alignment / 2;  // in the flat arrays, units begin at a multiple of this

    const int stage;
    const size_t parts, own;  // for buckets without experts
    const size_t expert_ranks,
        expert_own;  // expert parallelism: the ranks that divide the experts, and this rank's number among them
    const size_t tensor_ranks, tensor_own;  // tensor parallelism: the ranks that cut tensors, and this rank's number among them
    const size_t aligned;                   // part sizes are multiples of this: 16 bytes of bf16, or a block of 8-bit moments
    const bool divided;  // a rank only has its parts of the parameters; a unit's parameters are gathered before use
    std::vector<Bucket> buckets;
    size_t elements = 0;              // of the table
    size_t count = 0;                 // elements of the flat arrays, including padding
    size_t shard_count = 0;           // elements of a shard, including padding
    size_t largest = 0;               // elements of the largest bucket, including padding
    size_t largest_part = 0;          // elements of the largest part of a bucket
    std::vector<size_t> unit_begins;  // (units + 1) first element of each unit in a shard, then the shard's end

    // Units are contiguous from 0 on. A bucket of rows has at most `bucket_bytes` of float gradients, but at least the fewest rows that are a
    // multiple of multiple(). `away`: the parameters are in a store (pieces.h), and are then also divided at stages 1 and 2.
    Sharding(const std::vector<Unit> &units, int stage, int world, int rank, size_t bucket_bytes, size_t aligned = 8,
             bool away = false, size_t expert_ranks = 1, size_t tensor_ranks = 1);

    size_t multiple() const { return parts * aligned; }  // the offset of a part within its bucket is a multiple of this
    size_t bucket_of(size_t global) const;               // index of the bucket that contains this element, or its range
    size_t flat(size_t global) const;  // position of this element in the flat arrays; for a range's first element, its bucket's
    size_t padded_count(size_t begin, size_t end) const;          // elements of the buckets of [begin, end), including padding
    std::vector<Tensor> padded(std::vector<Tensor> table) const;  // the tensors that a rank has, with offsets in the flat arrays
    // This rank's part of bucket b, and all parts (which have no position in a shard), including padding.
    ShardRun own_part(size_t b) const {
        const Bucket &bucket = buckets[b];
        const size_t first = bucket.own * bucket.part;
        return {bucket.global + first, bucket.begin + first, bucket.shard, bucket.part};
    }
    ShardRun all_parts(size_t b) const {
        const Bucket &bucket = buckets[b];
        return {bucket.global, bucket.begin, bucket.shard, bucket.padded()};
    }
    std::vector<ShardRun> shard_runs() const;  // one run per bucket with elements of this rank
    std::vector<TensorRun> tensor_runs(const std::vector<Tensor> &padded_table) const;  // divided at the borders of tensors
    // The same, joined where the update and the numbers go on.
    std::vector<UpdateRun> update_runs(const std::vector<Tensor> &padded_table) const;
};
