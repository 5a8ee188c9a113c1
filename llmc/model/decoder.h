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
// pass.h describes a pass, weights.h loads weights from wherever they are stored, trace.h has the tools that observe ops, and generation_arrays.h the cache and
// the draws of generation. decoder.cu defines the functions of this class, and is compiled once for all programs.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../core/arena.h"
#include "../core/memory.h"
#include "../core/rehearsal.h"
#include "../ops/attention_types.h"
#include "../ops/divergence.h"
#include "../ops/loss.h"
#include "../ops/matmul.h"
#include "../parallel/expert_exchange.h"
#include "../parallel/mesh.h"
#include "../parallel/rehearsal_comm.h"
#include "config.h"
#include "delta.h"
#include "device_row.h"
#include "linear_layers.h"
#include "model.h"
#include "op_list.h"
#include "pass.h"
#include "ranks.h"
#include "table.h"
#include "trace.h"

template <class Dev> class Weights;
template <class Dev> class GenerationArrays;
template <class Dev> struct Zero;
class Graphs;
struct RingAttention;

// The arrays of a layer's attention.
template <class X> struct AttentionActs {
    X *qkv;        // (T, (H+2*KV)*D)    queries, keys, values. Backward: becomes dqkv
    X *att;        // (T, H*D)
    float *lse;    // (H, T)
    float *out32;  // (T, H*D)           attention output during the merge of blocks; may be empty without a merge
    X *datt;       // (T, H*D)
    AttentionGrads grads;
    float *delta;        // (H, T)
    std::byte *scratch;  // attention_scratch
    X *ring;             // ring_attention_buffers, this and the next one
    float *ring32;
};

