// train_gpt2: trains GPT-2 (Radford et al., "Language models are unsupervised multitask learners", 2019) on packed sequences.
//
// This is the file to read first. It is the model, top to bottom: the parameter table, the activation plan, the forward pass, the backward pass.
// Each op is a free function in llmc/ops, one file an op, with its formula and shapes above it. What all decoder-only models share, from the
// packed row to the loss, calls this file's functions and stands in llmc/model/decoder.h; what a run is made of (data, steps,
// checkpoints, evaluation, generation) in llmc/train/run.h. docs/gpt2_tour.md follows a batch through all of it.
//
// Sizes, here and in every op:   T tokens of a rank's row     C hidden size     H heads     D head size, C = H*D
//                                F feed-forward size          V vocabulary      L layers    P positions a document may have
// There is no batch dimension: a micro-batch is one packed row of documents laid end to end (llmc/data/dataloader.h).
#include "llmc/app/program.h"    // defines: run_program
#include "llmc/model/decoder.h"  // defines: Decoder, AttentionActs
#include "llmc/ops/embedding.h"  // defines: embedding_{forward,backward}
#include "llmc/ops/gelu.h"       // defines: gelu_{forward,backward}
#include "llmc/ops/layernorm.h"  // defines: layernorm_{forward,backward}, residual_layernorm_forward
#include "llmc/ops/residual.h"   // defines: residual_forward

// ---- parameter table ------------------------------------------------------------------------------------------------------------------

// S is the storage type for weights, and float for their gradients.
template <class S> struct Gpt2Layer {
    S *qkv;             // (3*C, C)  rows of the queries, then of the keys, then of the values
    S *proj;            // (C, C)    projection out of attention
    S *fc;              // (F, C)    projection into the feed-forward part
    S *fc_proj;         // (C, F)    projection out of the feed-forward part
    S *qkv_bias;        // (3*C)
    S *proj_bias;       // (C)
    S *fc_bias;         // (F)
    S *fc_proj_bias;    // (C)
    S *ln1, *ln1_bias;  // (C)  norm before attention
    S *ln2, *ln2_bias;  // (C)  norm before the feed-forward part
};

template <class S> struct Gpt2Weights {
    S *embed;      // (V, C)
    S *positions;  // (P, C)
    std::vector<Gpt2Layer<S>> layer;
    S *norm, *norm_bias;  // (C)
    S *head;              // (V, C)  the embedding itself if they are tied; (1, C) in a reward model
};

// One row per tensor of the Hugging Face files, in the order in which they lie in the flat arrays, and the member that points at it. The files
// hold matrices as (in, out), here they are (out, in): their last column says `true`, transposed. The initial values of projections into
// the residual stream (Tensor::residual) are divided by sqrt(2 L), because there are 2 L such sums. Within a layer the tensors that decay
// come first.
template <class S> Table gpt2_table(const ModelConfig &c, Gpt2Weights<S> &w, Locate<S> locate) {
    const size_t C = c.C, V = c.V, F = c.F;
    const auto normal = Tensor::normal, residual = Tensor::residual, ones = Tensor::ones, zeros = Tensor::zeros;
    TableBuilder<S> t(locate);
    w.layer.resize(c.L);

    // clang-format off
    //    exists  Hugging Face name                member            shape                  init      decay  transposed
    t.begin_unit(C);
    t.add(true,   "transformer.wte.weight",        &w.embed,         {V, C},                normal,   true);
    for (size_t l = 0; l < c.L; l++) {
        t.begin_unit();
        Gpt2Layer<S> &y = w.layer[l];
        t.prefix = format("transformer.h.%zu.", l);
        t.add(true,   "attn.c_attn.weight",            &y.qkv,           {3 * C, C},            normal,   true,  true);
        t.add(true,   "attn.c_proj.weight",            &y.proj,          {C, C},                residual, true,  true);
        t.add(true,   "mlp.c_fc.weight",               &y.fc,            {F, C},                normal,   true,  true);
        t.add(true,   "mlp.c_proj.weight",             &y.fc_proj,       {C, F},                residual, true,  true);
        t.add(true,   "attn.c_attn.bias",              &y.qkv_bias,      {3 * C},               zeros,    false);
        t.add(true,   "attn.c_proj.bias",              &y.proj_bias,     {C},                   zeros,    false);
        t.add(true,   "mlp.c_fc.bias",                 &y.fc_bias,       {F},                   zeros,    false);
        t.add(true,   "mlp.c_proj.bias",               &y.fc_proj_bias,  {C},                   zeros,    false);
        t.add(true,   "ln_1.weight",                   &y.ln1,           {C},                   ones,     false);
        t.add(true,   "ln_1.bias",                     &y.ln1_bias,      {C},                   zeros,    false);
        t.add(true,   "ln_2.weight",                   &y.ln2,           {C},                   ones,     false);
        t.add(true,   "ln_2.bias",                     &y.ln2_bias,      {C},                   zeros,    false);
    }
    t.prefix = "";
    t.table.positions = t.begin_unit();
    t.add(true,   "transformer.wpe.weight",        &w.positions,     {c.max_positions, C},  normal,   true);
    t.add_head(c, &w.head, w.embed);
    t.begin_unit();
    t.add(true,   "transformer.ln_f.weight",       &w.norm,          {C},                   ones,     false);
    t.add(true,   "transformer.ln_f.bias",         &w.norm_bias,     {C},                   zeros,    false);
    // clang-format on
    return t.table;
}

