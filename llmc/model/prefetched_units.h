// Units whose weights are loaded into other arrays before use: weights that are divided among ranks, as at stage 3 of ZeRO (../parallel/zero.h), and
// weights in a store (--offload weights, ../parallel/pieces.h). Each unit has an array while its weights are in use. Layers alternate between two
// such arrays, so the next layer's weights arrive while the current layer computes.
//
// Weights that are both divided and in a store are loaded in two steps: a rank reads its part of a unit from the store into a separate array, while
// the previous unit is being gathered, and then all ranks gather the parts in the unit's array. If weights are divided, all ranks make the same
// calls, with or without a row.
#pragma once
#include "../core/arena.h"
#include "../parallel/sharded_parameters.h"
#include "table.h"

constexpr size_t no_unit = SIZE_MAX;

template <class Dev> class PrefetchedUnits {
  public:
    using X = typename Dev::X;

    // of: the parameters, with the units of `table`. `table` must outlive this object.
    PrefetchedUnits(ShardedParameters<Dev> &of, const Table &table, size_t layers);

    // The head's number among the fetched units; other units keep their own numbers. A tied embedding is fetched twice in a pass.
    const size_t head;

    bool any() const { return zero_.prefetched(); }
    bool divided() const { return zero_.sharding.divided; }
    bool stored() const { return zero_.pieces.any(); }  // true if weights are in a store
    size_t bytes(size_t unit) const;                    // bytes that each rank reads from the store

    void plan(Plan &plan);
    // Returns the address of an element of the table, in this unit, while the unit is ready.
    X *find(size_t unit, size_t offset) const {
        const Sharding &s = zero_.sharding;
        return here_[unit > 0 && unit == table_.head ? head : unit] + (s.flat(offset) - s.flat(table_.units[unit].begin));
    }
    X *head_weights() const { return here_[head]; }

    // Starts loading a unit. next: the unit of the next call, or no_unit; if units are loaded in two steps, it is read from the store meanwhile.
    void fetch(const ShardRanks &ranks, size_t unit, size_t next);
    // Waits until a unit has been read from the store. If it is then gathered, Zero::ready() waits for that.
    void wait(size_t unit) {
        if (stored() && !divided()) zero_.pieces.wait(unit);
    }

  private:
    const Unit &unit_of(size_t unit) const { return table_.units[number_of(unit)]; }
    size_t number_of(size_t unit) const { return unit == head ? table_.head : unit; }
    void bring(size_t unit) { zero_.pieces.bring(number_of(unit), own_[unit]); }

    ShardedParameters<Dev> &zero_;
    const Table &table_;
    const size_t layers_;
    std::vector<X *> here_;    // (head + 1) the unit's weights
    std::vector<X *> own_;     // (head + 1) this rank's part of them: the same array if they are not divided
    size_t coming_ = no_unit;  // the unit whose local part is being read, to be gathered next
};

template <class Dev>
PrefetchedUnits<Dev>::PrefetchedUnits(ShardedParameters<Dev> &of, const Table &table, size_t layers)
    : head(table.units.size()), zero_(of), table_(table), layers_(layers), here_(head + 1), own_(head + 1) {}

template <class Dev> size_t PrefetchedUnits<Dev>::bytes(size_t unit) const {
    if (!stored()) return 0;
    const std::vector<size_t> &begins = zero_.sharding.unit_begins;
    return (begins[unit + 1] - begins[unit]) * sizeof(X);
}

template <class Dev> void PrefetchedUnits<Dev>::plan(Plan &plan) {
    if (!any()) return;
    // Plans one array for `unit` and every `step`th unit after it up to `end`, with room for the largest (layers with and without experts differ).
    const auto add = [&](size_t unit, const std::string &name, size_t end = 0, size_t step = 1) {
        size_t whole = 0, own = 0;
        for (size_t of = unit; of == unit || of < end; of += step) {
            whole = std::max(whole, zero_.sharding.padded_count(unit_of(of).begin, unit_of(of).end));
            own = std::max(own, bytes(number_of(of)) / sizeof(X));
        }
        plan.transient(&here_[unit], "weights." + name, {whole});
        if (stored() && divided()) plan.transient(&own_[unit], "weights." + name + ", own part", {own});
        if (stored()) plan.travels();
        if (stored() && !divided()) plan.alias(&own_[unit], &here_[unit]);
        for (size_t of = unit + step; of < end; of += step)
            plan.alias(&here_[of], &here_[unit]), plan.alias(&own_[of], &own_[unit]);
    };
    add(0, "embedding");
    if (table_.positions) add(table_.positions, "positions");
    for (size_t l = 0; l < std::min<size_t>(2, layers_); l++) add(1 + l, format("layers.%zu", l), 1 + layers_, 2);
    add(head - 1, "norm");
    add(head, "head");
}

template <class Dev> void PrefetchedUnits<Dev>::fetch(const ShardRanks &ranks, size_t unit, size_t next) {
    if (stored() && coming_ != unit) bring(unit);
    if (!divided()) return;
    const Unit &u = unit_of(unit);
    if (stored()) zero_.pieces.wait(number_of(unit));
    zero_.fetch(ranks, u.begin, u.end, here_[unit], own_[unit]);
    if (!stored()) return;
    coming_ = next;
    if (coming_ != no_unit) bring(coming_);
}