template <class Dev> class Decoder : public Model, public Generator {
  public:
    ~Decoder() override;
    Plan &plan() override;
    RehearsedSteps rehearse_steps(size_t micro_steps) override;
    Arena &arena() override { return *arena_; }
    Memory &memory() override;
    void profile() override;
    Trace &trace() override { return trace_; }
    Generator &generator() override { return *this; }
    void allocate(Mesh &mesh, bool guards, bool poison) override;
    const std::vector<Tensor> &tensors() const override;
    const std::vector<Tensor> &frozen_tensors() const override;
    void load(const HfWeights &files, uint64_t seed) override;
    void load_adapters(const HfWeights &adapter, const HfWeights &base, uint64_t seed) override;
    void randomise(std::optional<uint64_t> key) override { key_ = key; }
    void initialise(uint64_t seed) override;
    void save(const std::string &dir, const std::string &export_dtype) override;
    void zero_gradients(uint64_t key = 0) override;
    double gradient_norm() override;
    std::string nonfinite_gradient() override;
    std::string store_name() const override;
    void update(const AdamW &adamw) override;
    OptimizerState optimizer_state(size_t tensor_ranks = 0) override;
    void optimizer_state_loaded() override;
    void gather_parameters() override;
    void copy_parameters_to(Model &other) override;
    Payload take_sent() override;
    double model_flops(const Row &row) const override { return whole_ops_.model_flops(whole_, row); }

    std::vector<double> evaluate(const Row &row) override;
    std::vector<double> evaluate_base(const Row &row) override;
    void backward(std::span<const float> weights, float entropy_weight, bool last) override;
    void accumulate(const Row &row, float weight, bool last) override;
    void accumulate(const Row &row, const TokenLoss &loss, float entropy_weight, bool last) override;
    void distil(const Row &row, const TeacherRow &teacher, float weight, bool last) override;
    void count_routing(const Row &row, bool last) override;
    TeacherRow teach(const Row &row) override;
    void compare(const Row &row, const TeacherRow &teacher) override;
    DivergenceSums take_divergence() override;
    LossSums take_sums() override;
    Routing routing() override;
    Zero<Dev> &parameters();

    void next_logits(const Row &row, const CacheStep &step) override;
    std::vector<float> logits() override;
    DrawnTokens draw(const DrawRequest &request) override;
    void copy_cache_page(size_t to, size_t from) override;
    void copy_state(size_t to, size_t from) override;
    bool stops(bool wants) override { return mesh_->tensor ? mesh_->tensor->max(wants) > 0 : wants; }
    void finish() override;

  protected:
    using X = typename Dev::X;
    using Calls = std::function<void(Model &, const ModelLimits &)>;  // the calls of a rehearsal

    // table, op_list: of the trainer, for any configuration
    Decoder(Dev dev, const ModelConfig &config, const ModelLimits &limits, Table (*table)(const ModelConfig &),
            OpList (*op_list)(const ModelConfig &));

    // ---- the trainer's part -----------------------------------------------------------------------------------------------------------

    // Points the trainer's weights and their gradients at their arrays. The gradients of frozen weights become null.
    virtual void point_weights(TensorList<X> &params, TensorList<float> &grads) = 0;
    virtual void input_forward(const Pass &pass) = 0;  // computes residual(0) from row.tokens
    // Layer l computes residual(l + 1) from residual(l): its first half up to attention's output, its second half the output projection
    // and the feed-forward (see runs() and for_tiles()). Ranks without a row call the second half, forward and backward, of layers whose experts are
    // divided.
    virtual void attention_half(size_t l, const Pass &pass) = 0;
    virtual void feed_forward_half(size_t l, const Pass &pass) = 0;
    virtual void final_norm_forward() = 0;   // computes acts.normf from residual(L)
    virtual void final_norm_backward() = 0;  // replaces acts.dx, the gradient of acts.normf, by the gradient of residual(L)
    // The first function replaces acts.dx, the gradient of residual(l + 1), by the gradient of the residual stream after attention, and the
    // second one by the gradient of residual(l).
    virtual void feed_forward_half_backward(size_t l, const Pass &pass) = 0;
    virtual void attention_half_backward(size_t l, const Pass &pass) = 0;
    virtual void rehearse(Touches &log, const Calls &calls) = 0;  // implemented as rehearse_as<the trainer's class>(log, calls)
    virtual void input_backward() = 0;  // calls sum_gradients itself, because only the trainer knows the units of its input

    // ---- the plan ---------------------------------------------------------------------------------------------------------------------

    bool trains() const { return limits.mode == Mode::train; }
    bool adapts() const { return config.lora.rank > 0; }
    bool has_teacher() const { return limits.teacher.C > 0; }
    bool routes() const { return trains() && config.experts.number > 0; }
    bool joins(size_t l) const { return mesh_->experts && config.has_experts(l); }
    bool trains_input() const { return !adapts() || config.lora.embedding; }
    auto layer_arrays(size_t l);
    template <class T>
    void plan_kept(size_t l, T **forward, T **backward, const std::string &name, std::vector<size_t> shape, bool whole = false);
    template <template <class> class M> void rehearse_as(Touches &log, const Calls &calls);
    Payload &sent();
    void plan_attention(size_t l, AttentionActs<X> &forward, AttentionActs<X> &backward);

    // ---- computation ------------------------------------------------------------------------------------------------------------------

    // Marks the beginning of an op, of layer l if it belongs to a layer. bucket: Work::bucket
    void begin_op(Phase phase, size_t op, size_t l, size_t bucket = 0) {
        matmul_use_scratch(dev, acts.matmul);  // another model on this device may have set its own scratch, and freed it since
        trace_.begin(phase, op, l, bucket);
    }
    void begin_op(Phase phase, RowOp op, size_t bucket = 0) { begin_op(phase, ops.number(op), 0, bucket); }
    // Begins an op of a half of layer l. Returns false if the op must not run: if the model lacks it, or in Phase::recompute, if its results have been
    // kept.
    bool runs(size_t op, size_t l, Phase phase) {
        if (!ops.layer[op].exists || (phase == Phase::recompute && !recomputes(op))) return false;
        begin_op(phase, op, l);
        return true;
    }
    bool recomputes(size_t op) const { return limits.recompute >= ops.layer[op].from; }
    // Calls f(first, n) for each tile of the row's tokens in order. The hidden arrays of the feed-forward hold one tile: (tile, F).
    template <class F> void for_tiles(F f) { for_tiles(f, row.T, tile); }
    template <class F> void for_tiles(F f, size_t tokens, size_t step) {
        in_parts(
            tokens, [&](size_t first, size_t n) { trace_.tile = n, f(first, n); }, step);
        trace_.tile = 0;
    }
    // Describes tokens [t, t + n) of those that the rank norms, in layer l, and of the ranks with which it divides experts.
    ExpertTokens expert_tokens(size_t l, size_t t, size_t n, std::vector<ExpertTraffic> &traffic);
    // The residual stream, (T, C): the input of layer l, or of the final norm for l = L. The backward pass may have loaded it into another array.
    X *residual(size_t l, Phase phase) const { return (phase == Phase::forward ? residual_.forward : residual_.backward)[l]; }
    X *embed_w(const Pass &pass) const { return pass.adapters ? embed_w_ : base_embed_w_; }
    // Under tensor parallelism a rank norms its own tokens and adds them to the residual stream, but computes its part of the heads and channels for all
    // tokens; experts see the rank's own tokens. gather_tokens() goes from the first form to the second, and returns the array that has all tokens.
    // sum_tokens() goes back: it adds the ranks' parts of each token's sum. On one rank both forms are the same array, and these functions do nothing.
    X *gather_tokens(X *all, const X *own);
    void sum_tokens(X *own, const X *all);
    X *all_tokens(X *all, X *own) const { return limits.ranks.tp > 1 ? all : own; }
    // The same between two ops of layer l's backward pass, while computation goes on. `all` has the tokens after await_tokens().
    Request begin_gather(size_t l, X *all, const X *own);
    void await_tokens(Request &gather) {
        if (limits.ranks.tp > 1) mesh_->tensor->wait(std::move(gather));
    }
    // The gathers of a half's input into acts.input and of its output's gradient into acts.output, before the half's backward pass. The one that is
    // needed later overlaps with computation.
    struct HalfGathers {
        Request input, dout;
    };
    HalfGathers begin_gathers(size_t l, const X *input, const X *dout, bool input_first = false);
    // Returns the rank's part of an array with n floats of each rank of its tensor group, which gather_floats() sends to the others.
    float *own_floats(float *all, size_t n) const { return all + limits.ranks.tp_rank() * n; }
    void gather_floats(float *all, size_t n);
    void attention_forward(const Pass &pass, size_t l, const AttentionActs<X> &a);
    void attention_backward(const Pass &pass, size_t l, const AttentionActs<X> &a);
    DeltaCache<X> delta_cache(size_t l) const;
    DeltaRing delta_ring(const Pass &pass) {
        return {pass.generates() ? static_cast<Comm &>(alone_) : *mesh_->ring, *row.split, row.borders, sent()};
    }
    // Computes a linear layer with its adapters for tokens [t, t + n) of the row; the pointers point at token t.
    void linear_forward(const LayerRows &rows, Linear matrix, X *out, const X *x, LinearWeights<X> w) {
        linears_.forward(rows, matrix, out, x, w);
    }
    void linear_backward(const LayerRows &rows, Linear matrix, X *dx, LinearWeights<float> dw, const X *dout, const X *x,
                         LinearWeights<X> w, bool add_dx = false);
    // Returns true if gradients of weights are added to the gradients of earlier rows, and false if they overwrite them.
    bool accumulates() const;
    // Adds the rank's tokens to the routing sums, unless the pass is of generation or of the base model.
    void add_routing(const Pass &pass, const float *probs, const int32_t *chosen, const ExpertTokens &tokens);
    const float *balance() const { return config.experts.aux_loss_coef > 0 ? acts.balance : nullptr; }
    // Calls add(first, n) for the unit's buckets, which computes the gradients of n elements (Weights::sum_gradients).
    void sum_gradients(size_t unit, bool complete, const std::function<void(size_t, size_t)> &add);

    Dev dev;
    const ModelConfig config;  // of the rank's part of the model
    const ModelLimits limits;
    const size_t T_max;    // tokens of this rank's part of the longest row
    const size_t own_max;  // of which the rank itself norms this many: all of them without tensor parallelism
    const OpList ops;
    // Tokens in the hidden arrays of the feed-forward: all tokens if the backward pass keeps these arrays, otherwise limits.tile_tokens
    // (by default one matmul_run), rounded up to a multiple of matmul_run so that no bit depends on it.
    const size_t tile;
    // The same for experts, which see only the tokens that the rank norms; without rounding if ranks divide them.
    const size_t expert_tile;
    const size_t positions_unit;  // the table's unit of learned positions
    Plan plan_;
    size_t most_own = 0;  // row.own of the rank with most of them in this pass, among the ranks that divide the experts
    float *embed_dw = nullptr, *head_dw = nullptr;

    DeviceRow row{config, limits};
    LinearLayers<Dev> linears_{dev, config};

    struct {
        X *normf;           // (own, C)         own: the tokens that the rank norms, all T without tensor parallelism
        X *dx;              // (own, C)         gradient of the residual stream
        X *input, *output;  // (T, C)           with tensor parallelism, all tokens of what a block reads and of what it computes
        float *parts;       // (tp, fields, rows of a chunk)  likewise the statistics of the head (head_parts.h)
        X *taught;          // (T, C)           normf by the base of adapters, which is the teacher, of all tokens
        std::byte *head;    // lm_head_scratch; of a student divergence_scratch
        HeadStats stats;    // (N) each
        DivergenceStats divergence;  // (N) each    of a student, with `stats` as its own
        float *scores;               // (N)              reward model
        double *sums;                // (3), of a student (8)    head_sums, the teacher's and divergence_sums since the last call
        int64_t *routing;            // (L, 2E+2)        with experts: router_sums of each layer's tokens since zero_gradients()
        float *balance;              // (E)              derivatives of the auxiliary loss
        std::byte *matmul;           // matmul_scratch
    } acts;

  private:
    void plan_row();
    void plan_head();
    void find_lifetimes();
    Work layout() const;
    void begin_pass();
    // The pass of the model that is trained, or evaluated.
    Pass own_pass(Phase phase) const { return {.phase = phase, .fp8 = limits.fp8, .key = key_}; }
    X *head_w(const Pass &pass) const { return pass.adapters ? head_w_ : base_head_w_; }
    void load_part(const Row &row, const Pass &pass);
    bool is_noisy(const Pass &pass) const { return pass.key && limits.neftune_alpha > 0; }
    bool all_finished(bool finished);
    HeadLoss head_loss() const;
    HeadShape head_shape(size_t T, size_t N) const {
        return {T, config.C, has_teacher() && limits.ranks.tp == 1 ? limits.teacher.V : config.V, N, limits.head_chunk, most_V()};
    }
    // The chunks of the head are those of the rank with the largest part of the vocabulary.
    size_t most_V() const { return config.part.ranks > 1 ? vocabulary_of(config.part, 0).count : config.V; }
    template <class Stats> void merge_over_parts(const Stats &stats, size_t n);
    // What gives the head's loss its derivatives: without either the row's weights, which are the derivatives with respect to each nll.
    struct Judge {
        const TokenLoss *loss = nullptr;
        const TeacherRow *teacher = nullptr;
    };
    TeacherHead<X> teacher_head(const Judge &judge) const {
        const TeacherRow &t = *judge.teacher;
        return {static_cast<const X *>(t.x), static_cast<const X *>(t.w), t.C, limits.teacher.beta};
    }
    void head_weight(const Pass &pass, const Judge &judge, size_t first, size_t count);
    void forward(const Pass &pass);
    void accumulate(const Row &row, float weight, const Judge &judge, bool last);
    void gradients(bool last, const Judge &judge = {});
    void head(const Pass &pass, X *dx, float *dhead, const Judge &judge = {});
    void head_backward(const Pass &pass, const Judge &judge);
    void add_sums();
    void clear_routing();
    void find_balance();
    std::vector<double> values_of(const Row &row, const Pass &pass);
    RingAttention ring(const Pass &pass, size_t l);
    AttentionShape attention_shape(size_t T) const { return {T, config.H, config.KV, config.D, config.attention_scale()}; }
    AttentionInputs<X> attention_inputs(size_t l, const AttentionActs<X> &a);
    enum Stretch { FORWARD, RECOMPUTE, BACKWARD };  // the parts of a layer's work
    template <class F> void recorded(const Pass &pass, size_t l, Stretch stretch, const F &work);
    void offload(size_t l);
    void prefetch(size_t l);
    void wait_for_copies(size_t l, Phase phase);

    Trace trace_{ops};
    const std::unique_ptr<Weights<Dev>> weights_;
    const std::unique_ptr<GenerationArrays<Dev>> generation_;
    Mesh *mesh_ = nullptr;
    std::unique_ptr<Memory> memory_;
    std::unique_ptr<Arena> arena_;    // in memory_
    std::unique_ptr<Store> store_;    // copies to and from the arena
    std::unique_ptr<Graphs> graphs_;  // null: every launch is a call
    SelfComm alone_;                  // this rank alone, for generation
    std::optional<uint64_t> key_;     // of dropout and noise; without a key both are off
    // (V, C); the head of a reward model is (1, C). With adapters the base model has its own, where they are trained in full.
    X *embed_w_ = nullptr, *head_w_ = nullptr, *base_embed_w_ = nullptr, *base_head_w_ = nullptr;
    size_t targets_ = 0;             // the number of targets since the last take_sums()
    bool balance_is_known_ = false;  // true if `balance` is valid for this step

    const ModelConfig whole_;
    Table (*const table_of_)(const ModelConfig &);
    const OpList whole_ops_;

    // (L + 1) The residual stream in the forward and in the backward pass: the same arrays, if they are not offloaded in between.
    struct {
        std::vector<X *> forward, backward;
    } residual_;

    // An array that is offloaded to the store after its layer's forward pass, and loaded into another array before the layer's backward
    // pass.
    struct OffloadedArray {
        size_t place, bytes;  // bytes: of T_max tokens
        bool whole;           // its size is not proportional to the tokens
        void **forward, **backward;
    };
    size_t bytes_now(const OffloadedArray &t) const {
        const size_t tokens = std::max(row.T, limits.ranks.tp * most_own);
        return round_up(t.whole ? t.bytes : std::min(t.bytes, ceil_div(t.bytes * tokens, T_max)), store_alignment);
    }
    std::vector<std::vector<OffloadedArray>> offloaded_;  // of each layer
};