static Table gpt2_table(const ModelConfig &config) {  // the table alone, before the arrays exist
    Gpt2Weights<float> none;
    return gpt2_table(config, none, nowhere<float>());
}

// ---- activation plan ------------------------------------------------------------------------------------------------------------------

// The arrays of one layer.
template <class X> struct Gpt2Acts : AttentionActs<X> {
    X *ln1;                // (T, C)  norm of the layer's input
    float *mean1, *rstd1;  // (T)
    X *mid;                // (T, C)  residual stream after attention
    X *ln2;                // (T, C)  norm of mid
    float *mean2, *rstd2;  // (T)
    X *fc;                 // (tile, F)  Backward: becomes its gradient
    X *act;                // (tile, F)  gelu(fc)
};

template <class Dev> class Gpt2 final : public Decoder<Dev> {
    using Base = Decoder<Dev>;
    using X = typename Dev::X;
    using Base::begin_op, Base::trains;
    using Base::dev, Base::config, Base::T_max, Base::limits, Base::plan_, Base::row, Base::acts;

  public:
    enum Op : size_t { LN1, QKV, ATTENTION, PROJ, LN2, UP, ACT, DOWN };  // of a layer, in the order of the forward pass
    static OpList op_list(const ModelConfig &config);

    Gpt2(Dev dev, const ModelConfig &config, const ModelLimits &limits);

  private:
    void plan_layer(size_t l);
    void point_weights(const Locate<X> &params, const Locate<float> *grads) override;
    void input_forward() override;
    void attention_half(size_t l, Pass pass) override;
    void feed_forward_half(size_t l, Pass pass) override;
    void hidden_forward(size_t l, Pass pass, size_t t, size_t n);
    void final_norm_forward() override;
    void final_norm_backward() override;
    void feed_forward_half_backward(size_t l) override;
    void attention_half_backward(size_t l) override;
    void input_backward() override;
    void find_lifetimes() override { Base::template rehearse<::Gpt2>(); }

    Gpt2Weights<X> w;
    Gpt2Weights<float> dw;
    std::vector<Gpt2Acts<X>> fwd,
        bwd;               // (L) a layer's arrays in the forward and in the backward pass; kept ones are the same in both
    float *meanf, *rstdf;  // (T)
    float *norm_scratch;   // layernorm_scratch
};

