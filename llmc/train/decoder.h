// What every model here is: a decoder-only transformer on packed rows. This class has what no architecture changes: the row and its parts on
// ranks, attention, the loss, the sums of gradients, the optimizer. A trainer adds its parameter table and the arrays and ops of its
// layers (train_gpt2.cu, train_llama.cu), and is called back in the order of a step:
//
//     forward()      input_forward, layer_forward of each layer, final_norm_forward, and here the head
//     gradients()    here the head, final_norm_backward; of each layer, from the last: layer_forward again, for what was not kept, and
//                    layer_backward; input_backward
//
// Ranks: those of a ring share each row, T / sp tokens of it each, and meet in attention alone (../parallel/ring.h). All ranks meet in
// the gradients, which are summed as soon as the backward pass has made those of a cut (../parallel/zero.h). One rank is a ring of one.
#pragma once
#include <cmath>
#include <optional>

#include "../core/arena.h"
#include "../core/memory.h"
#include "../data/dataloader.h"
#include "../io/hf.h"
#include "../ops/attention.h"
#include "../ops/layout.h"
#include "../ops/loss.h"
#include "../ops/matmul.h"
#include "../ops/score.h"
#include "../parallel/mesh.h"
#include "../parallel/ring.h"
#include "../parallel/split.h"
#include "../parallel/zero.h"
#include "clock.h"
#include "model.h"
#include "parameters.h"
#include "profile.h"
#include "ranks.h"
#include "table.h"

// The arrays of a layer's attention.
template <class X> struct AttentionActs {
    X *qkv;               // (T, (H+2*KV)*D)    queries, keys, values. Backward: becomes dqkv
    X *att;               // (T, H*D)
    float *lse;           // (H, T)
    float *out32;         // (T, H*D)           attention output while blocks are merged
    X *datt;              // (T, H*D)
    float *dq32;          // (T, H*D)
    float *dk32;          // (T, KV*D)
    float *dv32;          // (T, KV*D)
    float *delta;         // (H, T)
    std::byte *scratch;   // attention_scratch
    RingBuffers<X> ring;  // ring_attention_buffers
};

