// The base class of every model: a decoder-only transformer on packed rows. It holds what no architecture changes: the row and its parts on
// ranks, attention, the loss, the sums of gradients, the optimizer. A trainer adds its parameter table and the arrays and ops of its
// layers (train_gpt2.cu, train_llama.cu). This class calls the trainer's functions in the order of a step:
//
//     forward()      input_forward, attention_half and feed_forward_half of each layer, final_norm_forward, and this class's head
//     gradients()    this class's head, final_norm_backward; for each layer, from the last to the first, and first for its feed-forward and then for
//                    its attention: the half once more, which recomputes what was not kept, and its backward function; then input_backward
//
// The ranks of a ring share each row: a rank computes T / sp of its tokens, and only attention needs the others (../parallel/ring.h). The
// gradients of a unit are summed over all ranks as soon as the backward pass has computed them (../parallel/zero.h). One rank is a ring of one.
//
// ready(unit) comes before the unit's weights are read. At stage 3 of ZeRO they are guests: fetch(unit) begins to gather them, some time before, into an
// array that the plan holds for as long as they are read. Every rank takes part in that, also one that has no row.
//
// With adapters (lora.h) `zero` and the optimizer have the adapters alone, and the model's own weights lie in `frozen`, without gradients or moments.
#pragma once
#include <cmath>
#include <optional>

#include "../core/arena.h"
#include "../core/memory.h"
#include "../data/dataloader.h"
#include "../ops/attention.h"
#include "../ops/attention_decode.h"
#include "../ops/dropout.h"
#include "../ops/embedding.h"
#include "../ops/layout.h"
#include "../ops/loss.h"
#include "../ops/matmul.h"
#include "../ops/score.h"
#include "../parallel/mesh.h"
#include "../parallel/optimizer.h"
#include "../parallel/ring.h"
#include "../parallel/split.h"
#include "clock.h"
#include "config.h"
#include "lora.h"
#include "model.h"
#include "parameters.h"
#include "profile.h"
#include "ranks.h"
#include "table.h"

// The arrays of a layer's attention.
template <class X> struct AttentionActs {
    X *qkv;        // (T, (H+2*KV)*D)    queries, keys, values. Backward: becomes dqkv
    X *att;        // (T, H*D)
    float *lse;    // (H, T)
    float *out32;  // (T, H*D)           attention output while blocks are merged
    X *datt;       // (T, H*D)
    AttentionGrads grads;
    float *delta;         // (H, T)
    std::byte *scratch;   // attention_scratch
    RingBuffers<X> ring;  // ring_attention_buffers
};

