// train_gpt2: trains GPT-2 (Radford et al., "Language models are unsupervised multitask learners", 2019) on packed sequences.
//
// Read this file first. It is the model: its weights, the arrays of a layer, the forward pass and the backward pass, followed by
// the lists of its tensors, arrays and ops, which determine files, memory and costs. Each op is a free function in llmc/ops, one
// file per op, with its formula and shapes above it. The base class Decoder (llmc/model/decoder.h) has the parts that all
// decoder-only models share, from the packed row to the loss, and calls this file's functions. The parts of a run (data, steps,
// checkpoints, evaluation, generation) begin at llmc/train/run.h. docs/tour.md follows a batch through all of it.
//
// Sizes, here and in every op:   T tokens of a rank's row     C hidden size     H heads     D head size, C = H*D
//                                F feed-forward size          V vocabulary      L layers    P positions of the longest document
// There is no batch dimension: a micro-batch is one packed row of concatenated documents (llmc/data/row.h).
//
// Under tensor parallelism a rank has H, F and V of its part of the model, H*D is smaller than C, and it norms `own` of the row's T tokens: see
// train_llama.cu.
//
// Dev is the device, CPU or CUDA, together with the storage type X of weights and activations: float or bf16. Gradients of weights
// are float.
#include "llmc/app/program.h"    // defines: run_program
#include "llmc/model/decoder.h"  // defines: Decoder, AttentionActs, LinearWeights
#include "llmc/ops/embedding.h"  // defines: embedding_{forward,backward}
#include "llmc/ops/gelu.h"       // defines: gelu_{forward,backward}
#include "llmc/ops/layernorm.h"  // defines: layernorm_{forward,backward}, residual_layernorm_forward
#include "llmc/ops/residual.h"   // defines: residual_forward

// The weights of a layer (S = X), or their gradients (S = float). A linear layer has a matrix (outputs, inputs) and a bias
// (outputs).
template <class S> struct Gpt2Layer {
    LinearWeights<S> qkv;      // (3*H*D, C)  rows of the queries, then of the keys, then of the values
    LinearWeights<S> proj;     // (C, H*D)  projection out of attention
    LinearWeights<S> fc;       // (F, C)    projection into the feed-forward part
    LinearWeights<S> fc_proj;  // (C, F)    projection out of the feed-forward part
    S *ln1, *ln1_bias;         // (C)       norm before attention
    S *ln2, *ln2_bias;         // (C)       norm before the feed-forward part
};

template <class S> struct Gpt2Weights {
    S *positions;  // (P, C)
    std::vector<Gpt2Layer<S>> layer;
    S *norm, *norm_bias;  // (C)
};

// The arrays of one layer, called activations, in addition to attention's: qkv (T, 3*H*D), att (T, H*D) and datt. The arrays of the
// feed-forward hold a tile of the row's tokens, or all of them.
template <class X> struct Gpt2Acts : AttentionActs<X> {
    X *ln1;                // (own, C)   norm of the layer's input
    float *mean1, *rstd1;  // (own)
    X *mid;                // (own, C)   residual stream after attention
    X *ln2;                // (own, C)   norm of mid
    float *mean2, *rstd2;  // (own)
    X *fc;                 // (tile, F)  in the backward pass it becomes its gradient
    X *act;                // (tile, F)  gelu(fc)
};