template <class Dev> class Decoder : public Model {
  public:
    ~Decoder() override { matmul_use_scratch(dev, nullptr); }
    Plan &plan() override { return plan_; }
    Arena &arena() override { return *arena_; }
    Memory &memory() override {  // made when it is first used: a plan needs no device
        if (!memory_) memory_ = make_memory(dev);
        return *memory_;
    }
    void profile() override;
    Profiler *profiler() override { return profiler_.get(); }
    void allocate(Mesh &mesh, bool guards, bool poison) override;
    const std::vector<Tensor> &tensors() const override { return zero.table; }
    void load(const HfWeights &weights, uint64_t seed) override { load_parameters(zero, weights, seed, memory()); }
    void initialise(uint64_t seed) override { initialise_parameters(zero, mesh_->all, seed, config.initializer_range, memory()); }
    void save(const std::string &dir, const std::string &export_dtype) override {
        save_parameters(zero, mesh_->all, dir, export_dtype, memory(), [&](size_t b) {
            return zero.sharding.stage == 2 ? *grads_of.largest : zero.grads + zero.sharding.buckets[b].begin;
        });
    }
    void zero_gradients() override {
        reach(clock.between_rows(ZERO_GRAD));
        accumulate_ = zero.sharding.stage == 2;  // there a buffer begins with the sum so far
        zero.zero_gradients(memory(), accumulate_);
    }
    double gradient_norm() override {
        reach(clock.between_rows(GRAD_NORM));
        return zero.gradient_norm(mesh_->all);
    }
    std::string nonfinite_gradient() override { return ::nonfinite_gradient(zero, mesh_->all); }
    void detect_anomaly() override { looks_ = true; }
    Anomaly anomaly() override { return anomaly_; }
    void update(const AdamW &adamw) override {
        reach(clock.between_rows(ADAMW));
        zero.update(mesh_->all, adamw);
    }
    OptimizerState optimizer_state() override;
    void optimizer_state_loaded() override { zero.gather(mesh_->all); }
    void gather_parameters() override { zero.ready(mesh_->all, 0, zero.sharding.elements); }
    Payload take_sent() override { return std::exchange(zero.sent, {}); }

    std::vector<double> evaluate(const Row &row) override;
    void backward(std::span<const float> weights, bool last) override;
    void accumulate(const Row &row, float weight, bool last) override;
    LossSums take_sums() override;
    const float *next_logits(const Row &row, const Pieces &where, std::span<const int32_t> cache_begin) override;
    Zero<Dev> &parameters() { return zero; }

  protected:
    using X = typename Dev::X;

    Decoder(Dev dev, const ModelConfig &config, const ModelLimits &limits, const Table &table);

    // ---- what a trainer adds ----------------------------------------------------------------------------------------------------------

    // The arrays exist now: where the parameters lie and, to train, their gradients (else null). Sets head_w and head_dw.
    virtual void place(const Place<X> &params, const Place<float> *grads) = 0;
    virtual void input_forward() = 0;                      // acts.x[0], of row.tokens
    virtual void layer_forward(size_t l, bool again) = 0;  // acts.x[l+1], of acts.x[l]. again: for the backward pass, see Kept
    virtual void final_norm_forward() = 0;                 // acts.normf, of acts.x[L]
    virtual void final_norm_backward() = 0;                // acts.dx, of the gradient of acts.normf, which it holds; and so below
    virtual void layer_backward(size_t l) = 0;
    virtual void input_backward() = 0;  // by sum_gradients, as it knows its cuts

    // ---- what it plans with -----------------------------------------------------------------------------------------------------------

    // Which of a layer's arrays outlive its forward pass.
    struct Kept {
        bool norms, qkv, mid, up, act;
    };
    static constexpr Kept everything = {true, true, true, true, true}, nothing = {false, false, false, false, false};

    bool trains() const { return limits.mode == Mode::train; }
    template <class Acts> auto layer_arrays(size_t l, Acts &forward, Acts &backward);
    void plan_attention(size_t l, AttentionActs<X> &forward, AttentionActs<X> &backward);

    // ---- what it computes with --------------------------------------------------------------------------------------------------------

    void reach(const Moment &now, size_t bucket = 0) {  // at the start of each op
        if (poison_) arena_->poison_dead(now.time);
        if (looks_) look(now);
        if (profiler_) profiler_->begin(now.pass, now.op, now.layer, bucket);
    }
    void ready(size_t cut) {  // its weights may be read
        if (zero.sharding.parts > 1) reach_comm(Pass::forward, PARAM_GATHER);
        zero.ready(mesh_->all, cuts[cut].begin, cuts[cut].end);
    }
    void attention_forward(size_t l, const AttentionActs<X> &a);
    void attention_backward(size_t l, const AttentionActs<X> &a);
    void weight_backward(float *dw, float *dbias, const X *dout, const X *x, size_t T, size_t IC, size_t OC) {
        matmul_backward_weight(dev, dw, dbias, dout, x, T, IC, OC, accumulate_);
    }
    template <class F> void sum_gradients(size_t cut, bool complete, F add) { sum_gradients(cut, buffer_of(cut), complete, add); }

    Dev dev;
    const ModelConfig config;
    const ModelLimits limits;
    const size_t T_max;  // tokens of this rank's part of the longest row
    const Clock clock;
    const Kept keep;
    const size_t positions_cut;  // of the table
    Plan plan_;
    X *head_w = nullptr;       // (V, C); of a reward model (1, C)
    float *head_dw = nullptr;  // its gradient

    // The packed row, this rank's part of it, on the device.
    struct {
        size_t T, N;
        std::vector<int32_t> owners;  // (N) on the host: the document of each predictor
        size_t documents;             // of the whole row
        std::optional<SequenceSplit> split;
        int32_t *tokens;       // (T)
        int32_t *doc_pos;      // (T) position in the document
        int32_t *lo;           // (sp*T) the first key that position t of the whole row sees; generate: (cache)
        int32_t *lo_window;    // (sp*T) the same in layers with a sliding window
        int32_t *rows;         // (N) predictors
        int32_t *targets;      // (N)
        float *weights;        // (N) dL/dnll, of a reward model dL/dscore
        Pieces queries, keys;  // generate: where this row's queries and keys are in the cache
    } row;

    struct {
        std::vector<X *> x;      // (L+1) x (T, C)   residual stream: input of each layer, then of the final norm
        std::vector<X *> cache;  // (L) x (cache, 2*KV*D)   generate: keys and values so far
        X *normf;                // (T, C)
        X *dx;                   // (T, C)           gradient of the residual stream
        std::byte *head;         // lm_head_scratch
        HeadStats stats;         // (N) each
        float *scores;           // (N)              reward model
        double *sums;            // (3)              of the rows since take_sums
        std::byte *matmul;       // matmul_scratch
        X *last;                 // (documents, C)   generate
        float *logits;           // (documents, V)   generate
    } acts;

  private:
    void plan_row();
    void plan_head();
    void plan_buckets();
    void load_row(const Row &row);
    void load_part(const Row &row);
    void load_weights(const std::vector<float> &weights);
    void load_lo(std::span<const int32_t> doc_begin);
    void forward();
    void gradients(bool last);
    void head(X *dx, float *dhead);
    void head_backward();
    void add_sums();
    RingAttention ring(size_t l);
    RingInputs<X> attention_inputs(size_t l, const AttentionActs<X> &a);
    template <class F> void sum_gradients(size_t cut, float *buffer, bool complete, F add);
    float *buffer_of(size_t cut) const { return zero.sharding.stage == 2 ? grads_of.cut[cut] : nullptr; }
    void look(const Moment &now);
    void reach_comm(Pass pass, Op op, size_t bucket = 0) {  // among ranks; between two ops, whose arrays stay alive
        if (profiler_ && mesh_->all.size > 1) profiler_->begin(pass, op, 0, bucket);
    }

    const std::vector<Cut> cuts;
    const size_t head_cut;
    Zero<Dev> zero;
    Mesh *mesh_ = nullptr;
    std::unique_ptr<Memory> memory_;
    std::unique_ptr<Arena> arena_;  // in memory_
    std::unique_ptr<Profiler> profiler_;
    bool poison_ = false, last_ = false;  // last_: micro-step
    bool accumulate_ = true;              // false: the gradients of products hold nothing yet, and the next overwrites them
    bool looks_ = false;                  // --detect_anomaly
    std::optional<Moment> looked_;        // the op that runs
    size_t ops_ = 0;                      // that were looked at
    Anomaly anomaly_;
    size_t targets_ = 0;         // of the rows whose sums were not taken yet
    std::vector<float> logits_;  // generate: (documents, V)

    // Stage 2 of ZeRO: where the gradients of a cut are made before they are summed over ranks, room for its largest bucket.
    struct {
        std::vector<float *> cut;
        float *head;      // tied, too
        float **largest;  // one of them, with room for any bucket
    } grads_of;
};