template <class Dev> OpList Gpt2<Dev>::op_list(const ModelConfig &c) {
    const size_t C = c.C, F = c.F;
    using enum Recompute;
    std::vector<LayerOp> ops(DOWN + 1);
    // clang-format off
    //               name        recomputed  cost (llmc/model/op_list.h)
    ops[LN1]       = {"norm 1",     cheap,   cost::elements(2 * C, 4 * C)};
    ops[QKV]       = {"qkv",        layer,   cost::linear(c, Linear::qkv, C, 3 * C)};
    ops[ATTENTION] = {"attention",  never,   cost::attention(C, C)};
    ops[PROJ]      = {"proj",       layer,   cost::linear(c, Linear::o, C, C)};
    ops[LN2]       = {"norm 2",     cheap,   cost::residual_norm(C)};
    ops[UP]        = {"up",         layer,   cost::linear(c, Linear::gate_up, C, F)};
    ops[ACT]       = {"activation", cheap,   cost::elements(2 * F, 3 * F)};
    ops[DOWN]      = {"down",       never,   cost::linear(c, Linear::down, F, C, C)};  // and the residual stream
    // clang-format on
    return {.layer = ops, .attention = ATTENTION, .embeddings = 2};
}

template <class Dev>
Gpt2<Dev>::Gpt2(Dev dev, const ModelConfig &config, const ModelLimits &limits)
    : Base(dev, config, limits, gpt2_table(config), op_list(config)), fwd(config.L), bwd(config.L) {
    for (size_t l = 0; l < config.L; l++) plan_layer(l);
    plan_.transient(&meanf, "act.meanf", {T_max});
    plan_.transient(&rstdf, "act.rstdf", {T_max});
    if (trains()) plan_.transient(&norm_scratch, "norm scratch", {layernorm_scratch(dev, config.C)});
}

template <class Dev> void Gpt2<Dev>::plan_layer(size_t l) {
    const size_t T = T_max, tile = this->tile, C = config.C, F = config.F, H = config.H;
    using A = Gpt2Acts<X>;
    const auto array = Base::layer_arrays(l, fwd[l], bwd[l]);
    using enum Recompute;
    // clang-format off
    //    name     member     shape       recomputed
    array("ln1",   &A::ln1,   {T, C},     cheap);
    array("mean1", &A::mean1, {T},        never);
    array("rstd1", &A::rstd1, {T},        never);
    array("qkv",   &A::qkv,   {T, 3 * C}, layer);
    array("att",   &A::att,   {T, C},     never);
    array("lse",   &A::lse,   {H, T},     never);
    array("mid",   &A::mid,   {T, C},     layer);
    array("ln2",   &A::ln2,   {T, C},     cheap);
    array("mean2", &A::mean2, {T},        never);
    array("rstd2", &A::rstd2, {T},        never);
    array("fc",    &A::fc,    {tile, F},  layer);
    array("act",   &A::act,   {tile, F},  cheap);
    // clang-format on
    Base::plan_attention(l, fwd[l], bwd[l]);
}

template <class Dev> void Gpt2<Dev>::point_weights(const Locate<X> &params, const Locate<float> *grads) {
    gpt2_table(config, w, params);
    if (grads) gpt2_table(config, dw, *grads);
    this->head_w = w.head, this->head_dw = dw.head;
}

// ---- forward --------------------------------------------------------------------------------------------------------------------------

// x = embed[token] + positions[position in the document]
template <class Dev> void Gpt2<Dev>::input_forward() {
    begin_op(Pass::forward, EMBED);
    embedding_forward(dev, acts.x[0], w.embed, row.tokens, w.positions, row.doc_pos, row.T, config.C);
}

// One layer: mid = x + attention(norm(x)), next = mid + feed_forward(norm(mid)). Its first half computes attention's output. In
// Pass::recompute both halves compute, for the backward pass, only the arrays that were not kept.
template <class Dev> void Gpt2<Dev>::attention_half(size_t l, Pass pass) {
    const size_t T = row.T, C = config.C;
    const Gpt2Layer<X> &y = w.layer[l];
    const Gpt2Acts<X> &a = pass == Pass::recompute ? bwd[l] : fwd[l];
    const X *x = acts.x[l];  // (T, C)
    const float eps = config.eps;
    const auto runs = [&](Op op) { return Base::runs(op, l, pass); };

    if (runs(LN1)) layernorm_forward(dev, a.ln1, a.mean1, a.rstd1, x, y.ln1, y.ln1_bias, T, C, eps);
    if (runs(QKV)) Base::linear_forward(l, {Linear::qkv, C, 3 * C}, a.qkv, a.ln1, y.qkv, y.qkv_bias, 0, T);
    if (runs(ATTENTION)) Base::attention_forward(l, a);
}