template <class Dev> class Gpt2 final : public Decoder<Dev> {
    using Base = Decoder<Dev>;
    using X = typename Dev::X;
    using Base::acts, Base::config, Base::dev,
        Base::row;  // acts.dx: (own, C), the residual stream's gradient
    using Base::all_tokens, Base::await_tokens, Base::begin_op, Base::for_tiles, Base::gather_tokens, Base::linear_backward,
        Base::linear_forward, Base::residual, Base::sum_tokens;

  public:
    enum Op : size_t { LN1, QKV, ATTENTION, PROJ, LN2, UP, ACT, DOWN };  // of a layer
    static OpList op_list(const ModelConfig &config);

    Gpt2(Dev dev, const ModelConfig &whole, const ModelLimits &limits);

  private:
    void input_forward(const Pass &pass) override;
    void attention_half(size_t l, const Pass &pass) override;
    void feed_forward_half(size_t l, const Pass &pass) override;
    void hidden_forward(size_t l, const Pass &pass, const X *input, size_t t, size_t n);
    void final_norm_forward() override;
    void final_norm_backward() override;
    void feed_forward_half_backward(size_t l, const Pass &pass) override;
    void attention_half_backward(size_t l, const Pass &pass) override;
    void input_backward() override;

    // Norms of the rank's tokens (own, C).
    NormShape norm_shape() const { return {row.own, config.C, config.eps}; }
    void norm(X *out, LayerNormStats stats, const X *x, LayerNormWeights<const X> w) {
        layernorm_forward(dev, out, stats, x, w, norm_shape());
    }
    void norm_backward(X *dx, LayerNormWeights<float> dw, const X *dresidual, const X *dout, const X *x, const X *w,
                       LayerNormStats stats) {
        layernorm_backward(dev, dx, dw, norm_scratch, dresidual, dout, x, w, stats, norm_shape());
    }

    void plan_layer(size_t l);
    void point_weights(TensorList<X> &params, TensorList<float> &grads) override;
    void rehearse(Touches &log, const typename Base::Calls &calls) override { Base::template rehearse_as<::Gpt2>(log, calls); }

    // Arrays that the forward pass does not keep are recomputed before a layer's backward pass (Phase::recompute), possibly at
    // another address.
    const Gpt2Acts<X> &arrays(size_t l, const Pass &pass) const { return pass.phase == Phase::forward ? fwd[l] : bwd[l]; }

    Gpt2Weights<X> weights;
    Gpt2Weights<float> gradients;
    std::vector<Gpt2Acts<X>> fwd, bwd;  // (L) the arrays of the forward and of the backward pass: the same if they are kept
    float *meanf, *rstdf;               // (own)
    float *norm_scratch;                // layernorm_scratch
};

// ---- forward --------------------------------------------------------------------------------------------------------------------------

// x = embed[token] + positions[position in the document], which the first rank of a tensor group adds
template <class Dev> void Gpt2<Dev>::input_forward(const Pass &pass) {
    begin_op(Phase::forward, EMBED);
    X *const x = residual(0, pass.phase), *const all = all_tokens(acts.output, x);
    const X *const positions = config.part.rank == 0 ? weights.positions : nullptr;
    embedding_forward(dev, all, Base::embed_w(pass), row.tokens, positions, row.doc_pos, row.T, config.C, config.V);
    sum_tokens(x, all);
}

// A layer:     mid = x + attention(norm(x))     next = mid + feed_forward(norm(mid))
//
// Its first half computes att, attention's output before the projection. In Phase::recompute, runs(op) is false for an op whose
// results were kept.
template <class Dev> void Gpt2<Dev>::attention_half(size_t l, const Pass &pass) {
    const size_t T = row.T;
    const Gpt2Layer<X> &w = weights.layer[l];
    const Gpt2Acts<X> &a = arrays(l, pass);
    const auto runs = [&](Op op) { return Base::runs(op, l, pass.phase); };

    if (runs(LN1)) norm(a.ln1, {a.mean1, a.rstd1}, residual(l, pass.phase), {w.ln1, w.ln1_bias});
    if (runs(QKV)) linear_forward({pass, l, 0, T}, Linear::qkv, a.qkv, gather_tokens(acts.input, a.ln1), w.qkv);
    if (runs(ATTENTION)) Base::attention_forward(pass, l, a);
}

