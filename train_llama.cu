// train_llama: trains Llama-class models (Llama 2/3, Qwen2/2.5/3, Mistral, Phi-3, SmolLM2) on packed sequences.
//
// This file is the model, from top to bottom: the parameter table, the activation plan, the forward pass, the backward pass. Each op is a free
// function in llmc/ops, one file an op, with its formula and shapes above it. What all decoder-only models share, from the packed row to
// the loss, calls this file's functions and stands in llmc/model/decoder.h; what a run is made of (data, steps, checkpoints,
// evaluation, generation) in llmc/train/run.h. train_gpt2.cu is the same for a simpler model.
//
// Sizes, here and in every op:   T tokens of a rank's row       C hidden size     H query heads     KV key/value heads     D head size
//                                F feed-forward size            V vocabulary      L layers          N tokens of the row that are targets
// There is no batch dimension: a micro-batch is one packed row of documents laid end to end (llmc/data/dataloader.h).
#include "llmc/app/program.h"       // defines: run_program
#include "llmc/model/decoder.h"     // defines: Decoder, AttentionActs
#include "llmc/ops/embedding.h"     // defines: embedding_{forward,backward}
#include "llmc/ops/qk_norm_rope.h"  // defines: qk_norm_rope_{forward,backward}
#include "llmc/ops/residual.h"      // defines: residual_forward
#include "llmc/ops/rmsnorm.h"       // defines: rmsnorm_{forward,backward}, residual_rmsnorm_forward
#include "llmc/ops/rope.h"          // defines: rope_table
#include "llmc/ops/swiglu.h"        // defines: swiglu_{forward,backward}

// ---- parameter table ------------------------------------------------------------------------------------------------------------------

// S is the storage type for weights, and float for their gradients.
template <class S> struct LlamaLayer {
    S *qkv;           // ((H+2*KV)*D, C)  rows of the query heads, then of the key heads, then of the value heads
    S *o;             // (C, H*D)
    S *gate_up;       // (2*F, C)         rows of the gate, then of the up projection
    S *down;          // (C, F)
    S *qkv_bias;      // ((H+2*KV)*D)     null if the model has none, like all members down to k_norm
    S *o_bias;        // (C)
    S *gate_up_bias;  // (2*F)
    S *down_bias;     // (C)
    S *q_norm;        // (D)
    S *k_norm;        // (D)
    S *ln1;           // (C)              norm before attention
    S *ln2;           // (C)              norm before the feed-forward part
};

template <class S> struct LlamaWeights {
    S *embed;  // (V, C)
    std::vector<LlamaLayer<S>> layer;
    S *norm;  // (C)
    S *head;  // (V, C)  the embedding itself if they are tied; (1, C) in a reward model
};

