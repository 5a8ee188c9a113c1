// The base class of every model: a decoder-only transformer on packed rows. It holds the parts common to all architectures: the row and
// its parts on ranks, attention, the loss, the sums of gradients, the optimizer. A trainer adds the tensors, arrays and ops of
// its layers (train_gpt2.cu, train_llama.cu). This class calls the trainer's functions in the order of a step. No other place states this order:
// lifetimes of arrays, the profile and predicted times come from running the step (../core/rehearsal.h).
//
//     forward()      input_forward; attention_half and feed_forward_half of each layer; final_norm_forward; the head of this class
//     gradients()    head, final_norm_backward; then, from the last layer to the first, the feed-forward half and the attention half: each calls its forward
//                    function again to recompute discarded activations, then its backward function; input_backward
//
// The ranks of a ring share each row: a rank computes T / sp of its tokens, and only attention needs the others
// (../parallel/ring.h). The gradients of a unit are summed over all ranks as soon as the backward pass has computed them. One
// rank is a ring of one.
//
// weights.h loads weights from wherever they are stored, trace.h has the tools that observe ops, and generator.h the forward passes
// of generation.
#pragma once
#include <cmath>
#include <optional>

#include "../core/arena.h"
#include "../core/graphs.h"
#include "../core/memory.h"
#include "../data/dataloader.h"
#include "../ops/attention.h"
#include "../ops/embedding.h"
#include "../ops/loss.h"
#include "../ops/matmul.h"
#include "../ops/noise.h"
#include "../ops/router.h"
#include "../ops/score.h"
#include "../parallel/expert_exchange.h"
#include "../parallel/mesh.h"
#include "../parallel/rehearsal_comm.h"
#include "../parallel/ring.h"
#include "config.h"
#include "device_row.h"
#include "generator.h"
#include "linear_layers.h"
#include "model.h"
#include "peaks.h"
#include "ranks.h"
#include "table.h"
#include "trace.h"
#include "weights.h"

// The arrays of a layer's attention.
template <class X> struct AttentionActs {
    X *qkv;        // (T, (H+2*KV)*D)    queries, keys, values. Backward: becomes dqkv
    X *att;        // (T, H*D)
    float *lse;    // (H, T)
    float *out32;  // (T, H*D)           attention output during the merge of blocks; may be empty without a merge
    X *datt;       // (T, H*D)
    AttentionGrads grads;
    float *delta;         // (H, T)
    std::byte *scratch;   // attention_scratch
    RingBuffers<X> ring;  // ring_attention_buffers
};

