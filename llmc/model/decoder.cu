// The functions of the models' base class (decoder.h): the plan of the arrays, the order of a step, and the calls of the loss and the optimizer.
// This file is compiled once for all programs: for the CPU, for the rehearsals of the memory plan (../core/rehearsal.h), and for CUDA.
#include "decoder.h"

#include "../core/graphs.h"
#include "../ops/attention.h"
#include "../ops/embedding.h"
#include "../ops/head_parts.h"
#include "../ops/loss.h"
#include "../ops/noise.h"
#include "../ops/router.h"
#include "../ops/score.h"
#include "../parallel/ring.h"
#include "every_call.h"
#include "generation_arrays.h"
#include "peaks.h"
#include "weights.h"
#ifdef CUDA_HALF
#include "../ops/kernels.cuh"
#endif

// ---- the plan -------------------------------------------------------------------------------------------------------------------------

template <class Dev>
Decoder<Dev>::Decoder(Dev dev, const ModelConfig &whole, const ModelLimits &limits, Table (*table)(const ModelConfig &),
                      OpList (*op_list)(const ModelConfig &))
    : dev(dev),
      config(part_of(whole, limits.ranks.tp, limits.ranks.tp_rank())),
      limits(limits),
      T_max(round_up(limits.row_tokens, row_multiple * limits.ranks.sp) / limits.ranks.sp),
      own_max(ceil_div(T_max, limits.ranks.tp)),
      ops(op_list(config)),
      tile(trains() && limits.recompute < Recompute::layer
               ? T_max
               : std::min(T_max, round_up(std::max<size_t>(limits.tile_tokens, 1), matmul_run(dev)))),
      expert_tile(std::min(
          own_max, is_rehearsal<Dev> || limits.ranks.expert_parallel == 1 || (trains() && limits.recompute < Recompute::layer)
                       ? tile
                       : std::min(tile, expert_run(dev, limits.ranks.expert_parallel)))),
      positions_unit(table(config).positions),
      weights_(std::make_unique<Weights<Dev>>(dev, this->config, this->limits, table(config), trace_)),
      generation_(std::make_unique<GenerationArrays<Dev>>(dev, this->config, this->limits)),
      whole_(whole),
      table_of_(table),
      whole_ops_(op_list(whole)) {
    offloaded_.resize(config.L);
    if constexpr (is_rehearsal<Dev>) trace_.rehearse(*dev.log);
    weights_->plan_state(plan_);
    plan_row();
    const size_t divide = limits.ranks.expert_parallel;
    if (adapts()) linears_.plan(plan_, T_max, config.experts.rows(divide, std::min(T_max, expert_run(dev, divide))), trains());
    if (limits.fp8) linears_.plan_fp8(plan_, T_max, trains());
    plan_head();
    weights_->plan_buffers(plan_);
}

template <class Dev> void Decoder<Dev>::plan_row() {
    const ModelConfig &c = config;
    const size_t T = T_max, C = c.C, own = own_max, all = limits.ranks.tp > 1 ? limits.ranks.tp * own : 0;
    row.plan(plan_, T);
    plan_.add(&acts.matmul, "matmul workspace", {matmul_scratch(dev)});

    residual_.forward.resize(c.L + 1), residual_.backward.resize(c.L + 1);
    for (size_t l = 0; l <= c.L; l++)
        plan_kept(l, &residual_.forward[l], &residual_.backward[l], format("act.%zu.x", l), {own, C});
    plan_.transient(&acts.normf, "act.normf", {own, C});
    plan_.transient(&acts.input, "block's input", {all, C});
    plan_.transient(&acts.output, "block's output", {all, C});
    if (limits.teacher.is_base) plan_.add(&acts.taught, "normf of the teacher", {std::max(T, all), C});
    if (trains()) plan_.transient(&acts.dx, "dx", {own, C});
    generation_->plan(plan_, T);
}

