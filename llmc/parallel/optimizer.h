// The optimizer of a rank's shard: AdamW, its two moments and how they are stored, its update, and what a checkpoint keeps of it.
#pragma once
#include <variant>
#include <vector>

#include "../ops/adamw.h"
#include "zero.h"

// Parameters are of either dtype; moments are float, bf16 alone, or in blocks of 8 bits. In files all are float.
using AnyFloats = std::variant<Floats<float>, Floats<bf16>, bf16 *, Blockwise>;

// A part of the optimizer's state that a rank holds. Elements are numbered through all tensors of the model in the order of its parameter table,
// without padding, so that an element has the same number whatever the number of ranks is.
struct OptimizerPart {
    size_t global, count;    // elements [global, global + count)
    AnyFloats master, m, v;  // (count), in `memory`; master holds the parameters
};

struct OptimizerState {
    std::vector<OptimizerPart>
        parts;     // of this rank: either all ranks together have each element once, or each rank has them all
    size_t count;  // elements of the model
    Memory *memory;
};

template <class Dev> class Optimizer {
  public:
    // Plans all that training keeps: the parameters and their gradients, too.
    void plan(Plan &plan, Zero<Dev> &zero, Moments moments = Moments::f32) {
        zero.plan(plan, true);
        plan_moment(plan, zero, moments, m_, "adamw m");
        plan_moment(plan, zero, moments, v_, "adamw v");
        plan.end_state();
        zero.plan_scratch(plan);
    }

    // Updates the parameters of the shard from their summed gradients; the table says which of them decay. Those that other ranks update are
    // gathered after it: zero.ready() waits for them.
    void update(Zero<Dev> &zero, Comm &comm, const AdamW &adamw) {
        zero.ready(comm, 0, zero.sharding.elements);  // the last step's gathers, if no forward pass has waited for them
        for_runs(zero, [&](const DecayRun &r, auto m, auto v) {
            AdamW a = adamw;
            if (!r.decay) a.weight_decay = 0;
            a.first = r.global;
            std::visit([&](const auto *grads) { adamw_update(zero.dev, zero.params_at(r), m, v, grads, a, r.count); },
                       zero.grads_at(r));
        });
        zero.gather(comm);
    }

    // This rank's part, for checkpoints.
    OptimizerState state(Zero<Dev> &zero, Memory &memory) {
        OptimizerState state{{}, zero.sharding.elements, &memory};
        const auto any = [](auto *moment) {
            if constexpr (std::is_same_v<decltype(moment), float *>) return Floats<float>{moment};
            else return moment;
        };
        const auto add = [&](const DecayRun &r, size_t first, size_t n, auto m, auto v) {
            if (n) state.parts.push_back({r.global + first, n, zero.params_at(r) + first, m + first, v + first});
        };
        for_runs(zero, [&](const DecayRun &r, auto m, auto v) {
            if constexpr (std::is_same_v<decltype(m), Blockwise>) {  // parts end where blocks end
                const size_t head = std::min(r.count, (Blockwise::size - m.skip) % Blockwise::size);
                add(r, 0, head, m, v), add(r, head, r.count - head, m, v);
            } else {
                add(r, 0, r.count, any(m), any(v));
            }
        });
        return state;
    }

  private:
    struct Moment {                // arrays that are not used are null
        float *floats = nullptr;   // (shard_count); with codes, of runs without decay alone, one after the other
        bf16 *rounded = nullptr;   // (shard_count)
        uint8_t *codes = nullptr;  // (shard_count)
        float *scales = nullptr;   // (blocks) of one run after the other
    } m_, v_;

    void plan_moment(Plan &plan, Zero<Dev> &zero, Moments moments, Moment &moment, const std::string &name) {
        const size_t n = zero.sharding.shard_count;
        if (moments == Moments::f32) return plan.add(&moment.floats, name, {n});
        if (moments == Moments::bf16) return plan.add(&moment.rounded, name, {n});
        size_t blocks = 0, floats = 0;
        for (const DecayRun &r : zero.sharding.decay_runs(zero.table)) {
            if (r.decay) blocks += ceil_div(r.shard % Blockwise::size + r.count, Blockwise::size);
            else floats += r.count;
        }
        plan.add(&moment.codes, name + ", 8 bits", {n});
        plan.add(&moment.scales, name + ", scales", {blocks});
        plan.add(&moment.floats, name + ", norms and biases", {floats});
    }

    // The run's moment; `block` is the number of its first block.
    static Blockwise in_blocks(const Moment &moment, const DecayRun &r, size_t block, bool negative) {
        return {moment.codes + r.shard, moment.scales + block, r.shard % Blockwise::size, r.count, negative};
    }

    // Calls f(run, m, v) for all runs, with the moments as they are stored. In 8 bits those of norms and biases, which do not decay, are floats.
    template <class F> void for_runs(Zero<Dev> &zero, F f) {
        size_t block = 0, others = 0;
        for (const DecayRun &r : zero.sharding.decay_runs(zero.table))
            if (m_.rounded) f(r, m_.rounded + r.shard, v_.rounded + r.shard);
            else if (!m_.codes) f(r, m_.floats + r.shard, v_.floats + r.shard);
            else if (r.decay) {
                const Blockwise m = in_blocks(m_, r, block, true), v = in_blocks(v_, r, block, false);
                f(r, m, v);
                block += m.blocks();
            } else f(r, m_.floats + others, v_.floats + others), others += r.count;
    }
};
