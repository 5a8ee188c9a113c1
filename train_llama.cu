// train_llama: trains Llama-class models (Llama 2/3, Qwen2/2.5/3, Mistral, SmolLM2) on packed sequences.
//
// This file is the model, top to bottom: the parameter table, the activation plan, the forward pass, the backward pass, and a small main.
// Each op is a free function in llmc/ops, one file an op, with its formula and shapes above it. What a run is made of (data, steps,
// checkpoints, evaluation, generation) stands in llmc/train/run.h and asks this file only what llmc/train/model.h declares.
//
// Ranks: those of a ring share each row, T / sp tokens of it each, and meet in attention alone (llmc/parallel/ring.h). All ranks meet in
// the gradients, which are summed as soon as the backward pass has made those of a layer (llmc/parallel/zero.h). One rank is a ring of one.
//
// Sizes, here and in every op:   T tokens of a rank's row       C hidden size     H query heads     KV key/value heads     D head size
//                                F feed-forward size            V vocabulary      L layers          N tokens of the row that are targets
// There is no batch dimension: a micro-batch is one packed row of documents laid end to end (llmc/data/dataloader.h).
#include <omp.h>

#include <cmath>
#include <optional>

#include "llmc/core/arena.h"             // defines: Plan, Arena
#include "llmc/core/gpu.h"               // defines: use_gpu, query_gpus
#include "llmc/core/memory.h"            // defines: Memory
#include "llmc/core/mutant.h"            // defines: MUTANT, a test-only bug
#include "llmc/core/options.h"           // defines: Options, Parsed, parse
#include "llmc/data/dataloader.h"        // defines: Row
#include "llmc/io/hf.h"                  // defines: ModelConfig, HfWeights, HfWriter
#include "llmc/ops/attention.h"          // defines: attention_{begin,part,end}, Heads, Pieces
#include "llmc/ops/embedding.h"          // defines: embedding_{forward,backward}
#include "llmc/ops/layout.h"             // defines: copy_rows
#include "llmc/ops/loss.h"               // defines: lm_head, lm_head_weight, head_sums
#include "llmc/ops/matmul.h"             // defines: matmul_forward, matmul_backward_{input,weight}
#include "llmc/ops/qk_norm_rope.h"       // defines: qk_norm_rope_{forward,backward}
#include "llmc/ops/residual.h"           // defines: residual_forward
#include "llmc/ops/rmsnorm.h"            // defines: rmsnorm_{forward,backward}, residual_rmsnorm_forward
#include "llmc/ops/rope.h"               // defines: rope_table
#include "llmc/ops/score.h"              // defines: score_{forward,backward}
#include "llmc/ops/swiglu.h"             // defines: swiglu_{forward,backward}
#include "llmc/parallel/comm_mpi.h"      // defines: started_by_mpirun, run_mpi
#include "llmc/parallel/comm_sockets.h"  // defines: run_sockets
#include "llmc/parallel/mesh.h"          // defines: Mesh
#include "llmc/parallel/ring.h"          // defines: ring_attention_{forward,backward}
#include "llmc/parallel/split.h"         // defines: pad_row, local_row, SequenceSplit
#include "llmc/parallel/zero.h"          // defines: Cut, Sharding, Zero
#include "llmc/train/flops.h"            // defines: Op, Pass
#include "llmc/train/model.h"            // defines: Model, ModelLimits, Recompute, LossSums
#include "llmc/train/parameters.h"       // defines: {load,initialise,save}_parameters, nonfinite_gradient
#include "llmc/train/profile.h"          // defines: Profiler, measure_peaks
#include "llmc/train/ranks.h"            // defines: Ranks, split_row
#include "llmc/train/run.h"              // defines: run_task

// ---- parameter table ------------------------------------------------------------------------------------------------------------------

template <class P> struct LlamaLayer {  // P: the storage type for weights, float for their gradients
    P *qkv;           // ((H+2*KV)*D, C)  rows of the query heads, then of the key heads, then of the value heads
    P *o;             // (C, H*D)
    P *gate_up;       // (2*F, C)         rows of the gate, then of the up projection
    P *down;          // (C, F)
    P *qkv_bias;      // ((H+2*KV)*D)     this and what follows down to down_bias: null where the model has none
    P *o_bias;        // (C)
    P *gate_up_bias;  // (2*F)
    P *down_bias;     // (C)
    P *q_norm;        // (D)
    P *k_norm;        // (D)
    P *ln1;           // (C)              before attention
    P *ln2;           // (C)              before the feed-forward part
};

template <class P> struct LlamaWeights {
    P *embed;  // (V, C)
    std::vector<LlamaLayer<P>> layer;
    P *norm;  // (C)
    P *head;  // (V, C)  the embedding itself where the two are tied; of a reward model (1, C)
};

struct LlamaTable {
    std::vector<Tensor> tensors;
    std::vector<Cut> cuts;  // the embedding, each layer, the head unless it is the embedding, the final norm
};