// One row per tensor of the Hugging Face files, in the order in which they lie in the flat arrays, and the member that points at it.
// A tensor without a member continues the matrix before it: q, k and v are row blocks of one matrix, and so are gate and up. In the files of
// Phi-3 these matrices are stored whole.
// Within a layer the tensors that decay come first.
template <class S> Table llama_table(const ModelConfig &c, LlamaWeights<S> &w, Locate<S> locate) {
    const size_t C = c.C, V = c.V, F = c.F, Q = c.H * c.D, K = c.KV * c.D;
    const auto normal = Tensor::normal, ones = Tensor::ones, zeros = Tensor::zeros;
    TableBuilder<S> t(locate);
    w.layer.resize(c.L);

    // clang-format off
    //    exists        Hugging Face name                   member           shape      init    decay
    t.begin_unit(C);
    t.add(true,          "model.embed_tokens.weight",       &w.embed,        {V, C},    normal, true);
    for (size_t l = 0; l < c.L; l++) {
        t.begin_unit();
        LlamaLayer<S> &y = w.layer[l];
        t.prefix = format("model.layers.%zu.", l);
        if (c.fused) {
            t.add(true,   "self_attn.qkv_proj.weight",       &y.qkv,          {Q + 2 * K, C}, normal, true);
        } else {
            t.add(true,   "self_attn.q_proj.weight",         &y.qkv,          {Q, C},    normal, true);
            t.add(true,   "self_attn.k_proj.weight",         nullptr,         {K, C},    normal, true);
            t.add(true,   "self_attn.v_proj.weight",         nullptr,         {K, C},    normal, true);
        }
        t.add(true,       "self_attn.o_proj.weight",         &y.o,            {C, Q},    normal, true);
        if (c.fused) {
            t.add(true,   "mlp.gate_up_proj.weight",         &y.gate_up,      {2 * F, C}, normal, true);
        } else {
            t.add(true,   "mlp.gate_proj.weight",            &y.gate_up,      {F, C},    normal, true);
            t.add(true,   "mlp.up_proj.weight",              nullptr,         {F, C},    normal, true);
        }
        t.add(true,       "mlp.down_proj.weight",            &y.down,         {C, F},    normal, true);
        t.add(c.qkv_bias, "self_attn.q_proj.bias",           &y.qkv_bias,     {Q},       zeros,  false);
        t.add(c.qkv_bias, "self_attn.k_proj.bias",           nullptr,         {K},       zeros,  false);
        t.add(c.qkv_bias, "self_attn.v_proj.bias",           nullptr,         {K},       zeros,  false);
        t.add(c.o_bias,   "self_attn.o_proj.bias",           &y.o_bias,       {C},       zeros,  false);
        t.add(c.mlp_bias, "mlp.gate_proj.bias",              &y.gate_up_bias, {F},       zeros,  false);
        t.add(c.mlp_bias, "mlp.up_proj.bias",                nullptr,         {F},       zeros,  false);
        t.add(c.mlp_bias, "mlp.down_proj.bias",              &y.down_bias,    {C},       zeros,  false);
        t.add(c.qk_norm,  "self_attn.q_norm.weight",         &y.q_norm,       {c.D},     ones,   false);
        t.add(c.qk_norm,  "self_attn.k_norm.weight",         &y.k_norm,       {c.D},     ones,   false);
        t.add(true,       "input_layernorm.weight",          &y.ln1,          {C},       ones,   false);
        t.add(true,       "post_attention_layernorm.weight", &y.ln2,          {C},       ones,   false);
    }
    t.prefix = "";
    t.add_head(c, &w.head, w.embed);
    t.begin_unit();
    t.add(true,          "model.norm.weight",               &w.norm,         {C},       ones,   false);
    // clang-format on
    return t.table;
}

static Table llama_table(const ModelConfig &config) {  // the table alone, before the arrays exist
    LlamaWeights<float> none;
    return llama_table(config, none, nowhere<float>());
}

// ---- activation plan ------------------------------------------------------------------------------------------------------------------

// The arrays of one layer; queries and keys are normed and rotated in place.
template <class X> struct LlamaActs : AttentionActs<X> {
    X *ln1;          // (T, C)             norm of the layer's input
    float *rstd1;    // (T)
    X *qk_raw;       // (T, (H+KV)*D)      queries and keys before their norm (Qwen3)
    float *qk_rstd;  // (T, H+KV)
    X *mid;          // (T, C)             residual stream after attention
    X *ln2;          // (T, C)             norm of mid
    float *rstd2;    // (T)
    X *gate_up;      // (tile, 2*F)        Backward: becomes its gradient
    X *act;          // (tile, F)          silu(gate) * up
};

template <class Dev> class Llama final : public Decoder<Dev> {
    using Base = Decoder<Dev>;
    using X = typename Dev::X;
    using Base::begin_op, Base::trains;
    using Base::dev, Base::config, Base::limits, Base::T_max, Base::plan_, Base::row, Base::acts;

  public:
    enum Op : size_t { LN1, QKV, ROPE, ATTENTION, PROJ, LN2, UP, ACT, DOWN };  // of a layer, in the order of the forward pass
    static OpList op_list(const ModelConfig &config);

    Llama(Dev dev, const ModelConfig &config, const ModelLimits &limits);

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
    void find_lifetimes() override { Base::template rehearse<::Llama>(); }

    LlamaWeights<X> w;
    LlamaWeights<float> dw;
    std::vector<LlamaActs<X>> fwd,
        bwd;              // (L) a layer's arrays in the forward and in the backward pass; kept ones are the same in both
    float *rstdf;         // (T)
    float *norm_scratch;  // rmsnorm_scratch
    float *rope;          // (positions, D/2, 2)
};