// The second half of a layer: attention's output projection and the feed-forward.
template <class Dev> void Gpt2<Dev>::feed_forward_half(size_t l, Pass pass) {
    const bool recompute = pass == Pass::recompute, mid_is_kept = limits.recompute < Recompute::layer;
    const size_t T = row.T, C = config.C, F = config.F;
    const Gpt2Layer<X> &y = w.layer[l];
    const Gpt2Acts<X> &a = recompute ? bwd[l] : fwd[l];
    const X *x = acts.x[l];  // (T, C)
    const float eps = config.eps;
    const auto runs = [&](Op op) { return Base::runs(op, l, pass); };

    if (runs(PROJ))  // ln2 holds the projection until its norm replaces it
        Base::linear_forward(l, {Linear::o, C, C}, a.ln2, a.att, y.proj, y.proj_bias, 0, T);
    if (runs(LN2)) {
        if (recompute && mid_is_kept) layernorm_forward(dev, a.ln2, a.mean2, a.rstd2, a.mid, y.ln2, y.ln2_bias, T, C, eps);
        else residual_layernorm_forward(dev, a.mid, a.ln2, a.mean2, a.rstd2, x, a.ln2, y.ln2, y.ln2_bias, T, C, eps);
    }
    if (recompute) return;  // the backward pass recomputes the hidden arrays, tile by tile
    Base::for_tiles([&](size_t t, size_t n) {
        hidden_forward(l, pass, t, n);
        X *next = acts.x[l + 1] + t * C;  // (n, C)
        begin_op(Pass::forward, DOWN, l);
        Base::linear_forward(l, {Linear::down, F, C}, next, a.act, y.fc_proj, y.fc_proj_bias, t, n);
        residual_forward(dev, next, next, a.mid + t * C, n * C);
    });
}

// Computes fc and act of tokens [t, t + n).
template <class Dev> void Gpt2<Dev>::hidden_forward(size_t l, Pass pass, size_t t, size_t n) {
    const size_t C = config.C, F = config.F;
    const Gpt2Layer<X> &y = w.layer[l];
    const Gpt2Acts<X> &a = pass == Pass::recompute ? bwd[l] : fwd[l];
    if (Base::runs(UP, l, pass)) Base::linear_forward(l, {Linear::gate_up, C, F}, a.fc, a.ln2 + t * C, y.fc, y.fc_bias, t, n);
    if (!Base::runs(ACT, l, pass)) return;
    if (config.gelu == Gelu::tanh) gelu_forward<Gelu::tanh>(dev, a.act, a.fc, n * F);
    else gelu_forward<Gelu::erf>(dev, a.act, a.fc, n * F);
}

template <class Dev> void Gpt2<Dev>::final_norm_forward() {
    begin_op(Pass::forward, FINAL_NORM);
    layernorm_forward(dev, acts.normf, meanf, rstdf, acts.x[config.L], w.norm, w.norm_bias, row.T, config.C, config.eps);
}

// ---- backward -------------------------------------------------------------------------------------------------------------------------

template <class Dev> void Gpt2<Dev>::final_norm_backward() {
    begin_op(Pass::backward, FINAL_NORM);
    layernorm_backward(dev, acts.dx, dw.norm, dw.norm_bias, norm_scratch, (const X *)nullptr, acts.dx, acts.x[config.L], w.norm,
                       meanf, rstdf, row.T, config.C);
}