// One row per tensor of the Hugging Face files, in the order in which they lie in the flat arrays, and the member that points at it.
// A tensor without a member continues the matrix before it: q, k and v are row blocks of one matrix, and so are gate and up.
// Within a layer what decays comes first. place(cut, offset) says where the element `offset` of the table lies.
template <class P, class Place> LlamaTable llama_table(const ModelConfig &c, LlamaWeights<P> &w, Place place) {
    const size_t C = c.C, V = c.V, F = c.F, Q = c.H * c.D, K = c.KV * c.D;
    LlamaTable table;
    size_t offset = 0;
    std::string prefix;
    auto cut = [&](size_t row = 0) { table.cuts.push_back({offset, offset, row}); };
    auto add = [&](bool exists, const char *name, P **member, std::vector<size_t> shape, Tensor::Init init, bool decay) {
        if (member) *member = exists ? place(table.cuts.size() - 1, offset) : nullptr;
        if (!exists) return;
        size_t count = 1;
        for (size_t n : shape) count *= n;
        table.tensors.push_back({prefix + name, std::move(shape), init, decay, offset, count});
        table.cuts.back().end = offset += count;
    };
    const auto normal = Tensor::normal, ones = Tensor::ones, zeros = Tensor::zeros, score = Tensor::score;
    w.layer.resize(c.L);

    // clang-format off
    //  exists       Hugging Face name                  member           shape      init   decay
    cut(C);
    add(true,        "model.embed_tokens.weight",       &w.embed,        {V, C},    normal, true);
    for (size_t l = 0; l < c.L; l++) {
        cut();
        LlamaLayer<P> &y = w.layer[l];
        prefix = format("model.layers.%zu.", l);
        add(true,       "self_attn.q_proj.weight",         &y.qkv,          {Q, C},    normal, true);
        add(true,       "self_attn.k_proj.weight",         nullptr,         {K, C},    normal, true);
        add(true,       "self_attn.v_proj.weight",         nullptr,         {K, C},    normal, true);
        add(true,       "self_attn.o_proj.weight",         &y.o,            {C, Q},    normal, true);
        add(true,       "mlp.gate_proj.weight",            &y.gate_up,      {F, C},    normal, true);
        add(true,       "mlp.up_proj.weight",              nullptr,         {F, C},    normal, true);
        add(true,       "mlp.down_proj.weight",            &y.down,         {C, F},    normal, true);
        add(c.qkv_bias, "self_attn.q_proj.bias",           &y.qkv_bias,     {Q},       zeros,  false);
        add(c.qkv_bias, "self_attn.k_proj.bias",           nullptr,         {K},       zeros,  false);
        add(c.qkv_bias, "self_attn.v_proj.bias",           nullptr,         {K},       zeros,  false);
        add(c.o_bias,   "self_attn.o_proj.bias",           &y.o_bias,       {C},       zeros,  false);
        add(c.mlp_bias, "mlp.gate_proj.bias",              &y.gate_up_bias, {F},       zeros,  false);
        add(c.mlp_bias, "mlp.up_proj.bias",                nullptr,         {F},       zeros,  false);
        add(c.mlp_bias, "mlp.down_proj.bias",              &y.down_bias,    {C},       zeros,  false);
        add(c.qk_norm,  "self_attn.q_norm.weight",         &y.q_norm,       {c.D},     ones,   false);
        add(c.qk_norm,  "self_attn.k_norm.weight",         &y.k_norm,       {c.D},     ones,   false);
        add(true,       "input_layernorm.weight",          &y.ln1,          {C},       ones,   false);
        add(true,       "post_attention_layernorm.weight", &y.ln2,          {C},       ones,   false);
    }
    prefix = "";
    if (!c.tied) cut(C);
    add(!c.tied && !c.reward, "lm_head.weight",         &w.head,         {V, C},    normal, true);
    if (c.reward)
    add(true,        "score.weight",                    &w.head,         {1, C},    score,  true);
    cut();
    add(true,        "model.norm.weight",               &w.norm,         {C},       ones,   false);
    // clang-format on
    if (c.tied) w.head = w.embed;
    return table;
}

template <class P> LlamaTable llama_table(const ModelConfig &config) {  // for who has no arrays yet
    LlamaWeights<P> none;
    return llama_table(config, none, [](size_t, size_t) { return (P *)nullptr; });
}

// ---- activation plan ------------------------------------------------------------------------------------------------------------------

// The arrays of one layer.
template <class X> struct LlamaActs {
    X *ln1;               // (T, C)             norm of the layer's input
    float *rstd1;         // (T)
    X *qkv;               // (T, (H+2*KV)*D)    queries, keys, values; normed and rotated in place. Backward: becomes dqkv
    X *qk_raw;            // (T, (H+KV)*D)      queries and keys before their norm (Qwen3)
    float *qk_rstd;       // (T, H+KV)
    X *att;               // (T, H*D)
    float *lse;           // (H, T)
    X *mid;               // (T, C)             residual stream after attention
    X *ln2;               // (T, C)             norm of mid
    float *rstd2;         // (T)
    X *gate_up;           // (T, 2*F)           Backward: becomes its gradient
    X *act;               // (T, F)             silu(gate) * up
    float *out32;         // (T, H*D)           attention output while blocks are merged
    X *datt;              // (T, H*D)
    float *dq32;          // (T, H*D)
    float *dk32;          // (T, KV*D)
    float *dv32;          // (T, KV*D)
    float *delta;         // (H, T)
    std::byte *scratch;   // attention_scratch
    RingBuffers<X> ring;  // ring_attention_buffers
};

// When an op runs: time is counted in the ops of one row. The backward pass of a layer is its recomputation, in forward order, and then its
// gradients, in reverse.
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
    Moment head_weight() const { return {head(), Pass::backward, HEAD}; }  // where the backward pass is an op of its own
    Moment final_norm_backward() const { return {final_norm() + 2, Pass::backward, FINAL_NORM}; }
    Moment recompute(size_t l, Op op) const {
        return {final_norm() + 3 + (L - 1 - l) * 2 * LAYER_OPS + op, Pass::recompute, op, l};
    }
    Moment backward(size_t l, Op op) const { return {recompute(l, LN1) + 2 * LAYER_OPS - 1 - op, Pass::backward, op, l}; }
    Moment embed_backward() const { return {final_norm() + 3 + L * 2 * LAYER_OPS, Pass::backward, EMBED}; }
    Moment between_rows(Op op) const { return {embed_backward() + 1, Pass::step, op}; }  // no activation is alive
};

