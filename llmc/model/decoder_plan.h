// What the decoder plans: its state, and the arrays of a step with the ops from which to which they are alive. Part of decoder.h, which includes it.
#pragma once
#include "decoder.h"

template <class Dev>
Decoder<Dev>::Decoder(Dev dev, const ModelConfig &config, const ModelLimits &limits, const Table &table, OpList ops)
    : dev(dev),
      config(config),
      limits(limits),
      T_max(round_up(limits.row_tokens, row_multiple * limits.ranks.sp) / limits.ranks.sp),
      ops(std::move(ops)),
      tile(trains() && limits.recompute < Recompute::layer
               ? T_max
               : std::min(T_max, round_up(std::max<size_t>(limits.tile_tokens, 1), matmul_run(dev)))),
      clock{config.L, this->ops.layer.size(), this->ops.attention, tile < T_max ? this->ops.hidden : this->ops.layer.size()},
      positions_unit(table.positions),
      weights_(dev, this->config, this->limits, table, trace_),
      linears_(dev, this->config) {
    travellers_.resize(config.L);
    weights_.plan_state(plan_, clock);
    plan_row();
    if (adapts()) linears_.plan(plan_, T_max, trains());
    plan_head();
    weights_.plan_buffers(plan_, clock, this->ops.hidden);
}

template <class Dev> void Decoder<Dev>::plan_row() {
    const ModelConfig &c = config;
    const size_t T = T_max, C = c.C, positions = std::max(T * limits.ranks.sp, limits.sequences);
    plan_.add(&row.tokens, "row.tokens", {T});
    plan_.add(&row.doc_pos, "row.doc_pos", {T});
    plan_.add(&row.first_key, "row.first_key", {positions});
    plan_.add(&row.first_key_window, "row.first_key_window", {positions});
    plan_.add(&row.predictors, "row.predictors", {T});
    plan_.add(&row.targets, "row.targets", {T});
    plan_.add(&row.weights, "row.weights", {T});
    if (trains() && (config.lora.dropout > 0 || limits.neftune_alpha > 0)) plan_.add(&row.documents, "row.document", {T});
    if (trains() && limits.neftune_alpha > 0) plan_.add(&row.magnitudes, "row.noise", {T});
    plan_.add(&acts.matmul, "matmul workspace", {matmul_scratch(dev)});

    x_of.forward.resize(c.L + 1), x_of.backward.resize(c.L + 1);
    for (size_t l = 0; l <= c.L; l++) {
        const size_t written = l == 0 ? clock.embed() : clock.layer_ends(l - 1);
        const size_t read = l < c.L ? (trains() ? clock.layer_backward_ends(l) : clock.forward(l, ops.reads_input))
                                    : (trains() ? clock.final_norm_backward() : clock.final_norm());
        plan_kept(l, &x_of.forward[l], &x_of.backward[l], format("act.%zu.x", l), {T, C}, written, read);
    }
    plan_.add(&acts.normf, "act.normf", {T, C}, clock.final_norm(), clock.head());
    if (trains()) plan_.add(&acts.dx, "dx", {T, C}, clock.head(), clock.embed_backward());
    generator_.plan(plan_);
}

template <class Dev> void Decoder<Dev>::plan_head() {
    if (limits.mode == Mode::generate) return;
    const size_t T = T_max, head = clock.head(), row_ends = clock.between_rows(COPY);
    if (config.reward) {
        plan_.add(&acts.scores, "scores", {T}, head, row_ends);
        return;
    }
    plan_.add(&acts.head, "head chunk", {lm_head_scratch(dev, T, config.C, config.V)}, head, head);
    plan_.add(&acts.stats.nll, "stats.nll", {T}, head, row_ends);
    plan_.add(&acts.stats.entropy, "stats.entropy", {T}, head, row_ends);
    plan_.add(&acts.stats.correct, "stats.correct", {T}, head, row_ends);
    plan_.add(&acts.stats.max, "stats.max", {T}, head, row_ends);
    plan_.add(&acts.stats.sum, "stats.sum", {T}, head, row_ends);
    plan_.add(&acts.sums, "stats.sums", {3});
}