template <class Dev> class Decoder : public Model {
  public:
    ~Decoder() override { matmul_use_scratch(dev, nullptr); }
    Plan &plan() override {
        if (trace_.times().empty()) find_lifetimes();
        return plan_;
    }
    RehearsedSteps rehearse_steps(size_t micro_steps) override;
    Arena &arena() override { return *arena_; }
    Memory &memory() override {  // created on first use: a plan needs no device
        if (!memory_) memory_ = make_memory(dev);
        return *memory_;
    }
    void profile() override;
    Trace &trace() override { return trace_; }
    Generator &generator() override { return generator_; }
    void allocate(Mesh &mesh, bool guards, bool poison) override;
    const std::vector<Tensor> &tensors() const override { return weights_.trained.whole; }
    const std::vector<Tensor> &frozen_tensors() const override { return weights_.frozen_table.tensors; }
    void load(const HfWeights &files, uint64_t seed) override { weights_.load(files, seed); }
    void load_adapters(const HfWeights &files, uint64_t seed) override {
        load_parameters(weights_.trained, files, seed, memory());
    }
    void randomise(std::optional<uint64_t> key) override { key_ = linears_.dropout_key = key; }
    void initialise(uint64_t seed) override { weights_.initialise(seed); }
    void save(const std::string &dir, const std::string &export_dtype) override { weights_.save(dir, export_dtype); }
    void zero_gradients(uint64_t key = 0) override {
        begin_op(Pass::step, ZERO_GRAD);
        weights_.begin_step(key);
        if (routes()) clear_routing(), balance_is_known_ = false;
    }
    double gradient_norm() override {
        begin_op(Pass::step, GRAD_NORM);
        return weights_.trained.gradients.norm(mesh_->shards, memory());
    }
    std::string nonfinite_gradient() override { return ::nonfinite_gradient(weights_.trained, mesh_->all); }
    std::string store_name() const override { return store_ ? store_->name() : ""; }
    void update(const AdamW &adamw) override {
        begin_op(Pass::step, ADAMW);
        weights_.optimizer.update(weights_.trained, mesh_->shards, adamw);
    }
    OptimizerState optimizer_state() override { return weights_.optimizer.state(weights_.trained, memory()); }
    void optimizer_state_loaded() override { weights_.trained.gather(mesh_->shards); }
    void gather_parameters() override { weights_.trained.ready(mesh_->shards, 0, weights_.trained.sharding.elements); }
    void copy_parameters_to(Model &other) override { weights_.copy_to(dynamic_cast<Decoder &>(other).weights_); }
    Payload take_sent() override {
        Payload sent = std::exchange(weights_.trained.sent, {});
        sent.grads = std::exchange(weights_.trained.gradients.sent, 0);
        return sent;
    }
    double model_flops(const Row &row) const override { return ops.model_flops(config, row); }

    std::vector<double> evaluate(const Row &row) override;
    std::vector<double> evaluate_base(const Row &row) override;
    void backward(std::span<const float> weights, float entropy_weight, bool last) override;
    void accumulate(const Row &row, float weight, bool last) override;
    void count_routing(const Row &row, bool last) override;
    LossSums take_sums() override;
    Routing routing() override;
    Zero<Dev> &parameters() { return weights_.trained; }

  protected:
    using X = typename Dev::X;
    using Calls = std::function<void(Model &, const ModelLimits &)>;  // the calls of a rehearsal

    Decoder(Dev dev, const ModelConfig &config, const ModelLimits &limits, const Table &table, OpList ops);

    // ---- the trainer's part -----------------------------------------------------------------------------------------------------------

    // Points the trainer's weights and their gradients at their arrays. The gradients of frozen weights become null.
    virtual void point_weights(TensorList<X> &params, TensorList<float> &grads) = 0;
    virtual void input_forward() = 0;  // computes acts.x[0] from row.tokens
    // Layer l computes acts.x[l+1] from acts.x[l]: its first half up to attention's output, its second half the output projection
    // and the feed-forward (see runs() and for_tiles()). Ranks without a row call the second half, forward and backward, of layers whose experts are
    // divided.
    virtual void attention_half(size_t l, Pass pass) = 0;
    virtual void feed_forward_half(size_t l, Pass pass) = 0;
    virtual void final_norm_forward() = 0;   // computes acts.normf from acts.x[L]
    virtual void final_norm_backward() = 0;  // replaces acts.dx, the gradient of acts.normf, by the gradient of acts.x[L]
    // The first function replaces acts.dx, the gradient of acts.x[l+1], by the gradient of the residual stream after attention, and the
    // second one by the gradient of acts.x[l].
    virtual void feed_forward_half_backward(size_t l) = 0;
    virtual void attention_half_backward(size_t l) = 0;
    virtual void rehearse(Touches &log, const Calls &calls) = 0;  // implemented as rehearse_as<the trainer's class>(log, calls)
    virtual void input_backward() = 0;  // calls sum_gradients itself, because only the trainer knows the units of its input

    // ---- the plan ---------------------------------------------------------------------------------------------------------------------

    bool trains() const { return limits.mode == Mode::train; }
    bool adapts() const { return config.lora.rank > 0; }
    bool routes() const { return trains() && config.experts.number > 0; }
    bool joins(size_t l) const { return mesh_->experts && config.has_experts(l); }
    bool trains_input() const { return !adapts() || config.lora.embedding; }
    auto layer_arrays(size_t l);
    template <class T> void plan_kept(size_t l, T **forward, T **backward, const std::string &name, std::vector<size_t> shape);
    template <template <class> class M> void rehearse_as(Touches &log, const Calls &calls);
    void plan_attention(size_t l, AttentionActs<X> &forward, AttentionActs<X> &backward);

    // ---- computation ------------------------------------------------------------------------------------------------------------------

    // Marks the beginning of an op, of layer l if it belongs to a layer. bucket: Work::bucket
    void begin_op(Pass pass, size_t op, size_t l, size_t bucket = 0) {
        matmul_use_scratch(dev, acts.matmul);  // another model on this device may have set its own scratch, and freed it since
        trace_.begin(pass, op, l, bucket);
    }
    void begin_op(Pass pass, RowOp op, size_t bucket = 0) { begin_op(pass, ops.number(op), 0, bucket); }
    // Begins an op of a half of layer l. Returns false if the op must not run: in Pass::recompute, if its results have been kept.
    bool runs(size_t op, size_t l, Pass pass) {
        if (pass == Pass::recompute && limits.recompute < ops.layer[op].from) return false;
        begin_op(pass, op, l);
        return true;
    }
    // Calls f(first, n) for each tile of the row's tokens in order. The hidden arrays of the feed-forward hold one tile: (tile, F).
    template <class F> void for_tiles(F f) { for_tiles(f, row.T, tile); }
    template <class F> void for_tiles(F f, size_t tokens, size_t step) {
        in_parts(
            tokens, [&](size_t first, size_t n) { trace_.tile = n, f(first, n); }, step);
        trace_.tile = 0;
    }
    // Describes tokens [t, t + n) of layer l, on this rank and on the ranks with which it divides experts.
    ExpertTokens expert_tokens(size_t l, size_t t, size_t n, std::vector<ExpertTraffic> &traffic) {
        return {l,       t, std::min(n, row.T - std::min(row.T, t)), n, mesh_->experts.get(), &memory(), &weights_.trained.sent,
                &traffic};
    }
    void attention_forward(size_t l, const AttentionActs<X> &a);
    void attention_backward(size_t l, const AttentionActs<X> &a);
    // Computes a linear layer with its adapters for tokens [t, t + n) of the row; the pointers point at token t.
    void linear_forward(size_t l, Linear matrix, X *out, const X *x, LinearWeights<X> w, size_t t, size_t n) {
        linears_.in_fp8 = limits.fp8 && !generator_.runs();
        linears_.forward(l, matrix, out, x, w, t, n);
    }
    void linear_backward(size_t l, Linear matrix, X *dx, LinearWeights<float> dw, const X *dout, const X *x, LinearWeights<X> w,
                         size_t t, size_t n) {
        linears_.backward(l, matrix, dx, dw, dout, x, w, t, n, weights_.accumulates());
    }
    // Returns true if gradients of weights are added to the gradients of earlier rows, and false if they overwrite them.
    bool accumulates() const { return weights_.accumulates(); }
    // Adds tokens [t, t + n) to the routing sums of layer l, if the forward pass belongs to a step.
    void add_routing(size_t l, const float *probs, const int32_t *chosen, size_t t, size_t n) {
        const ExpertConfig &c = config.experts;
        if (!routes() || generator_.runs() || !linears_.adapters_are_on) return;
        router_sums(dev, acts.routing + l * Routing::width(c.number), probs, chosen, row.documents + t, n, c.number, c.chosen);
    }
    const float *balance() const { return config.experts.aux_loss_coef > 0 ? acts.balance : nullptr; }
    template <class F> void sum_gradients(size_t unit, bool complete, F add) { weights_.sum_gradients(unit, complete, add); }

    Dev dev;
    const ModelConfig config;
    const ModelLimits limits;
    const size_t T_max;  // tokens of this rank's part of the longest row
    const OpList ops;
    // Tokens in the hidden arrays of the feed-forward: all tokens if the backward pass keeps these arrays, otherwise limits.tile_tokens
    // (by default one matmul_run), rounded up to a multiple of matmul_run so that no bit depends on it.
    const size_t tile;
    // The same for experts; without rounding if ranks divide them.
    const size_t expert_tile;
    const size_t positions_unit;  // the table's unit of learned positions
    Plan plan_;
    size_t most_tokens = 0;  // tokens of the rank with the most tokens in this pass, among the ranks that divide the experts
    X *embed_w = nullptr, *head_w = nullptr;  // (V, C); the head of a reward model is (1, C)
    float *embed_dw = nullptr, *head_dw = nullptr;

    DeviceRow row{config, limits};
    LinearLayers<Dev> linears_{dev, config};

    struct {
        std::vector<X *> x;  // (L+1) x (T, C)   residual stream of this pass: the input of each layer, then of the final norm
        X *normf;            // (T, C)
        X *dx;               // (T, C)           gradient of the residual stream
        std::byte *head;     // lm_head_scratch
        HeadStats stats;     // (N) each
        float *scores;       // (N)              reward model
        double *sums;        // (3)              sums over the rows since the last take_sums()
        int64_t *routing;    // (L, 2E+2)        with experts: router_sums of each layer's tokens since zero_gradients()
        float *balance;      // (E)              derivatives of the auxiliary loss
        std::byte *matmul;   // matmul_scratch
    } acts;

  private:
    friend class CachedGenerator<Dev>;
    void plan_row();
    void plan_head();
    void find_lifetimes();
    Work layout() const;
    void begin_pass();
    void load_part(const Row &row);
    // Returns false for the reference model, which gets no noise.
    bool is_noisy() const { return key_ && limits.neftune_alpha > 0 && linears_.adapters_are_on; }
    HeadLoss head_loss() const { return {row.predictors, row.targets, row.weights, row.entropy_weight, limits.temperature}; }
    void forward();
    void gradients(bool last);
    void head(X *dx, float *dhead);
    void head_backward();
    void add_sums();
    void clear_routing() { memory().fill(acts.routing, 0, config.L * Routing::width(config.experts.number) * sizeof(int64_t)); }
    void find_balance();
    std::vector<double> values_of(const Row &row);
    RingAttention ring(size_t l);
    AttentionShape attention_shape(size_t T) const { return {T, config.H, config.KV, config.D, config.attention_scale()}; }
    AttentionInputs<X> attention_inputs(size_t l, const AttentionActs<X> &a);
    enum Stretch { FORWARD, RECOMPUTE, BACKWARD };  // the parts of a layer's work
    template <class F> void recorded(size_t l, Stretch stretch, const F &work);
    void offload(size_t l);
    void prefetch(size_t l);
    void wait_for_copies(size_t l, Pass pass);

    Trace trace_{ops};
    Weights<Dev> weights_;
    CachedGenerator<Dev> generator_{*this};
    Mesh *mesh_ = nullptr;
    std::unique_ptr<Memory> memory_;
    std::unique_ptr<Arena> arena_;    // in memory_
    std::unique_ptr<Store> store_;    // copies to and from the arena
    std::unique_ptr<Graphs> graphs_;  // null: every launch is a call
    SelfComm alone_;                  // this rank alone, for generation
    std::optional<uint64_t> key_;     // of dropout and noise; without a key both are off
    X *base_embed_, *base_head_;      // the base model's embed_w and head_w
    size_t targets_ = 0;              // the number of targets since the last take_sums()
    bool balance_is_known_ = false;   // true if `balance` is valid for this step

    // The residual stream in the forward and in the backward pass: the same arrays, if they are not offloaded in between.
    struct {
        std::vector<X *> forward, backward;
    } residual_;

    // An array that is offloaded to the store after its layer's forward pass, and loaded into another array before the layer's backward
    // pass.
    struct OffloadedArray {
        size_t place, bytes;  // bytes: of T_max tokens
        void **forward, **backward;
    };
    size_t bytes_now(const OffloadedArray &t) const { return round_up(t.bytes / T_max * most_tokens, store_alignment); }
    std::vector<std::vector<OffloadedArray>> offloaded_;  // of each layer
};