// ---- functions that the trainers instantiate --------------------------------------------------------------------------------------------

// Plans arrays of layer l, one per call:
//   array(name, pointer of the forward pass, pointer of the backward pass, shape, recomputed from, whole)
// The fifth argument is the lowest level of recomputation at which the array is not kept for the backward pass. There are then two
// arrays: the forward pass's, and one into which the backward pass recomputes it. whole: the array's size is not proportional to the tokens.
template <class Dev> auto Decoder<Dev>::layer_arrays(size_t l) {
    return [this, l](const char *name, auto *&forward, auto *&backward, std::vector<size_t> shape, Recompute from,
                     bool whole = false) {
        const std::string full = format("act.%zu.%s", l, name);
        if (trains() && limits.recompute < from) return plan_kept(l, &forward, &backward, full, shape, whole);
        plan_.transient(&forward, full, shape);
        if (trains()) plan_.transient(&backward, full + " recomputed", shape);
    };
}

// Plans an array of layer l that is alive from the forward to the backward pass. With offloaded activations there are two arrays; the second is
// loaded from the store. The backward pass begins with the last layer, so the last layer's arrays are not offloaded.
template <class Dev>
template <class T>
void Decoder<Dev>::plan_kept(size_t l, T **forward, T **backward, const std::string &name, std::vector<size_t> shape,
                             bool whole) {
    size_t bytes = sizeof(T);
    for (size_t n : shape) bytes *= n;
    plan_.transient(forward, name, shape);
    if (!trains() || !limits.offload.activations || l + 1 >= config.L || bytes == 0) return plan_.alias(backward, forward);
    plan_.travels();
    offloaded_[l].push_back(
        {plan_.add_place(name, bytes), bytes, whole, reinterpret_cast<void **>(forward), reinterpret_cast<void **>(backward)});
    plan_.transient(backward, name + " again", shape);
    plan_.travels();
}