// ---- plan -----------------------------------------------------------------------------------------------------------------------------

// Each cut is a bucket of ZeRO's; at stage 2 a large vocabulary's is several, whose gradients never exist together.
inline Sharding sharding_for(std::vector<Cut> cuts, const ModelLimits &limits) {
    const Ranks &r = limits.ranks;
    const bool train = limits.mode == Mode::train;
    if (!train || r.zero_stage < 2 || r.world == 1)
        for (Cut &cut : cuts) cut.row = 0;
    if (!train) return Sharding(cuts, 0, 1, 0, 0);
    return Sharding(cuts, r.zero_stage, int(r.world), int(r.rank), r.bucket_bytes);
}

template <class Dev>
Decoder<Dev>::Decoder(Dev dev, const ModelConfig &config, const ModelLimits &limits, const Table &table)
    : dev(dev),
      config(config),
      limits(limits),
      T_max(round_up(limits.row_tokens, row_multiple * limits.ranks.sp) / limits.ranks.sp),
      clock{config.L},
      keep(limits.mode != Mode::train || limits.recompute == Recompute::layer ? nothing
           : limits.recompute == Recompute::cheap                             ? Kept{false, true, true, true, false}
                                                                              : everything),
      positions_cut(table.positions),
      cuts(table.cuts),
      head_cut(table.head),
      zero(dev, sharding_for(table.cuts, limits), table.tensors) {
    zero.plan(plan_, trains(), limits.bf16_moments);
    plan_row();
    plan_head();
    if (zero.sharding.stage == 2) plan_buckets();
}

