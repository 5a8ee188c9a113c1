// The decoder's plan: its state, and the arrays of a step with their lifetimes. Part of decoder.h, which includes it.
#pragma once
#include "decoder.h"
#include "every_call.h"

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
      expert_tile(is_rehearsal<Dev> || limits.ranks.expert_parallel == 1 || (trains() && limits.recompute < Recompute::layer)
                      ? tile
                      : std::min(tile, expert_run(dev, limits.ranks.expert_parallel))),
      positions_unit(table.positions),
      weights_(dev, this->config, this->limits, table, trace_) {
    offloaded_.resize(config.L);
    if constexpr (is_rehearsal<Dev>) trace_.rehearse(*dev.log);
    weights_.plan_state(plan_);
    plan_row();
    const size_t divide = limits.ranks.expert_parallel;
    if (adapts()) linears_.plan(plan_, T_max, config.experts.rows(divide, std::min(T_max, expert_run(dev, divide))), trains());
    if (limits.fp8) linears_.plan_fp8(plan_, T_max, trains());
    plan_head();
    weights_.plan_buffers(plan_);
}

template <class Dev> void Decoder<Dev>::plan_row() {
    const ModelConfig &c = config;
    const size_t T = T_max, C = c.C;
    row.plan(plan_, T);
    plan_.add(&acts.matmul, "matmul workspace", {matmul_scratch(dev)});

    residual_.forward.resize(c.L + 1), residual_.backward.resize(c.L + 1);
    for (size_t l = 0; l <= c.L; l++) plan_kept(l, &residual_.forward[l], &residual_.backward[l], format("act.%zu.x", l), {T, C});
    plan_.transient(&acts.normf, "act.normf", {T, C});
    if (trains()) plan_.transient(&acts.dx, "dx", {T, C});
    generator_.plan(plan_);
}

template <class Dev> void Decoder<Dev>::plan_head() {
    if (limits.mode == Mode::generate) return;
    if (routes()) plan_.add(&acts.routing, "routing sums", {config.L, Routing::width(config.experts.number)});
    if (routes()) plan_.add(&acts.balance, "auxiliary loss", {config.experts.number});
    const size_t T = T_max;
    if (config.reward) {
        plan_.transient(&acts.scores, "scores", {T});
        return;
    }
    plan_.transient(&acts.head, "head chunk", {lm_head_scratch(dev, T, config.C, config.V)});
    plan_.transient(&acts.stats.nll, "stats.nll", {T});
    plan_.transient(&acts.stats.entropy, "stats.entropy", {T});
    plan_.transient(&acts.stats.correct, "stats.correct", {T});
    plan_.transient(&acts.stats.max, "stats.max", {T});
    plan_.transient(&acts.stats.sum, "stats.sum", {T});
    plan_.add(&acts.sums, "stats.sums", {3});
}

// Plans arrays of layer l, one per call:
//   array(name, pointer of the forward pass, pointer of the backward pass, shape, recomputed from)
// The last argument is the lowest level of recomputation at which the array is not kept for the backward pass. There are then two
// arrays: the forward pass's, and one into which the backward pass recomputes it.
template <class Dev> auto Decoder<Dev>::layer_arrays(size_t l) {
    return [this, l](const char *name, auto *&forward, auto *&backward, std::vector<size_t> shape, Recompute from) {
        const std::string full = format("act.%zu.%s", l, name);
        if (trains() && limits.recompute < from) return plan_kept(l, &forward, &backward, full, shape);
        plan_.transient(&forward, full, shape);
        if (trains()) plan_.transient(&backward, full + " recomputed", shape);
    };
}

// Plans an array of layer l that is alive from the forward to the backward pass. With offloaded activations there are two arrays; the second is
// loaded from the store. The backward pass begins with the last layer, so the last layer's arrays are not offloaded.
template <class Dev>
template <class T>
void Decoder<Dev>::plan_kept(size_t l, T **forward, T **backward, const std::string &name, std::vector<size_t> shape) {
    size_t bytes = sizeof(T);
    for (size_t n : shape) bytes *= n;
    plan_.transient(forward, name, shape);
    if (!trains() || !limits.offload.activations || l + 1 >= config.L || bytes == 0) return plan_.alias(backward, forward);
    plan_.travels();
    offloaded_[l].push_back(
        {plan_.add_place(name, bytes), bytes, reinterpret_cast<void **>(forward), reinterpret_cast<void **>(backward)});
    plan_.transient(backward, name + " again", shape);
    plan_.travels();
}