template <class Dev> OpList Llama<Dev>::op_list(const ModelConfig &c) {
    const size_t C = c.C, F = c.F, Q = c.H * c.D, K = c.KV * c.D;
    const size_t raw = c.qk_norm * (Q + K);  // queries and keys before their norm, which are stored, too
    using enum Recompute;
    std::vector<LayerOp> ops(DOWN + 1);
    // clang-format off
    //               name        recomputed  cost (llmc/model/op_list.h)
    ops[LN1]       = {"norm 1",     cheap,   cost::elements(2 * C, 4 * C)};
    ops[QKV]       = {"qkv",        layer,   cost::linear(c, Linear::qkv, C, Q + 2 * K)};
    ops[ROPE]      = {"rope",       layer,   cost::elements(2 * (Q + K) + raw, 2 * (Q + K) + raw)};
    ops[ATTENTION] = {"attention",  never,   cost::attention(Q, K)};
    ops[PROJ]      = {"proj",       layer,   cost::linear(c, Linear::o, Q, C)};
    ops[LN2]       = {"norm 2",     cheap,   cost::residual_norm(C)};
    ops[UP]        = {"up",         layer,   cost::linear(c, Linear::gate_up, C, 2 * F)};
    ops[ACT]       = {"activation", cheap,   cost::elements(3 * F, 5 * F)};
    ops[DOWN]      = {"down",       never,   cost::linear(c, Linear::down, F, C, C)};  // and the residual stream
    // clang-format on
    return {.layer = ops, .attention = ATTENTION};
}

template <class Dev>
Llama<Dev>::Llama(Dev dev, const ModelConfig &config, const ModelLimits &limits)
    : Base(dev, config, limits, llama_table(config), op_list(config)), fwd(config.L), bwd(config.L) {
    for (size_t l = 0; l < config.L; l++) plan_layer(l);
    plan_.transient(&rstdf, "act.rstdf", {T_max});
    if (trains()) plan_.transient(&norm_scratch, "norm scratch", {rmsnorm_scratch(dev, std::max(config.C, 2 * config.D))});
    plan_.add(&rope, "rope table", {limits.positions, config.D / 2, 2});
}

template <class Dev> void Llama<Dev>::plan_layer(size_t l) {
    const ModelConfig &c = config;
    const size_t T = T_max, tile = this->tile, C = c.C, F = c.F, Q = c.H * c.D, K = c.KV * c.D;
    using A = LlamaActs<X>;
    const auto array = Base::layer_arrays(l, fwd[l], bwd[l]);
    using enum Recompute;
    // clang-format off
    //    name       member       shape                        recomputed
    array("ln1",     &A::ln1,     {T, C},                      cheap);
    array("rstd1",   &A::rstd1,   {T},                         never);
    array("qkv",     &A::qkv,     {T, Q + 2 * K},              layer);
    array("qk_raw",  &A::qk_raw,  {c.qk_norm * T, Q + K},      layer);
    array("qk_rstd", &A::qk_rstd, {c.qk_norm * T, c.H + c.KV}, never);
    array("att",     &A::att,     {T, Q},                      never);
    array("lse",     &A::lse,     {c.H, T},                    never);
    array("mid",     &A::mid,     {T, C},                      layer);
    array("ln2",     &A::ln2,     {T, C},                      cheap);
    array("rstd2",   &A::rstd2,   {T},                         never);
    array("gate_up", &A::gate_up, {tile, 2 * F},               layer);
    array("act",     &A::act,     {tile, F},                   cheap);
    // clang-format on
    Base::plan_attention(l, fwd[l], bwd[l]);
}

template <class Dev> void Llama<Dev>::point_weights(const Locate<X> &params, const Locate<float> *grads) {
    llama_table(config, w, params);
    if (grads) llama_table(config, dw, *grads);
    this->head_w = w.head, this->head_dw = dw.head;
    if (is_rehearsal<Dev>) return;
    std::vector<float> angles(limits.positions * config.D);
    rope_table(angles.data(), config.rope, limits.positions, config.D);
    write(this->memory(), rope, angles);
}

// ---- forward --------------------------------------------------------------------------------------------------------------------------