template <class Dev> void Decoder<Dev>::plan_row() {
    const ModelConfig &c = config;
    const size_t T = T_max, C = c.C, positions = std::max(T * limits.ranks.sp, limits.cache_tokens);
    plan_.add(&row.tokens, "row.tokens", {T});
    plan_.add(&row.doc_pos, "row.doc_pos", {T});
    plan_.add(&row.lo, "row.lo", {positions});
    plan_.add(&row.lo_window, "row.lo_window", {positions});
    plan_.add(&row.rows, "row.rows", {T});
    plan_.add(&row.targets, "row.targets", {T});
    plan_.add(&row.weights, "row.weights", {T});
    plan_.add(&acts.matmul, "matmul workspace", {matmul_scratch(dev)});

    acts.x.resize(c.L + 1);
    for (size_t l = 0; l <= c.L; l++) {
        const size_t written = l == 0 ? clock.embed() : clock.forward(l - 1, DOWN);
        const size_t read = l < c.L ? (trains() ? clock.backward(l, LN1) : clock.forward(l, LN2))
                                    : (trains() ? clock.final_norm_backward() : clock.final_norm());
        plan_.add(&acts.x[l], format("act.%zu.x", l), {T, C}, written, read);
    }
    plan_.add(&acts.normf, "act.normf", {T, C}, clock.final_norm(), clock.head());
    if (trains()) plan_.add(&acts.dx, "dx", {T, C}, clock.head(), clock.embed_backward());
    acts.cache.resize(c.L);
    if (limits.cache_tokens == 0) return;
    for (size_t l = 0; l < c.L; l++) plan_.add(&acts.cache[l], format("cache.%zu", l), {limits.cache_tokens, 2 * c.KV * c.D});
    plan_.add(&acts.last, "last rows", {Pieces::capacity, C}, clock.head(), clock.head());
    plan_.add(&acts.logits, "logits", {Pieces::capacity, c.V}, clock.head(), clock.head());
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
    const auto add = [&](float **buffer, const std::string &name, size_t cut, size_t first, size_t last) {
        size_t room = 0;
        for (const Bucket &b : s.buckets)
            if (cuts[cut].begin <= b.global && b.global < cuts[cut].end) room = std::max(room, s.parts * b.part);
        plan_.add(buffer, name, {room}, first, last);
        if (room == s.largest) grads_of.largest = buffer;
    };
    // Each is alive until the next is reduced, as its own sum may be under way.
    const size_t L = config.L, head = clock.head(), norm = clock.final_norm_backward(), embed = clock.embed_backward();
    grads_of.cut.resize(cuts.size());
    add(&grads_of.head, "bucket.head", head_cut, head, norm);
    add(&grads_of.cut.back(), "bucket.norm", cuts.size() - 1, norm, clock.backward(L - 1, LN1));
    for (size_t l = 0; l < L; l++)
        add(&grads_of.cut[1 + l], format("bucket.layer.%zu", l), 1 + l, clock.backward(l, DOWN),
            l ? clock.backward(l - 1, LN1) : embed);
    if (positions_cut) add(&grads_of.cut[positions_cut], "bucket.positions", positions_cut, embed, clock.between_rows(GRAD_NORM));
    add(&grads_of.cut[0], "bucket.embedding", 0, embed, clock.between_rows(GRAD_NORM));
}