// The second half: the projection of attention's output, and the feed-forward.
template <class Dev> void Gpt2<Dev>::feed_forward_half(size_t l, const Pass &pass) {
    const bool recompute = pass.phase == Phase::recompute, mid_is_kept = Base::limits.recompute < Recompute::layer;
    const size_t T = row.T, C = config.C;
    const Gpt2Layer<X> &w = weights.layer[l];
    const Gpt2Acts<X> &a = arrays(l, pass);
    const X *x = residual(l, pass.phase);
    const auto runs = [&](Op op) { return Base::runs(op, l, pass.phase); };

    X *proj = a.ln2;  // ln2 holds the projection until its norm replaces it
    if (runs(PROJ)) {
        X *const all = all_tokens(acts.output, proj);
        linear_forward({pass, l, 0, T}, Linear::o, all, a.att, w.proj);
        sum_tokens(proj, all);
    }
    if (runs(LN2)) {
        const LayerNormStats stats2{a.mean2, a.rstd2};
        const LayerNormWeights<const X> weights2{w.ln2, w.ln2_bias};
        if (recompute && mid_is_kept) norm(a.ln2, stats2, a.mid, weights2);
        else residual_layernorm_forward(dev, a.mid, a.ln2, stats2, x, proj, weights2, norm_shape());
    }
    if (recompute) return;  // the backward pass recomputes the hidden arrays, tile by tile
    const X *const input = gather_tokens(acts.input, a.ln2);
    X *const next = residual(l + 1, pass.phase), *const all = all_tokens(acts.output, next);
    for_tiles([&](size_t t, size_t n) {
        hidden_forward(l, pass, input, t, n);
        begin_op(pass.phase, DOWN, l);
        linear_forward({pass, l, t, n}, Linear::down, all + t * C, a.act, w.fc_proj);
    });
    sum_tokens(next, all);
    residual_forward(dev, next, next, a.mid, row.own * C);
}

// Computes fc and act of tokens [t, t + n) from the input of all tokens.
template <class Dev> void Gpt2<Dev>::hidden_forward(size_t l, const Pass &pass, const X *input, size_t t, size_t n) {
    const size_t C = config.C, F = config.F;
    const Gpt2Layer<X> &w = weights.layer[l];
    const Gpt2Acts<X> &a = arrays(l, pass);
    if (Base::runs(UP, l, pass.phase)) linear_forward({pass, l, t, n}, Linear::gate_up, a.fc, input + t * C, w.fc);
    if (Base::runs(ACT, l, pass.phase)) gelu_forward(dev, a.act, a.fc, n * F, config.gelu);
}

template <class Dev> void Gpt2<Dev>::final_norm_forward() {
    begin_op(Phase::forward, FINAL_NORM);
    norm(acts.normf, {meanf, rstdf}, residual(config.L, Phase::forward), {weights.norm, weights.norm_bias});
}

// ---- backward -------------------------------------------------------------------------------------------------------------------------

template <class Dev> void Gpt2<Dev>::final_norm_backward() {
    begin_op(Phase::backward, FINAL_NORM);
    norm_backward(acts.dx, {gradients.norm, gradients.norm_bias}, nullptr, acts.dx, residual(config.L, Phase::forward),
                  weights.norm, {meanf, rstdf});
}

// dx is first the gradient of the layer's output and finally the gradient of its input. An input's gradient overwrites the input,
// which linear_backward no longer needs.
template <class Dev> void Gpt2<Dev>::feed_forward_half_backward(size_t l, const Pass &pass) {
    const size_t C = config.C, F = config.F;
    const Gpt2Layer<X> &w = weights.layer[l];
    const Gpt2Layer<float> &dw = gradients.layer[l];
    const Gpt2Acts<X> &a = bwd[l];
    X *dx = acts.dx, *dln2 = a.ln2;

    X *const input = all_tokens(acts.input, dln2);  // which its gradient overwrites
    const X *const dout = all_tokens(acts.output, dx);
    auto gathers = Base::begin_gathers(l, dln2, dx, Base::recomputes(UP));
    for_tiles([&](size_t t, size_t n) {
        if (Base::recomputes(UP)) await_tokens(gathers.input);
        hidden_forward(l, pass.in(Phase::recompute), input, t, n);
        X *dact = a.act, *dfc = a.fc;  // (n, F)
        begin_op(Phase::backward, DOWN, l);
        await_tokens(gathers.dout);
        linear_backward({pass, l, t, n}, Linear::down, dact, dw.fc_proj, dout + t * C, a.act, w.fc_proj);
        begin_op(Phase::backward, ACT, l);
        gelu_backward(dev, dfc, dact, a.fc, n * F, config.gelu);
        begin_op(Phase::backward, UP, l);
        await_tokens(gathers.input);
        linear_backward({pass, l, t, n}, Linear::gate_up, input + t * C, dw.fc, dfc, input + t * C, w.fc);
    });
    sum_tokens(dln2, input);
    begin_op(Phase::backward, LN2, l);
    norm_backward(dx, {dw.ln2, dw.ln2_bias}, dx, dln2, a.mid, w.ln2, {a.mean2, a.rstd2});
}

