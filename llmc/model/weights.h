// The weights of a model and their gradients, for every kind of storage: whole on every rank, divided among ranks (../parallel/zero.h), in a store
// (--offload), in 4 or 8 bits (quantised_layers.h), frozen under adapters (lora.h). A step uses them by unit, for example a layer:
//
//     fetch(unit, next)      called early: starts to copy or gather the unit's weights, if they must be loaded before use (prefetched_units.h)
//     ready(unit)            called before its weights are read: waits for them, and dequantises them
//     sum_gradients(unit)    called when the backward pass computes the unit's gradients: adds them to the sum so far, and sums them over ranks
//
// All ranks make these calls in the same order. If ranks gather weights or sum gradients, ranks without a row also take part.
//
// With adapters, `trained` and the optimizer only have the adapters; the model's own weights are frozen, without gradients or
// moments.
#pragma once
#include <algorithm>
#include <vector>

#include "../core/arena.h"
#include "../parallel/optimizer.h"
#include "lora.h"
#include "model.h"
#include "parameters.h"
#include "pass.h"
#include "prefetched_units.h"
#include "quantised_layers.h"
#include "trace.h"

// Makes each unit a bucket of ZeRO. If gradients have buffers, a large embedding or head is divided into several buckets, so its gradients never
// exist as a whole. A model that is not trained is only divided at stage 3.
inline Sharding sharding_for(std::vector<Unit> units, const ModelLimits &limits) {
    const Ranks &r = limits.ranks;
    const bool train = limits.mode == Mode::train;
    const int world = int(r.group()), rank = int(r.rank % r.group());
    if (!train || !(limits.bf16_gradients || (r.zero_stage >= 2 && r.group() > 1)))
        for (Unit &unit : units) unit.row_elements = 0;
    if (!train && r.zero_stage < 3) return Sharding(units, 0, world, rank, 0, 8, false, r.expert_parallel, r.tp);
    const bool in_blocks = limits.moments == Moments::blockwise;
    return Sharding(units, r.zero_stage, world, rank, r.bucket_bytes, in_blocks ? Blockwise::size : 8, limits.offload.weights,
                    r.expert_parallel, r.tp);
}

// Frozen weights are not divided, and adapters are too small for division to pay.
inline ModelLimits undivided(ModelLimits limits, Mode mode) {
    limits.mode = mode, limits.ranks.zero_stage = std::min(limits.ranks.zero_stage, 2), limits.offload.weights = false;
    return limits;
}

// The size of the pieces in which a model's own weights are stored; 0: not offloaded. A model that only generates reads all
// weights for each token.
inline size_t weights_piece(const ModelLimits &limits) {
    return limits.offload.weights && limits.mode != Mode::generate ? limits.offload.piece : 0;
}

// Returns the table of trained tensors: all tensors, or adapters. With a frozen base and no adapters, only a reward model's head is trained.
inline Table trained_table(const ModelConfig &config, const Table &base) {
    if (!config.freezes()) return base;
    Adapters<float> none;
    TensorList<float> list;
    return lora_table(config, base, none, list);
}

