// The time line of a row's ops, along which the memory plan says when an array is alive. Time is counted in ops. The backward pass of a
// layer consists of its recomputation, in forward order, and then its gradients, in reverse order.
#pragma once
#include "op_list.h"

struct Moment {
    size_t time;
    Pass pass;
    size_t op;  // its number in the OpList
    size_t layer = 0;
    operator size_t() const { return time; }
};

// An `op` of a layer is its number in the OpList, of which there are n.
struct Clock {
    size_t L, n;
    Moment embed() const { return {0, Pass::forward, n + EMBED}; }
    Moment forward(size_t l, size_t op) const { return {1 + l * n + op, Pass::forward, op, l}; }
    Moment final_norm() const { return {1 + L * n, Pass::forward, n + FINAL_NORM}; }
    Moment head(bool backward = true) const { return {final_norm() + 1, backward ? Pass::both : Pass::forward, n + HEAD}; }
    Moment head_weight() const {
        return {head(), Pass::backward, n + HEAD};
    }  // for a head whose backward pass is an op of its own
    Moment final_norm_backward() const { return {final_norm() + 2, Pass::backward, n + FINAL_NORM}; }
    Moment recompute(size_t l, size_t op) const { return {final_norm() + 3 + (L - 1 - l) * 2 * n + op, Pass::recompute, op, l}; }
    Moment backward(size_t l, size_t op) const { return {recompute(l, 0) + 2 * n - 1 - op, Pass::backward, op, l}; }
    Moment embed_backward() const { return {final_norm() + 3 + L * 2 * n, Pass::backward, n + EMBED}; }
    Moment between_rows(RowOp op) const { return {embed_backward() + 1, Pass::step, n + op}; }  // no activation is alive
    Moment layer_ends(size_t l) const { return forward(l, n - 1); }  // the forward pass's last op of a layer
    Moment layer_backward_begins(size_t l) const { return backward(l, n - 1); }
    Moment layer_backward_ends(size_t l) const { return backward(l, 0); }
};