// Plans arrays of layer l, one a call:
//   array(name, &Acts::member, shape, written, consumed, last gradient, recomputed from)
// The last argument is the level of recomputation from which on the array is not kept. A kept array lives from the op that writes it to the last op of the backward pass that reads it. Otherwise there are two arrays: the
// forward pass's, which dies when the next op or two have consumed it, and the one into which the backward pass recomputes it.
template <class Dev> template <class Acts> auto Decoder<Dev>::layer_arrays(size_t l, Acts &f, Acts &b) {
    return [this, l, &f, &b](const char *name, auto member, std::vector<size_t> shape, size_t written, size_t consumed,
                             size_t last_gradient, Recompute from) {
        const std::string full = format("act.%zu.%s", l, name);
        const bool train = trains(), kept = limits.recompute < from;
        if (!train || !kept) plan_.add(&(f.*member), full, shape, clock.forward(l, written), clock.forward(l, consumed));
        if (train && !kept)
            plan_.add(&(b.*member), full + " recomputed", shape, clock.recompute(l, written), clock.backward(l, last_gradient));
        if (train && kept)
            plan_kept(l, &(f.*member), &(b.*member), full, shape, clock.forward(l, written), clock.backward(l, last_gradient));
    };
}

// Plans an array of layer l that is alive from the forward to the backward pass. Where activations are offloaded there are two: one is alive until it has
// left, that is until the next layer's forward pass ends, and the other from the beginning of the next layer's backward pass on. The backward pass begins
// with the last layer, whose arrays therefore stay.
template <class Dev>
template <class T>
void Decoder<Dev>::plan_kept(size_t l, T **forward, T **backward, const std::string &name, std::vector<size_t> shape,
                             size_t written, size_t read) {
    size_t bytes = sizeof(T);
    for (size_t n : shape) bytes *= n;
    if (!trains() || !limits.offload.activations || l + 1 >= config.L || bytes == 0) {
        plan_.add(forward, name, shape, written, read);
        return plan_.alias(backward, forward);
    }
    travellers_[l].push_back(
        {plan_.add_place(name, bytes), bytes, reinterpret_cast<void **>(forward), reinterpret_cast<void **>(backward)});
    plan_.add(forward, name, shape, written, clock.layer_ends(l + 1));
    plan_.travels();
    plan_.add(backward, name + " again", shape, clock.layer_backward_begins(l + 1), read);
    plan_.travels(), plan_.guest();
}

// Plans the arrays that attention needs only while it runs.
template <class Dev> void Decoder<Dev>::plan_attention(size_t l, AttentionActs<X> &f, AttentionActs<X> &b) {
    const ModelConfig &c = config;
    const Ranks &r = limits.ranks;
    const size_t T = T_max, Q = c.H * c.D, K = c.KV * c.D;
    auto transient = [&](const char *name, auto pointer, std::vector<size_t> shape, size_t first, size_t last) {
        plan_.add(pointer, format("act.%zu.%s", l, name), std::move(shape), first, last);
    };
    const size_t forward = clock.forward(l, ops.attention), backward = clock.backward(l, ops.attention);
    const auto sizes = [&](bool backward) {
        return ring_attention_buffers(r.sp_mode, r.sp, r.head_stride, attention_shape(T), backward);
    };
    transient("out32", &f.out32, {ring_attention_floats(dev, r.sp_mode, r.sp, attention_shape(T))}, forward, forward);
    transient("ring", &f.ring.values, {sizes(false).values}, forward, forward);
    if (!trains()) return;
    transient("ring backward", &b.ring.values, {sizes(true).values}, backward, backward);
    transient("ring gradients", &b.ring.floats, {sizes(true).floats}, backward, backward);
    transient("datt", &b.datt, {T, Q}, clock.backward(l, ops.attention + 1), backward);
    transient("dq32", &b.grads.dq32, {T, Q}, backward, backward);
    transient("dk32", &b.grads.dk32, {T, K}, backward, backward);
    transient("dv32", &b.grads.dv32, {T, K}, backward, backward);
    transient("delta", &b.delta, {c.H, T}, backward, backward);
    transient("scratch", &b.scratch, {attention_scratch(dev) * sizeof(float)}, backward, backward);
}