template <class Dev> class Llama final : public Model {
    using X = typename Dev::X;

  public:
    Llama(Dev dev, const ModelConfig &config, const ModelLimits &limits);

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
        zero.zero_gradients(memory());
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
    Zero<Dev> &parameters() { return zero; }
    const float *next_logits(const Row &row, const Pieces &where, std::span<const int32_t> cache_begin) override;

  private:
    // Which of a layer's arrays outlive its forward pass.
    struct Kept {
        bool norms, qkv, mid, gate_up, act;
    };
    static constexpr Kept everything = {true, true, true, true, true}, nothing = {false, false, false, false, false};

    void plan_activations();
    void plan_layer(size_t l, size_t T);
    void plan_buckets();
    size_t head_cut() const { return config.tied ? 0 : config.L + 1; }
    void load_row(const Row &row);
    void load_part(const Row &row);
    void load_weights(const std::vector<float> &weights);
    void load_lo(std::span<const int32_t> doc_begin);
    void ready(size_t cut) {  // its weights may be read
        if (zero.sharding.parts > 1) reach_comm(Pass::forward, PARAM_GATHER);
        zero.ready(mesh_->all, cuts[cut].begin, cuts[cut].end);
    }
    void forward();
    void layer_forward(size_t l, const LlamaActs<X> &a, bool again);
    void attention_forward(size_t l, const LlamaActs<X> &a);
    void gradients(bool last);
    void layer_backward(size_t l, const LlamaActs<X> &a);
    void head(X *dx, float *dhead);
    void head_backward();
    void add_sums();
    RingAttention ring(size_t l);
    RingInputs<X> attention_inputs(size_t l, const LlamaActs<X> &a);
    template <class F> void sum_gradients(size_t cut, float *buffer, bool complete, F add);
    void reach(const Moment &now, size_t bucket = 0) {  // at the start of each op
        if (poison_) arena_->poison_dead(now.time);
        if (looks_) look(now);
        if (profiler_) profiler_->begin(now.pass, now.op, now.layer, bucket);
    }
    void look(const Moment &now);
    void reach_comm(Pass pass, Op op, size_t bucket = 0) {  // among ranks; between two ops, whose arrays stay alive
        if (profiler_ && mesh_->all.size > 1) profiler_->begin(pass, op, 0, bucket);
    }

    Dev dev;
    ModelConfig config;
    ModelLimits limits;
    Clock clock;
    Kept keep;
    LlamaWeights<X> w;
    LlamaWeights<float> dw;
    const std::vector<Cut> cuts;
    Zero<Dev> zero;
    Mesh *mesh_ = nullptr;
    std::unique_ptr<Memory> memory_;
    Plan plan_;
    std::unique_ptr<Arena> arena_;  // in memory_
    std::unique_ptr<Profiler> profiler_;
    bool poison_ = false, last_ = false;  // last_: micro-step
    bool looks_ = false;                  // --detect_anomaly
    std::optional<Moment> looked_;        // the op that runs
    size_t ops_ = 0;                      // that were looked at
    Anomaly anomaly_;
    size_t targets_ = 0;         // of the rows whose sums were not taken yet
    std::vector<float> logits_;  // generate: (documents, V)

    // The packed row, this rank's part of it, on the device.
    struct {
        size_t T, N;
        std::vector<int32_t> owners;  // (N) on the host: the document of each predictor
        size_t documents;             // of the whole row
        std::optional<SequenceSplit> split;
        int32_t *tokens;       // (T)
        int32_t *doc_pos;      // (T) position in the document, for rope
        int32_t *lo;           // (sp*T) the first key that position t of the whole row sees; generate: (cache)
        int32_t *lo_window;    // (sp*T) the same in layers with a sliding window
        int32_t *rows;         // (N) predictors
        int32_t *targets;      // (N)
        float *weights;        // (N) dL/dnll, of a reward model dL/dscore
        Pieces queries, keys;  // generate: where this row's queries and keys are in the cache
    } row;

    // Stage 2 of ZeRO: where the gradients of a cut are made before they are summed over ranks, room for its largest bucket.
    struct {
        std::vector<float *> cut;
        float *head;      // tied, too
        float **largest;  // one of them, with room for any bucket
    } grads_of;

    struct {
        std::vector<X *> x;  // (L+1) x (T, C)   residual stream: input of each layer, then of the final norm
        std::vector<LlamaActs<X>> forward, backward;  // (L) each; the same arrays where they are kept
        std::vector<X *> cache;                       // (L) x (cache, 2*KV*D)   generate: keys and values so far
        X *normf;                                     // (T, C)
        float *rstdf;                                 // (T)
        X *dx;                                        // (T, C)           gradient of the residual stream
        float *dw_scratch;                            // rmsnorm_scratch
        std::byte *head;                              // lm_head_scratch
        HeadStats stats;                              // (N) each
        float *scores;                                // (N)              reward model
        double *sums;                                 // (3)              of the rows since take_sums
        std::byte *matmul;                            // matmul_scratch
        X *last;                                      // (documents, C)   generate
        float *logits;                                // (documents, V)   generate
        float *rope;                                  // (positions, D/2, 2)
    } acts;
};

// Each cut is a bucket of ZeRO's; at stage 2 a large vocabulary's is several, whose gradients never exist together.
static Sharding sharding_for(const ModelConfig &config, const ModelLimits &limits) {
    const Ranks &r = limits.ranks;
    const bool train = limits.mode == Mode::train;
    auto cuts = llama_table<float>(config).cuts;
    if (!train || r.zero_stage < 2 || r.world == 1)
        for (Cut &cut : cuts) cut.row = 0;
    if (!train) return Sharding(cuts, 0, 1, 0, 0);
    return Sharding(cuts, r.zero_stage, int(r.world), int(r.rank), r.bucket_bytes);
}

template <class Dev>
Llama<Dev>::Llama(Dev dev, const ModelConfig &config, const ModelLimits &limits)
    : dev(dev),
      config(config),
      limits(limits),
      clock{config.L},
      cuts(llama_table<float>(config).cuts),
      zero(dev, sharding_for(config, limits), llama_table<float>(config).tensors) {
    const bool train = limits.mode == Mode::train;
    const Recompute r = limits.recompute;
    keep = train && r == Recompute::none    ? everything
           : train && r == Recompute::cheap ? Kept{false, true, true, true, false}
                                            : nothing;
    zero.plan(plan_, train);
    plan_activations();
    if (zero.sharding.stage == 2) plan_buckets();
}