// Must be called before allocate(), while there is free memory to measure the device's peaks in.
template <class Dev> void Decoder<Dev>::profile() {
    auto timeline = make_timeline(dev);
    const Peaks peaks = measure_peaks(dev, memory(), *timeline);
    trace_.profile(std::make_unique<Profiler>(std::move(timeline), peaks, ops, config, layout()));
}

template <class Dev> Work Decoder<Dev>::layout() const {
    const Zero<Dev> &zero = weights_.trained;
    Work layout{};
    constexpr size_t bytes_of_moment[] = {sizeof(float), sizeof(bf16), sizeof(uint8_t)};
    layout.element = sizeof(X), layout.gradient = zero.gradients.in_bf16 ? sizeof(bf16) : sizeof(float);
    layout.moment = bytes_of_moment[size_t(limits.moments)], layout.recompute = limits.recompute;
    layout.head_in_buckets = weights_.head_in_buckets();
    layout.expert_ranks = limits.ranks.expert_parallel, layout.expert_run = expert_run(dev, layout.expert_ranks);
    for (const ShardRun &s : zero.sharding.shard_runs()) layout.parameters += s.count;
    for (const TensorRun &s : zero.sharding.tensor_runs(zero.table))
        if (const Tensor &t = zero.table[s.tensor]; limits.muon && t.of_layer)
            layout.without_v += s.count, layout.muon_flops += orthogonalise_flops(t.shape[0], t.shape[1]);
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
    weights_.use(mesh, memory(), store_.get());
    if (limits.graphs) graphs_ = make_graphs(dev);
    TensorList<X> params = weights_.trained_weights(), frozen = weights_.frozen_weights();
    TensorList<float> grads = trains() ? weights_.gradients() : TensorList<float>(), none;
    TensorList<X> &own = config.freezes() ? frozen : params;
    point_weights(own, config.freezes() ? none : grads);
    if (weights_.prefetched.any()) own.head = weights_.prefetched.head_weights();
    if (config.freezes()) {
        lora_table(config, weights_.frozen_table, linears_.adapters, params);
        lora_table(config, weights_.frozen_table, linears_.gradients, grads);
        linears_.documents = row.documents, linears_.positions = row.doc_pos;
    }
    base_embed_ = own.embed, base_head_ = own.head;
    embed_w = params.embed ? params.embed : own.embed, head_w = params.head ? params.head : own.head;
    embed_dw = grads.embed, head_dw = grads.head;
    if (trains() && head_dw && weights_.trained.gradients.in_buffers()) head_dw = weights_.head_buffer;
}

