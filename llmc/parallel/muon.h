// Muon's update of the layers' matrices (../ops/muon.h) with parts on several ranks: "Distributed Muon" of Liu et al. (2025, arXiv:2502.16982). A
// rank computes the momentum of its part of a bucket, all ranks gather the bucket, and each rank orthogonalises the matrices of which it updates a
// part. So shards are the same as with AdamW, results do not depend on the number of ranks, and with 7 matrices per layer each of 8 ranks has about
// two. The gathered momentum is of type X, and adds (parts - 1) * x * padded elements of layers to the bytes per step in zero.h.
//
// Under tensor parallelism the gathered bucket has the rank's parts of matrices. The N ranks of a tensor group then put their parts together, in an
// array of whole matrices that they sum; each of them orthogonalises a matrix, and updates its own part. All N together send 2 (N - 1) x more bytes
// per element of these matrices.
#pragma once
#include "../ops/layout.h"
#include "../ops/muon.h"
#include "zero.h"

template <class Dev> class Muon {
  public:
    using X = typename Dev::X;

    void plan(Plan &plan, const Zero<Dev> &zero) {
        size_t bucket = 0, whole = 0, matrix = 0, side = 0;
        for (const Bucket &b : zero.sharding.buckets) {
            for (const Tensor *t : matrices_of(zero, b)) {
                const std::vector<size_t> shape = t->whole_shape();
                bucket = std::max(bucket, b.padded());
                matrix = std::max(matrix, t->whole_count()), side = std::max(side, std::min(shape[0], shape[1]));
            }
            if (b.holders == Holders::same_cut) whole = std::max(whole, whole_count(zero, b));
        }
        plan.transient(&momenta_, "muon bucket", {bucket});
        plan.transient(&whole_, "muon whole matrices", {whole});
        plan.transient(&buffers_.x, "muon matrix", {matrix});
        plan.transient(&buffers_.gram, "muon gram", {side, side});
        plan.transient(&buffers_.polynomial, "muon polynomial", {side, side});
        plan.transient(&buffers_.product, "muon product", {side, side});
        plan.transient(&buffers_.norm, "muon norm", {squared_norm_scratch(matrix)});
    }

    // m: (shard_count) the momentum, float or bf16
    template <class M> void update(Zero<Dev> &zero, const ShardRanks &ranks, Memory &memory, const AdamW &settings, M *m) {
        const auto runs = zero.sharding.tensor_runs(zero.table);
        for (const Bucket &b : zero.sharding.buckets)
            if (!matrices_of(zero, b).empty()) update_bucket(zero, ranks, memory, settings, m, b, runs);
    }

  private:
    static bool in(const Bucket &b, size_t flat) { return b.begin <= flat && flat < b.begin + b.count; }
    static std::vector<const Tensor *> matrices_of(const Zero<Dev> &zero, const Bucket &b) {
        std::vector<const Tensor *> matrices;
        for (const Tensor &t : zero.table)
            if (t.of_layer && in(b, t.offset)) matrices.push_back(&t);
        return matrices;
    }
    // The elements of a bucket's whole matrices that come before `end` in the bucket.
    static size_t whole_count(const Zero<Dev> &zero, const Bucket &b, size_t end = SIZE_MAX) {
        size_t count = 0;
        for (const Tensor *t : matrices_of(zero, b)) count += t->offset < end ? t->whole_count() : 0;
        return count;
    }
    // Calls copy(whole, ld, part, ld of the part, rows, columns) for the pieces of which the rank's part of a matrix consists.
    template <class F> static void for_pieces(const Tensor &t, X *whole, X *part, F copy) {
        const size_t rows = t.shape[0], columns = t.shape[1];
        if (t.cut.dim == 1) return copy(whole + t.cut.first, t.cut.whole, part, columns, rows, columns);
        t.cut.for_sections(rows, [&](size_t begin, size_t at, size_t n) {
            copy(whole + begin * columns, columns, part + at * columns, columns, n, columns);
        });
    }

    template <class M>
    void update_bucket(Zero<Dev> &zero, const ShardRanks &ranks, Memory &memory, AdamW settings, M *m, const Bucket &b,
                       const std::vector<TensorRun> &runs) {
        const auto for_own = [&](auto f) {  // the matrices of which this rank updates elements
            for (const TensorRun &r : runs)
                if (zero.table[r.tensor].of_layer && in(b, r.flat)) f(r, zero.table[r.tensor]);
        };
        for_own([&](const TensorRun &r, const Tensor &) {
            settings.first = r.number;
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
        const bool cut = b.holders == Holders::same_cut;
        if (cut) put_together(zero, *ranks.tensor, memory, b);
        for_own([&](const TensorRun &r, const Tensor &t) {
            X *const part = momenta_ + (t.offset - b.begin), *const whole = cut ? whole_ + whole_count(zero, b, t.offset) : part;
            const std::vector<size_t> shape = t.whole_shape();
            orthogonalise(zero.dev, whole, buffers_, shape[0], shape[1]);
            if (cut)
                for_pieces(t, whole, part, [&](const X *of_whole, size_t ld, X *own, size_t own_ld, size_t rows, size_t columns) {
                    copy_rows(zero.dev, own, own_ld, of_whole, ld, rows, columns);
                });
            muon_update(zero.dev, zero.params_at(r), part + r.first, settings, muon_size(shape[0], shape[1]), r.count);
        });
    }

    // Sums whole_ over the tensor group, in which each rank has written its parts of the bucket's matrices.
    void put_together(Zero<Dev> &zero, Comm &tensor, Memory &memory, const Bucket &b) {
        const size_t count = whole_count(zero, b);
        memory.fill(whole_, 0, count * sizeof(X));
        for (const Tensor *t : matrices_of(zero, b))
            for_pieces(*t, whole_ + whole_count(zero, b, t->offset), momenta_ + (t->offset - b.begin),
                       [&](X *of_whole, size_t ld, const X *own, size_t own_ld, size_t rows, size_t columns) {
                           copy_rows(zero.dev, of_whole, ld, own, own_ld, rows, columns);
                       });
        const size_t size = size_t(tensor.size), rank = size_t(tensor.rank);
        zero.sent.params += (count + (size - 2) * (count * (rank + 1) / size - count * rank / size)) * sizeof(X);
        tensor.all_reduce_sum({whole_, count});
    }

    X *momenta_ = nullptr;  // (elements of a bucket)
    X *whole_ = nullptr;    // (elements of a bucket's whole matrices)
    OrthogonaliseRoom<X> buffers_ = {};
};
