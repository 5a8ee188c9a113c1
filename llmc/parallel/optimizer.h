// The optimizer of a rank's shard: its moments and their storage, its update, and its part of a checkpoint. It is AdamW, or Muon (muon.h) for
// the layers' matrices with AdamW for all other tensors. Muon has one moment, m.
#pragma once
#include <algorithm>
#include <optional>
#include <vector>

#include "../ops/adamw.h"
#include "muon.h"
#include "optimizer_state.h"
#include "pieces.h"
#include "zero.h"

template <class Dev> class Optimizer {
  public:
    // Plans all persistent arrays of training, including parameters and gradients. If `piece` is not 0, the moments are in a store, in pieces of
    // `piece` elements; a few pieces are in memory while update() runs. Muon supports neither offloading of moments or parameters nor moments in 8
    // bits.
    void plan(Plan &plan, Zero<Dev> &zero, Moments moments = Moments::f32, size_t piece = 0, bool muon = false) {
        const size_t n = zero.sharding.shard_count;
        moments_ = moments;
        if (muon) muon_.emplace();
        pieces_ = ShardPieces(zero.sharding, piece);
        zero.plan(plan, true);
        size_t without_v = 0;
        for (const UpdateRun &r : zero.sharding.update_runs(zero.table)) without_v += is_muons(r) ? r.count : 0;
        plan_moment(plan, zero, m_, muon ? "muon m" : "adamw m", n);
        plan_moment(plan, zero, v_, "adamw v", n - without_v);
        plan.end_state();
        if (muon) muon_->plan(plan, zero);
        pieces_.plan_windows(plan, true);
        zero.gradients.plan_scratch(plan);
    }

    void use(Store &store, Memory &memory) { pieces_.use(store, memory); }

    // Updates the parameters of the shard from their summed gradients; the table defines weight decay. Afterwards the parameters that other ranks
    // update are gathered: zero.ready() waits for them.
    void update(Zero<Dev> &zero, const ShardRanks &ranks, Memory &memory, const AdamW &adamw) {
        zero.ready(ranks, 0, zero.sharding.elements);  // waits for the previous step's gathers, if no forward pass has
        const auto reach = [&](size_t piece) { zero.pieces.reach(piece), pieces_.reach(piece); };
        for_runs(zero, reach, [&](const UpdateRun &r, auto m, auto v) {
            if (is_muons(r)) return;
            AdamW a = adamw;
            if (!r.decay) a.weight_decay = 0;
            a.first = r.number;
            std::visit([&](const auto *grads) { adamw_update(zero.dev, zero.params_at(r), m, v, grads, a, r.count); },
                       zero.gradients.at(r));
        });
        zero.pieces.finish(), pieces_.finish();
        if (muon_ && moments_ == Moments::f32) muon_->update(zero, ranks, memory, adamw, m_.floats);
        else if (muon_) muon_->update(zero, ranks, memory, adamw, m_.rounded);
        zero.gather(ranks);
    }

    // Returns this rank's part, for checkpoints; to load one of ranks that divided tensors otherwise, with the tables of these ranks.
    OptimizerState state(Zero<Dev> &zero, Memory &memory, const std::vector<std::vector<Tensor>> &tables = {}) {
        const Sharding &sharding = zero.sharding;
        const auto writers = [&](Holders holders) {  // that together have each element of such buckets once
            if (sharding.stage) return sharding.parts;
            return holders == Holders::same_experts ? sharding.expert_ranks
                   : holders == Holders::same_cut   ? sharding.tensor_ranks
                                                    : 1;
        };
        OptimizerState state{{},
                             zero.elements(),
                             std::max(writers(Holders::same_experts), writers(Holders::same_cut)),
                             sharding.tensor_ranks,
                             &memory};
        const auto any = [](auto *moment) {
            if constexpr (std::is_same_v<decltype(moment), float *>) return Floats<float>{moment};
            else return moment;
        };
        size_t piece = 0;
        const auto add = [&](const UpdateRun &r, size_t first, size_t n, auto m, auto v) {
            const auto part = [&](size_t number, size_t at, size_t count) {
                at += first;
                state.parts.push_back(
                    {number, count, zero.params_at(r) + at, m + at, v + at, piece, !is_muons(r), writers(r.holders)});
            };
            if (n == 0) return;
            if (tables.empty()) part(r.number + first, 0, n);
            else zero.for_numbers(tables, r.global + first, n, part);
        };
        for_runs(
            zero, [&](size_t p) { piece = p, zero.pieces.point_at(p), pieces_.point_at(p); },
            [&](const UpdateRun &r, auto m, auto v) {
                if constexpr (std::is_same_v<decltype(m), Blockwise>) {  // parts end at the ends of blocks
                    const size_t head = std::min(r.count, (Blockwise::size - m.skip) % Blockwise::size);
                    add(r, 0, head, m, v), add(r, head, r.count - head, m, v);
                } else {
                    add(r, 0, r.count, any(m), any(v));
                }
            });
        zero.pieces.close(), pieces_.close();
        state.open = [this, &zero](const OptimizerPart &part) { zero.pieces.open(part.piece), pieces_.open(part.piece); };
        state.keep = [this, &zero](const OptimizerPart &) { zero.pieces.keep(), pieces_.keep(); };
        return state;
    }

  private:
    struct Moment {               // unused arrays are null
        float *floats = nullptr;  // (shard_count; for v without Muon's elements), or the piece in memory; likewise the next two
        bf16 *rounded = nullptr;
        uint8_t *codes = nullptr;
        float *scales = nullptr;  // with codes: (blocks) of all runs, in order
        float *others = nullptr;  // with codes: the moments of runs without decay, in order
    } m_, v_;

    bool is_muons(const UpdateRun &r) const { return muon_ && r.of_layer; }

    void plan_moment(Plan &plan, Zero<Dev> &zero, Moment &moment, const std::string &name, size_t count) {
        const auto add = [&](auto **array, const std::string &of) {
            if (pieces_.any()) pieces_.add(plan, array, of);
            else plan.add(array, of, {count});
        };
        if (moments_ == Moments::f32) add(&moment.floats, name);
        else if (moments_ == Moments::bf16) add(&moment.rounded, name);
        else add(&moment.codes, name + ", 8 bits");
        if (moments_ != Moments::blockwise) return;
        size_t blocks = 0, others = 0;
        for (const UpdateRun &r : zero.sharding.update_runs(zero.table)) {
            if (r.decay) blocks += ceil_div(r.shard % Blockwise::size + r.count, Blockwise::size);
            else others += r.count;
        }
        plan.add(&moment.scales, name + ", scales", {blocks});
        plan.add(&moment.others, name + ", norms and biases", {others});
    }

    // Returns the run's moment; `block` is the number of its first block.
    Blockwise in_blocks(const Moment &moment, const UpdateRun &r, size_t block, bool negative) const {
        return {moment.codes + (r.shard - pieces_.begin()), moment.scales + block, r.shard % Blockwise::size, r.count, negative};
    }

    // Calls f(run, m, v) for all runs, with the moments in their storage type; Muon's runs have no v. With 8 bits the moments of norms and biases,
    // which do not decay, are floats. With offloaded moments or parameters, runs end at the ends of pieces, and open(piece) is called before a
    // piece's runs.
    template <class Open, class F> void for_runs(Zero<Dev> &zero, Open open, F f) {
        const ShardPieces &pieces = pieces_.any() ? pieces_ : zero.pieces;
        size_t block = 0, others = 0, without_v = 0;
        for (const UpdateRun &whole : zero.sharding.update_runs(zero.table)) {
            pieces.in_pieces(whole.shard, whole.count, [&](size_t piece, size_t first, size_t n) {
                UpdateRun r = whole;
                r.global += first, r.flat += first, r.shard += first, r.number += first, r.count = n;
                open(piece);
                const size_t at = r.shard - pieces_.begin();
                if (moments_ == Moments::f32) f(r, m_.floats + at, v_.floats + (at - without_v));
                else if (moments_ == Moments::bf16) f(r, m_.rounded + at, v_.rounded + (at - without_v));
                else if (r.decay) {
                    const Blockwise m = in_blocks(m_, r, block, true), v = in_blocks(v_, r, block, false);
                    f(r, m, v);
                    block += m.blocks();
                } else f(r, m_.others + others, v_.others + others), others += n;
            });
            if (is_muons(whole)) without_v += whole.count;
        }
    }

    std::optional<Muon<Dev>> muon_;
    Moments moments_ = Moments::f32;
    ShardPieces pieces_;  // for offloaded moments
};