// dx is the gradient of the layer's output at first and that of its input in the end. An input's gradient overwrites the input, which
// linear_backward does not need any more.
template <class Dev> void Gpt2<Dev>::feed_forward_half_backward(size_t l) {
    const size_t T = row.T, C = config.C, F = config.F;
    const Gpt2Layer<X> &y = w.layer[l];
    const Gpt2Layer<float> &dy = dw.layer[l];
    const Gpt2Acts<X> &a = bwd[l];
    X *dx = acts.dx;  // (T, C)

    X *dln2 = a.ln2;  // (T, C)
    Base::for_tiles([&](size_t t, size_t n) {
        hidden_forward(l, Pass::recompute, t, n);
        const X *dnext = dx + t * C;  // (n, C)
        begin_op(Pass::backward, DOWN, l);
        X *dact = a.act;  // (n, F)
        Base::linear_backward(l, {Linear::down, F, C}, dact, dy.fc_proj, dy.fc_proj_bias, dnext, a.act, y.fc_proj, t, n);
        begin_op(Pass::backward, ACT, l);
        X *dfc = a.fc;  // (n, F)
        if (config.gelu == Gelu::tanh) gelu_backward<Gelu::tanh>(dev, dfc, dact, a.fc, n * F);
        else gelu_backward<Gelu::erf>(dev, dfc, dact, a.fc, n * F);
        begin_op(Pass::backward, UP, l);
        Base::linear_backward(l, {Linear::gate_up, C, F}, dln2 + t * C, dy.fc, dy.fc_bias, dfc, a.ln2 + t * C, y.fc, t, n);
    });
    begin_op(Pass::backward, LN2, l);
    layernorm_backward(dev, dx, dy.ln2, dy.ln2_bias, norm_scratch, dx, dln2, a.mid, y.ln2, a.mean2, a.rstd2, T, C);
}

template <class Dev> void Gpt2<Dev>::attention_half_backward(size_t l) {
    const size_t T = row.T, C = config.C;
    const Gpt2Layer<X> &y = w.layer[l];
    const Gpt2Layer<float> &dy = dw.layer[l];
    const Gpt2Acts<X> &a = bwd[l];
    X *dx = acts.dx;  // (T, C)

    begin_op(Pass::backward, PROJ, l);
    Base::linear_backward(l, {Linear::o, C, C}, a.datt, dy.proj, dy.proj_bias, dx, a.att, y.proj, 0, T);
    begin_op(Pass::backward, ATTENTION, l);
    Base::attention_backward(l, a);
    begin_op(Pass::backward, QKV, l);
    X *dqkv = a.qkv;                             // (T, 3*C)
    const bool ends = l == 0 && Base::adapts();  // nothing in front of the first adapters is trained
    X *dln1 = ends ? nullptr : a.ln1;            // (T, C)
    Base::linear_backward(l, {Linear::qkv, C, 3 * C}, dln1, dy.qkv, dy.qkv_bias, dqkv, a.ln1, y.qkv, 0, T);
    if (ends) return;
    begin_op(Pass::backward, LN1, l);
    layernorm_backward(dev, dx, dy.ln1, dy.ln1_bias, norm_scratch, dx, dln1, acts.x[l], y.ln1, a.mean1, a.rstd1, T, C);
}

// The input is a sum of two embeddings, of tokens and of positions, so each of them gets the gradient of the sum.
template <class Dev> void Gpt2<Dev>::input_backward() {
    const size_t T = row.T, C = config.C;
    Base::sum_gradients(Base::positions_unit, true, [&](size_t, size_t) {
        begin_op(Pass::backward, EMBED);
        embedding_backward(dev, dw.positions, acts.dx, row.doc_pos, T, C, 0, config.max_positions);
    });
    Base::sum_gradients(0, true, [&](size_t from, size_t n) {
        begin_op(Pass::backward, EMBED);
        embedding_backward(dev, dw.embed, acts.dx, row.tokens, T, C, from / C, n / C);
    });
}

// ---- main -----------------------------------------------------------------------------------------------------------------------------

// This file is compiled once by g++, for main and the CPU, and once by nvcc, for CUDA (or by g++ again, with the emulator in place of the
// GPU: dev/emulator/README.md). Both halves are linked into one program.
#ifndef LLMC_NO_MAIN  // tests include this file and bring their own
#ifdef CUDA_HALF
#include "llmc/app/cuda_models.cuh"  // defines: make_cuda_models
ModelFactory cuda_models(const Options &options, const ModelFactory &cpu, Comm &host, bool own_gpu,
                         std::unique_ptr<Comm> &gpu_comm) {
    return make_cuda_models<Gpt2>(options, cpu, host, own_gpu, gpu_comm);
}
#else
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
