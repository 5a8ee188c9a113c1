// Muon's update of the layers' matrices (../ops/muon.h) with parts on several ranks: "Distributed Muon" of Liu et al. (2025, arXiv:2502.16982). A
// rank computes the momentum of its part of a bucket, all ranks gather the bucket, and each rank orthogonalises the matrices of which it updates a
// part. So shards are the same as with AdamW, results do not depend on the number of ranks, and with 7 matrices per layer each of 8 ranks has about
// two. The gathered momentum is of type X, and adds (parts - 1) * x * padded elements of layers to the bytes per step in zero.h.
#pragma once
#include "../ops/muon.h"
#include "zero.h"

template <class Dev> class Muon {
  public:
    using X = typename Dev::X;

    void plan(Plan &plan, const Zero<Dev> &zero) {
        size_t bucket = 0, matrix = 0, side = 0;
        for (const Bucket &b : zero.sharding.buckets)
            if (has_matrices(zero, b)) bucket = std::max(bucket, b.padded());
        for (const Tensor &t : zero.table)
            if (t.of_layer) matrix = std::max(matrix, t.count), side = std::max(side, std::min(t.shape[0], t.shape[1]));
        plan.transient(&momenta_, "muon bucket", {bucket});
        plan.transient(&buffers_.x, "muon matrix", {matrix});
        plan.transient(&buffers_.gram, "muon gram", {side, side});
        plan.transient(&buffers_.polynomial, "muon polynomial", {side, side});
        plan.transient(&buffers_.product, "muon product", {side, side});
        plan.transient(&buffers_.norm, "muon norm", {squared_norm_scratch(matrix)});
    }

    // m: (shard_count) the momentum, float or bf16
    template <class M> void update(Zero<Dev> &zero, const ShardRanks &ranks, const AdamW &settings, M *m) {
        const auto runs = zero.sharding.tensor_runs(zero.table);
        for (const Bucket &b : zero.sharding.buckets)
            if (has_matrices(zero, b)) update_bucket(zero, ranks, settings, m, b, runs);
    }

  private:
    static bool has_matrices(const Zero<Dev> &zero, const Bucket &b) {
        return std::ranges::any_of(zero.table, [&](const Tensor &t) { return t.of_layer && in(b, t.offset); });
    }
    static bool in(const Bucket &b, size_t flat) { return b.begin <= flat && flat < b.begin + b.count; }

    template <class M>
    void update_bucket(Zero<Dev> &zero, const ShardRanks &ranks, AdamW settings, M *m, const Bucket &b,
                       const std::vector<TensorRun> &runs) {
        const auto for_matrices = [&](auto f) {  // the matrices of which this rank has a part
            for (const TensorRun &r : runs)
                if (zero.table[r.tensor].of_layer && in(b, r.flat)) f(r, zero.table[r.tensor]);
        };
        for_matrices([&](const TensorRun &r, const Tensor &) {
            settings.first = r.global;
            std::visit(
                [&](const auto *grads) {
                    muon_momentum(zero.dev, momenta_ + (r.flat - b.begin), m + r.shard, grads, settings, r.count);
                },
                zero.gradients.at(r));
        });
        if (b.parts > 1) {
            zero.sent.params += (b.parts - 1) * b.part * sizeof(X);
            ranks.of(b.holders).all_gather({momenta_ + b.own * b.part, b.part}, {momenta_, b.padded()});
        }
        for_matrices([&](const TensorRun &r, const Tensor &t) {
            X *const matrix = momenta_ + (t.offset - b.begin);
            orthogonalise(zero.dev, matrix, buffers_, t.shape[0], t.shape[1]);
            muon_update(zero.dev, zero.params_at(r), matrix + r.first, settings, muon_size(t.shape[0], t.shape[1]), r.count);
        });
    }

    X *momenta_ = nullptr;  // (elements of a bucket)
    OrthogonaliseRoom<X> buffers_ = {};
};