template <class Dev> void Gpt2<Dev>::attention_half_backward(size_t l, const Pass &pass) {
    const size_t T = row.T;
    const Gpt2Layer<X> &w = weights.layer[l];
    const Gpt2Layer<float> &dw = gradients.layer[l];
    const Gpt2Acts<X> &a = bwd[l];
    X *dx = acts.dx, *dqkv = a.qkv;

    X *const dln1 = a.ln1, *const input = all_tokens(acts.input, dln1);
    auto gathers = Base::begin_gathers(l, dln1, dx);
    begin_op(Phase::backward, PROJ, l);
    await_tokens(gathers.dout);
    linear_backward({pass, l, 0, T}, Linear::o, a.datt, dw.proj, all_tokens(acts.output, dx), a.att, w.proj);
    begin_op(Phase::backward, ATTENTION, l);
    Base::attention_backward(pass, l, a);
    begin_op(Phase::backward, QKV, l);
    const bool has_dln1 = l > 0 || Base::trains_input();  // no trained weights precede the first adapters
    await_tokens(gathers.input);
    linear_backward({pass, l, 0, T}, Linear::qkv, has_dln1 ? input : nullptr, dw.qkv, dqkv, input, w.qkv);
    if (!has_dln1) return;
    sum_tokens(dln1, input);
    begin_op(Phase::backward, LN1, l);
    norm_backward(dx, {dw.ln1, dw.ln1_bias}, dx, dln1, residual(l, pass.phase), w.ln1, {a.mean1, a.rstd1});
}

// The input is a sum of two embeddings, of tokens and of positions, so each of them gets the gradient of the sum. The gradients
// of an embedding are summed over ranks as soon as they are complete, a few rows at a time.
template <class Dev> void Gpt2<Dev>::input_backward() {
    const size_t C = config.C;
    Base::sum_gradients(Base::positions_unit, true, [&](size_t, size_t) {
        if (!gradients.positions) return;  // frozen
        begin_op(Phase::backward, EMBED);
        embedding_backward(dev, gradients.positions, acts.dx, row.doc_pos + row.own_begin, row.own, C, 0, config.max_positions);
    });
    const X *const dx = all_tokens(acts.output, acts.dx);
    if (row.T) {
        Request gather = Base::begin_gather(0, acts.output, acts.dx);
        await_tokens(gather);
    }
    Base::sum_gradients(0, true, [&](size_t first, size_t n) {
        begin_op(Phase::backward, EMBED);
        embedding_backward(dev, Base::embed_dw, dx, row.tokens, row.T, C, first / C, n / C);
    });
}

// ---- tensors --------------------------------------------------------------------------------------------------------------------------