template <class Dev> void Llama<Dev>::input_forward() {
    begin_op(Pass::forward, EMBED);
    embedding_forward(dev, acts.x[0], w.embed, row.tokens, row.T, config.C);
}

// The first half of a layer, up to attention's output. In Pass::recompute both halves compute, for the backward pass, only the arrays that
// were not kept.
template <class Dev> void Llama<Dev>::attention_half(size_t l, Pass pass) {
    const size_t T = row.T, C = config.C, H = config.H, KV = config.KV, D = config.D;
    const LlamaLayer<X> &y = w.layer[l];
    const LlamaActs<X> &a = pass == Pass::recompute ? bwd[l] : fwd[l];
    const X *x = acts.x[l];  // (T, C)
    const float eps = config.eps;
    const auto runs = [&](Op op) { return Base::runs(op, l, pass); };

    if (runs(LN1)) rmsnorm_forward(dev, a.ln1, a.rstd1, x, y.ln1, T, C, eps);
    if (runs(QKV)) Base::linear_forward(l, {Linear::qkv, C, (H + 2 * KV) * D}, a.qkv, a.ln1, y.qkv, y.qkv_bias, 0, T);
    if (runs(ROPE))
        qk_norm_rope_forward(dev, a.qkv, a.qk_raw, a.qk_rstd, y.q_norm, y.k_norm, rope, row.doc_pos, T, H, KV, D, eps);
    if (runs(ATTENTION)) Base::attention_forward(l, a);
}

// The second half of a layer: mid = x + projection of attention's output, next = mid + feed_forward(norm(mid)).
template <class Dev> void Llama<Dev>::feed_forward_half(size_t l, Pass pass) {
    const bool recompute = pass == Pass::recompute, mid_is_kept = limits.recompute < Recompute::layer;
    const size_t T = row.T, C = config.C, H = config.H, D = config.D, F = config.F;
    const LlamaLayer<X> &y = w.layer[l];
    const LlamaActs<X> &a = recompute ? bwd[l] : fwd[l];
    const X *x = acts.x[l];  // (T, C)
    const float eps = config.eps;
    const auto runs = [&](Op op) { return Base::runs(op, l, pass); };

    if (runs(PROJ))
        Base::linear_forward(l, {Linear::o, H * D, C}, a.ln2, a.att, y.o, y.o_bias, 0,
                             T);  // ln2 holds the projection until its norm replaces it
    if (runs(LN2)) {
        if (recompute && mid_is_kept) rmsnorm_forward(dev, a.ln2, a.rstd2, a.mid, y.ln2, T, C, eps);
        else residual_rmsnorm_forward(dev, a.mid, a.ln2, a.rstd2, x, a.ln2, y.ln2, T, C, eps);
    }
    if (recompute) return;  // the backward pass recomputes the hidden arrays, tile by tile
    Base::for_tiles([&](size_t t, size_t n) {
        hidden_forward(l, pass, t, n);
        X *next = acts.x[l + 1] + t * C;  // (n, C)
        begin_op(Pass::forward, DOWN, l);
        Base::linear_forward(l, {Linear::down, F, C}, next, a.act, y.down, y.down_bias, t, n);
        residual_forward(dev, next, next, a.mid + t * C, n * C);
    });
}

// Computes gate_up and act of tokens [t, t + n).
template <class Dev> void Llama<Dev>::hidden_forward(size_t l, Pass pass, size_t t, size_t n) {
    const size_t C = config.C, F = config.F;
    const LlamaLayer<X> &y = w.layer[l];
    const LlamaActs<X> &a = pass == Pass::recompute ? bwd[l] : fwd[l];
    if (Base::runs(UP, l, pass))
        Base::linear_forward(l, {Linear::gate_up, C, 2 * F}, a.gate_up, a.ln2 + t * C, y.gate_up, y.gate_up_bias, t, n);
    if (Base::runs(ACT, l, pass)) swiglu_forward(dev, a.act, a.gate_up, n, F);
}

template <class Dev> void Llama<Dev>::final_norm_forward() {
    begin_op(Pass::forward, FINAL_NORM);
    rmsnorm_forward(dev, acts.normf, rstdf, acts.x[config.L], w.norm, row.T, config.C, config.eps);
}

