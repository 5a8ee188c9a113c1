// The parameter table of a model: each tensor of its Hugging Face files, and its position in the flat arrays of parameters,
// gradients and moments. A trainer lists its tensors once, in a function that fills a TensorList; everything else walks the
// table.
#pragma once
#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "../parallel/sharding.h"
#include "config.h"

struct Table {
    std::vector<Tensor> tensors;
    std::vector<Unit> units;  // the embedding, each layer, learned positions (if any), the head (if not tied), the final norm
    size_t positions = 0;     // the unit of learned positions; 0: the model has none
    size_t head = 0;          // the unit of the head; the embedding's if they are tied
};

// Declares the unit's last `count` elements, a cut tensor, as such: a range of Unit::cut.
inline void add_cut(Unit &unit, size_t count) {
    const size_t begin = unit.end - count;
    if (!unit.cut.empty() && unit.cut.back().second == begin) unit.cut.back().second = unit.end;
    else unit.cut.emplace_back(begin, unit.end);
}

// A subset of a table's tensors, in the same units and without gaps.
struct TablePart {
    Table table;
    std::map<size_t, size_t> offsets;  // offsets of these tensors here, by their offsets in the whole table

    template <class F> TablePart(const Table &whole, F keep) {  // keep(tensor, its unit)
        table.positions = whole.positions, table.head = whole.head;
        size_t end = 0, next = 0;
        for (size_t unit = 0; unit < whole.units.size(); unit++) {
            table.units.push_back({end, end, whole.units[unit].row_elements});
            const std::vector<size_t> &experts = whole.units[unit].experts;
            for (; next < whole.tensors.size() && whole.tensors[next].offset < whole.units[unit].end; next++) {
                Tensor t = whole.tensors[next];
                if (!keep(t, unit)) continue;
                const bool ends_experts = std::ranges::count(experts, t.offset + t.count) > 0;
                offsets[t.offset] = end, t.offset = end;
                table.units.back().end = end += t.count;
                if (t.cut.dim >= 0) add_cut(table.units.back(), t.count);
                if (ends_experts) table.units.back().experts.push_back(end);
                table.tensors.push_back(std::move(t));
            }
        }
    }
};

// Lists the tensors of a model in memory order, and points a struct's members at them. S: the storage
// type for weights, float for their gradients.
template <class S> class TensorList {
  public:
    using Addresses =
        std::function<S *(size_t unit, size_t offset)>;  // returns the address of element `offset` of the table, in this unit

    TensorList() : addresses_([](size_t, size_t) { return nullptr; }) {}  // before the arrays exist
    explicit TensorList(Addresses addresses) : addresses_(std::move(addresses)) {}

    Table table;
    S *embed = nullptr;  // (V, C)
    S *head = nullptr;   // (V, C); in a reward model (1, C)

    // Begins a unit; the names of its tensors begin with `prefix`.
    size_t begin_unit(std::string prefix = "", size_t row_elements = 0) {
        prefix_ = std::move(prefix);
        table.units.push_back({offset_, offset_, row_elements});
        return table.units.size() - 1;
    }
    // Adds a tensor. If it does not exist in this model, its member becomes null. A tensor without a member appends rows to the previous
    // matrix. The shape is that of the rank's part. For `transposed` see Tensor.
    void add(bool exists, const char *name, S **member, std::vector<size_t> shape, Tensor::Init init, bool decay, Cut cut) {
        add(exists, name, member, std::move(shape), init, decay, false, cut);
    }
    void add(bool exists, const char *name, S **member, std::vector<size_t> shape, Tensor::Init init, bool decay,
             bool transposed = false, Cut cut = {}) {
        if (member) *member = exists ? addresses_(table.units.size() - 1, offset_) : nullptr;
        if (!exists) return;
        size_t count = 1;
        for (size_t n : shape) count *= n;
        const size_t unit = table.units.size() - 1;
        const bool matrix =
            decay && shape.size() == 2 && table.units[unit].row_elements == 0 && unit != table.positions;  // of a layer
        Tensor t{prefix_ + name,
                 std::move(shape),
                 init,
                 decay,
                 offset_,
                 count,
                 transposed,
                 matrix,
                 matrix && init != Tensor::router,
                 cut};
        t.number = whole_ + (cut.dim < 0 ? 0 : cut.first * (count / t.shape[size_t(cut.dim)]));
        whole_ += t.whole_count();
        table.units.back().end = offset_ += count;
        if (cut.dim >= 0) add_cut(table.units.back(), count);
        table.tensors.push_back(std::move(t));
    }
    // Declares the unit's tensors since the last call, or since its beginning, as the experts', with an equal number for each: a range of
    // Unit::experts.
    void end_experts() { table.units.back().experts.push_back(offset_); }
    // Adds the head: the embedding itself if they are tied, or one row in a reward model.
    void add_head(const ModelConfig &c) {
        if (c.tied) {
            head = embed;
            table.tensors.front().product = true;  // the head's product comes first; the embedding's gradient is added to it
            return;
        }
        table.head = begin_unit("", c.C);
        add_head_tensor(c);
    }
    void add_head_tensor(const ModelConfig &c) {
        if (c.reward) add(true, "score.weight", &head, {1, c.C}, Tensor::score, true);
        else
            add(true, head_name, &head, {c.V, c.C}, Tensor::normal, true, c.part.vocabulary.rows()),
                table.tensors.back().product = true;
    }

  private:
    Addresses addresses_;
    std::string prefix_;
    size_t offset_ = 0, whole_ = 0;  // elements so far, of the rank's parts and of the whole tensors
};
