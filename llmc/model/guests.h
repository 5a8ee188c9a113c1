// The weights of a model that are brought to other arrays before they are read (guests): those that are divided among ranks, as at stage 3 of ZeRO
// (../parallel/zero.h), and those that lie in a store (--offload weights, ../parallel/pieces.h). Each unit has an array for the time in which its weights
// are read, and layers take two such arrays in turn, so that the next layer's weights arrive while this one computes.
//
// Weights that are both come in two steps: a rank's part of a unit from the store to an array of its own, while the unit before it is gathered, and then
// with the other ranks' parts to the unit's array. Where weights are divided all ranks make the same calls, whether they have a row or not.
#pragma once
#include "../core/arena.h"
#include "../parallel/zero.h"
#include "clock.h"
#include "table.h"

template <class Dev> class Guests {
  public:
    using X = typename Dev::X;

    // of: the parameters, with the units of `table`, which outlives this object
    Guests(Zero<Dev> &of, const Table &table);

    // Guests have the numbers of their units, but for the head, because a tied embedding is a guest twice in a pass: as embedding, and as head.
    const size_t head;

    bool any() const { return of_.guests(); }
    bool divided() const { return of_.sharding.divided; }
    bool away() const { return of_.pieces.any(); }  // they lie in a store
    size_t bytes(size_t unit) const;                // that come from the store, for each rank

    // Plans the arrays. They are alive from the moment at which the first copy or gather may begin.
    void plan(Plan &plan, const Clock &clock, bool trains);
    // Returns the address of an element of the table, in this unit, while the unit is ready.
    X *find(size_t unit, size_t offset) const {
        const size_t guest = unit > 0 && unit == table_.head ? head : unit;
        return here_[guest] + (offset - table_.units[unit].begin);
    }
    X *head_weights() const { return here_[head]; }

    // Begins to bring a guest, in the order in which a pass reads them: the embedding, learned positions, layers from the first to the last, the final norm,
    // the head; and backward layers from the last to the first.
    void fetch(const ShardRanks &ranks, size_t guest, bool backward);
    // Waits until a unit has come from the store. Where it is then gathered, zero.ready() waits for it.
    void wait(size_t unit) {
        if (away() && !divided()) of_.pieces.wait(unit);
    }

  private:
    const Unit &unit_of(size_t guest) const { return table_.units[number_of(guest)]; }
    size_t number_of(size_t guest) const { return guest == head ? table_.head : guest; }
    void bring(size_t guest) { of_.pieces.bring(number_of(guest), own_[guest]); }

    static constexpr size_t none = SIZE_MAX;

    Zero<Dev> &of_;
    const Table &table_;
    std::vector<size_t> next_;  // (guests) the one that is read after it in the forward pass
    std::vector<X *> here_;     // (guests) its weights
    std::vector<X *> own_;      // (guests) this rank's part of them: the same array where they are not divided
    size_t coming_ = none;      // the guest of which this rank's part has begun to come, to be gathered next
};

template <class Dev>
Guests<Dev>::Guests(Zero<Dev> &of, const Table &table)
    : head(table.units.size()), of_(of), table_(table), next_(head + 1, none), here_(head + 1), own_(head + 1) {
    std::vector<size_t> order = {0};
    if (table.positions) order.push_back(table.positions);
    for (size_t unit = 1; unit < head - 1; unit++)
        if (unit != table.positions && unit != table.head) order.push_back(unit);
    order.push_back(head - 1), order.push_back(head);
    for (size_t i = 0; i + 1 < order.size(); i++) next_[order[i]] = order[i + 1];
}

template <class Dev> size_t Guests<Dev>::bytes(size_t unit) const {
    if (!away()) return 0;
    const std::vector<size_t> &begins = of_.sharding.unit_begins;
    return (begins[unit + 1] - begins[unit]) * sizeof(X);
}

template <class Dev> void Guests<Dev>::plan(Plan &plan, const Clock &clock, bool trains) {
    if (!any()) return;
    const size_t L = clock.L, norm = head - 1, begin = clock.embed(), last_layer = clock.forward(L - 1, 0);
    const auto add = [&](size_t guest, const std::string &name, size_t first, size_t last) {
        const Unit &u = unit_of(guest);
        plan.add(&here_[guest], "weights." + name, {of_.sharding.padded_count(u.begin, u.end)}, first, last);
        plan.guest();
        if (away() && !divided()) plan.travels(), plan.alias(&own_[guest], &here_[guest]);
        if (!away() || !divided()) return;
        plan.add(&own_[guest], "weights." + name + ", own part", {bytes(number_of(guest)) / sizeof(X)}, first, last);
        plan.guest(), plan.travels();
    };
    add(0, "embedding", begin, begin);
    if (table_.positions) add(table_.positions, "positions", begin, begin);
    for (size_t l = 0; l < L; l++)  // all layers are of one size
        if (l >= 2) plan.alias(&here_[1 + l], &here_[1 + l % 2]), plan.alias(&own_[1 + l], &own_[1 + l % 2]);
        else add(1 + l, format("layers.%zu", l), begin, trains ? clock.layer_backward_ends(0) : clock.layer_ends(L - 1));
    add(norm, "norm", begin, trains ? clock.final_norm_backward() : clock.final_norm());
    add(head, "head", last_layer, clock.head());
}

template <class Dev> void Guests<Dev>::fetch(const ShardRanks &ranks, size_t guest, bool backward) {
    if (away() && coming_ != guest) bring(guest);
    if (!divided()) return;
    const Unit &u = unit_of(guest);
    if (away()) of_.pieces.wait(number_of(guest));
    of_.fetch(ranks, u.begin, u.end, here_[guest], own_[guest]);
    if (!away()) return;
    coming_ = !backward ? next_[guest] : guest > 1 ? guest - 1 : none;
    if (coming_ != none) bring(coming_);
}