template <class Dev> class Decoder : public Model {
  public:
    ~Decoder() override { matmul_use_scratch(dev, nullptr); }
    Plan &plan() override { return plan_; }
    Arena &arena() override { return *arena_; }
    Memory &memory() override {  // is made when it is first used, because a plan needs no device
        if (!memory_) memory_ = make_memory(dev);
        return *memory_;
    }
    void profile() override;
    Profiler *profiler() override { return profiler_.get(); }
    void allocate(Mesh &mesh, bool guards, bool poison) override;
    const std::vector<Tensor> &tensors() const override { return zero.table; }
    const std::vector<Tensor> &frozen_tensors() const override { return frozen.table; }
    void load(const HfWeights &weights, uint64_t seed) override {
        load_parameters(frozen, weights, seed, memory());
        load_parameters(zero, weights, seed, memory());
    }
    void load_adapters(const HfWeights &weights, uint64_t seed) override { load_parameters(zero, weights, seed, memory()); }
    void use_dropout(std::optional<uint64_t> key) override { dropout_key_ = key; }
    void initialise(uint64_t seed) override {
        initialise_parameters(frozen, mesh_->all, seed, config.initializer_range, memory());
        initialise_parameters(zero, mesh_->all, seed, config.initializer_range, memory());
    }
    void save(const std::string &dir, const std::string &export_dtype) override {
        save_parameters(
            zero, mesh_->all, dir, export_dtype, memory(),
            [&](size_t b) { return zero.sharding.stage >= 2 ? *grads_of.largest : zero.grads + zero.sharding.buckets[b].begin; },
            adapts() ? adapter_files : model_files);
    }
    void zero_gradients() override {
        begin_op(clock.between_rows(ZERO_GRAD));
        accumulate_ = zero.sharding.stage >= 2;  // a buffer then begins with the sum so far
        zero.zero_gradients(memory(), accumulate_);
    }
    double gradient_norm() override {
        begin_op(clock.between_rows(GRAD_NORM));
        return zero.gradient_norm(mesh_->all);
    }
    std::string nonfinite_gradient() override { return ::nonfinite_gradient(zero, mesh_->all); }
    void detect_anomaly() override { looks_ = true; }
    Anomaly anomaly() override { return anomaly_; }
    void update(const AdamW &adamw) override {
        begin_op(clock.between_rows(ADAMW));
        optimizer.update(zero, mesh_->all, adamw);
    }
    OptimizerState optimizer_state() override { return optimizer.state(zero, memory()); }
    void optimizer_state_loaded() override { zero.gather(mesh_->all); }
    void gather_parameters() override { zero.ready(mesh_->all, 0, zero.sharding.elements); }
    Payload take_sent() override { return std::exchange(zero.sent, {}); }
    double model_flops(const Row &row) const override { return ops.model_flops(config, row); }

    std::vector<double> evaluate(const Row &row) override;
    std::vector<double> evaluate_base(const Row &row) override;
    void backward(std::span<const float> weights, float entropy_weight, bool last) override;
    void accumulate(const Row &row, float weight, bool last) override;
    LossSums take_sums() override;
    const float *next_logits(const Row &row, const CacheStep &step) override;
    void finish_generation() override;
    void copy_cache_page(size_t to, size_t from) override;
    Zero<Dev> &parameters() { return zero; }

  protected:
    using X = typename Dev::X;

    Decoder(Dev dev, const ModelConfig &config, const ModelLimits &limits, const Table &table, OpList ops);

    // ---- what a trainer adds ----------------------------------------------------------------------------------------------------------

    // Points the trainer's weights at their arrays, and their gradients, too, if the model is trained (else `grads` is null). It sets
    // head_w and head_dw.
    virtual void point_weights(const Locate<X> &params, const Locate<float> *grads) = 0;
    virtual void input_forward() = 0;  // computes acts.x[0] from row.tokens
    // Layer l computes acts.x[l+1] from acts.x[l]: its first half up to attention's output, its second half the output projection and the feed-forward
    // (see runs() and for_tiles()).
    virtual void attention_half(size_t l, Pass pass) = 0;
    virtual void feed_forward_half(size_t l, Pass pass) = 0;
    virtual void final_norm_forward() = 0;   // computes acts.normf from acts.x[L]
    virtual void final_norm_backward() = 0;  // replaces acts.dx, the gradient of acts.normf, by that of acts.x[L]
    // They replace acts.dx, the gradient of acts.x[l+1], by that of the residual stream after attention, and that by the gradient of acts.x[l].
    virtual void feed_forward_half_backward(size_t l) = 0;
    virtual void attention_half_backward(size_t l) = 0;
    virtual void input_backward() = 0;  // calls sum_gradients itself, since only the trainer knows which units its input has

    // ---- what it plans with -----------------------------------------------------------------------------------------------------------

    bool trains() const { return limits.mode == Mode::train; }
    bool adapts() const { return config.lora.rank > 0; }
    template <class Acts> auto layer_arrays(size_t l, Acts &forward, Acts &backward);
    void plan_attention(size_t l, AttentionActs<X> &forward, AttentionActs<X> &backward);

    // ---- what it computes with --------------------------------------------------------------------------------------------------------

    void begin_op(const Moment &now, size_t bucket = 0) {  // is called at the start of each op
        matmul_use_scratch(dev, acts.matmul);  // another model on this device may have used its own, and freed it since
        if (looks_) look(now);
        if (poison_) arena_->poison_dead(now.time);
        if (profiler_) profiler_->begin(now.pass, now.op, now.layer, bucket, of_tile_);
    }
    // Begins an op of a half of layer l. Returns false if the op must not run: in Pass::recompute, if its results were kept.
    bool runs(size_t op, size_t l, Pass pass) {
        if (pass == Pass::recompute && limits.recompute < ops.layer[op].from) return false;
        begin_op(pass == Pass::recompute ? clock.recompute(l, op) : clock.forward(l, op));
        return true;
    }
    // Calls f(first, n) for each tile of the row's tokens, one after the other. The hidden arrays of the feed-forward hold one tile: (tile, F).
    template <class F> void for_tiles(F f) {
        in_parts(
            row.T, [&](size_t first, size_t n) { of_tile_ = n, f(first, n); }, tile);
        of_tile_ = 0;
    }
    void ready(size_t unit, Pass pass = Pass::forward) {  // waits until the unit's weights have arrived from all ranks
        if (zero.sharding.parts > 1) begin_comm_op(pass, PARAM_GATHER);
        zero.ready(mesh_->all, units[unit].begin, units[unit].end);
    }
    void attention_forward(size_t l, const AttentionActs<X> &a);
    void attention_backward(size_t l, const AttentionActs<X> &a);
    // `more`: an earlier tile of this pass has added to dw, too.
    void weight_backward(float *dw, float *dbias, const X *dout, const X *x, size_t T, size_t IC, size_t OC, bool more = false,
                         size_t ld = 0) {
        matmul_backward_weight(dev, dw, dbias, dout, x, T, IC, OC, accumulate_ || more, ld);
    }
    // A matrix of layer l with its adapters, for tokens [t, t + n) of the row, to which all pointers belong. The backward pass computes the gradients
    // of what is trained, and the input's, which may overwrite the input; dx may be null.
    struct LinearShape {
        Linear matrix;
        size_t IC, OC;
    };
    void linear_forward(size_t l, LinearShape m, X *out, const X *x, const X *w, const X *bias, size_t t, size_t n);
    void linear_backward(size_t l, LinearShape m, X *dx, float *dw, float *dbias, const X *dout, const X *x, const X *w, size_t t,
                         size_t n);
    template <class F> void sum_gradients(size_t unit, bool complete, F add) {
        sum_gradients(unit, buffer_of(unit), complete, add);
    }

    Dev dev;
    const ModelConfig config;
    const ModelLimits limits;
    const size_t T_max;  // tokens of this rank's part of the longest row
    const OpList ops;
    // The tokens for which the hidden arrays of the feed-forward exist at a time. Where they are not kept for the backward pass, that is
    // limits.tile_tokens, rounded up to a multiple of matmul_run so that no bit depends on it, and by default one run.
    const size_t tile;
    const Clock clock;
    const size_t positions_unit;  // of the table
    Plan plan_;
    X *head_w = nullptr;       // (V, C); of a reward model (1, C)
    float *head_dw = nullptr;  // its gradient

    // This rank's part of the packed row, on the device.
    struct {
        size_t T, N;
        std::vector<size_t> numbers;  // (N) of each predictor among those of the whole row, on the host
        size_t predictors_of_all;     // of the whole row
        std::optional<SequenceSplit> split;
        int32_t *tokens;    // (T)
        int32_t *doc_pos;   // (T) position in the document
        int32_t *document;  // (T) number of the document in its file, for dropout
        int32_t *
            first_key;  // (sp*T) the first key that each position of the whole row sees; of tokens that see the cache (sequences)
        int32_t *first_key_window;  // (sp*T) the same in layers with a sliding window
        int32_t *predictors;        // (N) the positions whose logits predict the targets
        int32_t *targets;           // (N)
        float *weights;             // (N) dL/dnll, of a reward model dL/dscore
        float entropy_weight;       // dL/dentropy of each predictor
        enum {
            training,
            prompting,
            decoding
        } cached;         // whether next_logits() fills the cache from prompts, or reads it for new tokens
        int32_t *slots;   // (T) CacheStep
        int32_t *table;   // (sequences, sequence_pages)
        int32_t *length;  // (sequences)
    } row;

    struct {
        std::vector<X *> x;      // (L+1) x (T, C)   residual stream: the input of each layer, then of the final norm
        std::vector<X *> cache;  // (L) x (pages * cache_page, 2*KV*D)   generate: the keys and values of all tokens so far
        X *normf;                // (T, C)
        X *dx;                   // (T, C)           gradient of the residual stream
        std::byte *head;         // lm_head_scratch
        HeadStats stats;         // (N) each
        float *scores;           // (N)              reward model
        double *sums;            // (3)              sums over the rows since the last take_sums()
        std::byte *matmul;       // matmul_scratch
        X *last;                 // (sequences, C)   generate
        float *logits;           // (sequences, logits_ld)   generate
        float *decode;           // attention_decode_scratch
        X *dropped;              // (matmul_run, the widest input)            with dropout: the input of an adapter
        X *low, *dlow;           // (matmul_run, rank), (.., 3 * rank)        x A^T, and the gradients of those of a matrix
    } acts;

  private:
    void plan_row();
    void plan_adapters();
    void plan_head();
    void plan_buckets();
    void plan_guests();
    void load_row(const Row &row);
    void load_part(const Row &row);
    void load_weights(std::span<const float> of_all, float entropy_weight);
    HeadLoss head_loss() const { return {row.predictors, row.targets, row.weights, row.entropy_weight, limits.temperature}; }
    // Before a pass of generation: at stage 3 of ZeRO it needs all ranks, and those that have finished make it without a row until all have.
    bool all_finished(bool finished) { return zero.sharding.stage < 3 || mesh_->all.all(finished); }
    void load_first_keys(std::span<const int32_t> doc_begin);
    void forward();
    void gradients(bool last);
    void head(X *dx, float *dhead);
    void head_backward();
    void add_sums();
    std::vector<double> values_of(const Row &row);
    DropoutMask mask_of(size_t l, const LinearModule &module, size_t t) const;
    template <class F> void for_adapters(Linear matrix, F f);
    const X *adapter_input(size_t l, const LinearModule &module, const X *x, size_t t, size_t n);
    RingAttention ring(size_t l);
    AttentionShape attention_shape(size_t T) const { return {T, config.H, config.KV, config.D, 1 / std::sqrt(float(config.D))}; }
    AttentionInputs<X> attention_inputs(size_t l, const AttentionActs<X> &a);
    // At stage 3, begins to gather the unit's weights into weights_of.
    void fetch(size_t unit, Pass pass = Pass::forward, bool as_head = false) {
        if (zero.sharding.stage < 3) return;
        begin_comm_op(pass, PARAM_GATHER);
        zero.fetch(mesh_->all, units[unit].begin, units[unit].end, as_head ? weights_of.head : weights_of.unit[unit]);
    }
    template <class F> void sum_gradients(size_t unit, float *buffer, bool complete, F add);
    float *buffer_of(size_t unit) const { return zero.sharding.stage >= 2 ? grads_of.unit[unit] : nullptr; }
    void look(const Moment &now);
    void begin_comm_op(Pass pass, RowOp op,
                       size_t bucket = 0) {  // a sum or gather among ranks. It lies between two ops and changes no lifetime
        if (profiler_ && mesh_->all.size > 1) profiler_->begin(pass, ops.number(op), 0, bucket);
    }

    const Table base_;     // of the trainer
    const Table trained_;  // base_, or the table of its adapters
    const std::vector<Unit> &units = trained_.units;
    const size_t head_unit;
    Zero<Dev> zero;
    Zero<Dev> frozen;                          // the base of adapters, of which only `params` is used; else empty
    const std::vector<LinearModule> modules_;  // that have adapters
    Adapters<X> adapters_;
    Adapters<float> dadapters_;
    bool adapters_are_on_ = true;
    std::optional<uint64_t> dropout_key_;
    Optimizer<Dev> optimizer;
    Mesh *mesh_ = nullptr;
    std::unique_ptr<Memory> memory_;
    std::unique_ptr<Arena> arena_;  // lies in memory_
    std::unique_ptr<Profiler> profiler_;
    SelfComm alone_;                      // this rank, which generates by itself
    size_t of_tile_ = 0;                  // the tokens of the tile that for_tiles() computes now
    bool poison_ = false, last_ = false;  // last_: this is the step's last micro-step
    bool accumulate_ = true;  // false: the next backward pass overwrites the gradients of products instead of adding to them
    bool looks_ = false;      // --detect_anomaly
    std::optional<Moment> looked_;  // the op that runs now
    size_t ops_ = 0;                // the number of ops whose outputs --detect_anomaly has examined
    Anomaly anomaly_;
    size_t targets_ = 0;         // the number of targets since the last take_sums()
    std::vector<float> logits_;  // generate: (documents, V)

    // From stage 2 of ZeRO on: the buffers in which gradients are computed before they are summed over ranks. A unit's buffer has room for its
    // largest bucket.
    struct {
        std::vector<float *> unit;
        float *head;      // of the head, also where the head is tied to the embedding
        float **largest;  // a buffer with room for any bucket
    } grads_of;

    // At stage 3 of ZeRO: the arrays into which a unit's weights are gathered. Layers take two in turn: the next layer's weights arrive while this one
    // computes.
    struct {
        std::vector<X *> unit;
        X *head;  // of the head, also where the head is tied to the embedding
    } weights_of;
};