// One row per tensor of the Hugging Face files, in memory order, with the member that will point at it.
// The files store matrices as (in, out), and here they are (out, in): `true` in the last column means transposed. The initial
// values of projections into the residual stream (Tensor::residual) are divided by sqrt(2 L), because there are 2 L such sums.
// Tensors whose gradients are finished together form a unit. Within a layer, tensors with weight decay come first.
template <class S> Table gpt2_table(const ModelConfig &c, Gpt2Weights<S> &w, TensorList<S> &t) {
    const size_t C = c.C, V = c.V, F = c.F, Q = c.H * c.D;
    const LayerCuts cuts = cuts_of(c);
    const auto normal = Tensor::normal, residual = Tensor::residual, ones = Tensor::ones, zeros = Tensor::zeros;
    w.layer.resize(c.L);

    // clang-format off
    //    exists  Hugging Face name             member             shape                  init      decay  transposed, cut
    t.begin_unit("", C);
    t.add(true,   "transformer.wte.weight",     &t.embed,          {V, C},                normal,   true,  c.part.vocabulary.rows());
    for (size_t l = 0; l < c.L; l++) {
        Gpt2Layer<S> &y = w.layer[l];
        t.begin_unit(format("transformer.h.%zu.", l));
        t.add(true,   "attn.c_attn.weight",       &y.qkv.weight,     {3 * Q, C},            normal,   true,  true,  cuts.qkv);
        t.add(true,   "attn.c_proj.weight",       &y.proj.weight,    {C, Q},                residual, true,  true,  cuts.o);
        t.add(true,   "mlp.c_fc.weight",          &y.fc.weight,      {F, C},                normal,   true,  true,  cuts.hidden);
        t.add(true,   "mlp.c_proj.weight",        &y.fc_proj.weight, {C, F},                residual, true,  true,  cuts.down);
        t.add(true,   "attn.c_attn.bias",         &y.qkv.bias,       {3 * Q},               zeros,    false, cuts.qkv);
        t.add(true,   "attn.c_proj.bias",         &y.proj.bias,      {C},                   zeros,    false);
        t.add(true,   "mlp.c_fc.bias",            &y.fc.bias,        {F},                   zeros,    false, cuts.hidden);
        t.add(true,   "mlp.c_proj.bias",          &y.fc_proj.bias,   {C},                   zeros,    false);
        t.add(true,   "ln_1.weight",              &y.ln1,            {C},                   ones,     false);
        t.add(true,   "ln_1.bias",                &y.ln1_bias,       {C},                   zeros,    false);
        t.add(true,   "ln_2.weight",              &y.ln2,            {C},                   ones,     false);
        t.add(true,   "ln_2.bias",                &y.ln2_bias,       {C},                   zeros,    false);
    }
    t.table.positions = t.begin_unit();
    t.add(true,   "transformer.wpe.weight",     &w.positions,      {c.max_positions, C},  normal,   true);
    t.add_head(c);
    t.begin_unit();
    t.add(true,   "transformer.ln_f.weight",    &w.norm,           {C},                   ones,     false);
    t.add(true,   "transformer.ln_f.bias",      &w.norm_bias,      {C},                   zeros,    false);
    // clang-format on
    return t.table;
}

static Table gpt2_table(const ModelConfig &config) {  // only the table, before the arrays exist
    Gpt2Weights<float> none;
    TensorList<float> list;
    return gpt2_table(config, none, list);
}

template <class Dev> void Gpt2<Dev>::point_weights(TensorList<X> &params, TensorList<float> &grads) {
    gpt2_table(config, weights, params);
    gpt2_table(config, gradients, grads);
    if (config.part.rank > 0)  // the first rank of a tensor group adds the biases of sums over the group
        for (size_t l = 0; l < config.L; l++) {
            weights.layer[l].proj.bias = weights.layer[l].fc_proj.bias = nullptr;
            gradients.layer[l].proj.bias = gradients.layer[l].fc_proj.bias = nullptr;
        }
}

// ---- arrays ---------------------------------------------------------------------------------------------------------------------------

template <class Dev>
Gpt2<Dev>::Gpt2(Dev dev, const ModelConfig &whole, const ModelLimits &limits)
    : Base(dev, whole, limits, gpt2_table, op_list), fwd(whole.L), bwd(whole.L) {
    Plan &plan = Base::plan_;
    for (size_t l = 0; l < config.L; l++) plan_layer(l);
    plan.transient(&meanf, "act.meanf", {Base::own_max});
    plan.transient(&rstdf, "act.rstdf", {Base::own_max});
    if (Base::trains()) plan.transient(&norm_scratch, "norm scratch", {layernorm_scratch(dev, config.C)});
}

// An array is recomputed at the last column's level of --recompute and above; below that level it is kept from the forward to
// the backward pass.
template <class Dev> void Gpt2<Dev>::plan_layer(size_t l) {
    const size_t T = Base::T_max, own = Base::own_max, tile = Base::tile, C = config.C, F = config.F, H = config.H,
                 Q = H * config.D;
    Gpt2Acts<X> &f = fwd[l], &b = bwd[l];
    const auto array = Base::layer_arrays(l);
    using enum Recompute;
    // clang-format off
    //    name     pointers          shape       recomputed
    array("ln1",   f.ln1, b.ln1,     {own, C},   cheap);
    array("mean1", f.mean1, b.mean1, {own},      never);
    array("rstd1", f.rstd1, b.rstd1, {own},      never);
    array("qkv",   f.qkv, b.qkv,     {T, 3 * Q}, layer);
    array("att",   f.att, b.att,     {T, Q},     never);
    array("lse",   f.lse, b.lse,     {H, T},     never);
    array("mid",   f.mid, b.mid,     {own, C},   layer);
    array("ln2",   f.ln2, b.ln2,     {own, C},   cheap);
    array("mean2", f.mean2, b.mean2, {own},      never);
    array("rstd2", f.rstd2, b.rstd2, {own},      never);
    array("fc",    f.fc, b.fc,       {tile, F},  layer);
    array("act",   f.act, b.act,     {tile, F},  cheap);
    // clang-format on
    Base::plan_attention(l, f, b);
}