// Calls a model M on a rehearsing device. The rehearsal only depends on whether the row is longer than one tile; its tiles have row_multiple
// tokens.
template <class Dev> template <template <class> class M> void Decoder<Dev>::rehearse_as(Touches &log, const Calls &calls) {
    if constexpr (!is_rehearsal<Dev>) {
        const Ranks &r = limits.ranks;
        const int group = int(r.group());
        const int experts = int(r.expert_parallel), tp = int(r.tp);
        std::vector<RehearsalComm::Split> splits = {{int(r.sp), tp}};
        if (group < int(r.world)) splits.insert(splits.end(), {{group, 1}, {int(r.world) / group, group}});
        for (int divide : {experts, tp})
            if (divide > 1) splits.insert(splits.end(), {{divide, 1}, {group / divide, divide}});
        RehearsalComm world(log, int(r.rank), int(r.world), splits);
        Mesh mesh(world, int(r.sp), int(r.zero_group), experts, tp);
        ModelLimits few = limits;
        few.row_tokens = (tile < T_max || expert_tile < own_max ? 2 : 1) * row_multiple * r.sp * r.tp;
        few.tile_tokens = row_multiple;
        M<Rehearsal<Dev>> model({dev, &log}, whole_, few);
        model.allocate(mesh, true, false);
        log.watch(model.plan());
        if (!std::ranges::equal(plan_.segments(), model.plan().segments(), {}, &Segment::name, &Segment::name))
            die("the rehearsed model plans other arrays than the model itself");
        calls(model, few);
        log.finish();
    }
}

// Instantiated in decoder.cu.
extern template class Decoder<CpuF32>;
extern template class Decoder<CpuBf16>;
extern template class Decoder<Rehearsal<CpuF32>>;
extern template class Decoder<Rehearsal<CpuBf16>>;
#ifdef CUDA_HALF
extern template class Decoder<CudaF32>;
extern template class Decoder<CudaBf16>;
extern template class Decoder<Rehearsal<CudaF32>>;
extern template class Decoder<Rehearsal<CudaBf16>>;
#endif