// Plans the arrays that attention only needs while it runs.
template <class Dev> void Decoder<Dev>::plan_attention(size_t l, AttentionActs<X> &f, AttentionActs<X> &b) {
    const ModelConfig &c = config;
    const Ranks &r = limits.ranks;
    const size_t T = T_max, Q = c.H * c.D, K = c.KV * c.D;
    const auto array = [&](const char *name, auto pointer, std::vector<size_t> shape) {
        plan_.transient(pointer, format("act.%zu.%s", l, name), std::move(shape));
    };
    const auto sizes = [&](bool backward) {
        return ring_attention_buffers(r.sp_mode, r.sp, r.head_stride, attention_shape(T), backward);
    };
    array("out32", &f.out32, {ring_attention_floats(dev, r.sp_mode, r.sp, attention_shape(T))});
    array("ring", &f.ring.values, {sizes(false).values});
    if (!trains()) return;
    array("ring backward", &b.ring.values, {sizes(true).values});
    array("ring gradients", &b.ring.floats, {sizes(true).floats});
    array("datt", &b.datt, {T, Q});
    array("dq32", &b.grads.dq32, {T, Q});
    const size_t of_layer = r.sp > 1 && r.sp_mode == SpMode::gather ? 0 : T;  // gather sums them in its buffers
    array("dk32", &b.grads.dk32, {of_layer, K});
    array("dv32", &b.grads.dv32, {of_layer, K});
    array("delta", &b.delta, {c.H, T});
    array("scratch", &b.scratch, {attention_scratch(dev, attention_shape(T)) * sizeof(float)});
}

// The documents of the longest row. They fill it, so every rank of a ring has all ops.
inline std::vector<std::vector<int32_t>> longest_row(const ModelConfig &config, const ModelLimits &limits) {
    const size_t T = limits.row_tokens;
    std::vector<std::vector<int32_t>> documents;
    in_parts(
        T, [&](size_t, size_t n) { documents.emplace_back(n, 1); }, config.gpt2() ? std::min(T, config.max_positions) : T);
    return documents;
}

// Calls a model M on a rehearsing device. The rehearsal only depends on whether the row is longer than one tile; its tiles have row_multiple
// tokens.
template <class Dev> template <template <class> class M> void Decoder<Dev>::rehearse_as(Touches &log, const Calls &calls) {
    if constexpr (!is_rehearsal<Dev>) {
        const Ranks &r = limits.ranks;
        const int group = int(r.group());
        const int experts = int(r.expert_parallel);
        std::vector<RehearsalComm::Split> splits = {{int(r.sp), 1}};
        if (group < int(r.world)) splits.insert(splits.end(), {{group, 1}, {int(r.world) / group, group}});
        if (experts > 1) splits.insert(splits.end(), {{experts, 1}, {group / experts, experts}});
        RehearsalComm world(log, int(r.rank), int(r.world), splits);
        Mesh mesh(world, int(r.sp), int(r.zero_group), experts);
        ModelLimits few = limits;
        few.row_tokens = (std::min(tile, expert_tile) < T_max ? 2 : 1) * row_multiple * r.sp, few.tile_tokens = row_multiple;
        M<Rehearsal<Dev>> model({dev, &log}, config, few);
        model.allocate(mesh, true, false);
        log.watch(model.plan());
        if (!std::ranges::equal(plan_.segments(), model.plan().segments(), {}, &Segment::name, &Segment::name))
            die("the rehearsed model plans other arrays than the model itself");
        calls(model, few);
        log.finish();
    }
}

// Finds the lifetimes of transient arrays, and the times of the ops.
template <class Dev> void Decoder<Dev>::find_lifetimes() {
    Touches log;
    rehearse(log, [&](Model &model, const ModelLimits &few) { make_every_call(model, longest_row(config, few), config, few); });
    const auto &lifetimes = log.lifetimes();
    for (size_t i = 0; i < lifetimes.size(); i++)
        if (const Touches::Lifetime &l = lifetimes[i]; plan_.segments()[i].transient && l.touched())
            plan_.live(i, l.first, l.last, l.in_pause);
    trace_.use_times(log.times());
}

template <class Dev> RehearsedSteps Decoder<Dev>::rehearse_steps(size_t micro_steps) {
    Touches log;
    rehearse(log,
             [&](Model &model, const ModelLimits &few) { make_two_steps(model, longest_row(config, few), config, micro_steps); });
    std::vector<Event> events = log.events();
    for (Event &e : events)  // replaces the index of a place by its bytes, for all tokens
        if (e.kind == Event::start && e.lane != Event::messages) e.amount = plan_.places()[e.amount].second;
    return {ops, layout(), weights_.table, std::move(events)};
}