// ---- backward -------------------------------------------------------------------------------------------------------------------------

template <class Dev> void Llama<Dev>::final_norm_backward() {
    begin_op(Pass::backward, FINAL_NORM);
    rmsnorm_backward(dev, acts.dx, dw.norm, norm_scratch, (const X *)nullptr, acts.dx, acts.x[config.L], w.norm, rstdf, row.T,
                     config.C);
}

// dx is the gradient of the layer's output at first and that of its input in the end. An input's gradient overwrites the input, which
// linear_backward does not need any more.
template <class Dev> void Llama<Dev>::feed_forward_half_backward(size_t l) {
    const size_t T = row.T, C = config.C, F = config.F;
    const LlamaLayer<X> &y = w.layer[l];
    const LlamaLayer<float> &dy = dw.layer[l];
    const LlamaActs<X> &a = bwd[l];
    X *dx = acts.dx;  // (T, C)

    X *dln2 = a.ln2;
    Base::for_tiles([&](size_t t, size_t n) {
        hidden_forward(l, Pass::recompute, t, n);
        const X *dnext = dx + t * C;  // (n, C)
        begin_op(Pass::backward, DOWN, l);
        X *dact = a.act;
        Base::linear_backward(l, {Linear::down, F, C}, dact, dy.down, dy.down_bias, dnext, a.act, y.down, t, n);
        begin_op(Pass::backward, ACT, l);
        X *dgate_up = a.gate_up;
        swiglu_backward(dev, dgate_up, dact, a.gate_up, n, F);
        begin_op(Pass::backward, UP, l);
        Base::linear_backward(l, {Linear::gate_up, C, 2 * F}, dln2 + t * C, dy.gate_up, dy.gate_up_bias, dgate_up, a.ln2 + t * C,
                              y.gate_up, t, n);
    });
    begin_op(Pass::backward, LN2, l);
    rmsnorm_backward(dev, dx, dy.ln2, norm_scratch, dx, dln2, a.mid, y.ln2, a.rstd2, T, C);
}

template <class Dev> void Llama<Dev>::attention_half_backward(size_t l) {
    const size_t T = row.T, C = config.C, H = config.H, KV = config.KV, D = config.D, stride = (H + 2 * KV) * D;
    const LlamaLayer<X> &y = w.layer[l];
    const LlamaLayer<float> &dy = dw.layer[l];
    const LlamaActs<X> &a = bwd[l];
    X *dx = acts.dx;  // (T, C)

    begin_op(Pass::backward, PROJ, l);
    Base::linear_backward(l, {Linear::o, H * D, C}, a.datt, dy.o, dy.o_bias, dx, a.att, y.o, 0, T);
    begin_op(Pass::backward, ATTENTION, l);
    Base::attention_backward(l, a);
    X *dqkv = a.qkv;
    begin_op(Pass::backward, ROPE, l);
    qk_norm_rope_backward(dev, dqkv, dy.q_norm, dy.k_norm, norm_scratch, a.qk_raw, y.q_norm, y.k_norm, a.qk_rstd, rope,
                          row.doc_pos, T, H, KV, D);
    begin_op(Pass::backward, QKV, l);
    const bool ends = l == 0 && Base::adapts();  // nothing in front of the first adapters is trained
    X *dln1 = ends ? nullptr : a.ln1;
    Base::linear_backward(l, {Linear::qkv, C, stride}, dln1, dy.qkv, dy.qkv_bias, dqkv, a.ln1, y.qkv, 0, T);
    if (ends) return;
    begin_op(Pass::backward, LN1, l);
    rmsnorm_backward(dev, dx, dy.ln1, norm_scratch, dx, dln1, acts.x[l], y.ln1, a.rstd1, T, C);
}

template <class Dev> void Llama<Dev>::input_backward() {
    Base::sum_gradients(0, true, [&](size_t first, size_t n) {
        begin_op(Pass::backward, EMBED);
        embedding_backward(dev, dw.embed, acts.dx, row.tokens, row.T, config.C, first / config.C, n / config.C);
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
    return make_cuda_models<Llama>(options, cpu, host, own_gpu, gpu_comm);
}
#else
int main(int argc, char **argv) { return run_program<Llama>("train_llama", argc, argv); }
#endif
#endif