template <class Dev> class Weights {
  public:
    using X = typename Dev::X;

    // table: the trainer's. All arguments except the device must outlive this object.
    Weights(Dev dev, const ModelConfig &config, const ModelLimits &limits, const Table &table, Trace &trace);

    const Table table;         // trained tensors: all tensors, or adapters
    const Table frozen_table;  // the trainer's table if the model is frozen; else empty
    const std::vector<Unit> &units = table.units;
    Zero<Dev> trained;  // in the order of `table`
    QuantisedLayers<Dev> quantised;
    ShardedParameters<Dev> frozen;    // frozen tensors that are not quantised
    PrefetchedUnits<Dev> prefetched;  // the model's own weights
    Optimizer<Dev> optimizer;
    float *head_buffer = nullptr;  // buffer of the head's gradients, also if the head is tied to the embedding

    void plan_state(Plan &plan);
    void plan_buffers(Plan &plan);
    void use(Mesh &mesh, Memory &memory, Store *store);  // called when the arrays have their addresses

    // Lists of tensors that point at weights and gradients.
    TensorList<X> trained_weights();
    TensorList<X> frozen_weights();
    TensorList<float> gradients();

    void load(const HfWeights &files, uint64_t seed);
    void initialise(uint64_t seed);
    void save(const std::string &dir, const std::string &export_dtype);
    void copy_to(Weights &other) {
        copy_parameters(trained, mesh_->shards, other.trained, [&](size_t b) { return room_for(b); });
    }

    // ---- during a step ------------------------------------------------------------------------------------------------------------

    void begin_step(uint64_t key);  // Model::zero_gradients
    // Returns true if this rank takes part in a forward pass: with a row; also without a row if weights are gathered or experts are divided.
    bool begin_forward(bool has_row) {
        has_row_ = has_row, reads_ = has_row || limits_.ranks.expert_parallel > 1;
        return reads_ || prefetched.divided();
    }
    void begin_backward(bool has_row, bool has_targets, bool last_micro_step);
    void end_backward();
    // False: the next gradients of products overwrite. True: they accumulate.
    bool accumulates() const { return accumulates_; }
    // True if the head's gradient is computed in several buckets.
    bool head_in_buckets() const {
        const Unit &head = units[table.head];
        const Sharding &s = trained.sharding;
        return head.begin < head.end && s.bucket_of(head.begin) != s.bucket_of(head.end - 1);
    }
    // True if layers share the arrays of their weights, so the next ready() overwrites this layer's weights.
    bool in_shared_arrays() const { return prefetched.any() || quantised.any(); }

    void fetch(size_t unit, size_t next, const Pass &pass);  // next: the unit of the next call, or no_unit
    void ready(size_t unit, const Pass &pass);
    // `joins`: ranks without a row also add
    template <class F> void sum_gradients(size_t unit, bool complete, F add, bool joins = false) {
        sum(unit, trained.gradients.in_buffers() ? buffers_[unit] : nullptr, complete, add, joins);
    }
    template <class F> void sum_head_gradients(F add);

  private:
    // True if no op of the pass reads the base's weights of this unit, because it is an embedding or a head that is trained in full.
    bool replaced(size_t unit, const Pass &pass) const {
        return config_.freezes() && pass.adapters && (unit == 0 || unit == table.head) && units[unit].begin < units[unit].end;
    }
    template <class F> void sum(size_t unit, float *buffer, bool complete, F add, bool joins = false);
    void begin_message(Phase phase, RowOp op, size_t unit, size_t bucket = 0) {
        if (mesh_->all.size > 1 || trained.gradients.in_bf16) trace_.begin_transfer(phase, op, unit, bucket);
    }
    // Between steps: memory for bucket b with its padding.
    float *room_for(size_t b) {
        return trained.gradients.in_buffers() ? *largest_ : trained.gradients.floats + trained.sharding.buckets[b].begin;
    }
    X *address(const ShardedParameters<Dev> &of, size_t unit, size_t offset) const {
        return of.prefetched() ? prefetched.find(unit, offset) : of.params + of.sharding.flat(offset);
    }
    Random rounding_keys() const { return {step_key_, Purpose::gradients, 0}; }

    const ModelConfig &config_;
    const ModelLimits &limits_;
    Trace &trace_;
    Mesh *mesh_ = nullptr;
    Memory *memory_ = nullptr;
    // From stage 2 of ZeRO on, and for gradients stored in bf16: the buffers in which gradients are computed before they are
    // summed over ranks and stored. A unit's buffer has room for its largest bucket.
    std::vector<float *> buffers_;                                                         // (units)
    float **largest_;                                                                      // the buffer with room for any bucket
    bool has_row_ = false, reads_ = false, last_micro_step_ = false, accumulates_ = true;  // reads_: the layers' weights
    uint64_t step_key_ = 0;  // key of the random bits that round gradients
    size_t micro_step_ = 0;  // the number of backward passes of this step so far
};

