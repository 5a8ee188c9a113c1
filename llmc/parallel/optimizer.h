// The optimizer of a rank's shard: AdamW, its two moments and how they are stored, its update, and what a checkpoint keeps of it.
#pragma once
#include <variant>
#include <vector>

#include "../ops/adamw.h"
#include "zero.h"

// Parameters are of either dtype; moments are float, or bf16 alone. In files all are float.
using AnyFloats = std::variant<Floats<float>, Floats<bf16>, bf16 *>;

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
    void plan(Plan &plan, Zero<Dev> &zero, bool bf16_moments = false) {
        const size_t n = zero.sharding.shard_count;
        zero.plan(plan, true);
        if (bf16_moments) plan.add(&m16_, "adamw m", {n}), plan.add(&v16_, "adamw v", {n});
        else plan.add(&m_, "adamw m", {n}), plan.add(&v_, "adamw v", {n});
        plan.end_state();
        zero.plan_scratch(plan);
    }

    // Updates the parameters of the shard from their summed gradients; the table says which of them decay. Those that other ranks update are
    // gathered after it: zero.ready() waits for them.
    void update(Zero<Dev> &zero, Comm &comm, const AdamW &adamw) {
        zero.ready(comm, 0, zero.sharding.elements);  // the last step's gathers, if no forward pass has waited for them
        for (const DecayRun &r : zero.sharding.decay_runs(zero.table)) {
            AdamW a = adamw;
            if (!r.decay) a.weight_decay = 0;
            a.first = r.global;
            const auto run = [&](auto *m, auto *v) {
                adamw_update(zero.dev, zero.params_at(r), m + r.shard, v + r.shard, zero.grads_at(r), a, r.count);
            };
            m16_ ? run(m16_, v16_) : run(m_, v_);
        }
        zero.gather(comm);
    }

    // This rank's part, for checkpoints.
    OptimizerState state(Zero<Dev> &zero, Memory &memory) {
        OptimizerState state{{}, zero.sharding.elements, &memory};
        const auto moment = [](float *whole, bf16 *rounded, size_t at) {
            return rounded ? AnyFloats(rounded + at) : AnyFloats(Floats<float>{whole + at});
        };
        for (const ShardRun &s : zero.sharding.shard_runs())
            state.parts.push_back({s.global, s.count, zero.params_at(s), moment(m_, m16_, s.shard), moment(v_, v16_, s.shard)});
        return state;
    }

  private:
    float *m_ = nullptr, *v_ = nullptr;     // (shard_count), null if the moments are bf16
    bf16 *m16_ = nullptr, *v16_ = nullptr;  // (shard_count), null if they are float
};