template <class Dev> void Llama<Dev>::plan_buckets() {
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
    add(&grads_of.head, "bucket.head", head_cut(), head, norm);
    add(&grads_of.cut.back(), "bucket.norm", cuts.size() - 1, norm, clock.backward(L - 1, LN1));
    for (size_t l = 0; l < L; l++)
        add(&grads_of.cut[1 + l], format("bucket.layer.%zu", l), 1 + l, clock.backward(l, DOWN),
            l ? clock.backward(l - 1, LN1) : embed);
    add(&grads_of.cut[0], "bucket.embedding", 0, embed, clock.between_rows(GRAD_NORM));
}

template <class Dev> void Llama<Dev>::plan_activations() {
    const ModelConfig &c = config;
    const size_t all_T = round_up(limits.row_tokens, row_multiple * limits.ranks.sp), T = all_T / limits.ranks.sp, C = c.C;
    const bool train = limits.mode == Mode::train;

    const size_t positions = std::max(all_T, limits.cache_tokens);
    plan_.add(&row.tokens, "row.tokens", {T});
    plan_.add(&row.doc_pos, "row.doc_pos", {T});
    plan_.add(&row.lo, "row.lo", {positions});
    plan_.add(&row.lo_window, "row.lo_window", {positions});
    plan_.add(&row.rows, "row.rows", {T});
    plan_.add(&row.targets, "row.targets", {T});
    plan_.add(&row.weights, "row.weights", {T});
    plan_.add(&acts.rope, "rope table", {limits.positions, c.D / 2, 2});
    plan_.add(&acts.matmul, "matmul workspace", {matmul_scratch(dev)});

    acts.x.resize(c.L + 1);
    acts.forward.resize(c.L);
    acts.backward.resize(c.L);
    acts.cache.resize(c.L);
    for (size_t l = 0; l <= c.L; l++) {
        const size_t written = l == 0 ? clock.embed() : clock.forward(l - 1, DOWN);
        const size_t read = l < c.L ? (train ? clock.backward(l, LN1) : clock.forward(l, LN2))
                                    : (train ? clock.final_norm_backward() : clock.final_norm());
        plan_.add(&acts.x[l], format("act.%zu.x", l), {T, C}, written, read);
        if (l < c.L) plan_layer(l, T);
    }
    plan_.add(&acts.normf, "act.normf", {T, C}, clock.final_norm(), clock.head());
    plan_.add(&acts.rstdf, "act.rstdf", {T}, clock.final_norm(), train ? clock.final_norm_backward() : clock.final_norm());
    if (limits.cache_tokens) {
        for (size_t l = 0; l < c.L; l++) plan_.add(&acts.cache[l], format("cache.%zu", l), {limits.cache_tokens, 2 * c.KV * c.D});
        plan_.add(&acts.last, "last rows", {Pieces::capacity, C}, clock.head(), clock.head());
        plan_.add(&acts.logits, "logits", {Pieces::capacity, c.V}, clock.head(), clock.head());
    }
    if (limits.mode == Mode::generate) return;
    const size_t head = clock.head(), row_ends = clock.between_rows(COPY);
    if (c.reward) {
        plan_.add(&acts.scores, "scores", {T}, head, row_ends);
    } else {
        plan_.add(&acts.head, "head chunk", {lm_head_scratch(dev, T, C, c.V)}, head, head);
        plan_.add(&acts.stats.nll, "stats.nll", {T}, head, row_ends);
        plan_.add(&acts.stats.entropy, "stats.entropy", {T}, head, row_ends);
        plan_.add(&acts.stats.correct, "stats.correct", {T}, head, row_ends);
        plan_.add(&acts.stats.max, "stats.max", {T}, head, row_ends);
        plan_.add(&acts.stats.sum, "stats.sum", {T}, head, row_ends);
        plan_.add(&acts.sums, "stats.sums", {3});
    }
    if (train) {
        plan_.add(&acts.dx, "dx", {T, C}, clock.head(), clock.embed_backward());
        plan_.add(&acts.dw_scratch, "norm scratch", {rmsnorm_scratch(dev, std::max(C, 2 * c.D))}, clock.final_norm_backward(),
                  clock.backward(0, LN1));
    }
}