// Plans arrays of layer l, one a call:
//   array(name, &Acts::member, shape, written, consumed, last gradient, kept)
// Kept: one array, from the op that writes it to the last op of the backward pass that reads it. Else two: one for the forward pass, which
// the next op or two consume, and one into which the backward pass computes it again.
template <class Dev> template <class Acts> auto Decoder<Dev>::layer_arrays(size_t l, Acts &f, Acts &b) {
    return [this, l, &f, &b](const char *name, auto member, std::vector<size_t> shape, Op written, Op consumed, Op last_gradient,
                             bool kept) {
        const std::string full = format("act.%zu.%s", l, name);
        const bool train = trains();
        if (!train || !kept) plan_.add(&(f.*member), full, shape, clock.forward(l, written), clock.forward(l, consumed));
        if (train && !kept)
            plan_.add(&(b.*member), full + " again", shape, clock.recompute(l, written), clock.backward(l, last_gradient));
        if (train && kept) {
            plan_.add(&(f.*member), full, shape, clock.forward(l, written), clock.backward(l, last_gradient));
            plan_.alias(&(b.*member), &(f.*member));
        }
    };
}

// What attention needs while it runs.
template <class Dev> void Decoder<Dev>::plan_attention(size_t l, AttentionActs<X> &f, AttentionActs<X> &b) {
    const ModelConfig &c = config;
    const Ranks &r = limits.ranks;
    const size_t T = T_max, Q = c.H * c.D, K = c.KV * c.D;
    auto transient = [&](const char *name, auto pointer, std::vector<size_t> shape, size_t first, size_t last) {
        plan_.add(pointer, format("act.%zu.%s", l, name), std::move(shape), first, last);
    };
    const size_t forward = clock.forward(l, ATTENTION), backward = clock.backward(l, ATTENTION);
    const auto sizes = [&](bool backward) {
        return ring_attention_buffers(r.sp_mode, r.sp, r.head_stride, T, c.H, c.KV, c.D, backward);
    };
    transient("out32", &f.out32, {T, Q}, forward, forward);
    transient("ring", &f.ring.values, {sizes(false).values}, forward, forward);
    if (!trains()) return;
    transient("ring backward", &b.ring.values, {sizes(true).values}, backward, backward);
    transient("ring gradients", &b.ring.floats, {sizes(true).floats}, backward, backward);
    transient("datt", &b.datt, {T, Q}, clock.backward(l, PROJ), backward);
    transient("dq32", &b.dq32, {T, Q}, backward, backward);
    transient("dk32", &b.dk32, {T, K}, backward, backward);
    transient("dv32", &b.dv32, {T, K}, backward, backward);
    transient("delta", &b.delta, {c.H, T}, backward, backward);
    transient("scratch", &b.scratch, {attention_scratch(dev) * sizeof(float)}, backward, backward);
}

// Before allocate(), while there is memory to measure the device's peaks in.
template <class Dev> void Decoder<Dev>::profile() {
    auto timeline = make_timeline(dev);
    const Peaks peaks = measure_peaks(dev, memory(), *timeline);
    Work layout{};
    layout.element = sizeof(X), layout.moment = limits.bf16_moments ? sizeof(bf16) : sizeof(float), layout.keeps_mid = keep.mid;
    profiler_ = std::make_unique<Profiler>(std::move(timeline), peaks, config, layout);
}

template <class Dev> void Decoder<Dev>::allocate(Mesh &mesh, bool guards, bool poison) {
    mesh_ = &mesh;
    poison_ = poison;
    plan_.place(guards);
    arena_ = std::make_unique<Arena>(plan_, memory());
    const Sharding &s = zero.sharding;
    const Place<X> params = [&](size_t, size_t offset) { return zero.params + s.flat(offset); };
    const Place<float> grads = [&](size_t cut, size_t offset) {
        return s.stage == 2 ? grads_of.cut[cut] + (offset - cuts[cut].begin) : zero.grads + s.flat(offset);
    };
    place(params, trains() ? &grads : nullptr);
    if (s.stage == 2) head_dw = grads_of.head;
}