// ---- plan -----------------------------------------------------------------------------------------------------------------------------

// Makes each unit a bucket of ZeRO. Only from stage 2 on a large embedding or head is divided into several, so that its gradients never exist at
// the same time. What is not trained is divided at stage 3 only.
inline Sharding sharding_for(std::vector<Unit> units, const ModelLimits &limits) {
    const Ranks &r = limits.ranks;
    const bool train = limits.mode == Mode::train;
    if (!train || r.zero_stage < 2 || r.world == 1)
        for (Unit &unit : units) unit.row_elements = 0;
    if (!train && r.zero_stage < 3) return Sharding(units, 0, 1, 0, 0);
    const bool in_blocks = limits.moments == Moments::blockwise;
    return Sharding(units, r.zero_stage, int(r.world), int(r.rank), r.bucket_bytes, in_blocks ? Blockwise::size : 8);
}

// Frozen weights lie on every rank, and adapters are too small for stage 3 to pay.
inline ModelLimits at_most_stage_2(ModelLimits limits, Mode mode) {
    limits.mode = mode, limits.ranks.zero_stage = std::min(limits.ranks.zero_stage, 2);
    return limits;
}

// The table of what is trained: everything, or adapters.
inline Table trained_table(const ModelConfig &config, const Table &base) {
    if (config.lora.rank == 0) return base;
    Adapters<float> none;
    float *head;
    return lora_table(config, base, none, &head, nowhere<float>());
}

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
      base_(table),
      trained_(trained_table(config, table)),
      head_unit(table.head),
      zero(dev, sharding_for(trained_.units, adapts() ? at_most_stage_2(limits, limits.mode) : limits), trained_.tensors),
      frozen(dev, sharding_for(adapts() ? table.units : std::vector<Unit>(), at_most_stage_2(limits, Mode::evaluate)),
             adapts() ? table.tensors : std::vector<Tensor>()),
      modules_(adapted_modules(config)) {
    if (adapts()) plan_.add(&frozen.params, "frozen params", {frozen.sharding.count});
    if (trains()) optimizer.plan(plan_, zero, limits.moments);
    else zero.plan(plan_, false), plan_.end_state();
    plan_row();
    if (adapts()) plan_adapters();
    plan_head();
    if (trains() && zero.sharding.stage >= 2) plan_buckets();
    if (zero.sharding.stage == 3) plan_guests();
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
    plan_.add(&acts.matmul, "matmul workspace", {matmul_scratch(dev)});

    acts.x.resize(c.L + 1);
    for (size_t l = 0; l <= c.L; l++) {
        const size_t written = l == 0 ? clock.embed() : clock.layer_ends(l - 1);
        const size_t read = l < c.L ? (trains() ? clock.layer_backward_ends(l) : clock.forward(l, ops.reads_input))
                                    : (trains() ? clock.final_norm_backward() : clock.final_norm());
        plan_.add(&acts.x[l], format("act.%zu.x", l), {T, C}, written, read);
    }
    plan_.add(&acts.normf, "act.normf", {T, C}, clock.final_norm(), clock.head());
    if (trains()) plan_.add(&acts.dx, "dx", {T, C}, clock.head(), clock.embed_backward());
    acts.cache.resize(c.L);
    if (limits.cache_pages == 0) return;
    const size_t n = limits.sequences, pages = limits.sequence_pages;
    for (size_t l = 0; l < c.L; l++)
        plan_.add(&acts.cache[l], format("cache.%zu", l), {limits.cache_pages * cache_page, 2 * c.KV * c.D});
    plan_.add(&row.slots, "row.slots", {T});
    plan_.add(&row.table, "row.table", {n, pages});
    plan_.add(&row.length, "row.length", {n});
    plan_.add(&acts.decode, "decode scratch", {attention_decode_scratch(dev, n, pages, c.H, c.D)},
              clock.forward(0, ops.attention), clock.forward(c.L - 1, ops.attention));
    plan_.add(&acts.last, "last rows", {n, C}, clock.head(), clock.head());
    plan_.add(&acts.logits, "logits", {n, logits_ld(dev, c.V)}, clock.head(), clock.head());
}