// ---- ops ------------------------------------------------------------------------------------------------------------------------------

template <class Dev> OpList Gpt2<Dev>::op_list(const ModelConfig &c) {
    const size_t C = c.C, F = c.F, Q = c.H * c.D;
    using enum Recompute;
    std::vector<LayerOp> ops(DOWN + 1);
    // clang-format off
    //               name        recomputed  cost (llmc/model/op_list.h)
    ops[LN1]       = {"norm 1",     cheap,   cost::own_tokens(cost::elements(2 * C, 4 * C))};
    ops[QKV]       = {"qkv",        layer,   cost::linear(c, Linear::qkv)};
    ops[ATTENTION] = {"attention",  never,   cost::attention(Q, Q)};
    ops[PROJ]      = {"proj",       layer,   cost::linear(c, Linear::o)};
    ops[LN2]       = {"norm 2",     cheap,   cost::own_tokens(cost::residual_norm(C))};
    ops[UP]        = {"up",         layer,   cost::linear(c, Linear::gate_up)};
    ops[ACT]       = {"activation", cheap,   cost::elements(2 * F, 3 * F)};
    ops[DOWN]      = {"down",       never,   cost::linear(c, Linear::down, C)};  // including the residual stream
    // clang-format on
    return {.layer = ops, .attention = ATTENTION, .embeddings = 2};
}

// ---- main -----------------------------------------------------------------------------------------------------------------------------

// This file is compiled three times, and the objects are linked into one program: by g++ for main and the CPU; by g++, in
// parallel, for the rehearsals of the memory plan (llmc/core/rehearsal.h); and by nvcc for CUDA (or by g++, with the emulator
// instead of the GPU: dev/emulator/README.md). The base class is compiled in llmc/model/decoder.cu.
#ifndef LLMC_NO_MAIN  // tests include this file in a single unit
#ifdef CUDA_HALF
#include "llmc/app/cuda_models.cuh"  // defines: make_cuda_device
Device cuda_device(const Options &options, const ModelFactory &cpu, Comm &host, bool own_gpu, std::unique_ptr<Comm> &gpu_comm) {
    return make_cuda_device<Gpt2>(options, cpu, host, own_gpu, gpu_comm);
}
#elif defined LLMC_REHEARSALS
template void Decoder<CpuF32>::rehearse_as<Gpt2>(Touches &, const Calls &);
template void Decoder<CpuBf16>::rehearse_as<Gpt2>(Touches &, const Calls &);
#else
extern template void Decoder<CpuF32>::rehearse_as<Gpt2>(Touches &, const Calls &);
extern template void Decoder<CpuBf16>::rehearse_as<Gpt2>(Touches &, const Calls &);
// Without a task the program trains a small GPT-2 on a novel (data/text/README.md).
int main(int argc, char **argv) {
    const auto text = [](const char *name) { return program_file(std::string("data/text/") + name); };
    // clang-format off
    const std::vector<std::string> bundled = {
        "pretrain", "--model", text("model"), "--data", text("train.safetensors"), "--eval_data", text("val.safetensors"),
        "--max_len", "256", "--row_tokens", "1024", "--train_batch_tokens", "1024", "--max_epochs", "4",
        "--learning_rate", "2e-3", "--weight_decay", "0.1", "--eval_steps", "100", "--logging_steps", "10",
        "--sample_every", "200", "--max_new_tokens", "100", "--temperature", "0.8", "--output_dir", "out/gpt2"};
    // clang-format on
    return run_program<Gpt2>("train_gpt2", argc, argv, bundled);
}
#endif
#endif