// --detect_anomaly: looks at what the op before this one has left.
template <class Dev> void Decoder<Dev>::look(const Moment &now) {
    if (looked_ && looked_->pass != Pass::step && anomaly_.what.empty()) {
        ops_++;
        const auto [time, pass, op, layer] = *looked_;
        const std::string of_layer = op < LAYER_OPS ? format("layer %zu, ", layer) : "";
        if (const std::string found = arena_->nonfinite(time, layer); !found.empty())
            anomaly_ = {ops_, format("%s, %s%s: %s", pass_names[size_t(pass)], of_layer.c_str(), op_names[op], found.c_str())};
    }
    if (!looked_ || looked_->time != now.time) arena_->clear_new(now.time);
    looked_ = now;
}

// ---- forward --------------------------------------------------------------------------------------------------------------------------

template <class Dev> void Decoder<Dev>::load_row(const Row &r) {
    reach(clock.between_rows(COPY));
    matmul_use_scratch(dev, acts.matmul);
    row.T = r.T, row.N = r.rows.size(), row.owners = r.owners, row.documents = r.documents.size();
    write(memory(), row.tokens, r.tokens);
    write(memory(), row.doc_pos, r.doc_pos);
    write(memory(), row.rows, r.rows);
    write(memory(), row.targets, r.targets);
}

// What the loss changes with the value of each document.
template <class Dev> void Decoder<Dev>::load_weights(const std::vector<float> &of_documents) {
    std::vector<float> weights(row.N);
    for (size_t n = 0; n < row.N; n++) weights[n] = of_documents[size_t(row.owners[n])];
    write(memory(), row.weights, weights);
}

// A whole row, of which this rank takes its part.
template <class Dev> void Decoder<Dev>::load_part(const Row &r) {
    const Row whole = pad_row(config.reward ? at_ends(r) : r, limits.ranks.sp);
    if (profiler_) profiler_->begin_row(whole, limits.ranks.sp);
    row.split = split_row(config, limits.ranks, sizeof(X), whole);
    row.queries = {};
    load_row(local_row(whole, *row.split, limits.ranks.sp_rank()));
    load_lo(whole.doc_begin);
}

// doc_begin[p]: where the document of position p begins.
template <class Dev> void Decoder<Dev>::load_lo(std::span<const int32_t> doc_begin) {
    const int32_t window = int32_t(*std::max_element(config.window.begin(), config.window.end()));
    std::vector<int32_t> lo(doc_begin.begin(), doc_begin.end());
    write(memory(), row.lo, lo);
    for (size_t p = 0; p < lo.size(); p++) lo[p] = std::max(lo[p], int32_t(p) - window + 1);
    write(memory(), row.lo_window, lo);
}

template <class Dev> void Decoder<Dev>::forward() {
    input_forward();
    for (size_t l = 0; l < config.L; l++) ready(1 + l), layer_forward(l, false);
    ready(cuts.size() - 1);
    final_norm_forward();
}

// What a layer's attention over the ring needs to know, and what it reads.
template <class Dev> RingAttention Decoder<Dev>::ring(size_t l) {
    const Ranks &r = limits.ranks;
    return {*mesh_->ring, r.sp_mode, r.head_stride, *row.split, row.split->travel[kind_of(config, l)], zero.sent};
}
template <class Dev> RingInputs<typename Dev::X> Decoder<Dev>::attention_inputs(size_t l, const AttentionActs<X> &a) {
    const size_t H = config.H, KV = config.KV, D = config.D, stride = (H + 2 * KV) * D;
    return {{a.qkv, stride},
            {a.qkv + H * D, stride},
            {a.qkv + (H + KV) * D, stride},
            config.window[l] ? row.lo_window : row.lo,
            H,
            KV,
            D,
            1 / std::sqrt(float(D))};
}