// ---- forward --------------------------------------------------------------------------------------------------------------------------

template <class Dev> void Decoder<Dev>::begin_pass() {  // called before the pass loads its row
    trace_.begin_pass();
    begin_op(Pass::step, COPY);
    generator_.stop();
}

// A rank with an empty row loads nothing, but still takes part in the collective calls of the pass.
template <class Dev> void Decoder<Dev>::load_part(const Row &r) {
    row.T = 0, generator_.stop();
    if (r.T == 0) return;
    const Row whole = pad_row(r, limits.ranks.sp);
    trace_.begin_row(whole, limits.ranks.sp);
    begin_pass();
    row.load_part(whole, sizeof(X), memory());
    if (linears_.drops() || is_noisy() || (trains() && config.experts.number)) row.load_documents(whole, is_noisy(), memory());
}

// A unit's weights are fetched when the previous layer begins.
template <class Dev> void Decoder<Dev>::forward() {
    const size_t L = config.L, norm = weights_.units.size() - 1;
    const Pass pass = Pass::forward;
    if (!weights_.begin_forward(row.T > 0)) return;
    most_tokens = mesh_->experts ? size_t(mesh_->experts->max(double(row.T))) : row.T;
    acts.x = residual_.forward;
    weights_.fetch(0, pass);
    if (positions_unit) weights_.fetch(positions_unit, pass);
    weights_.fetch(1, pass);
    weights_.ready(0, pass);
    if (positions_unit) weights_.ready(positions_unit, pass);
    if (row.T) input_forward();
    if (row.T && !generator_.runs() && is_noisy())
        noise_forward(dev, acts.x[0], TokenNoise{*key_, row.magnitudes, row.documents, row.doc_pos}, row.T, config.C);
    for (size_t l = 0; l < L; l++) {
        weights_.ready(1 + l, pass);
        if (l + 1 < L) weights_.fetch(2 + l, pass);
        else weights_.fetch(norm, pass), weights_.fetch(weights_.prefetched.head, pass);
        if (row.T) recorded(l, FORWARD, [&] { attention_half(l, pass), feed_forward_half(l, pass); });
        else if (joins(l)) feed_forward_half(l, pass);
        if (most_tokens && !generator_.runs()) offload(l);
    }
    weights_.ready(norm, pass);
    if (row.T) final_norm_forward();
    weights_.ready(weights_.table.head, pass);
}