template <class Dev> void Decoder<Dev>::plan_head() {
    if (limits.mode == Mode::generate || limits.mode == Mode::teach) return;
    if (routes()) plan_.add(&acts.routing, "routing sums", {config.L, Routing::width(config.experts.number)});
    if (routes()) plan_.add(&acts.balance, "auxiliary loss", {config.experts.number});
    const size_t T = T_max;
    if (config.reward) {
        plan_.transient(&acts.scores, "scores", {T});
        return;
    }
    const HeadShape shape = head_shape(T, T);
    plan_.transient(&acts.head, "head chunk",
                    {has_teacher() ? divergence_scratch(dev, shape, limits.teacher.C) : lm_head_scratch(dev, shape)});
    const size_t tp = limits.ranks.tp;
    const size_t rows = has_teacher() ? divergence_rows(dev, T, most_V(), limits.head_chunk)
                                      : lm_head_rows(dev, T, most_V(), limits.head_chunk),
                 fields = has_teacher() ? fields_of<DivergenceStats> : fields_of<HeadStats>;
    plan_.transient(&acts.parts, "parts' statistics", {tp > 1 ? tp : 0, fields, rows});
    const auto plan_stats = [&](HeadStats &stats, const std::string &name) {
        plan_.transient(&stats.nll, name + ".nll", {T});
        plan_.transient(&stats.entropy, name + ".entropy", {T});
        plan_.transient(&stats.correct, name + ".correct", {T});
        plan_.transient(&stats.max, name + ".max", {T});
        plan_.transient(&stats.sum, name + ".sum", {T});
    };
    plan_stats(has_teacher() ? acts.divergence.student : acts.stats, "stats");
    plan_.add(&acts.sums, "stats.sums", {size_t(has_teacher() ? 8 : 3)});
    if (!has_teacher()) return;
    plan_stats(acts.divergence.teacher, "stats.teacher");
    plan_.transient(&acts.divergence.divergence, "stats.divergence", {T});
    plan_.transient(&acts.divergence.mean, "stats.mean", {T});
    plan_.transient(&acts.divergence.agreement, "stats.agreement", {T});
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
    array("out32", &f.out32, {ring_attention_floats(dev, r.sp_mode, r.sp, limits.share_prompts, attention_shape(T))});
    array("ring", &f.ring, {sizes(false).values});
    if (!trains()) return;
    array("ring backward", &b.ring, {sizes(true).values});
    array("ring gradients", &b.ring32, {sizes(true).floats});
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

template <class Dev> Decoder<Dev>::~Decoder() { matmul_use_scratch(dev, nullptr); }

template <class Dev> Plan &Decoder<Dev>::plan() {
    if (trace_.times().empty()) find_lifetimes();
    return plan_;
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
    size_t tokens = 0;
    rehearse(log, [&](Model &model, const ModelLimits &few) {
        tokens = few.row_tokens / few.ranks.sp;
        make_two_steps(model, longest_row(config, few), config, micro_steps);
    });
    std::vector<Event> events = log.events();
    for (Event &e : events)  // replaces the index of a place by its bytes, for all tokens
        if (e.kind == Event::start && e.lane != Event::messages) e.amount = plan_.places()[e.amount].second;
    return {ops, layout(), weights_->table, std::move(events), tokens};
}

// Must be called before allocate(), while there is free memory to measure the device's peaks in.
template <class Dev> void Decoder<Dev>::profile() {
    auto timeline = make_timeline(dev);
    const Peaks peaks = measure_peaks(dev, memory(), *timeline);
    trace_.profile(std::make_unique<Profiler>(std::move(timeline), peaks, ops, config, layout()));
}

template <class Dev> Work Decoder<Dev>::layout() const {
    const Zero<Dev> &zero = weights_->trained;
    Work layout{};
    constexpr size_t bytes_of_moment[] = {sizeof(float), sizeof(bf16), sizeof(uint8_t)};
    layout.element = sizeof(X), layout.gradient = zero.gradients.in_bf16 ? sizeof(bf16) : sizeof(float);
    layout.moment = bytes_of_moment[size_t(limits.moments)], layout.recompute = limits.recompute;
    layout.head_in_buckets = weights_->head_in_buckets();
    layout.tensor_ranks = limits.ranks.tp, layout.expert_ranks = limits.ranks.expert_parallel;
    layout.expert_run = expert_run(dev, layout.expert_ranks);
    for (const ShardRun &s : zero.sharding.shard_runs()) layout.parameters += s.count;
    for (const TensorRun &s : zero.sharding.tensor_runs(zero.table))
        if (const Tensor &t = zero.table[s.tensor]; limits.muon && t.of_layer)
            layout.without_v += s.count, layout.muon_flops += orthogonalise_flops(t.whole_shape()[0], t.whole_shape()[1]);
    if (zero.sharding.stage >= 2) layout.cleared = layout.parameters;
    else
        for (const Tensor &t : zero.table) layout.cleared += t.product && !zero.gradients.in_buffers() ? 0 : t.count;
    return layout;
}

template <class Dev> void Decoder<Dev>::allocate(Mesh &mesh, bool guards, bool poison) {
    mesh_ = &mesh;
    plan().place(guards);
    arena_ = std::make_unique<Arena>(plan_, memory());
    trace_.watch(*arena_, poison);
    if (plan_.store_bytes()) store_ = make_store(dev, limits.offload.dir, plan_.store_bytes(), limits.offload.patience);
    weights_->use(mesh, memory(), store_.get());
    if (limits.graphs) graphs_ = make_graphs(dev);
    TensorList<X> params = weights_->trained_weights(), frozen = weights_->frozen_weights();
    TensorList<float> grads = trains() ? weights_->gradients() : TensorList<float>(), none;
    TensorList<X> &own = config.freezes() ? frozen : params;
    point_weights(own, config.freezes() ? none : grads);
    if (weights_->prefetched.any()) own.head = weights_->prefetched.head_weights();
    if (config.freezes()) {
        lora_table(config, weights_->frozen_table, linears_.adapters, params);
        lora_table(config, weights_->frozen_table, linears_.gradients, grads);
        linears_.documents = row.documents, linears_.positions = row.doc_pos;
    }
    base_embed_w_ = own.embed, base_head_w_ = own.head;
    embed_w_ = params.embed ? params.embed : own.embed, head_w_ = params.head ? params.head : own.head;
    embed_dw = grads.embed, head_dw = grads.head;
    if (trains() && head_dw && weights_->trained.gradients.in_buffers()) head_dw = weights_->head_buffer;
}

// ---- forward --------------------------------------------------------------------------------------------------------------------------

template <class Dev> void Decoder<Dev>::begin_pass() {  // called before the pass loads its row
    trace_.begin_pass();
    begin_op(Phase::step, COPY);
}

// A rank with an empty row loads nothing, but still takes part in the collective calls of the pass.
template <class Dev> void Decoder<Dev>::load_part(const Row &r, const Pass &pass) {
    row.clear();
    if (r.T == 0) return;
    const Row whole = pad_row(r, limits.ranks.sp);
    if (whole.T > T_max * limits.ranks.sp)
        throw Error(format("a row of %zu tokens, and arrays for %zu", whole.T, T_max * limits.ranks.sp));
    trace_.begin_row(whole, limits.ranks.sp);
    begin_pass();
    row.load_part(whole, sizeof(X), memory());
    if (linears_.drops(pass) || is_noisy(pass)) row.load_documents(whole, is_noisy(pass), memory());
    if (routes()) row.load_copies(whole, memory());
}

// A unit's weights are fetched when the previous layer begins.
template <class Dev> void Decoder<Dev>::forward(const Pass &pass) {
    const size_t L = config.L, norm = weights_->units.size() - 1, head = weights_->prefetched.head;
    const auto behind_layer = [&](size_t l) { return l + 1 < L ? 2 + l : norm; };  // the unit that is used after layer l
    if (!weights_->begin_forward(row.T > 0)) return;
    most_own = mesh_->experts ? size_t(mesh_->experts->max(double(row.own))) : row.own;
    weights_->fetch(0, positions_unit ? positions_unit : 1, pass);
    if (positions_unit) weights_->fetch(positions_unit, 1, pass);
    weights_->fetch(1, behind_layer(0), pass);
    weights_->ready(0, pass);
    if (positions_unit) weights_->ready(positions_unit, pass);
    if (row.T) input_forward(pass);
    if (row.T && is_noisy(pass))
        noise_forward(
            dev, residual(0, pass.phase),
            TokenNoise{*pass.key, row.magnitudes + row.own_begin, row.documents + row.own_begin, row.doc_pos + row.own_begin},
            row.own, config.C);
    for (size_t l = 0; l < L; l++) {
        weights_->ready(1 + l, pass);
        if (l + 1 < L) weights_->fetch(2 + l, behind_layer(l + 1), pass);
        else weights_->fetch(norm, head, pass), weights_->fetch(head, no_unit, pass);
        if (row.T) recorded(pass, l, FORWARD, [&] { attention_half(l, pass), feed_forward_half(l, pass); });
        else if (joins(l)) feed_forward_half(l, pass);
        if ((row.T || most_own) && !pass.generates()) offload(l);
    }
    weights_->ready(norm, pass);
    if (row.T) final_norm_forward();
    weights_->ready(weights_->table.head, pass);
}

// Launches a part of a layer's work, by replay if there is a recording. A recording lacks the host's actions between launches: messages of a ring or
// to experts, time stamps, and fills or checks of dead arrays. It would also fix the key of dropout, which is an argument of the launches.
template <class Dev> template <class F> void Decoder<Dev>::recorded(const Pass &pass, size_t l, Stretch stretch, const F &work) {
    const Ranks &r = limits.ranks;
    const bool only_launches = r.sp == 1 && r.tp == 1 && r.expert_parallel == 1 && !trace_.is_on() && config.lora.dropout == 0;
    if (!graphs_ || !only_launches || pass.generates() || !pass.adapters || !row.prompts[0].parts.empty()) return work();
    Graphs::Stretch key{l, stretch, row.T, weights_->accumulates()};
    graphs_->run(key, work);
}

// Starts offloading the kept activations of layer l, and waits for layer l-1, whose arrays the next layer may overwrite.
template <class Dev> void Decoder<Dev>::offload(size_t l) {
    if (l > 0) wait_for_copies(l - 1, Phase::forward);
    trace_.pause(Phase::forward, COPY, l);
    for (const OffloadedArray &t : offloaded_[l]) store_->offload(t.place, *t.forward, bytes_now(t));
}

// Waits for layer l's kept activations, and starts prefetching layer l-1's.
template <class Dev> void Decoder<Dev>::prefetch(size_t l) {
    wait_for_copies(l, Phase::backward);
    if (l == 0) return;
    trace_.pause(Phase::backward, COPY, l - 1);
    for (const OffloadedArray &t : offloaded_[l - 1]) store_->prefetch(t.place, *t.backward, bytes_now(t));
}

template <class Dev> void Decoder<Dev>::wait_for_copies(size_t l, Phase phase) {
    if (!offloaded_[l].empty()) trace_.begin_transfer(phase, COPY, l);
    for (const OffloadedArray &t : offloaded_[l]) store_->wait(t.place);
}

// ring() describes a layer's attention over the ring, and attention_inputs() the arrays that it reads.
template <class Dev> RingAttention Decoder<Dev>::ring(const Pass &pass, size_t l) {
    const Ranks &r = limits.ranks;
    const KeyTravel &travel = row.split->travel[kind_of(config, l)];
    const PromptParts &prompts = row.prompts[config.window[l] > 0];
    if (pass.generates()) return {alone_, SpMode::ring, 1, *row.split, travel, prompts, weights_->trained.sent};
    return {*mesh_->ring, r.sp_mode, r.head_stride, *row.split, travel, prompts, weights_->trained.sent};
}
template <class Dev> AttentionInputs<typename Dev::X> Decoder<Dev>::attention_inputs(size_t l, const AttentionActs<X> &a) {
    const size_t H = config.H, KV = config.KV, D = config.D, stride = (H + 2 * KV) * D;
    return {{a.qkv, stride},
            {a.qkv + H * D, stride},
            {a.qkv + (H + KV) * D, stride},
            config.window[l] ? row.first_key_window : row.first_key,
            row.cuts,
            attention_shape(row.T)};
}

template <class Dev> void Decoder<Dev>::attention_forward(const Pass &pass, size_t l, const AttentionActs<X> &a) {
    const AttentionInputs<X> in = attention_inputs(l, a);
    if (pass.generates()) generation_->store(l, in);
    if (pass.keys == Keys::cache) return generation_->attention(l, a.att, in);
    RingAttention ranks = ring(pass, l);
    if constexpr (is_rehearsal<Dev>) dev.note(a.out32, a.ring, a.ring32);  // the ranks that use these arrays depend on the row
    ring_attention_forward(dev, ranks, a.att, a.out32, a.lse, in, {a.ring, a.ring32});
}

// ---- tensor parallelism -----------------------------------------------------------------------------------------------------------------

template <class Dev> typename Dev::X *Decoder<Dev>::gather_tokens(X *all, const X *own) {
    if (limits.ranks.tp == 1) return const_cast<X *>(own);
    const size_t n = row.shard * config.C;
    mesh_->tensor->all_gather({own, n}, {all, n * limits.ranks.tp});
    weights_->trained.sent.tensor += n * (limits.ranks.tp - 1) * sizeof(X);
    return all;
}

template <class Dev> Request Decoder<Dev>::begin_gather(size_t l, X *all, const X *own) {
    Request gather;
    if (limits.ranks.tp == 1) return gather;
    trace_.begin_transfer(Phase::backward, TOKENS, l);
    mesh_->tensor->start(gather, [&] { gather_tokens(all, own); });
    return gather;
}

template <class Dev>
typename Decoder<Dev>::HalfGathers Decoder<Dev>::begin_gathers(size_t l, const X *input, const X *dout, bool input_first) {
    HalfGathers gathers;
    if (input_first) gathers.input = begin_gather(l, acts.input, input);
    gathers.dout = begin_gather(l, acts.output, dout);
    if (!input_first) gathers.input = begin_gather(l, acts.input, input);
    return gathers;
}

template <class Dev> void Decoder<Dev>::sum_tokens(X *own, const X *all) {
    if (limits.ranks.tp == 1) return;
    const size_t n = row.shard * config.C;
    mesh_->tensor->reduce_scatter_sum({all, n * limits.ranks.tp}, {own, n});
    weights_->trained.sent.tensor += n * (limits.ranks.tp - 1) * sizeof(X);
}

template <class Dev> void Decoder<Dev>::gather_floats(float *all, size_t n) {
    const size_t tp = limits.ranks.tp;
    if (tp == 1) return;
    mesh_->tensor->all_gather({own_floats(all, n), n}, {all, n * tp});
    weights_->trained.sent.tensor += (tp - 1) * n * sizeof(float);
}

// Replaces statistics of n predictors in the rank's part of the vocabulary by those of the whole.
template <class Dev> template <class Stats> void Decoder<Dev>::merge_over_parts(const Stats &stats, size_t n) {
    constexpr size_t fields = fields_of<Stats>;
    pack_head_stats(dev, own_floats(acts.parts, fields * n), stats, n);
    gather_floats(acts.parts, fields * n);
    merge_head_stats(dev, stats, acts.parts, limits.ranks.tp, n);
}

// ---- the head -----------------------------------------------------------------------------------------------------------------------

// Computes the loss; with `dx` also the gradient of the final norm's output, and with `dhead` the gradient of the head's weights. A reward model's head
// is not cut: one rank of a tensor group has its gradients.
template <class Dev> void Decoder<Dev>::head(const Pass &pass, X *dx, float *dhead, const Judge &judge) {
    const size_t T = row.T, C = config.C, N = row.N;
    begin_op(!dx ? Phase::forward : config.reward ? Phase::backward : Phase::both, HEAD);
    const X *const x = gather_tokens(acts.input, acts.normf);
    X *const all_dx = dx ? all_tokens(acts.output, dx) : nullptr;
    const std::function<void(size_t, size_t)> stats_known = [&](size_t first, size_t n) {
        if (limits.ranks.tp > 1) merge_over_parts(acts.stats.from(first), n);
        if (judge.loss)
            write(memory(), row.weights + first,
                  (*judge.loss)({&row.numbers[first], n}, read(memory(), acts.stats.nll + first, n)));
    };
    const bool in_two_steps = judge.loss || limits.ranks.tp > 1;
    if (judge.teacher) {
        const bool accumulates = weights_->accumulates();
        const HeadShape shape = head_shape(T, N);
        const size_t V = shape.V;
        const MergeParts merge = [&](OfParts what, size_t first, size_t n) {
            const DivergenceStats stats = acts.divergence.from(first);
            if (what == OfParts::statistics) merge_over_parts(stats, n);
            else merge_over_parts(PartsOfDivergence{stats.divergence, stats.mean}, n);
        };
        divergence_head(dev, acts.divergence, all_dx, dhead, acts.head, x, head_w(pass), teacher_head(judge), head_loss(), shape,
                        accumulates, limits.ranks.tp > 1 ? merge : nullptr);
        if (dhead && !accumulates)
            memory().fill(dhead + V * C, 0, (config.V - V) * C * sizeof(float));  // rows that are not compared
    } else if (!config.reward)
        lm_head(dev, acts.stats, all_dx, dhead, acts.head, x, head_w(pass), head_loss(), head_shape(T, N),
                weights_->accumulates(), in_two_steps ? stats_known : nullptr);
    else if (!dx) score_forward(dev, acts.scores, x, head_w(pass), row.predictors, C, N);
    else if (config.part.rank == 0) score_backward(dev, all_dx, dhead, x, head_w(pass), row.predictors, row.weights, T, C, N);
    else memory().fill(all_dx, 0, T * C * sizeof(X));
    if (dx) sum_tokens(dx, all_dx);
}

template <class Dev> HeadLoss Decoder<Dev>::head_loss() const {
    return {row.predictors, row.targets, row.weights, row.entropy_weight, limits.temperature};
}

template <class Dev> void Decoder<Dev>::add_sums() {
    if (config.reward) return;
    targets_ += row.N;
    if (!has_teacher()) return head_sums(dev, acts.sums, acts.stats, row.N);
    head_sums(dev, acts.sums, acts.divergence.student, row.N);
    head_sums(dev, acts.sums + 3, acts.divergence.teacher, row.N);
    divergence_sums(dev, acts.sums + 6, acts.divergence, row.N);
}

template <class Dev> std::vector<double> Decoder<Dev>::evaluate(const Row &r) {
    const auto values = values_of(r, own_pass(Phase::forward));
    if (row.T) add_sums();
    return values;
}

// Runs the forward pass, and returns the values of the whole row.
template <class Dev> std::vector<double> Decoder<Dev>::values_of(const Row &r, const Pass &pass) {
    load_part(r, pass);
    forward(pass);
    if (r.T == 0) return {};
    head(pass, nullptr, nullptr);
    const auto of_predictors = read(memory(), config.reward ? acts.scores : acts.stats.nll, row.N);
    std::vector<double> values(row.predictors_of_whole);
    for (size_t n = 0; n < row.N; n++) values[row.numbers[n]] = of_predictors[n];
    return mesh_->ring->sum(values);
}

template <class Dev> std::vector<double> Decoder<Dev>::evaluate_base(const Row &r) {
    return values_of(r, {.adapters = false, .fp8 = limits.fp8});
}

// The ranks of a tensor group have the same sums; the first returns them.
template <class Dev> LossSums Decoder<Dev>::take_sums() {
    if (config.reward) return {};
    begin_op(Phase::step, COPY);
    const auto sums = read(memory(), acts.sums, 3);
    memory().fill(acts.sums, 0, 3 * sizeof(double));
    const double targets = double(std::exchange(targets_, 0));
    return config.part.rank == 0 ? LossSums{sums[0], sums[1], sums[2], targets} : LossSums{};
}

// ---- teachers and students --------------------------------------------------------------------------------------------------------------

// The base of a student's adapters writes its hidden states to an array of their own, because the student's own pass follows.
template <class Dev> TeacherRow Decoder<Dev>::teach(const Row &r) {
    const bool is_base = limits.teacher.is_base;
    const Pass pass{.adapters = !is_base, .fp8 = limits.fp8};
    load_part(r, pass);
    X *const own = acts.normf;
    if (is_base && limits.ranks.tp == 1) acts.normf = acts.taught;
    forward(pass);
    begin_op(Phase::forward, HEAD);  // of the student, which reads them
    const X *const all = row.T ? gather_tokens(is_base ? acts.taught : acts.input, acts.normf) : nullptr;
    if constexpr (is_rehearsal<Dev>) dev.note(all, head_w(pass));
    acts.normf = own;
    return {all, head_w(pass), config.C};
}

template <class Dev> void Decoder<Dev>::distil(const Row &r, const TeacherRow &teacher, float weight, bool last) {
    accumulate(r, weight, {.teacher = &teacher}, last);
}

template <class Dev> void Decoder<Dev>::compare(const Row &r, const TeacherRow &teacher) {
    const Pass pass = own_pass(Phase::forward);
    load_part(r, pass);
    forward(pass);
    if (r.T) head(pass, nullptr, nullptr, {.teacher = &teacher}), add_sums();
}

template <class Dev> DivergenceSums Decoder<Dev>::take_divergence() {
    begin_op(Phase::step, COPY);
    const auto s = read(memory(), acts.sums, 8);
    memory().fill(acts.sums, 0, 8 * sizeof(double));
    const double targets = double(std::exchange(targets_, 0));
    if (config.part.rank > 0) return {};
    return {{s[0], s[1], s[2], targets}, {s[3], s[4], s[5], targets}, s[6], s[7]};
}

// ---- the auxiliary loss of mixtures of experts ---------------------------------------------------------------------------------------

template <class Dev> Routing Decoder<Dev>::routing() {
    if (!routes()) return {};
    return {config.experts.number, read(memory(), acts.routing, config.L * Routing::width(config.experts.number))};
}

template <class Dev> void Decoder<Dev>::clear_routing() {
    memory().fill(acts.routing, 0, config.L * Routing::width(config.experts.number) * sizeof(int64_t));
}

// The derivatives of the auxiliary loss depend on the tokens of all ranks.
template <class Dev> void Decoder<Dev>::find_balance() {
    Routing whole = routing();
    whole.sums = mesh_->all.sum(whole.sums);
    write(memory(), acts.balance, whole.balance(config.experts.aux_loss_coef));
    balance_is_known_ = true;
}

template <class Dev> void Decoder<Dev>::count_routing(const Row &r, bool last) {
    const Pass pass = own_pass(Phase::forward);
    load_part(r, pass);
    forward(pass);
    if (last) find_balance(), clear_routing();  // the rows will be evaluated again
}

// ---- backward -------------------------------------------------------------------------------------------------------------------------

template <class Dev> void Decoder<Dev>::accumulate(const Row &r, float weight, bool last) {
    accumulate(r, weight, Judge{}, last);
}

template <class Dev> void Decoder<Dev>::accumulate(const Row &r, float weight, const Judge &judge, bool last) {
    const Pass pass = own_pass(Phase::forward);
    load_part(r, pass);
    if (r.T) row.load_weights(std::vector<float>(row.predictors_of_whole, weight), 0, memory());
    forward(pass);
    gradients(last, judge);
    if (r.T) add_sums();
}

template <class Dev> void Decoder<Dev>::accumulate(const Row &r, const TokenLoss &loss, float entropy_weight, bool last) {
    const Pass pass = own_pass(Phase::forward);
    load_part(r, pass);
    row.entropy_weight = entropy_weight;
    forward(pass);
    gradients(last, {.loss = &loss});
    if (r.T) add_sums();
}

template <class Dev> void Decoder<Dev>::backward(std::span<const float> weights, float entropy_weight, bool last) {
    if (row.T) row.load_weights(weights, entropy_weight, memory());
    gradients(last);
}

// If the head's gradient is computed in several buckets, the logits are recomputed for each of them.
template <class Dev> void Decoder<Dev>::head_backward(const Pass &pass, const Judge &judge) {
    const size_t C = config.C;
    if (!head_dw) return row.T ? head(pass, acts.dx, nullptr, judge) : void();
    const bool in_buckets = weights_->head_in_buckets();
    if (in_buckets && row.T) head(pass, acts.dx, nullptr, judge);
    weights_->sum_head_gradients([&](size_t first, size_t n) {
        if (!in_buckets) return head(pass, acts.dx, head_dw, judge);
        begin_op(Phase::backward, HEAD, n);
        head_weight(pass, judge, first / C, n / C);
    });
}

// Adds the gradient of `count` rows of the head's weights.
template <class Dev> void Decoder<Dev>::head_weight(const Pass &pass, const Judge &judge, size_t first, size_t count) {
    const HeadShape shape = head_shape(row.T, row.N);
    const X *const x = all_tokens(acts.input, acts.normf);  // head() has gathered them
    if (!judge.teacher)
        return lm_head_weight(dev, head_dw, acts.head, x, head_w(pass), head_loss(), acts.stats, shape, first, count);
    if (first < shape.V)
        divergence_head_weight(dev, head_dw, acts.head, x, head_w(pass), teacher_head(judge), head_loss(), acts.divergence, shape,
                               first, std::min(count, shape.V - first));
}

template <class Dev> void Decoder<Dev>::gradients(bool last_micro_step, const Judge &judge) {
    const Pass pass = own_pass(Phase::backward), recompute = pass.in(Phase::recompute);
    const size_t L = config.L;
    if (routes() && config.experts.aux_loss_coef > 0 && !balance_is_known_) find_balance();
    weights_->begin_backward(row.T > 0, row.T > 0 && row.N > 0, last_micro_step);
    head_backward(pass, judge);
    sum_gradients(weights_->units.size() - 1, true, [&](size_t, size_t) { final_norm_backward(); });
    for (size_t l = L; l-- > 0;) {  // the last two layers' weights are still here
        if (weights_->in_shared_arrays() && l + 1 < L) weights_->ready(1 + l, pass);
        if (l > 0 && l + 1 < L) weights_->fetch(l, l > 1 ? l - 1 : no_unit, pass);  // the weights of layer l - 1
        if (row.T || most_own) prefetch(l);
        if (row.T) recorded(pass, l, RECOMPUTE, [&] { feed_forward_half(l, recompute); });
        const auto add = [&](size_t, size_t) {
            if (row.T == 0) return feed_forward_half_backward(l, pass);
            recorded(pass, l, BACKWARD, [&] {
                feed_forward_half_backward(l, pass);
                attention_half(l, recompute);
                attention_half_backward(l, pass);
            });
        };
        weights_->sum_gradients(1 + l, true, add, joins(l));
    }
    if (trains_input()) input_backward();
    weights_->end_backward();
}

template <class Dev> void Decoder<Dev>::attention_backward(const Pass &pass, size_t l, const AttentionActs<X> &a) {
    const AttentionInputs<X> in = attention_inputs(l, a);
    float *const scratch = reinterpret_cast<float *>(a.scratch);
    RingAttention ranks = ring(pass, l);
    if constexpr (is_rehearsal<Dev>) dev.note(a.ring, a.ring32);
    ring_attention_backward(dev, ranks, a.qkv, a.grads, a.delta, scratch, in, a.att, a.datt, a.lse, {a.ring, a.ring32});
}

// ---- the trainer's part ---------------------------------------------------------------------------------------------------------------

template <class Dev> ExpertTokens Decoder<Dev>::expert_tokens(size_t l, size_t t, size_t n, std::vector<ExpertTraffic> &traffic) {
    const size_t own = std::min(n, row.own - std::min(row.own, t));
    return {l, row.own_begin + t, own, n, mesh_->experts.get(), &memory(), &weights_->trained.sent, &traffic};
}

template <class Dev>
void Decoder<Dev>::linear_backward(const LayerRows &rows, Linear matrix, X *dx, LinearWeights<float> dw, const X *dout,
                                   const X *x, LinearWeights<X> w, bool add_dx) {
    linears_.backward(rows, matrix, dx, dw, dout, x, w, weights_->accumulates(), add_dx);
}

template <class Dev> bool Decoder<Dev>::accumulates() const { return weights_->accumulates(); }

template <class Dev>
void Decoder<Dev>::add_routing(const Pass &pass, const float *probs, const int32_t *chosen, const ExpertTokens &n) {
    const ExpertConfig &c = config.experts;
    if (!routes() || pass.generates() || !pass.adapters || n.own == 0) return;
    router_sums(dev, acts.routing + n.layer * Routing::width(c.number), probs, chosen, row.copies + n.first,
                RouterShape{n.own, c.number, c.chosen, c.normed});
}

template <class Dev>
void Decoder<Dev>::sum_gradients(size_t unit, bool complete, const std::function<void(size_t, size_t)> &add) {
    weights_->sum_gradients(unit, complete, add);
}

// ---- generation ------------------------------------------------------------------------------------------------------------------------

// With ZeRO-3 or divided experts every rank must join each forward pass; ranks that finished generating join with an empty row until all are done.
template <class Dev> bool Decoder<Dev>::all_finished(bool finished) {
    const bool all_join = weights_->prefetched.divided() || mesh_->experts;
    return !all_join || mesh_->all.all(finished);
}

template <class Dev> void Decoder<Dev>::next_logits(const Row &r, const CacheStep &step) {
    const Pass pass{.keys = step.prompts ? Keys::prompts : Keys::cache};
    all_finished(false);
    begin_pass();
    row.load(r, memory());
    generation_->load(r, step, row, memory());
    forward(pass);
    begin_op(pass.phase, HEAD);
    generation_->find_logits(gather_tokens(acts.input, acts.normf), head_w(pass), row);
}

template <class Dev> std::vector<float> Decoder<Dev>::logits() { return generation_->logits(memory(), mesh_->tensor.get()); }
template <class Dev> DrawnTokens Decoder<Dev>::draw(const DrawRequest &request) {
    return generation_->draw(request, memory(), mesh_->tensor.get(), weights_->trained.sent);
}
template <class Dev> void Decoder<Dev>::copy_cache_page(size_t to, size_t from) { generation_->copy_page(to, from); }
template <class Dev> void Decoder<Dev>::copy_state(size_t to, size_t from) { generation_->copy_state(to, from); }
template <class Dev> DeltaCache<typename Dev::X> Decoder<Dev>::delta_cache(size_t l) const { return generation_->delta(l); }

template <class Dev> void Decoder<Dev>::finish() {
    row.clear();
    while (!all_finished(true)) forward({.keys = Keys::cache});
}

// ---- the model's interface (model.h) ---------------------------------------------------------------------------------------------------

template <class Dev> Memory &Decoder<Dev>::memory() {  // created on first use: a plan needs no device
    if (!memory_) memory_ = make_memory(dev);
    return *memory_;
}
template <class Dev> Zero<Dev> &Decoder<Dev>::parameters() { return weights_->trained; }
template <class Dev> const std::vector<Tensor> &Decoder<Dev>::tensors() const { return weights_->trained.whole; }
template <class Dev> const std::vector<Tensor> &Decoder<Dev>::frozen_tensors() const { return weights_->frozen_table.tensors; }

template <class Dev> void Decoder<Dev>::load(const HfWeights &files, uint64_t seed) { weights_->load(files, seed); }
template <class Dev> void Decoder<Dev>::load_adapters(const HfWeights &adapter, const HfWeights &base, uint64_t seed) {
    load_parameters(weights_->trained, adapter, base, seed, memory());
}
template <class Dev> void Decoder<Dev>::initialise(uint64_t seed) { weights_->initialise(seed); }
template <class Dev> void Decoder<Dev>::save(const std::string &dir, const std::string &export_dtype) {
    weights_->save(dir, export_dtype);
}

template <class Dev> void Decoder<Dev>::zero_gradients(uint64_t key) {
    begin_op(Phase::step, ZERO_GRAD);
    weights_->begin_step(key);
    if (routes()) clear_routing(), balance_is_known_ = false;
}
template <class Dev> double Decoder<Dev>::gradient_norm() {
    begin_op(Phase::step, GRAD_NORM);
    return weights_->trained.gradients.norm(mesh_->shards, memory());
}
template <class Dev> std::string Decoder<Dev>::nonfinite_gradient() {
    return ::nonfinite_gradient(weights_->trained, mesh_->all);
}
template <class Dev> std::string Decoder<Dev>::store_name() const { return store_ ? store_->name() : ""; }

template <class Dev> void Decoder<Dev>::update(const AdamW &adamw) {
    begin_op(Phase::step, ADAMW);
    weights_->optimizer.update(weights_->trained, mesh_->shards, memory(), adamw);
}
template <class Dev> OptimizerState Decoder<Dev>::optimizer_state(size_t tensor_ranks) {
    std::vector<std::vector<Tensor>> tables;
    for (size_t r = 0; tensor_ranks != limits.ranks.tp && r < tensor_ranks; r++) {
        const ModelConfig part = part_of(whole_, tensor_ranks, r);
        tables.push_back(trained_table(part, table_of_(part)).tensors);
    }
    return weights_->optimizer.state(weights_->trained, memory(), tables);
}
template <class Dev> void Decoder<Dev>::optimizer_state_loaded() { weights_->trained.gather(mesh_->shards); }
template <class Dev> void Decoder<Dev>::gather_parameters() {
    weights_->trained.ready(mesh_->shards, 0, weights_->trained.sharding.elements);
}
template <class Dev> void Decoder<Dev>::copy_parameters_to(Model &other) {
    weights_->copy_to(*dynamic_cast<Decoder &>(other).weights_);
}
template <class Dev> Payload &Decoder<Dev>::sent() { return weights_->trained.sent; }
template <class Dev> Payload Decoder<Dev>::take_sent() {
    Payload sent = std::exchange(weights_->trained.sent, {});
    sent.grads = std::exchange(weights_->trained.gradients.sent, 0);
    return sent;
}

#ifdef CUDA_HALF
template class Decoder<CudaF32>;
template class Decoder<CudaBf16>;
template class Decoder<Rehearsal<CudaF32>>;
template class Decoder<Rehearsal<CudaBf16>>;
#elif defined LLMC_REHEARSALS
template class Decoder<Rehearsal<CpuF32>>;
template class Decoder<Rehearsal<CpuBf16>>;
#else
template class Decoder<CpuF32>;
template class Decoder<CpuBf16>;
#endif