// The arrays of adapters hold one run of tokens, however long the row is.
template <class Dev> void Decoder<Dev>::plan_adapters() {
    const size_t n = std::min(T_max, matmul_run(dev)), r = config.lora.rank;
    size_t widest = 0, most = 0;
    for (const LinearModule &m : modules_) {
        widest = std::max(widest, m.IC);
        most = std::max(most, size_t(std::ranges::count(modules_, m.matrix, &LinearModule::matrix)));
    }
    plan_.add(&acts.low, "adapters' products", {n, r});
    if (!trains()) return;
    plan_.add(&acts.dlow, "adapters' gradients", {n, most * r});
    if (config.lora.dropout == 0) return;
    plan_.add(&acts.dropped, "adapters' inputs", {n, widest});
    plan_.add(&row.document, "row.document", {T_max});
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

template <class Dev> void Decoder<Dev>::plan_buckets() {
    const Sharding &s = zero.sharding;
    const auto add = [&](float **buffer, const std::string &name, size_t unit, size_t first, size_t last) {
        size_t room = 0;
        for (const Bucket &b : s.buckets)
            if (units[unit].begin <= b.global && b.global < units[unit].end) room = std::max(room, s.parts * b.part);
        plan_.add(buffer, name, {room}, first, last);
        plan_.guest();
        if (room == s.largest) grads_of.largest = buffer;
    };
    // A buffer is alive until the next one is reduced, because until then the sum of its gradients may still be under way; the last one
    // until gradients() ends, which waits for it. That of a layer is filled with the sum so far before the layer's hidden arrays are recomputed.
    const size_t L = config.L, head = clock.head(), norm = clock.final_norm_backward(), embed = clock.embed_backward();
    grads_of.unit.resize(units.size());
    add(&grads_of.head, "bucket.head", head_unit, head, norm);
    add(&grads_of.unit.back(), "bucket.norm", units.size() - 1, norm, clock.layer_backward_ends(L - 1));
    for (size_t l = 0; l < L; l++)
        add(&grads_of.unit[1 + l], format("bucket.layer.%zu", l), 1 + l, clock.recompute(l, ops.hidden),
            l ? clock.layer_backward_ends(l - 1) : embed);
    if (positions_unit)
        add(&grads_of.unit[positions_unit], "bucket.positions", positions_unit, embed, clock.between_rows(GRAD_NORM));
    add(&grads_of.unit[0], "bucket.embedding", 0, embed, clock.between_rows(GRAD_NORM));
}

// The arrays of weights that are gathered are alive from the moment at which the gather may begin.
template <class Dev> void Decoder<Dev>::plan_guests() {
    const size_t L = config.L, norm = units.size() - 1, begin = clock.embed(), last_layer = clock.forward(L - 1, 0);
    const auto add = [&](X **array, const std::string &name, size_t unit, size_t first, size_t last) {
        plan_.add(array, "weights." + name, {zero.sharding.padded_count(units[unit].begin, units[unit].end)}, first, last);
        plan_.guest();
    };
    weights_of.unit.resize(units.size());
    add(&weights_of.unit[0], "embedding", 0, begin, begin);
    if (positions_unit) add(&weights_of.unit[positions_unit], "positions", positions_unit, begin, begin);
    for (size_t l = 0; l < L; l++)  // all layers are of one size
        if (l >= 2) plan_.alias(&weights_of.unit[1 + l], &weights_of.unit[1 + l % 2]);
        else
            add(&weights_of.unit[1 + l], format("layers.%zu", l), 1 + l, begin,
                trains() ? clock.layer_backward_ends(0) : clock.layer_ends(L - 1));
    add(&weights_of.unit[norm], "norm", norm, last_layer, trains() ? clock.final_norm_backward() : clock.final_norm());
    add(&weights_of.head, "head", head_unit, last_layer, clock.head());
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
        if (train && kept) {
            plan_.add(&(f.*member), full, shape, clock.forward(l, written), clock.backward(l, last_gradient));
            plan_.alias(&(b.*member), &(f.*member));
        }
    };
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
    transient("out32", &f.out32, {T, Q}, forward, forward);
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

// Must be called before allocate(), while there is free memory in which the device's peaks can be measured.
template <class Dev> void Decoder<Dev>::profile() {
    auto timeline = make_timeline(dev);
    const Peaks peaks = measure_peaks(dev, memory(), *timeline);
    Work layout{};
    constexpr size_t bytes_of_moment[] = {sizeof(float), sizeof(bf16), sizeof(uint8_t)};
    layout.element = sizeof(X), layout.moment = bytes_of_moment[size_t(limits.moments)], layout.recompute = limits.recompute;
    for (const Tensor &t : zero.table) layout.parameters += t.count, layout.cleared += t.product ? 0 : t.count;
    profiler_ = std::make_unique<Profiler>(std::move(timeline), peaks, ops, config, layout);
}

template <class Dev> void Decoder<Dev>::allocate(Mesh &mesh, bool guards, bool poison) {
    mesh_ = &mesh;
    poison_ = poison;
    plan_.place(guards);
    arena_ = std::make_unique<Arena>(plan_, memory());
    const Sharding &s = zero.sharding;
    const Locate<X> params = [&](size_t unit, size_t offset) {
        return s.stage == 3 ? weights_of.unit[unit] + (offset - units[unit].begin) : zero.params + s.flat(offset);
    };
    const Locate<float> grads = [&](size_t unit, size_t offset) {
        return s.stage >= 2 ? grads_of.unit[unit] + (offset - units[unit].begin) : zero.grads + s.flat(offset);
    };
    if (!adapts()) {
        point_weights(params, trains() ? &grads : nullptr);
        if (trains() && s.stage >= 2) head_dw = grads_of.head;
        if (s.stage == 3) head_w = weights_of.head;
        return;
    }
    const Locate<X> base = [&](size_t, size_t offset) { return frozen.params + frozen.sharding.flat(offset); };
    const Locate<float> none = nowhere<float>();
    point_weights(base, trains() ? &none : nullptr);
    lora_table(config, base_, adapters_, &head_w, params);
    if (trains()) lora_table(config, base_, dadapters_, &head_dw, grads);
    if (config.reward && trains() && s.stage >= 2) head_dw = grads_of.head;
}

// For --detect_anomaly: examines the arrays that the op before this one has written.
template <class Dev> void Decoder<Dev>::look(const Moment &now) {
    if (looked_ && looked_->pass != Pass::step && anomaly_.what.empty()) {
        ops_++;
        const auto [time, pass, op, layer] = *looked_;
        const std::string of_layer = ops.of_layer(op) ? format("layer %zu, ", layer) : "";
        if (const std::string found = arena_->nonfinite(time, layer); !found.empty())
            anomaly_ = {ops_, format("%s, %s%s: %s", pass_names[size_t(pass)], of_layer.c_str(), ops.name(op), found.c_str())};
    }
    if (!looked_ || looked_->time != now.time) arena_->clear_new(now.time);
    looked_ = now;
}

// ---- forward --------------------------------------------------------------------------------------------------------------------------

template <class Dev> void Decoder<Dev>::load_row(const Row &r) {
    begin_op(clock.between_rows(COPY));
    row.cached = row.training;
    row.T = r.T, row.N = r.predictors.size();
    write(memory(), row.tokens, r.tokens);
    write(memory(), row.doc_pos, r.doc_pos);
    write(memory(), row.predictors, r.predictors);
    write(memory(), row.targets, r.targets);
}

// Writes this rank's part of the derivatives to the device.
template <class Dev> void Decoder<Dev>::load_weights(std::span<const float> of_all, float entropy_weight) {
    std::vector<float> weights(row.N);
    for (size_t n = 0; n < row.N; n++) weights[n] = of_all[row.numbers[n]];
    write(memory(), row.weights, weights);
    row.entropy_weight = entropy_weight;
}

// Takes this rank's part of a whole row.
template <class Dev> void Decoder<Dev>::load_part(const Row &r) {
    const Row whole = pad_row(r, limits.ranks.sp);
    if (profiler_) profiler_->begin_row(whole, limits.ranks.sp);
    row.split = split_row(config, limits.ranks, sizeof(X), whole);
    load_row(local_row(whole, *row.split, limits.ranks.sp_rank()));
    row.numbers = local_predictors(whole, *row.split, limits.ranks.sp_rank());
    row.predictors_of_all = whole.predictors.size();
    load_first_keys(whole.doc_begin);
    if (!dropout_key_ || config.lora.dropout == 0) return;
    std::vector<int32_t> of_all(whole.T, -1), own;  // -1: of padding
    for (size_t i = 0; i < whole.documents.size(); i++)
        std::fill(of_all.begin() + ptrdiff_t(whole.doc_offsets[i]), of_all.begin() + ptrdiff_t(whole.doc_offsets[i + 1]),
                  int32_t(whole.documents[i]));
    for (size_t p : row.split->positions(limits.ranks.sp_rank())) own.push_back(of_all[p]);
    write(memory(), row.document, own);
}

// Computes the first visible key of each position, without and with the sliding window. doc_begin[p] is the first position of p's document.
template <class Dev> void Decoder<Dev>::load_first_keys(std::span<const int32_t> doc_begin) {
    const int32_t window = int32_t(*std::max_element(config.window.begin(), config.window.end()));
    std::vector<int32_t> first_key(doc_begin.begin(), doc_begin.end());
    write(memory(), row.first_key, first_key);
    for (size_t p = 0; p < first_key.size(); p++) first_key[p] = std::max(first_key[p], int32_t(p) - window + 1);
    write(memory(), row.first_key_window, first_key);
}

// At stage 3 a rank without a row sends its part of the weights, too. A gather begins when the layer before it begins.
template <class Dev> void Decoder<Dev>::forward() {
    const size_t L = config.L, norm = units.size() - 1;
    if (row.T == 0 && zero.sharding.stage < 3) return;
    fetch(0);
    if (positions_unit) fetch(positions_unit);
    fetch(1);
    ready(0);
    if (positions_unit) ready(positions_unit);
    if (row.T) input_forward();
    for (size_t l = 0; l < L; l++) {
        ready(1 + l);
        if (l + 1 < L) fetch(2 + l);
        else fetch(norm), fetch(head_unit, Pass::forward, true);
        if (row.T) attention_half(l, Pass::forward), feed_forward_half(l, Pass::forward);
    }
    ready(norm);
    if (row.T) final_norm_forward();
    ready(head_unit);
}

// The mask by which the inputs of a module's adapter are dropped, from token t of the row on, with the scale of the adapter. Without dropout it has
// the scale alone.
template <class Dev> DropoutMask Decoder<Dev>::mask_of(size_t l, const LinearModule &module, size_t t) const {
    const LoraConfig &lora = config.lora;
    if (!dropout_key_ || lora.dropout == 0) return {float(lora.scale())};
    const Random keys{*dropout_key_, Purpose::dropout, stream_of(module.name)};
    return {float(lora.scale() / (1 - lora.dropout)), uint32_t(lora.dropout * 0x1p32), keys.bits(l), row.document + t,
            row.doc_pos + t};
}

// Calls f(module, number of the adapter among those of the matrix, number in the layer) for each adapter of a matrix.
template <class Dev> template <class F> void Decoder<Dev>::for_adapters(Linear matrix, F f) {
    size_t number = 0;
    for (size_t i = 0; adapters_are_on_ && i < modules_.size(); i++)
        if (modules_[i].matrix == matrix) f(modules_[i], number++, i);
}

// Computes acts.low = scale * drop(x) A^T (n, rank). Returns the input that A was multiplied with: x itself, or acts.dropped, which has the scale.
template <class Dev>
const typename Dev::X *Decoder<Dev>::adapter_input(size_t l, const LinearModule &module, const X *x, size_t t, size_t n) {
    const size_t r = config.lora.rank, i = size_t(&module - modules_.data());
    const DropoutMask mask = mask_of(l, module, t);
    if (mask.threshold) dropout_forward(dev, acts.dropped, x, mask, n, module.IC), x = acts.dropped;
    matmul_forward(dev, acts.low, x, adapters_[l][i].a, (const X *)nullptr, n, module.IC, r);
    if (!mask.threshold && mask.scale != 1) dropout_forward(dev, acts.low, acts.low, mask, n, r);
    return x;
}

template <class Dev>
void Decoder<Dev>::linear_forward(size_t l, LinearShape m, X *out, const X *x, const X *w, const X *bias, size_t t, size_t n) {
    matmul_forward(dev, out, x, w, bias, n, m.IC, m.OC);
    if (modules_.empty()) return;
    in_parts(
        n,
        [&](size_t first, size_t part) {
            for_adapters(m.matrix, [&](const LinearModule &module, size_t, size_t i) {
                adapter_input(l, module, x + first * m.IC, t + first, part);
                matmul_forward(dev, out + first * m.OC + module.first, acts.low, adapters_[l][i].b, (const X *)nullptr, part,
                               config.lora.rank, module.OC, m.OC, true);
            });
        },
        matmul_run(dev));
}

// With u = scale * drop(x) A^T and d = dout B:   dB += dout^T u    dA += scale * d^T drop(x)    dx = dout W + scale * drop(d A)
template <class Dev>
void Decoder<Dev>::linear_backward(size_t l, LinearShape m, X *dx, float *dw, float *dbias, const X *dout, const X *x, const X *w,
                                   size_t t, size_t n) {
    if (dw) weight_backward(dw, dbias, dout, x, n, m.IC, m.OC, t > 0);
    const size_t r = config.lora.rank;
    in_parts(
        n,
        [&](size_t first, size_t part) {
            const X *dout_part = dout + first * m.OC;
            X *dx_part = dx + first * m.IC;
            const bool more = t + first > 0;
            for_adapters(m.matrix, [&](const LinearModule &module, size_t number, size_t i) {
                const Adapter<X> &adapter = adapters_[l][i];
                const Adapter<float> &d = dadapters_[l][i];
                const DropoutMask mask = mask_of(l, module, t + first);
                const X *input = adapter_input(l, module, x + first * m.IC, t + first, part), *dblock = dout_part + module.first;
                X *dlow = acts.dlow + number * part * r;
                weight_backward(d.b, nullptr, dblock, acts.low, part, r, module.OC, more, m.OC);
                matmul_backward_input(dev, dlow, dblock, adapter.b, part, r, module.OC, m.OC);
                if (!mask.threshold && mask.scale != 1) dropout_forward(dev, dlow, dlow, mask, part, r);
                weight_backward(d.a, nullptr, dlow, input, part, module.IC, r, more);
            });
            if (!dx) return;
            matmul_backward_input(dev, dx_part, dout_part, w, part, m.IC, m.OC);
            for_adapters(m.matrix, [&](const LinearModule &module, size_t number, size_t i) {
                const DropoutMask mask = mask_of(l, module, t + first);
                const X *a = adapters_[l][i].a, *dlow = acts.dlow + number * part * r;
                if (!mask.threshold) return matmul_backward_input(dev, dx_part, dlow, a, part, m.IC, r, 0, true);
                matmul_backward_input(dev, acts.dropped, dlow, a, part, m.IC, r);
                dropout_backward(dev, dx_part, acts.dropped, mask, part, m.IC);
            });
        },
        matmul_run(dev));
}

// ring() describes a layer's attention over the ring, and attention_inputs() the arrays that it reads.
template <class Dev> RingAttention Decoder<Dev>::ring(size_t l) {
    const Ranks &r = limits.ranks;
    if (row.cached) return {alone_, SpMode::ring, 1, *row.split, row.split->travel[kind_of(config, l)], zero.sent};
    return {*mesh_->ring, r.sp_mode, r.head_stride, *row.split, row.split->travel[kind_of(config, l)], zero.sent};
}
template <class Dev> AttentionInputs<typename Dev::X> Decoder<Dev>::attention_inputs(size_t l, const AttentionActs<X> &a) {
    const size_t H = config.H, KV = config.KV, D = config.D, stride = (H + 2 * KV) * D;
    return {{a.qkv, stride},
            {a.qkv + H * D, stride},
            {a.qkv + (H + KV) * D, stride},
            config.window[l] ? row.first_key_window : row.first_key,
            attention_shape(row.T)};
}

template <class Dev> void Decoder<Dev>::attention_forward(size_t l, const AttentionActs<X> &a) {
    const AttentionInputs<X> in = attention_inputs(l, a);
    const auto [T, H, KV, D, scale] = in.shape;
    if (row.cached) cache_store(dev, acts.cache[l], in.k, in.v, row.slots, T, KV, D);
    if (row.cached == row.decoding)
        return attention_decode(dev, a.att, acts.decode, in.q, acts.cache[l], row.table, in.first_key, row.length, T,
                                limits.sequence_pages, H, KV, D, scale);
    RingAttention ranks = ring(l);
    ring_attention_forward(dev, ranks, a.att, a.out32, a.lse, in, a.ring);
}

// Computes the loss; with `dx` also the gradient of the final norm's output, and with `dhead` that of the head's weights.
template <class Dev> void Decoder<Dev>::head(X *dx, float *dhead) {
    const size_t T = row.T, C = config.C, N = row.N;
    begin_op(config.reward && dx ? clock.head_weight() : clock.head(dx != nullptr));
    if (!config.reward)
        lm_head(dev, acts.stats, dx, dhead, acts.head, acts.normf, head_w, head_loss(), T, C, config.V, N, accumulate_);
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
    row.T = 0;
    if (r.T) load_part(r);
    forward();
    if (r.T == 0) return {};
    head(nullptr, nullptr);
    const auto of_predictors = read(memory(), config.reward ? acts.scores : acts.stats.nll, row.N);
    std::vector<double> values(row.predictors_of_all);
    for (size_t n = 0; n < row.N; n++) values[row.numbers[n]] = of_predictors[n];
    return mesh_->ring->sum(values);
}

template <class Dev> std::vector<double> Decoder<Dev>::evaluate_base(const Row &r) {
    const auto key = std::exchange(dropout_key_, {});
    adapters_are_on_ = false;
    const auto values = values_of(r);
    adapters_are_on_ = true, dropout_key_ = key;
    return values;
}

template <class Dev> LossSums Decoder<Dev>::take_sums() {
    if (config.reward) return {};
    begin_op(clock.between_rows(COPY));
    const auto sums = read(memory(), acts.sums, 3);
    memory().fill(acts.sums, 0, 3 * sizeof(double));
    return {sums[0], sums[1], sums[2], double(std::exchange(targets_, 0))};
}

template <class Dev> const float *Decoder<Dev>::next_logits(const Row &r, const CacheStep &step) {
    const size_t C = config.C, V = config.V, ld = logits_ld(dev, V), documents = r.doc_offsets.size() - 1;
    all_finished(false);
    load_row(r);
    row.cached = step.prompts ? row.prompting : row.decoding;
    write(memory(), row.slots, step.slots);
    const X *last = acts.normf;
    if (step.prompts) {
        row.split = split_row(config, {}, sizeof(X), r);
        load_first_keys(r.doc_begin);
        std::vector<int32_t> ends(documents);
        for (size_t i = 0; i < documents; i++) ends[i] = int32_t(r.doc_offsets[i + 1]) - 1;
        write(memory(), row.predictors, ends);
        last = acts.last;
    } else {
        const int32_t window = int32_t(*std::max_element(config.window.begin(), config.window.end()));
        std::vector<int32_t> first_key(documents);
        write(memory(), row.first_key, first_key);
        for (size_t i = 0; i < documents; i++) first_key[i] = std::max(0, step.length[i] - window);
        write(memory(), row.first_key_window, first_key);
        write(memory(), row.table, step.table);
        write(memory(), row.length, step.length);
    }
    forward();
    begin_op(clock.head(false));
    if (step.prompts) embedding_forward(dev, acts.last, acts.normf, row.predictors, documents, C);  // gathers the last rows
    matmul_forward(dev, acts.logits, last, head_w, (const X *)nullptr, documents, C, V, ld);
    if constexpr (std::is_same_v<Dev, Cpu<X>>) return acts.logits;  // they lie on the host, without padding
    logits_ = read(memory(), acts.logits, documents * ld);
    for (size_t i = 1; i < documents; i++) std::copy_n(logits_.data() + i * ld, V, logits_.data() + i * V);  // without padding
    return logits_.data();
}

template <class Dev> void Decoder<Dev>::finish_generation() {
    row.T = 0;
    while (!all_finished(true)) forward();
}

template <class Dev> void Decoder<Dev>::copy_cache_page(size_t to, size_t from) {
    const size_t width = 2 * config.KV * config.D;
    for (X *cache : acts.cache)
        copy_rows(dev, cache + to * cache_page * width, width, cache + from * cache_page * width, width, cache_page, width);
}

// ---- backward -------------------------------------------------------------------------------------------------------------------------

template <class Dev> void Decoder<Dev>::accumulate(const Row &r, float weight, bool last) {
    row.T = 0;
    if (r.T) load_part(r), load_weights(std::vector<float>(row.predictors_of_all, weight), 0);
    forward();
    gradients(last);
    if (r.T) add_sums();
}

template <class Dev> void Decoder<Dev>::backward(std::span<const float> weights, float entropy_weight, bool last) {
    if (row.T) load_weights(weights, entropy_weight);
    gradients(last);
}

// Calls add(first, n), which adds to the gradients of elements [first, first + n) of a unit, and then sums these over ranks: from stage 2 on in
// every micro-step and from a buffer, otherwise in the last one. `complete` says that no other call of this pass adds to them. A rank without
// a row takes part in the sum all the same, because the ranks that have a row wait for it.
template <class Dev> template <class F> void Decoder<Dev>::sum_gradients(size_t unit, float *buffer, bool complete, F add) {
    const Sharding &s = zero.sharding;
    if (units[unit].begin == units[unit].end) {  // the unit is frozen, and has no gradients to sum
        if (row.T) add(0, 0);
        return;
    }
    for (size_t b = s.bucket_of(units[unit].begin); b < s.buckets.size() && s.buckets[b].global < units[unit].end; b++) {
        const Bucket &bucket = s.buckets[b];
        const auto begin_sum = [&] { begin_comm_op(Pass::backward, GRAD_SUM, bucket.count); };
        if (s.stage >= 2) begin_sum(), zero.start(mesh_->all, memory(), b, buffer);
        if (row.T) add(bucket.global - units[unit].begin, bucket.count);
        if (s.stage >= 2) begin_sum(), zero.reduce(mesh_->all, b, buffer);
        else if (last_ && complete) begin_sum(), zero.reduce(mesh_->all, b, zero.grads + bucket.begin);
    }
}

// Where the head's gradient is computed in several buckets, the logits are recomputed for each of them.
template <class Dev> void Decoder<Dev>::head_backward() {
    const size_t C = config.C, V = config.V;
    const bool tied = head_unit == 0;
    if (!head_dw) return row.T ? head(acts.dx, nullptr) : void();
    const bool in_parts = zero.sharding.bucket_of(units[head_unit].begin) != zero.sharding.bucket_of(units[head_unit].end - 1);
    if (in_parts && row.T) head(acts.dx, nullptr);
    sum_gradients(head_unit, grads_of.head, !tied, [&](size_t first, size_t n) {
        if (!in_parts) return head(acts.dx, head_dw);
        begin_op(clock.head_weight(), n);
        lm_head_weight(dev, head_dw, acts.head, acts.normf, head_w, head_loss(), acts.stats, C, V, row.N, first / C, n / C);
    });
}

template <class Dev> void Decoder<Dev>::gradients(bool last_micro_step) {
    last_ = last_micro_step;
    if (!accumulate_ && (row.T == 0 || row.N == 0))
        zero.zero_gradients(memory(), accumulate_ = true);  // no product will overwrite them
    head_backward();
    sum_gradients(units.size() - 1, true, [&](size_t, size_t) { final_norm_backward(); });
    for (size_t l = config.L; l-- > 0;) {
        if (zero.sharding.stage == 3) ready(1 + l, Pass::backward);
        if (l > 0 && l + 1 < config.L) fetch(l, Pass::backward);  // of layer l - 1. The last two layers' weights are still here
        if (row.T) feed_forward_half(l, Pass::recompute);
        sum_gradients(1 + l, true, [&](size_t, size_t) {
            feed_forward_half_backward(l);
            attention_half(l, Pass::recompute);
            attention_half_backward(l);
        });
    }
    if (!adapts()) input_backward();
    accumulate_ = true;
    if (zero.sharding.stage >= 2) zero.finish(mesh_->all);
}

template <class Dev> void Decoder<Dev>::attention_backward(size_t l, const AttentionActs<X> &a) {
    RingAttention ranks = ring(l);
    ring_attention_backward(dev, ranks, a.qkv, a.grads, a.delta, reinterpret_cast<float *>(a.scratch), attention_inputs(l, a),
                            a.att, a.datt, a.lse, a.ring);
}
