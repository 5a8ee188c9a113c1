// The time line of a row's ops, along which the memory plan says when an array is alive. Time is counted in ops. The backward pass of a
// layer consists of two halves: the feed-forward's, with attention's output projection recomputed in front of it, and attention's. Each half is its
// recomputation, in forward order, and then its gradients, in reverse order. So queries, keys and values are recomputed when the feed-forward's arrays,
// which are larger, are gone.
#pragma once
#include <algorithm>

#include "op_list.h"

struct Moment {
    size_t time;
    Pass pass;
    size_t op;  // its number in the OpList
    size_t layer = 0;
    operator size_t() const { return time; }
};

// An `op` of a layer is its number in the OpList, of which there are n. The gradients of the ops up to `attention` + 1, its output projection, belong
// to the second half of the backward pass. The ops from `tiled` on run in turn for each tile of tokens, and so have one time; n: none does.
struct Clock {
    size_t L, n, attention, tiled;
    Moment embed() const { return {0, Pass::forward, n + EMBED}; }
    Moment forward(size_t l, size_t op) const { return {1 + l * n + std::min(op, tiled), Pass::forward, op, l}; }
    Moment final_norm() const { return {1 + L * n, Pass::forward, n + FINAL_NORM}; }
    Moment head(bool backward = true) const { return {final_norm() + 1, backward ? Pass::both : Pass::forward, n + HEAD}; }
    Moment head_weight() const {
        return {head(), Pass::backward, n + HEAD};
    }  // for a head whose backward pass is an op of its own
    Moment final_norm_backward() const { return {final_norm() + 2, Pass::backward, n + FINAL_NORM}; }
    Moment recompute(size_t l, size_t op) const {
        const bool second = op <= attention;
        return {backward_begins(l) + (second ? 2 * (n - attention) - 3 + op : std::min(op, tiled) - attention - 1),
                Pass::recompute, op, l};
    }
    Moment backward(size_t l, size_t op) const {
        if (op >= tiled) return {recompute(l, op).time, Pass::backward, op, l};
        return {backward_begins(l) + 2 * n - 1 - op - (op > attention + 1 ? attention + 1 : 0), Pass::backward, op, l};
    }
    Moment embed_backward() const { return {final_norm() + 3 + L * 2 * n, Pass::backward, n + EMBED}; }
    Moment between_rows(RowOp op) const { return {embed_backward() + 1, Pass::step, n + op}; }  // no activation is alive
    Moment layer_ends(size_t l) const { return forward(l, n - 1); }  // the forward pass's last op of a layer
    Moment layer_backward_ends(size_t l) const { return backward(l, 0); }
    Moment layer_backward_begins(size_t l) const { return recompute(l, attention + 1); }

  private:
    size_t backward_begins(size_t l) const { return final_norm() + 3 + (L - 1 - l) * 2 * n; }
};