// Launches a part of a layer's work, by replay if there is a recording. A recording lacks the host's actions between launches: messages of a ring or
// to experts, time stamps, and fills or checks of dead arrays. It would also fix the key of dropout, which is an argument of the launches.
template <class Dev> template <class F> void Decoder<Dev>::recorded(size_t l, Stretch stretch, const F &work) {
    const Ranks &r = limits.ranks;
    const bool only_launches = r.sp == 1 && r.expert_parallel == 1 && !trace_.is_on() && config.lora.dropout == 0;
    if (!graphs_ || !only_launches || generator_.runs() || !linears_.adapters_are_on) return work();
    Graphs::Stretch key{l, stretch, row.T, weights_.accumulates()};
    graphs_->run(key, work);
}

// Starts offloading the kept activations of layer l, and waits for layer l-1, whose arrays the next layer may overwrite.
template <class Dev> void Decoder<Dev>::offload(size_t l) {
    if (l > 0) wait_for_copies(l - 1, Pass::forward);
    trace_.pause(Pass::forward, COPY, l);
    for (const OffloadedArray &t : offloaded_[l]) store_->offload(t.place, *t.forward, bytes_now(t));
}

// Waits for layer l's kept activations, and starts prefetching layer l-1's.
template <class Dev> void Decoder<Dev>::prefetch(size_t l) {
    wait_for_copies(l, Pass::backward);
    acts.x[l] = residual_.backward[l];
    if (l == 0) return;
    trace_.pause(Pass::backward, COPY, l - 1);
    for (const OffloadedArray &t : offloaded_[l - 1]) store_->prefetch(t.place, *t.backward, bytes_now(t));
}

