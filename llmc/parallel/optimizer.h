// The optimizer of a rank's shard: AdamW, its two moments and how they are stored, its update, and what a checkpoint keeps of it.
#pragma once
#include <functional>
#include <memory>
#include <set>
#include <variant>
#include <vector>

#include "../core/store.h"
#include "../ops/adamw.h"
#include "zero.h"

// Parameters are of either dtype; moments are float, bf16 alone, or in blocks of 8 bits. In files all are float.
using AnyFloats = std::variant<Floats<float>, Floats<bf16>, bf16 *, Blockwise>;

// A part of the optimizer's state that a rank holds. Elements are numbered through all tensors of the model in the order of its parameter table,
// without padding, so that an element has the same number whatever the number of ranks is.
struct OptimizerPart {
    size_t global, count;    // elements [global, global + count)
    AnyFloats master, m, v;  // (count), in `memory`; master holds the parameters
    size_t piece = 0;        // of moments that are offloaded
};

struct OptimizerState {
    std::vector<OptimizerPart> parts;  // of this rank
    size_t count;                      // elements of the model
    size_t writers;                    // the first so many ranks of the world have each element once, and write files
    Memory *memory;
    // Of moments that are offloaded one piece is in `memory` at a time: come() precedes whatever reads or writes a part, and leave() follows what has
    // written to it.
    std::function<void(const OptimizerPart &)> come = [](const OptimizerPart &) {}, leave = come;
};

// Of offloaded moments so many elements are a piece.
constexpr size_t offload_piece = size_t(4) << 20;

