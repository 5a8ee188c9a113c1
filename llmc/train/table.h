// The parameter table of a model: each tensor of its Hugging Face files, and where it lies in the flat arrays of parameters, gradients
// and moments. A trainer lists its tensors once, in a function of this form, and what else must know of them walks the table:
//
//     Table table(const ModelConfig &, Weights<S> &, Place<S>)        S: the storage type for weights, float for their gradients
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "../io/hf.h"
#include "../parallel/zero.h"

struct Table {
    std::vector<Tensor> tensors;
    std::vector<Cut> cuts;  // the embedding, each layer, learned positions and the head where they are its own, the final norm
    size_t positions = 0;   // their cut; 0: none
    size_t head = 0;        // its cut, that of the embedding where the two are tied
};

template <class S>
using Place = std::function<S *(size_t cut, size_t offset)>;  // where element `offset` of the table lies, in this cut

// Tensors in the order in which they lie. One without a member continues the matrix before it, whose rows it adds to.
template <class S> class TableBuilder {
  public:
    explicit TableBuilder(Place<S> place) : place_(std::move(place)) {}

    std::string prefix;  // of the names that follow
    Table table;

    size_t cut(size_t row = 0) {
        table.cuts.push_back({offset_, offset_, row});
        return table.cuts.size() - 1;
    }
    // One that does not exist makes its member null. transposed: as in Tensor
    void add(bool exists, const char *name, S **member, std::vector<size_t> shape, Tensor::Init init, bool decay,
             bool transposed = false) {
        if (member) *member = exists ? place_(table.cuts.size() - 1, offset_) : nullptr;
        if (!exists) return;
        size_t count = 1;
        for (size_t n : shape) count *= n;
        const size_t cut = table.cuts.size() - 1;
        const bool product = decay && table.cuts[cut].row == 0 && cut != table.positions;  // the matrix of a linear layer
        table.tensors.push_back({prefix + name, std::move(shape), init, decay, offset_, count, transposed, product});
        table.cuts.back().end = offset_ += count;
    }
    // The head: the embedding itself where the two are tied; of a reward model one row.
    void add_head(const ModelConfig &c, S **head, S *embed) {
        if (c.tied) {
            *head = embed;
            table.tensors.front().product = true;  // as head; as embedding it adds to that
            return;
        }
        table.head = cut(c.C);
        if (c.reward) add(true, "score.weight", head, {1, c.C}, Tensor::score, true);
        else add(true, "lm_head.weight", head, {c.V, c.C}, Tensor::normal, true), table.tensors.back().product = true;
    }

  private:
    Place<S> place_;
    size_t offset_ = 0;
};

template <class S> Place<S> nowhere() {  // for who has no arrays yet
    return [](size_t, size_t) { return nullptr; };
}