template <class Dev> void Decoder<Dev>::wait_for_copies(size_t l, Pass pass) {
    if (!offloaded_[l].empty()) trace_.begin_transfer(pass, COPY, l);
    for (const OffloadedArray &t : offloaded_[l]) store_->wait(t.place);
}

// ring() describes a layer's attention over the ring, and attention_inputs() the arrays that it reads.
template <class Dev> RingAttention Decoder<Dev>::ring(size_t l) {
    const Ranks &r = limits.ranks;
    const KeyTravel &travel = row.split->travel[kind_of(config, l)];
    if (generator_.runs()) return {alone_, SpMode::ring, 1, *row.split, travel, weights_.trained.sent};
    return {*mesh_->ring, r.sp_mode, r.head_stride, *row.split, travel, weights_.trained.sent};
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

template <class Dev> void Decoder<Dev>::attention_forward(size_t l, const AttentionActs<X> &a) {
    const AttentionInputs<X> in = attention_inputs(l, a);
    if (generator_.runs() && generator_.attention(l, a.att, in)) return;
    RingAttention ranks = ring(l);
    if constexpr (is_rehearsal<Dev>)
        dev.note(a.out32, a.ring.values, a.ring.floats);  // the ranks that use these arrays depend on the row
    ring_attention_forward(dev, ranks, a.att, a.out32, a.lse, in, a.ring);
}

// Computes the loss; with `dx` also the gradient of the final norm's output, and with `dhead` the gradient of the head's weights.
template <class Dev> void Decoder<Dev>::head(X *dx, float *dhead) {
    const size_t T = row.T, C = config.C, N = row.N;
    begin_op(!dx ? Pass::forward : config.reward ? Pass::backward : Pass::both, HEAD);
    if (!config.reward)
        lm_head(dev, acts.stats, dx, dhead, acts.head, acts.normf, head_w, head_loss(), T, C, config.V, N,
                weights_.accumulates());
    else if (dx) score_backward(dev, dx, dhead, acts.normf, head_w, row.predictors, row.weights, T, C, N);
    else score_forward(dev, acts.scores, acts.normf, head_w, row.predictors, C, N);
}

template <class Dev> void Decoder<Dev>::add_sums() {
    if (config.reward) return;
    head_sums(dev, acts.sums, acts.stats, row.N);
    targets_ += row.N;
}

template <class Dev> std::vector<double> Decoder<Dev>::evaluate(const Row &r) {
    const auto values = values_of(r);
    if (row.T) add_sums();
    return values;
}

// Runs the forward pass, and returns the values of the whole row.
template <class Dev> std::vector<double> Decoder<Dev>::values_of(const Row &r) {
    load_part(r);
    forward();
    if (r.T == 0) return {};
    head(nullptr, nullptr);
    const auto of_predictors = read(memory(), config.reward ? acts.scores : acts.stats.nll, row.N);
    std::vector<double> values(row.predictors_of_whole);
    for (size_t n = 0; n < row.N; n++) values[row.numbers[n]] = of_predictors[n];
    return mesh_->ring->sum(values);
}

template <class Dev> std::vector<double> Decoder<Dev>::evaluate_base(const Row &r) {
    const auto change = [&](bool on) {
        linears_.adapters_are_on = on, weights_.base_alone = !on;
        std::swap(embed_w, base_embed_), std::swap(head_w, base_head_);
    };
    change(false);
    const auto values = values_of(r);
    change(true);
    return values;
}

template <class Dev> LossSums Decoder<Dev>::take_sums() {
    if (config.reward) return {};
    begin_op(Pass::step, COPY);
    const auto sums = read(memory(), acts.sums, 3);
    memory().fill(acts.sums, 0, 3 * sizeof(double));
    return {sums[0], sums[1], sums[2], double(std::exchange(targets_, 0))};
}

// ---- the auxiliary loss of mixtures of experts ---------------------------------------------------------------------------------------

template <class Dev> Routing Decoder<Dev>::routing() {
    if (!routes()) return {};
    return {config.experts.number, read(memory(), acts.routing, config.L * Routing::width(config.experts.number))};
}

// Its derivatives depend on the tokens of all ranks.
template <class Dev> void Decoder<Dev>::find_balance() {
    Routing whole = routing();
    whole.sums = mesh_->all.sum(whole.sums);
    write(memory(), acts.balance, whole.balance(config.experts.aux_loss_coef));
    balance_is_known_ = true;
}

template <class Dev> void Decoder<Dev>::count_routing(const Row &r, bool last) {
    load_part(r);
    forward();
    if (last) find_balance(), clear_routing();  // the rows will be evaluated again
}

// ---- backward -------------------------------------------------------------------------------------------------------------------------

template <class Dev> void Decoder<Dev>::accumulate(const Row &r, float weight, bool last) {
    load_part(r);
    if (r.T) row.load_weights(std::vector<float>(row.predictors_of_whole, weight), 0, memory());
    forward();
    gradients(last);
    if (r.T) add_sums();
}

template <class Dev> void Decoder<Dev>::backward(std::span<const float> weights, float entropy_weight, bool last) {
    if (row.T) row.load_weights(weights, entropy_weight, memory());
    gradients(last);
}

// If the head's gradient is computed in several buckets, the logits are recomputed for each of them.
template <class Dev> void Decoder<Dev>::head_backward() {
    const size_t C = config.C, V = config.V;
    if (!head_dw) return row.T ? head(acts.dx, nullptr) : void();
    const bool in_buckets = weights_.head_in_buckets();
    if (in_buckets && row.T) head(acts.dx, nullptr);
    weights_.sum_head_gradients([&](size_t first, size_t n) {
        if (!in_buckets) return head(acts.dx, head_dw);
        begin_op(Pass::backward, HEAD, n);
        lm_head_weight(dev, head_dw, acts.head, acts.normf, head_w, head_loss(), acts.stats, C, V, row.N, first / C, n / C);
    });
}

template <class Dev> void Decoder<Dev>::gradients(bool last_micro_step) {
    const Pass pass = Pass::backward;
    const size_t L = config.L;
    if (routes() && config.experts.aux_loss_coef > 0 && !balance_is_known_) find_balance();
    weights_.begin_backward(row.T > 0, row.T > 0 && row.N > 0, last_micro_step);
    head_backward();
    sum_gradients(weights_.units.size() - 1, true, [&](size_t, size_t) { final_norm_backward(); });
    for (size_t l = L; l-- > 0;) {  // the last two layers' weights are still here
        if (weights_.in_shared_arrays() && l + 1 < L) weights_.ready(1 + l, pass);
        if (l > 0 && l + 1 < L) weights_.fetch(l, pass);  // the weights of layer l - 1
        if (most_tokens) prefetch(l);
        if (row.T) recorded(l, RECOMPUTE, [&] { feed_forward_half(l, Pass::recompute); });
        const auto add = [&](size_t, size_t) {
            if (row.T == 0) return feed_forward_half_backward(l);
            recorded(l, BACKWARD, [&] {
                feed_forward_half_backward(l);
                attention_half(l, Pass::recompute);
                attention_half_backward(l);
            });
        };
        weights_.sum_gradients(1 + l, true, add, joins(l));
    }
    if (trains_input()) input_backward();
    weights_.end_backward();
}

template <class Dev> void Decoder<Dev>::attention_backward(size_t l, const AttentionActs<X> &a) {
    RingAttention ranks = ring(l);
    if constexpr (is_rehearsal<Dev>) dev.note(a.ring.values, a.ring.floats);
    ring_attention_backward(dev, ranks, a.qkv, a.grads, a.delta, reinterpret_cast<float *>(a.scratch), attention_inputs(l, a),
                            a.att, a.datt, a.lse, a.ring);
}

#include "decoder_plan.h"

// Compiled in decoder.cu, once for all programs.
extern template class Decoder<CpuF32>;
extern template class Decoder<CpuBf16>;
#ifdef CUDA_HALF
extern template class Decoder<CudaF32>;
extern template class Decoder<CudaBf16>;
#endif