template <class Dev> class Optimizer {
  public:
    // Plans all that training keeps: the parameters and their gradients, too. If `piece` is not 0 the moments are offloaded in pieces of so many elements,
    // rounded up, and at the time `update` some of them are in memory: one is updated, while the next one comes and those before it leave.
    void plan(Plan &plan, Zero<Dev> &zero, Moments moments = Moments::f32, size_t piece = 0, size_t update = 0) {
        const size_t n = zero.sharding.shard_count;
        moments_ = moments;
        if (piece) piece_ = round_up(std::min(piece, n), store_alignment), pieces_ = ceil_div(n, piece_), count_ = n;
        zero.plan(plan, true);
        plan_moment(plan, zero, m_, "adamw m");
        plan_moment(plan, zero, v_, "adamw v");
        plan.end_state();
        if (piece_) plan_windows(plan, m_, "adamw m", update), plan_windows(plan, v_, "adamw v", update);
        zero.plan_scratch(plan);
    }

    void use(Store &store, Memory &memory) { store_ = &store, memory_ = &memory; }

    // Updates the parameters of the shard from their summed gradients; the table says which of them decay. Those that other ranks update are
    // gathered after it: zero.ready() waits for them.
    void update(Zero<Dev> &zero, const ShardRanks &ranks, const AdamW &adamw) {
        zero.ready(ranks, 0, zero.sharding.elements);  // the last step's gathers, if no forward pass has waited for them
        size_t came = 0, left = 0;                     // the pieces before these have begun to come, and to leave
        const auto reach = [&](size_t piece) {
            for (; left < piece; left++) leave(left, left % windows);
            for (; came < std::min(piece + 2, pieces_); came++) {
                if (came >= windows) wait(came - windows);
                come(came, came % windows);
            }
            wait(piece);
            point_at(piece, piece % windows);
        };
        for_runs(zero, reach, [&](const DecayRun &r, auto m, auto v) {
            AdamW a = adamw;
            if (!r.decay) a.weight_decay = 0;
            a.first = r.global;
            std::visit([&](const auto *grads) { adamw_update(zero.dev, zero.params_at(r), m, v, grads, a, r.count); },
                       zero.grads_at(r));
        });
        for (; left < came; left++) leave(left, left % windows);
        for (size_t piece = came - std::min(came, windows); piece < came; piece++) wait(piece);  // other arrays need the windows
        zero.gather(ranks);
    }

    // This rank's part, for checkpoints.
    OptimizerState state(Zero<Dev> &zero, Memory &memory) {
        OptimizerState state{{}, zero.sharding.elements, zero.sharding.parts, &memory};
        const auto any = [](auto *moment) {
            if constexpr (std::is_same_v<decltype(moment), float *>) return Floats<float>{moment};
            else return moment;
        };
        const auto add = [&](const DecayRun &r, size_t first, size_t n, auto m, auto v) {
            const size_t piece = piece_ ? r.shard / piece_ : 0;
            if (n) state.parts.push_back({r.global + first, n, zero.params_at(r) + first, m + first, v + first, piece});
        };
        for_runs(
            zero, [&](size_t piece) { point_at(piece, 0); },
            [&](const DecayRun &r, auto m, auto v) {
                if constexpr (std::is_same_v<decltype(m), Blockwise>) {  // parts end where blocks end
                    const size_t head = std::min(r.count, (Blockwise::size - m.skip) % Blockwise::size);
                    add(r, 0, head, m, v), add(r, head, r.count - head, m, v);
                } else {
                    add(r, 0, r.count, any(m), any(v));
                }
            });
        if (!piece_) return state;
        state.come = [this, here = std::make_shared<size_t>(pieces_)](const OptimizerPart &part) {
            if (*here == part.piece) return;
            come(*here = part.piece, 0), wait(part.piece);
        };
        state.leave = [this](const OptimizerPart &part) { leave(part.piece, 0), wait(part.piece); };
        return state;
    }

  private:
    static constexpr size_t windows = 3;

    struct Moment {               // arrays that are not used are null
        float *floats = nullptr;  // (shard_count), or of one piece, as the next two
        bf16 *rounded = nullptr;
        uint8_t *codes = nullptr;
        float *scales = nullptr;          // with codes: (blocks) of one run after the other
        float *others = nullptr;          // with codes: the moments of runs without decay, one after the other
        std::byte *window[windows] = {};  // (piece) each
        std::vector<size_t> place = {};   // (pieces) in the store
    } m_, v_;

    size_t bytes_of(size_t piece) const {
        return round_up(std::min(piece_, count_ - piece * piece_) * element(), store_alignment);
    }
    size_t element() const { return moments_ == Moments::f32 ? sizeof(float) : moments_ == Moments::bf16 ? sizeof(bf16) : 1; }

    void plan_moment(Plan &plan, Zero<Dev> &zero, Moment &moment, const std::string &name) {
        const size_t n = zero.sharding.shard_count;
        if (piece_)
            in_parts(
                n, [&](size_t, size_t part) { moment.place.push_back(plan.add_place(name, part * element())); }, piece_);
        else if (moments_ == Moments::f32) plan.add(&moment.floats, name, {n});
        else if (moments_ == Moments::bf16) plan.add(&moment.rounded, name, {n});
        else plan.add(&moment.codes, name + ", 8 bits", {n});
        if (moments_ != Moments::blockwise) return;
        size_t blocks = 0, others = 0;
        for (const DecayRun &r : zero.sharding.decay_runs(zero.table)) {
            if (r.decay) blocks += ceil_div(r.shard % Blockwise::size + r.count, Blockwise::size);
            else others += r.count;
        }
        plan.add(&moment.scales, name + ", scales", {blocks});
        plan.add(&moment.others, name + ", norms and biases", {others});
    }

    void plan_windows(Plan &plan, Moment &moment, const std::string &name, size_t update) {
        for (std::byte *&window : moment.window)
            plan.add(&window, name + ", window", {piece_ * element()}, update, update), plan.travels();
    }

    // Makes the moments' pointers those of a piece in a window.
    void point_at(size_t piece, size_t window) {
        begin_ = piece * piece_;
        for (Moment *moment : {&m_, &v_}) {
            std::byte *const at = moment->window[window];
            if (moments_ == Moments::f32) moment->floats = reinterpret_cast<float *>(at);
            else if (moments_ == Moments::bf16) moment->rounded = reinterpret_cast<bf16 *>(at);
            else moment->codes = reinterpret_cast<uint8_t *>(at);
        }
    }

    // They begin to copy a piece, and wait for the copy. A piece that has never left is 0.
    void come(size_t piece, size_t window) {
        for (Moment *moment : {&m_, &v_})
            if (has_left_.contains(piece)) store_->come(moment->place[piece], moment->window[window], bytes_of(piece));
            else memory_->fill(moment->window[window], 0, bytes_of(piece));
    }
    void leave(size_t piece, size_t window) {
        for (Moment *moment : {&m_, &v_}) store_->leave(moment->place[piece], moment->window[window], bytes_of(piece));
        has_left_.insert(piece);
    }
    void wait(size_t piece) {
        for (const Moment *moment : {&m_, &v_}) store_->wait(moment->place[piece]);
    }

    // The run's moment; `block` is the number of its first block.
    Blockwise in_blocks(const Moment &moment, const DecayRun &r, size_t block, bool negative) const {
        return {moment.codes + (r.shard - begin_), moment.scales + block, r.shard % Blockwise::size, r.count, negative};
    }

    // Calls f(run, m, v) for all runs, with the moments as they are stored. In 8 bits those of norms and biases, which do not decay, are floats. Where
    // moments are offloaded, runs end where pieces end, and open(piece) precedes those of a piece.
    template <class Open, class F> void for_runs(Zero<Dev> &zero, Open open, F f) {
        size_t block = 0, others = 0;
        for (const DecayRun &whole : zero.sharding.decay_runs(zero.table))
            for (size_t first = 0, n; first < whole.count; first += n) {
                const size_t shard = whole.shard + first;
                n = piece_ ? std::min(whole.count - first, piece_ - shard % piece_) : whole.count;
                const DecayRun r{{whole.global + first, whole.flat + first, shard, n}, whole.decay};
                if (piece_) open(shard / piece_);
                const size_t at = shard - begin_;
                if (moments_ == Moments::f32) f(r, m_.floats + at, v_.floats + at);
                else if (moments_ == Moments::bf16) f(r, m_.rounded + at, v_.rounded + at);
                else if (r.decay) {
                    const Blockwise m = in_blocks(m_, r, block, true), v = in_blocks(v_, r, block, false);
                    f(r, m, v);
                    block += m.blocks();
                } else f(r, m_.others + others, v_.others + others), others += n;
            }
    }

    Moments moments_ = Moments::f32;
    size_t piece_ = 0, pieces_ = 0;  // 0: moments are not offloaded
    size_t count_ = 0;               // of the shard
    size_t begin_ = 0;               // the element of the shard that the moments' pointers point at
    std::set<size_t> has_left_;      // pieces
    Store *store_ = nullptr;
    Memory *memory_ = nullptr;
};