template <class Dev> void Decoder<Dev>::attention_forward(size_t l, const AttentionActs<X> &a) {
    const RingInputs<X> in = attention_inputs(l, a);
    if (row.queries.count == 0) {
        RingAttention ranks = ring(l);
        return ring_attention_forward(dev, ranks, a.att, a.out32, a.lse, in, a.ring);
    }
    const size_t T = row.T, H = config.H, KV = config.KV, D = config.D;
    X *cache = acts.cache[l];  // keys and values of all tokens so far; these tokens join them
    for (size_t i = 0; i < row.queries.count; i++) {
        const Piece &piece = row.queries.piece[i];
        copy_rows(dev, cache + piece.begin * 2 * KV * D, 2 * KV * D, in.k.data + piece.offset * in.k.stride, in.k.stride,
                  piece.end - piece.begin, 2 * KV * D);
    }
    attention_begin(dev, a.out32, a.lse, T, H, D);
    attention_forward_part(dev, a.out32, a.lse, in.q, {cache, 2 * KV * D}, {cache + KV * D, 2 * KV * D}, in.lo, row.queries,
                           row.keys, T, H, KV, D, in.scale);
    attention_end(dev, a.att, a.out32, T * H * D);
}

// The loss; with `dx` also the gradient of the final norm's output, with `dhead` that of the head's weights.
template <class Dev> void Decoder<Dev>::head(X *dx, float *dhead) {
    const size_t T = row.T, C = config.C, N = row.N;
    ready(head_cut);
    reach(config.reward && dx ? clock.head_weight() : clock.head(dx != nullptr));
    if (!config.reward)
        lm_head(dev, acts.stats, dx, dhead, acts.head, acts.normf, head_w, row.rows, row.targets, row.weights, T, C, config.V, N,
                accumulate_);
    else if (dx) score_backward(dev, dx, dhead, acts.normf, head_w, row.rows, row.weights, T, C, N);
    else score_forward(dev, acts.scores, acts.normf, head_w, row.rows, C, N);
}

template <class Dev> void Decoder<Dev>::add_sums() {
    if (config.reward) return;
    head_sums(dev, acts.sums, acts.stats, row.N);
    targets_ += row.N;
}

template <class Dev> std::vector<double> Decoder<Dev>::evaluate(const Row &r) {
    row.T = 0;
    if (r.T == 0) return {};
    load_part(r);
    forward();
    head(nullptr, nullptr);
    add_sums();
    const auto of_predictors = read(memory(), config.reward ? acts.scores : acts.stats.nll, row.N);
    std::vector<double> sums(row.documents);
    for (size_t n = 0; n < row.N; n++) sums[size_t(row.owners[n])] += of_predictors[n];
    return mesh_->ring->sum(sums);
}

template <class Dev> OptimizerState Decoder<Dev>::optimizer_state() {
    OptimizerState state{{}, zero.sharding.elements, &memory()};
    const auto moment = [](float *whole, bf16 *rounded, size_t at) {
        return rounded ? AnyFloats(rounded + at) : AnyFloats(Floats<float>{whole + at});
    };
    for (const Span &s : zero.sharding.spans())
        state.parts.push_back(
            {s.global, s.count, zero.params_at(s), moment(zero.m, zero.m16, s.shard), moment(zero.v, zero.v16, s.shard)});
    return state;
}

template <class Dev> LossSums Decoder<Dev>::take_sums() {
    if (config.reward) return {};
    reach(clock.between_rows(COPY));
    const auto sums = read(memory(), acts.sums, 3);
    memory().fill(acts.sums, 0, 3 * sizeof(double));
    return {sums[0], sums[1], sums[2], double(std::exchange(targets_, 0))};
}