template <class Dev> void Llama<Dev>::plan_layer(size_t l, size_t T) {
    const ModelConfig &c = config;
    const Ranks &r = limits.ranks;
    const size_t C = c.C, F = c.F, Q = c.H * c.D, K = c.KV * c.D;
    const bool train = limits.mode == Mode::train;
    using A = LlamaActs<X>;
    A &f = acts.forward[l], &b = acts.backward[l];

    // Kept: one array, from the op that writes it to the last op of the backward pass that reads it. Else two: one for the forward
    // pass, which the next op or two consume, and one into which the backward pass computes it again.
    auto act = [&](const char *name, auto member, std::vector<size_t> shape, Op written, Op consumed, Op last_gradient,
                   bool kept) {
        const std::string full = format("act.%zu.%s", l, name);
        if (!train || !kept) plan_.add(&(f.*member), full, shape, clock.forward(l, written), clock.forward(l, consumed));
        if (train && !kept)
            plan_.add(&(b.*member), full + " again", shape, clock.recompute(l, written), clock.backward(l, last_gradient));
        if (train && kept) {
            plan_.add(&(f.*member), full, shape, clock.forward(l, written), clock.backward(l, last_gradient));
            plan_.alias(&(b.*member), &(f.*member));
        }
    };
    // clang-format off
    //   name       member       shape               written    consumed   last grad  kept
    act("ln1",     &A::ln1,     {T, C},             LN1,       QKV,       LN1,       keep.norms);
    act("rstd1",   &A::rstd1,   {T},                LN1,       QKV,       LN1,       true);
    act("qkv",     &A::qkv,     {T, Q + 2 * K},     QKV,       ATTENTION, QKV,       keep.qkv);
    act("qk_raw",  &A::qk_raw,  {c.qk_norm * T, Q + K},       ROPE, ROPE, ROPE,      keep.qkv);
    act("qk_rstd", &A::qk_rstd, {c.qk_norm * T, c.H + c.KV},  ROPE, ROPE, ROPE,      true);
    act("att",     &A::att,     {T, Q},             ATTENTION, PROJ,      ATTENTION, true);
    act("lse",     &A::lse,     {c.H, T},           ATTENTION, ATTENTION, ATTENTION, true);
    act("mid",     &A::mid,     {T, C},             LN2,       DOWN,      LN2,       keep.mid);
    act("ln2",     &A::ln2,     {T, C},             PROJ,      GATE_UP,   LN2,       keep.norms);
    act("rstd2",   &A::rstd2,   {T},                LN2,       LN2,       LN2,       true);
    act("gate_up", &A::gate_up, {T, 2 * F},         GATE_UP,   SWIGLU,    GATE_UP,   keep.gate_up);
    act("act",     &A::act,     {T, F},             SWIGLU,    DOWN,      SWIGLU,    keep.act);
    // clang-format on

    auto transient = [&](const char *name, auto pointer, std::vector<size_t> shape, size_t first, size_t last) {
        plan_.add(pointer, format("act.%zu.%s", l, name), std::move(shape), first, last);
    };
    const size_t forward = clock.forward(l, ATTENTION), backward = clock.backward(l, ATTENTION);
    const auto sizes = [&](bool backward) {
        return ring_attention_buffers(r.sp_mode, r.sp, r.head_stride, T, c.H, c.KV, c.D, backward);
    };
    transient("out32", &f.out32, {T, Q}, forward, forward);
    transient("ring", &f.ring.values, {sizes(false).values}, forward, forward);
    if (!train) return;
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
template <class Dev> void Llama<Dev>::profile() {
    auto timeline = make_timeline(dev);
    const Peaks peaks = measure_peaks(dev, memory(), *timeline);
    profiler_ = std::make_unique<Profiler>(std::move(timeline), peaks, config, sizeof(X), keep.mid);
}

template <class Dev> void Llama<Dev>::allocate(Mesh &mesh, bool guards, bool poison) {
    mesh_ = &mesh;
    poison_ = poison;
    plan_.place(guards);
    arena_ = std::make_unique<Arena>(plan_, memory());
    matmul_use_scratch(dev, acts.matmul);
    const Sharding &s = zero.sharding;
    llama_table(config, w, [&](size_t, size_t offset) { return zero.params + s.flat(offset); });
    if (limits.mode == Mode::train)
        llama_table(config, dw, [&](size_t cut, size_t offset) {
            return s.stage == 2 ? grads_of.cut[cut] + (offset - cuts[cut].begin) : zero.grads + s.flat(offset);
        });
    if (s.stage == 2) dw.head = grads_of.head;
    std::vector<float> rope(limits.positions * config.D);
    rope_table(rope.data(), config.rope, limits.positions, config.D);
    write(memory(), acts.rope, rope);
}

// --detect_anomaly: looks at what the op before this one has left.
template <class Dev> void Llama<Dev>::look(const Moment &now) {
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

template <class Dev> void Llama<Dev>::load_row(const Row &r) {
    reach(clock.between_rows(COPY));
    row.T = r.T, row.N = r.rows.size(), row.owners = r.owners, row.documents = r.documents.size();
    write(memory(), row.tokens, r.tokens);
    write(memory(), row.doc_pos, r.doc_pos);
    write(memory(), row.rows, r.rows);
    write(memory(), row.targets, r.targets);
}

// What the loss changes with the value of each document.
template <class Dev> void Llama<Dev>::load_weights(const std::vector<float> &of_documents) {
    std::vector<float> weights(row.N);
    for (size_t n = 0; n < row.N; n++)
        weights[n] = MUTANT(84, 1 / float(limits.ranks.sp), 1) * of_documents[size_t(row.owners[n])];
    write(memory(), row.weights, weights);
}

// A whole row, of which this rank takes its part.
template <class Dev> void Llama<Dev>::load_part(const Row &r) {
    const Row whole = pad_row(config.reward ? at_ends(r) : r, limits.ranks.sp);
    if (profiler_) profiler_->begin_row(whole, limits.ranks.sp);
    row.split = split_row(config, limits.ranks, sizeof(X), whole);
    row.queries = {};
    load_row(local_row(whole, *row.split, limits.ranks.sp_rank()));
    load_lo(whole.doc_begin);
}

// doc_begin[p]: where the document of position p begins.
template <class Dev> void Llama<Dev>::load_lo(std::span<const int32_t> doc_begin) {
    const int32_t window = int32_t(*std::max_element(config.window.begin(), config.window.end()));
    std::vector<int32_t> lo(doc_begin.begin(), doc_begin.end());
    write(memory(), row.lo, lo);
    for (size_t p = 0; p < lo.size(); p++) lo[p] = std::max(lo[p], int32_t(p) - window + MUTANT(18, 0, 1));
    write(memory(), row.lo_window, lo);
}

template <class Dev> void Llama<Dev>::forward() {
    ready(0);
    reach(clock.embed());
    embedding_forward(dev, acts.x[0], w.embed, row.tokens, row.T, config.C);
    for (size_t l = 0; l < config.L; l++) ready(1 + l), layer_forward(l, acts.forward[l], false);
    ready(cuts.size() - 1);
    reach(clock.final_norm());
    rmsnorm_forward(dev, acts.normf, acts.rstdf, acts.x[config.L], w.norm, row.T, config.C, config.eps);
}

// One layer. `again`: the backward pass wants back what was not kept; ops whose output is still there are left out.
template <class Dev> void Llama<Dev>::layer_forward(size_t l, const LlamaActs<X> &a, bool again) {
    const size_t T = row.T, C = config.C, H = config.H, KV = config.KV, D = config.D, F = config.F;
    const LlamaLayer<X> &y = w.layer[l];
    const X *x = acts.x[l];  // (T, C)
    const float eps = config.eps;
    const auto at = [&](Op op) { return again ? clock.recompute(l, op) : clock.forward(l, op); };

    if (!again || !keep.norms) reach(at(LN1)), rmsnorm_forward(dev, a.ln1, a.rstd1, x, y.ln1, T, C, eps);
    if (!again || MUTANT(20, false, !keep.qkv)) {
        reach(at(QKV));
        matmul_forward(dev, a.qkv, a.ln1, y.qkv, y.qkv_bias, T, C, (H + 2 * KV) * D);
        reach(at(ROPE));
        qk_norm_rope_forward(dev, a.qkv, a.qk_raw, a.qk_rstd, y.q_norm, y.k_norm, acts.rope, row.doc_pos, T, H, KV, D, eps);
    }
    if (!again) reach(at(ATTENTION)), attention_forward(l, a);
    if (!again || !keep.mid) {
        reach(at(PROJ));
        matmul_forward(dev, a.ln2, a.att, y.o, y.o_bias, T, H * D, C);  // ln2 holds the projection until its norm replaces it
        reach(at(LN2));
        residual_rmsnorm_forward(dev, a.mid, a.ln2, a.rstd2, x, a.ln2, y.ln2, T, C, eps);
    } else if (!keep.norms) {
        reach(at(LN2));
        rmsnorm_forward(dev, a.ln2, a.rstd2, a.mid, y.ln2, T, C, eps);
    }
    if (!again || !keep.gate_up)
        reach(at(GATE_UP)), matmul_forward(dev, a.gate_up, a.ln2, y.gate_up, y.gate_up_bias, T, C, 2 * F);
    if (!again || !keep.act) reach(at(SWIGLU)), swiglu_forward(dev, a.act, a.gate_up, T, F);
    if (!again) {
        X *next = acts.x[l + 1];
        reach(at(DOWN));
        matmul_forward(dev, next, a.act, y.down, y.down_bias, T, F, C);
        residual_forward(dev, next, next, a.mid, T * C);
    }
}

// What a layer's attention over the ring needs to know, and what it reads.
template <class Dev> RingAttention Llama<Dev>::ring(size_t l) {
    const Ranks &r = limits.ranks;
    return {*mesh_->ring, r.sp_mode, r.head_stride, *row.split, row.split->travel[kind_of(config, l)], zero.sent};
}
template <class Dev> RingInputs<typename Dev::X> Llama<Dev>::attention_inputs(size_t l, const LlamaActs<X> &a) {
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

template <class Dev> void Llama<Dev>::attention_forward(size_t l, const LlamaActs<X> &a) {
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
template <class Dev> void Llama<Dev>::head(X *dx, float *dhead) {
    const size_t T = row.T, C = config.C, N = row.N;
    ready(head_cut());
    reach(config.reward && dx ? clock.head_weight() : clock.head(dx != nullptr));
    if (!config.reward)
        lm_head(dev, acts.stats, dx, dhead, acts.head, acts.normf, w.head, row.rows, row.targets, row.weights, T, C, config.V, N);
    else if (dx) score_backward(dev, dx, dhead, acts.normf, w.head, row.rows, row.weights, T, C, N);
    else score_forward(dev, acts.scores, acts.normf, w.head, row.rows, C, N);
}

template <class Dev> void Llama<Dev>::add_sums() {
    if (config.reward) return;
    head_sums(dev, acts.sums, acts.stats, row.N);
    targets_ += row.N;
}

template <class Dev> std::vector<double> Llama<Dev>::evaluate(const Row &r) {
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

template <class Dev> OptimizerState Llama<Dev>::optimizer_state() {
    OptimizerState state{{}, zero.sharding.elements, &memory()};
    for (const Span &s : zero.sharding.spans())
        state.parts.push_back(
            {s.global, s.count, zero.params_at(s), Floats<float>{zero.m + s.shard}, Floats<float>{zero.v + s.shard}});
    return state;
}

template <class Dev> LossSums Llama<Dev>::take_sums() {
    if (config.reward) return {};
    reach(clock.between_rows(COPY));
    const auto sums = read(memory(), acts.sums, 3);
    memory().fill(acts.sums, 0, 3 * sizeof(double));
    return {sums[0], sums[1], sums[2], double(std::exchange(targets_, 0))};
}

template <class Dev>
const float *Llama<Dev>::next_logits(const Row &r, const Pieces &where, std::span<const int32_t> cache_begin) {
    load_row(r);
    row.queries = where;
    row.keys = Pieces{{{0, cache_begin.size(), 0}}, 1};
    load_lo(cache_begin);
    forward();
    const size_t C = config.C;
    reach(clock.head(false));
    for (size_t i = 0; i < where.count; i++)
        copy_rows(dev, acts.last + i * C, C, acts.normf + (r.doc_offsets[i + 1] - 1) * C, C, 1, C);
    matmul_forward(dev, acts.logits, acts.last, w.head, (const X *)nullptr, where.count, C, config.V);
    logits_ = read(memory(), acts.logits, where.count * config.V);
    return logits_.data();
}

// ---- backward -------------------------------------------------------------------------------------------------------------------------

template <class Dev> void Llama<Dev>::accumulate(const Row &r, float weight, bool last) {
    row.T = 0;
    if (r.T) load_part(r), load_weights(std::vector<float>(row.documents, weight)), forward();
    gradients(last);
    if (r.T) add_sums();
}

template <class Dev> void Llama<Dev>::backward(std::span<const float> weights, bool last) {
    if (row.T) load_weights({weights.begin(), weights.end()});
    gradients(last);
}

// add(first, n) adds to the gradients of elements [first, first + n) of a cut, which are then summed over ranks: at stage 2 in every
// micro-step and out of a buffer, else in the last one. `complete`: nothing else of this pass adds to them. Without a row they are summed all
// the same, for the ranks that have one.
template <class Dev> template <class F> void Llama<Dev>::sum_gradients(size_t cut, float *buffer, bool complete, F add) {
    if (MUTANT(86, row.T == 0, false)) return;
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
template <class Dev> void Llama<Dev>::head_backward() {
    const size_t C = config.C, V = config.V, cut = head_cut();
    const bool in_parts = zero.sharding.bucket_of(cuts[cut].begin) != zero.sharding.bucket_of(cuts[cut].end - 1);
    if (in_parts && row.T) head(acts.dx, nullptr);
    sum_gradients(cut, grads_of.head, MUTANT(85, true, !config.tied), [&](size_t first, size_t n) {
        if (!in_parts) return head(acts.dx, dw.head);
        reach(clock.head_weight(), n);
        lm_head_weight(dev, dw.head, acts.head, acts.normf, w.head, row.rows, row.targets, row.weights, acts.stats, C, V, row.N,
                       first / C, n / C);
    });
}

template <class Dev> void Llama<Dev>::gradients(bool last_micro_step) {
    last_ = last_micro_step;
    head_backward();
    const size_t L = config.L, C = config.C, last = cuts.size() - 1;
    const auto buffer = [&](size_t cut) { return zero.sharding.stage == 2 ? grads_of.cut[cut] : nullptr; };
    sum_gradients(last, buffer(last), true, [&](size_t, size_t) {
        reach(clock.final_norm_backward());
        rmsnorm_backward(dev, acts.dx, dw.norm, acts.dw_scratch, (const X *)nullptr, acts.dx, acts.x[L], w.norm, acts.rstdf,
                         row.T, C);
    });
    for (size_t l = L; l-- > 0;) {
        if (row.T) layer_forward(l, acts.backward[l], true);
        sum_gradients(1 + l, buffer(1 + l), true, [&](size_t, size_t) { layer_backward(l, acts.backward[l]); });
    }
    sum_gradients(0, buffer(0), true, [&](size_t first, size_t n) {
        reach(clock.embed_backward());
        embedding_backward(dev, dw.embed, acts.dx, row.tokens, row.T, C, first / C, n / C);
    });
}

// dx comes in as the gradient of the layer's output and leaves as that of its input. Within a line the weight's gradient goes first:
// the input's gradient then takes the place of the input, which nobody needs any more.
template <class Dev> void Llama<Dev>::layer_backward(size_t l, const LlamaActs<X> &a) {
    const size_t T = row.T, C = config.C, H = config.H, KV = config.KV, D = config.D, F = config.F, stride = (H + 2 * KV) * D;
    const LlamaLayer<X> &y = w.layer[l];
    const LlamaLayer<float> &dy = dw.layer[l];
    X *dx = acts.dx;  // (T, C)

    reach(clock.backward(l, DOWN));
    matmul_backward_weight(dev, dy.down, dy.down_bias, dx, a.act, T, F, C);
    X *dact = a.act;
    matmul_backward_input(dev, dact, dx, y.down, T, F, C);
    reach(clock.backward(l, SWIGLU));
    X *dgate_up = a.gate_up;
    swiglu_backward(dev, dgate_up, dact, a.gate_up, T, F);
    reach(clock.backward(l, GATE_UP));
    matmul_backward_weight(dev, dy.gate_up, dy.gate_up_bias, dgate_up, a.ln2, T, C, 2 * F);
    X *dln2 = a.ln2;
    matmul_backward_input(dev, dln2, dgate_up, y.gate_up, T, C, 2 * F);
    reach(clock.backward(l, LN2));
    rmsnorm_backward(dev, dx, dy.ln2, acts.dw_scratch, MUTANT(19, nullptr, dx), dln2, a.mid, y.ln2, a.rstd2, T, C);

    reach(clock.backward(l, PROJ));
    matmul_backward_weight(dev, dy.o, dy.o_bias, dx, a.att, T, H * D, C);
    matmul_backward_input(dev, a.datt, dx, y.o, T, H * D, C);
    reach(clock.backward(l, ATTENTION));
    X *dqkv = a.qkv;
    RingAttention ranks = ring(l);
    ring_attention_backward(dev, ranks, dqkv, a.dq32, a.dk32, a.dv32, a.delta, reinterpret_cast<float *>(a.scratch),
                            attention_inputs(l, a), a.att, a.datt, a.lse, a.ring);
    reach(clock.backward(l, ROPE));
    qk_norm_rope_backward(dev, dqkv, dy.q_norm, dy.k_norm, acts.dw_scratch, a.qk_raw, y.q_norm, y.k_norm, a.qk_rstd, acts.rope,
                          row.doc_pos, T, H, KV, D);
    reach(clock.backward(l, QKV));
    matmul_backward_weight(dev, dy.qkv, dy.qkv_bias, dqkv, a.ln1, T, C, stride);
    X *dln1 = a.ln1;
    matmul_backward_input(dev, dln1, dqkv, y.qkv, T, C, stride);
    reach(clock.backward(l, LN1));
    rmsnorm_backward(dev, dx, dy.ln1, acts.dw_scratch, dx, dln1, acts.x[l], y.ln1, a.rstd1, T, C);
}

// ---- the GPU's half -------------------------------------------------------------------------------------------------------------------

// This file is compiled once by g++, for main and the CPU, and once by nvcc, for CUDA. (Or by g++ again, with the emulator in place of
// the GPU: dev/cuda/README.md.) Both halves are linked into one program.
//
// `own_gpu`: each rank takes a GPU of its host, and `gpu_comm` becomes the communicator between their memories. Else ranks are threads
// that share a GPU, and `host` moves what lies in its memory.
ModelFactory cuda_models(const Options &options, Comm &host, bool own_gpu, std::unique_ptr<Comm> &gpu_comm);

#ifdef CUDA_HALF
#include "llmc/ops/kernels.cuh"       // defines: the same ops on CUDA; CudaStream, CudaMemory, CudaTimeline
#include "llmc/parallel/comm_nccl.h"  // defines: select_gpu, make_gpu_comm
#include "llmc/parallel/slices.cuh"   // defines: device_slices

struct CudaHalf {
    CudaStream stream;
    std::unique_ptr<CudaContext> ctx;
};

ModelFactory cuda_models(const Options &options, Comm &host, bool own_gpu, std::unique_ptr<Comm> &gpu_comm) {
    std::shared_ptr<CudaHalf> half;  // a plan needs no GPU
    if (!options.plan) {
        if (own_gpu) select_gpu(host);
        half = std::make_shared<CudaHalf>();
        half->ctx = make_cuda_context(int(options.threads), options.tf32);
        if (own_gpu) gpu_comm = make_gpu_comm(host, half->stream, options.comm_timeout);
        else host.memory = device_slices(half->stream);
    }
    return [half, bf16_storage = options.dtype == "bf16"](const ModelConfig &config,
                                                          const ModelLimits &limits) -> std::unique_ptr<Model> {
        const auto model_on = [&](auto dev) -> std::unique_ptr<Model> {
            if (half) dev.stream = half->stream, dev.ctx = half->ctx.get();
            return std::make_unique<Llama<decltype(dev)>>(dev, config, limits);
        };
        return bf16_storage ? model_on(CudaBf16()) : model_on(CudaF32());
    };
}
#else

// ---- main -----------------------------------------------------------------------------------------------------------------------------

#ifndef LLMC_NO_MAIN  // tests include this file and bring their own
static ModelFactory cpu_models(const Options &options) {
    const int threads = int(options.threads);
    std::shared_ptr<Context> ctx = make_context(threads);
    return [=, bf16_storage = options.dtype == "bf16"](const ModelConfig &config,
                                                       const ModelLimits &limits) -> std::unique_ptr<Model> {
        if (bf16_storage) return std::make_unique<Llama<CpuBf16>>(CpuBf16{threads, ctx.get()}, config, limits);
        return std::make_unique<Llama<CpuF32>>(CpuF32{threads, ctx.get()}, config, limits);
    };
}

// Whether to compute on a GPU; fills in what depends on it. --plan --gpu needs no GPU, only the sizes that the kernels ask for.
static bool choose_device(Options &o, bool speaks) {
    bool gpu = false;
    std::string note;
#ifdef LLMC_CUDA
    gpu = o.plan && !o.gpu.empty() ? o.device != "cpu" : use_gpu(o.device, query_gpus(), note);
#else
    gpu = use_gpu(o.device, {}, note);
#endif
    if (!note.empty() && speaks) printf("note: %s\n", note.c_str());
    if (o.attention_tflops == 0) o.attention_tflops = gpu ? 400 : 0.05;
    if (o.link_gb_s == 0) o.link_gb_s = gpu ? 50 : 5;
    if (o.dtype == "auto") o.dtype = gpu || !o.gpu.empty() ? "bf16" : "f32";  // bf16 is what GPUs train in
    if (o.tf32 && (!gpu || o.dtype != "f32") && speaks)
        printf("note: --tf32 is for float products on a GPU, and there are none in this run\n");
    return gpu;
}

// One rank of the run; `threads`: all are threads of this process.
static int run_rank(Parsed parsed, Comm &host, bool threads) {
    const bool speaks = host.rank == 0;
    Options &o = parsed.options;
    for (const std::string &note : parsed.notes)
        if (speaks) printf("note: %s\n", note.c_str());
    const auto hosts = host.gather(host_name());
    const size_t here = size_t(std::count(hosts.begin(), hosts.end(), hosts[size_t(host.rank)]));  // ranks on this machine
    if (o.threads == 0)
        o.threads =
            getenv("OMP_NUM_THREADS") ? size_t(omp_get_max_threads()) : std::max<size_t>(1, size_t(omp_get_num_procs()) / here);
    omp_set_num_threads(int(o.threads));  // for what is not told
    bool gpu = false;
    agree(host, [&] { gpu = choose_device(o, speaks); });
    const auto gpus = host.gather(int(gpu));
    agree(host, [&] {
        for (size_t r = 0; r < gpus.size(); r++)
            if (gpus[r] != gpus[0])
                die("rank %zu on %s has %s GPU that can be used, unlike rank 0 on %s\n  fix: --device cpu, or other hosts", r,
                    hosts[r].c_str(), gpus[r] ? "a" : "no", hosts[0].c_str());
    });
    ModelFactory make_model;  // has the stream that gpu_comm works with, so it ends after that
    std::unique_ptr<Comm> gpu_comm;
#ifdef LLMC_CUDA
    if (gpu) make_model = cuda_models(o, host, !threads && host.size > 1, gpu_comm);
#endif
    if (!gpu) make_model = cpu_models(o);
    return run_task(parsed, gpu_comm ? *gpu_comm : host, threads || !gpu ? here : 1, make_model);
}

int main(int argc, char **argv) {
    Parsed parsed;
    const auto parse_arguments = [&] { parsed = parse({argv + 1, argv + argc}); };
    const auto run = [&](Comm &comm, bool threads) {
        if (parsed.help.empty()) return run_rank(parsed, comm, threads);
        if (comm.rank == 0) printf("%s", parsed.help.c_str());
        return 0;
    };
    try {
        if (started_by_mpirun()) {
            std::string wrong;  // all ranks read the same flags, and one of them says what is wrong
            try {
                parse_arguments();
            } catch (const std::exception &error) {
                wrong = error.what();
            }
            const Options &o = parsed.options;
            return run_mpi({.timeout = o.comm_timeout}, [&](Comm &comm) {
                agree(comm, [&] {
                    if (!wrong.empty()) die("%s", wrong.c_str());
                    if (o.ranks > 1 && !o.plan)
                        die("--ranks %zu makes ranks of threads, but mpirun has started %d processes\n  fix: one of the two",
                            o.ranks, comm.size);
                    if (!o.rendezvous.empty())
                        die("--rendezvous is for ranks started by hand, but mpirun has started %d\n  fix: one of the two",
                            comm.size);
                });
                return run(comm, false);
            });
        }
        parse_arguments();
        const Options &o = parsed.options;
        const CommOptions options = {.timeout = o.comm_timeout};
        const bool alone = o.plan || !parsed.help.empty();
        if (!o.rendezvous.empty() && !alone)
            return run_sockets({int(o.rank), int(o.world_size), o.rendezvous}, options,
                               [&](Comm &comm) { return run(comm, false); });
        if (o.ranks > 1 && !alone) return run_threads(int(o.ranks), options, [&](Comm &comm) { return run(comm, true); });
        SelfComm comm;
        return run(comm, true);
    } catch (const std::exception &error) {
        fflush(stdout);
        fprintf(stderr, "train_llama: %s\n", error.what());
        return 1;
    }
}
#endif
#endif