template <class Dev>
Weights<Dev>::Weights(Dev dev, const ModelConfig &config, const ModelLimits &limits, const Table &base, Trace &trace)
    : table(trained_table(config, base)),
      frozen_table(config.freezes() ? base : Table()),
      trained(dev, sharding_for(table.units, config.freezes() ? undivided(limits, limits.mode) : limits), table.tensors,
              limits.bf16_gradients, config.freezes() ? 0 : weights_piece(limits)),
      quantised(dev, config, frozen_table),
      frozen(dev, sharding_for(quantised.others.table.units, undivided(limits, Mode::evaluate)), quantised.others.table.tensors,
             weights_piece(limits)),
      prefetched(config.freezes() ? frozen : trained, config.freezes() ? quantised.others.table : table, config.L),
      config_(config),
      limits_(limits),
      trace_(trace) {}

template <class Dev> void Weights<Dev>::plan_state(Plan &plan) {
    if (config_.freezes()) frozen.plan(plan, "frozen params", false);
    if (quantised.any()) quantised.plan(plan);
    if (limits_.mode == Mode::train)
        optimizer.plan(plan, trained, limits_.moments, limits_.offload.optimizer ? limits_.offload.piece : 0, limits_.muon);
    else trained.plan(plan, false), plan.end_state();
}

template <class Dev> void Weights<Dev>::plan_buffers(Plan &plan) {
    if (quantised.any()) quantised.plan_layer(plan);
    size_t largest = 0;
    const auto add = [&](float **buffer, const std::string &name, size_t unit) {
        const Unit &u = units[unit];
        size_t room = u.begin == u.end || u.row_elements ? 0 : trained.sharding.padded_count(u.begin, u.end);
        for (const Bucket &b : trained.sharding.buckets)
            if (u.begin <= b.global && b.global < u.end) room = std::max(room, b.padded());
        plan.transient(buffer, "bucket." + name, {room});
        if (room >= largest) largest_ = buffer, largest = room;
    };
    if (limits_.mode == Mode::train && trained.gradients.in_buffers()) {
        buffers_.resize(units.size());
        add(&head_buffer, "head", table.head);
        if (table.head) plan.alias(&buffers_[table.head], &head_buffer);
        add(&buffers_.back(), "norm", units.size() - 1);
        for (size_t l = 0; l < config_.L; l++) add(&buffers_[1 + l], format("layer.%zu", l), 1 + l);
        if (table.positions) add(&buffers_[table.positions], "positions", table.positions);
        add(&buffers_[0], "embedding", 0);
    }
    prefetched.plan(plan);
}

template <class Dev> void Weights<Dev>::use(Mesh &mesh, Memory &memory, Store *store) {
    mesh_ = &mesh, memory_ = &memory;
    quantised.point();
    if (store) optimizer.use(*store, memory), trained.pieces.use(*store, memory), frozen.pieces.use(*store, memory);
}

template <class Dev> TensorList<typename Dev::X> Weights<Dev>::trained_weights() {
    return TensorList<X>([this](size_t unit, size_t offset) { return address(trained, unit, offset); });
}
template <class Dev> TensorList<typename Dev::X> Weights<Dev>::frozen_weights() {
    return TensorList<X>([this](size_t unit, size_t offset) {
        X *const written_out = quantised.find(unit, offset);
        return written_out ? written_out : address(frozen, unit, quantised.others.offsets.at(offset));
    });
}
template <class Dev> TensorList<float> Weights<Dev>::gradients() {
    return TensorList<float>([this](size_t unit, size_t offset) {
        const Sharding &s = trained.sharding;
        return trained.gradients.in_buffers() ? buffers_[unit] + (s.flat(offset) - s.flat(units[unit].begin))
                                              : trained.gradients.floats + s.flat(offset);
    });
}

template <class Dev> void Weights<Dev>::load(const HfWeights &files, uint64_t seed) {
    load_parameters(frozen, files, files, seed, *memory_);
    load_parameters(trained, files, files, seed, *memory_);
    if (quantised.any()) quantised.load(files, *memory_);
}
template <class Dev> void Weights<Dev>::initialise(uint64_t seed) {
    const auto initialise = [&](ShardedParameters<Dev> &parameters) {
        initialise_parameters(parameters, mesh_->shards, seed, config_.initializer_range, *memory_);
    };
    initialise(frozen), initialise(trained);
}
template <class Dev> void Weights<Dev>::save(const std::string &dir, const std::string &export_dtype) {
    save_parameters(
        trained, *mesh_, dir, export_dtype, *memory_, [&](size_t b) { return room_for(b); },
        config_.lora.rank ? adapter_files : model_files);
}