template <class Dev>
const float *Decoder<Dev>::next_logits(const Row &r, const Pieces &where, std::span<const int32_t> cache_begin) {
    load_row(r);
    row.queries = where;
    row.keys = Pieces{{{0, cache_begin.size(), 0}}, 1};
    load_lo(cache_begin);
    forward();
    const size_t C = config.C;
    reach(clock.head(false));
    for (size_t i = 0; i < where.count; i++)
        copy_rows(dev, acts.last + i * C, C, acts.normf + (r.doc_offsets[i + 1] - 1) * C, C, 1, C);
    matmul_forward(dev, acts.logits, acts.last, head_w, (const X *)nullptr, where.count, C, config.V);
    logits_ = read(memory(), acts.logits, where.count * config.V);
    return logits_.data();
}

// ---- backward -------------------------------------------------------------------------------------------------------------------------

template <class Dev> void Decoder<Dev>::accumulate(const Row &r, float weight, bool last) {
    row.T = 0;
    if (r.T) load_part(r), load_weights(std::vector<float>(row.documents, weight)), forward();
    gradients(last);
    if (r.T) add_sums();
}

template <class Dev> void Decoder<Dev>::backward(std::span<const float> weights, bool last) {
    if (row.T) load_weights({weights.begin(), weights.end()});
    gradients(last);
}

// add(first, n) adds to the gradients of elements [first, first + n) of a cut, which are then summed over ranks: at stage 2 in every
// micro-step and out of a buffer, else in the last one. `complete`: nothing else of this pass adds to them. Without a row they are summed all
// the same, for the ranks that have one.
template <class Dev> template <class F> void Decoder<Dev>::sum_gradients(size_t cut, float *buffer, bool complete, F add) {
    const Sharding &s = zero.sharding;
    for (size_t b = s.bucket_of(cuts[cut].begin); b < s.buckets.size() && s.buckets[b].global < cuts[cut].end; b++) {
        const Bucket &bucket = s.buckets[b];
        const auto reach_sum = [&] { reach_comm(Pass::backward, GRAD_SUM, bucket.count); };
        if (s.stage == 2) reach_sum(), zero.start(mesh_->all, memory(), b, buffer);
        if (row.T) add(bucket.global - cuts[cut].begin, bucket.count);
        if (s.stage == 2) reach_sum(), zero.reduce(mesh_->all, b, buffer);
        else if (last_ && complete) reach_sum(), zero.reduce(mesh_->all, b, zero.grads + bucket.begin);
    }
}

// Where the head's gradient is made in parts, its logits are computed again for each.
template <class Dev> void Decoder<Dev>::head_backward() {
    const size_t C = config.C, V = config.V;
    const bool tied = head_cut == 0;
    const bool in_parts = zero.sharding.bucket_of(cuts[head_cut].begin) != zero.sharding.bucket_of(cuts[head_cut].end - 1);
    if (in_parts && row.T) head(acts.dx, nullptr);
    sum_gradients(head_cut, grads_of.head, !tied, [&](size_t first, size_t n) {
        if (!in_parts) return head(acts.dx, head_dw);
        reach(clock.head_weight(), n);
        lm_head_weight(dev, head_dw, acts.head, acts.normf, head_w, row.rows, row.targets, row.weights, acts.stats, C, V, row.N,
                       first / C, n / C);
    });
}

template <class Dev> void Decoder<Dev>::gradients(bool last_micro_step) {
    last_ = last_micro_step;
    if (!accumulate_ && (row.T == 0 || row.N == 0)) zero.zero_gradients(memory(), accumulate_ = true);  // nothing overwrites them
    head_backward();
    sum_gradients(cuts.size() - 1, true, [&](size_t, size_t) { final_norm_backward(); });
    for (size_t l = config.L; l-- > 0;) {
        if (row.T) layer_forward(l, true);
        sum_gradients(1 + l, true, [&](size_t, size_t) { layer_backward(l); });
    }
    input_backward();
    accumulate_ = true;
}

template <class Dev> void Decoder<Dev>::attention_backward(size_t l, const AttentionActs<X> &a) {
    RingAttention ranks = ring(l);
    ring_attention_backward(dev, ranks, a.qkv, a.dq32, a.dk32, a.dv32, a.delta, reinterpret_cast<float *>(a.scratch),
                            attention_inputs(l, a), a.att, a.datt, a.lse, a.ring);
}
