// The time line of a row's ops, along which the memory plan says when an array is alive. Time is counted in ops. The backward pass of a
// layer consists of its recomputation, in forward order, and then its gradients, in reverse order.
#pragma once
#include "flops.h"

struct Moment {
    size_t time;
    Pass pass;
    Op op;
    size_t layer = 0;
    operator size_t() const { return time; }
};

struct Clock {
    size_t L;
    Moment embed() const { return {0, Pass::forward, EMBED}; }
    Moment forward(size_t l, Op op) const { return {1 + l * LAYER_OPS + op, Pass::forward, op, l}; }
    Moment final_norm() const { return {1 + L * LAYER_OPS, Pass::forward, FINAL_NORM}; }
    Moment head(bool backward = true) const { return {final_norm() + 1, backward ? Pass::both : Pass::forward, HEAD}; }
    Moment head_weight() const { return {head(), Pass::backward, HEAD}; }  // for a head whose backward pass is an op of its own
    Moment final_norm_backward() const { return {final_norm() + 2, Pass::backward, FINAL_NORM}; }
    Moment recompute(size_t l, Op op) const {
        return {final_norm() + 3 + (L - 1 - l) * 2 * LAYER_OPS + op, Pass::recompute, op, l};
    }
    Moment backward(size_t l, Op op) const { return {recompute(l, LN1) + 2 * LAYER_OPS - 1 - op, Pass::backward, op, l}; }
    Moment embed_backward() const { return {final_norm() + 3 + L * 2 * LAYER_OPS, Pass::backward, EMBED}; }
    Moment between_rows(Op op) const { return {embed_backward() + 1, Pass::step, op}; }  // no activation is alive
};