// ---- during a step --------------------------------------------------------------------------------------------------------------------

template <class Dev> void Weights<Dev>::begin_step(uint64_t key) {
    step_key_ = key, micro_step_ = 0;
    accumulates_ = trained.gradients.in_buffers();  // a buffer starts with the sum so far
    trained.gradients.clear(*memory_, accumulates_);
}

template <class Dev> void Weights<Dev>::begin_backward(bool has_row, bool has_targets, bool last_micro_step) {
    has_row_ = has_row, last_micro_step_ = last_micro_step;
    if (!accumulates_ && !has_targets) trained.gradients.clear(*memory_, accumulates_ = true);  // no product will overwrite them
    trained.gradients.rounding_key = rounding_keys().bits(2 * micro_step_ + 1);
}

template <class Dev> void Weights<Dev>::end_backward() {
    accumulates_ = true, micro_step_++;
    if (trained.gradients.in_buffers()) trained.gradients.finish(mesh_->shards);
}

template <class Dev> void Weights<Dev>::fetch(size_t unit, size_t next, const Pass &pass) {
    const bool read = reads_ || prefetched.divided();
    if (!prefetched.any() || !read || replaced(unit == prefetched.head ? table.head : unit, pass)) return;
    if (prefetched.stored()) trace_.begin_transfer(pass.phase, FETCH_PARAMS, unit);
    else begin_message(pass.phase, FETCH_PARAMS, unit);
    prefetched.fetch(mesh_->shards, unit, next);
}

template <class Dev> void Weights<Dev>::ready(size_t unit, const Pass &pass) {
    if (trained.sharding.parts > 1) begin_message(pass.phase, FETCH_PARAMS, unit);
    trained.ready(mesh_->shards, units[unit].begin, units[unit].end);
    if (prefetched.stored()) trace_.begin_transfer(pass.phase, FETCH_PARAMS, unit);
    if (!replaced(unit, pass)) prefetched.wait(unit);
    const size_t n = reads_ ? quantised.weights(unit) : 0;
    if (n == 0) return;
    trace_.begin_transfer(pass.phase, DEQUANTISE, unit, n);
    quantised.ready(unit);
}

// A tied embedding's gradients are rounded twice in a pass, as head and as embedding, with different random bits.
template <class Dev> template <class F> void Weights<Dev>::sum_head_gradients(F add) {
    trained.gradients.rounding_key = rounding_keys().bits(2 * micro_step_);
    sum(table.head, head_buffer, table.head != 0, add);
    trained.gradients.rounding_key = rounding_keys().bits(2 * micro_step_ + 1);
}

// Calls add(first, n), which adds to the gradients of elements [first, first + n) of a unit, and then sums these gradients over ranks: from
// stage 2 on in every micro-step, otherwise in the last one. `complete`: no other call of this pass adds to them. A rank without a row still
// takes part in the sum, because the ranks with a row wait for it.
template <class Dev> template <class F> void Weights<Dev>::sum(size_t unit, float *buffer, bool complete, F add, bool joins) {
    const Sharding &s = trained.sharding;
    if (units[unit].begin == units[unit].end) {  // the unit is frozen, and has no gradients to sum
        if (has_row_ || joins) add(0, 0);
        return;
    }
    const bool last = last_micro_step_ && complete;
    const size_t begin = units[unit].begin, first = s.bucket_of(begin), behind = s.bucket_of(units[unit].end - 1) + 1;
    const size_t together = units[unit].row_elements ? 1 : behind - first;  // buckets
    for (size_t b = first; b < behind; b += together) {
        size_t n = 0;
        for (size_t i = b; i < b + together; i++) n += s.buckets[i].count;
        const auto begin_sum = [&] { begin_message(Phase::backward, GRAD_SUM, unit, n); };
        if (trained.gradients.in_buffers()) begin_sum(), trained.gradients.start(mesh_->shards, *memory_, b, buffer, together);
        if (has_row_ || joins) add(s.buckets[b].range - begin, n);
        if (trained.gradients.in_buffers() || last)
            begin_sum(), trained.gradients.reduce(mesh_->shards, b, buffer, last, together);
    }
}
