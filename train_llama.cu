// train_llama: trains Llama-class models (Llama, Qwen2 to 3, Mistral, Phi-3, SmolLM, Granite, OLMo 2, Gemma 3 and relatives) on packed sequences.
//
// This file is the model: its weights, the arrays of a layer, the forward pass and the backward pass, followed by the lists of its
// tensors, arrays and ops, which determine files, memory and costs. Each op is a free function in llmc/ops, one file per op, with
// its formula and shapes above it. The base class Decoder (llmc/model/decoder.h) has the parts that all decoder-only models share,
// from the packed row to the loss, and calls this file's functions. The parts of a run (data, steps, checkpoints, evaluation,
// generation) begin at llmc/train/run.h. train_gpt2.cu is the same for a simpler model.
//
// Sizes, here and in every op:   T tokens of a rank's row       C hidden size     H query heads     KV key/value heads     D head size
//                                F feed-forward size            V vocabulary      L layers          N targets of the row
// There is no batch dimension: a micro-batch is one packed row of concatenated documents (llmc/data/row.h).
//
// Under tensor parallelism a rank has H, KV, F and V of its part of the model, and norms `own` of the row's T tokens. A block is what reads all tokens
// and computes a part of a sum for each: attention with both of its matrices, and the feed-forward (gather_tokens and sum_tokens in Decoder).
//
// Dev is the device, CPU or CUDA, together with the storage type X of weights and activations: float or bf16. Gradients of weights
// are float.
#include "llmc/app/program.h"          // defines: run_program
#include "llmc/model/decoder.h"        // defines: Decoder, AttentionActs, LinearWeights
#include "llmc/model/delta.h"          // defines: DeltaWeights, DeltaActs
#include "llmc/model/experts.h"        // defines: Experts, ExpertWeights, ExpertActs
#include "llmc/ops/causal_conv.h"      // defines: causal_conv_forward
#include "llmc/ops/delta_decode.h"     // defines: causal_conv_decode, conv_store, gated_delta_decode
#include "llmc/ops/delta_gates.h"      // defines: delta_gates_{forward,backward}
#include "llmc/ops/dropout.h"          // defines: dropout_forward, only used to scale here
#include "llmc/ops/embedding.h"        // defines: embedding_{forward,backward}
#include "llmc/ops/gated_delta.h"      // defines: gated_delta_forward
#include "llmc/ops/gated_rmsnorm.h"    // defines: gated_rmsnorm_{forward,backward}
#include "llmc/ops/layout.h"           // defines: copy_rows
#include "llmc/ops/qk_norm_rope.h"     // defines: qk_norm_rope_{forward,backward}
#include "llmc/ops/residual.h"         // defines: residual_forward
#include "llmc/ops/rmsnorm.h"          // defines: rmsnorm_{forward,backward}, residual_rmsnorm_forward
#include "llmc/ops/rope_table.h"       // defines: rope_table
#include "llmc/ops/sigmoid_gate.h"     // defines: sigmoid_gate_{forward,backward}
#include "llmc/ops/swiglu.h"           // defines: swiglu_{forward,backward}
#include "llmc/ops/wide_norm.h"        // defines: wide_norm_{squares,forward,dots,backward}
#include "llmc/parallel/delta_ring.h"  // defines: ring_conv_{forward,backward}, ring_delta_{forward,backward}

// The weights of a layer (S = X), or their gradients (S = float). A linear layer has a matrix (outputs, inputs) and a bias
// (outputs). Tensors that a model lacks are null. ln1 and ln2 norm the inputs of attention and feed-forward, post1 and post2 their
// outputs: most models have ln1 and ln2, OLMo 2 has post1 and post2, and Gemma 3 has all four.
template <class S> struct LlamaLayer {
    LinearWeights<S> qkv;      // ((H+2*KV)*D, C)  rows of the query heads, then of the key heads, then of the value heads
    LinearWeights<S> k, v;     // (whole KV*D, C)  of more tensor-parallel ranks than key heads; qkv then lacks them
    LinearWeights<S> o;        // (C, H*D)
    DeltaWeights<S> delta;     // in layers with linear attention, whose qkv and o have the sizes of its heads
    LinearWeights<S> gate_up;  // (2*F, C)         rows of the gate, then of the up projection
    LinearWeights<S> down;     // (C, F)
    ExpertWeights<S> experts;  // instead of gate_up and down, in layers with experts
    S *q_norm, *k_norm;        // (D)              with wide_qk_norm: (H*D), (KV*D)
    S *ln1, *ln2;              // (C)
    S *post1, *post2;          // (C)
};

template <class S> struct LlamaWeights {
    std::vector<LlamaLayer<S>> layer;
    S *norm;  // (C)
};

// The arrays of one layer, called activations, in addition to attention's: qkv (T, (H+2*KV)*D), att (T, H*D) and datt. Queries and
// keys are normed and rotated in place. The arrays of the feed-forward hold a tile of the row's tokens, or all of them.
//
// In a layer with linear attention, qkv (T, 2*Hk*Dk+Hv*Dv) is the output of the convolution, and att, datt, gate and gated are (T, Hv*Dv).
template <class X> struct LlamaActs : AttentionActs<X> {
    X *ln1;           // (own, C)           norm of the layer's input
    float *rstd1;     // (own)
    X *qk_raw;        // (T, (H+KV)*D)      queries and keys before their norm; with wide_qk_norm all queries, then all keys
    float *qk_rstd;   // (T, H+KV)
    X *projected;     // (T, ...)           with gates of attention's output: the product with the matrix qkv
    X *gate, *gated;  // (T, H*D)           these gates, which become their gradients; and the gated output
    DeltaActs<X> delta;
    X *proj;  // (own, C)           attention's projected output; without norm_after it lies in ln2, whose norm replaces it
    float *post_rstd1, *post_rstd2;  // (own)  with norm_after
    X *mid;                          // (own, C)           residual stream after attention
    X *ln2;                          // (own, C)           norm of mid
    float *rstd2;                    // (own)
    X *gate_up;                      // (tile, 2*F)        in the backward pass it becomes its gradient
    X *act;                          // (tile, F)          silu(gate) * up
    X *down;                         // (own, C)           with norm_after: the feed-forward's output before its norm
    ExpertActs<X> experts;
};

template <class Dev> class Llama final : public Decoder<Dev> {
    using Base = Decoder<Dev>;
    using X = typename Dev::X;
    using Base::acts, Base::config, Base::dev,
        Base::row;  // acts.dx: (own, C), the residual stream's gradient
    using Base::all_tokens, Base::await_tokens, Base::begin_op, Base::for_tiles, Base::gather_tokens, Base::linear_backward,
        Base::linear_forward, Base::residual, Base::sum_tokens;

  public:
    enum Op : size_t { LN1, QKV, GATES, CONV, ROPE, ATTENTION, GATE, PROJ, POST1, LN2, UP, ACT, DOWN, POST2 };  // of a layer
    static OpList op_list(const ModelConfig &config);

    Llama(Dev dev, const ModelConfig &whole, const ModelLimits &limits);

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
    NormShape norm_shape() const { return {row.own, config.C, config.eps, config.norm_w0}; }
    void norm(X *out, float *rstd, const X *x, const X *weight) { rmsnorm_forward(dev, out, rstd, x, weight, norm_shape()); }
    void norm_backward(X *dx, float *dweight, const X *dresidual, const X *dout, const X *x, const X *weight, const float *rstd) {
        rmsnorm_backward(dev, dx, dweight, norm_scratch, dresidual, dout, x, weight, rstd, norm_shape());
    }

    // What families add to the layer of Llama (docs/contributing.md).
    void norm_and_add(X *out, float *rstd, const X *x, const X *weight, const X *other) {  // out = norm(x) + other
        norm(out, rstd, x, weight);
        residual_forward(dev, out, out, other, row.own * config.C);
    }
    void scale(X *out, const X *x, float factor, size_t n) {  // (n, C), by one of Granite's factors
        if (factor != 1) dropout_forward(dev, out, x, DropoutMask{factor}, n, config.C);
    }
    void add_and_norm(size_t l, const Pass &pass, const LlamaLayer<X> &w, const LlamaActs<X> &a);
    void add_gradient(bool normed, X *dinput, float *dweight, const X *x, const X *weight, const float *rstd);
    X *branch_gradient();
    void rotate(size_t l, const LlamaLayer<X> &w, const LlamaActs<X> &a);
    void rotate_backward(size_t l, const LlamaLayer<X> &w, const LlamaLayer<float> &dw, const LlamaActs<X> &a);
    void wide_qk_norm_forward(const LlamaLayer<X> &w, const LlamaActs<X> &a);
    void wide_qk_norm_backward(const LlamaLayer<X> &w, const LlamaLayer<float> &dw, const LlamaActs<X> &a);
    template <class F> void for_heads_and_gates(const LlamaActs<X> &a, F copy);
    void gate_output(size_t l, const LlamaLayer<X> &w, const LlamaActs<X> &a);
    void gate_output_backward(size_t l, const LlamaLayer<X> &w, const LlamaLayer<float> &dw, const LlamaActs<X> &a);
    void shared_keys_forward(size_t l, const Pass &pass, const X *input);
    void shared_keys_backward(size_t l, const Pass &pass, X *input, bool has_dinput);
    void linear_attention(size_t l, const Pass &pass);
    void linear_attention_backward(size_t l, const Pass &pass, Request &input_gather, bool has_input);
    template <class F> void for_expert_tiles(size_t l, F f);
    void hidden_forward(size_t l, const Pass &pass, size_t t, const ExpertTokens &n);
    void experts_forward(size_t l, const Pass &pass, X *next);
    void experts_backward(size_t l, const Pass &pass);

    void plan_layer(size_t l);
    void plan_experts(size_t l, ExpertActs<X> &forward, ExpertActs<X> &backward);
    void plan_gates(size_t l, LlamaActs<X> &forward, LlamaActs<X> &backward);
    void plan_delta(size_t l, LlamaActs<X> &forward, LlamaActs<X> &backward);
    void plan_pieces(size_t l, DeltaPieceActs<X> &forward, DeltaPieceActs<X> &backward);
    void point_weights(TensorList<X> &params, TensorList<float> &grads) override;
    void rehearse(Touches &log, const typename Base::Calls &calls) override { Base::template rehearse_as<::Llama>(log, calls); }

    // Arrays that the forward pass does not keep are recomputed before a layer's backward pass (Phase::recompute), possibly at
    // another address.
    const LlamaActs<X> &arrays(size_t l, const Pass &pass) const { return pass.phase == Phase::forward ? fwd[l] : bwd[l]; }
    // In a layer with norms but without rotation all tokens are at position 0, whose rotation changes no bit.
    const int32_t *positions_of(size_t l) const { return config.rotates(l) ? row.doc_pos : first_position; }
    // The inputs of a layer's halves.
    X *attention_input(size_t l, const Pass &pass) const {
        return config.norm_before ? arrays(l, pass).ln1 : residual(l, pass.phase);
    }
    // The matrices at both ends of attention, the output of the first and the input of the second.
    Linear first_matrix(size_t l) const { return config.has_delta(l) ? Linear::delta_qkv : Linear::qkv; }
    Linear last_matrix(size_t l) const { return config.has_delta(l) ? Linear::delta_out : Linear::o; }
    X *projected(const LlamaActs<X> &a) const { return config.output_gate ? a.projected : a.qkv; }
    X *attention_output(const LlamaActs<X> &a) const { return config.output_gate ? a.gated : a.att; }
    X *hidden_input(const LlamaActs<X> &a) const { return config.norm_before ? a.ln2 : a.mid; }
    // Returns the factor of the embedding. transformers rounds Gemma's to the type of the weights, but not Granite's.
    float embedding_factor() const {
        return config.gemma() ? float(X(config.embedding_multiplier)) : config.embedding_multiplier;
    }
    QkShape qk_shape() const {
        return {row.T, config.H, config.KV, config.D, config.rope.channels(config.D), config.eps, config.norm_w0};
    }
    WideNormShape wide_shape(size_t heads, size_t of_all_ranks) const {
        const size_t D = config.D, stride = (config.H + 2 * config.KV) * D;
        return {row.T, heads * D, stride, of_all_ranks * D, Base::limits.ranks.tp, 2 * row.T, config.eps};
    }
    DeltaShape delta_shape(size_t T) const {
        const DeltaConfig &d = config.delta;
        return {T, d.Hk, d.Hv, d.Dk, d.Dv, 1e-6f};
    }
    DeltaPieceActs<X> pieces(const LlamaActs<X> &a) const {  // with the row's arrays
        DeltaPieceActs<X> p = a.delta.pieces;
        p.position = row.piece_pos, p.starts = row.starts, p.ends = row.ends, p.seen = row.seen;
        return p;
    }
    NormShape delta_norm_shape() const { return {row.T * config.delta.Hv, config.delta.Dv, config.eps}; }
    const float *rope_of(size_t l) const { return config.window[l] && config.local_rope ? local_rope : rope; }

    const Experts<Dev> experts{Base::dev, Base::config, Base::linears_, Base::limits.ranks.expert_parallel};
    std::vector<std::vector<ExpertTraffic>> traffic;  // (L) of the last forward pass, under expert parallelism
    LlamaWeights<X> weights;
    LlamaWeights<float> gradients;
    std::vector<LlamaActs<X>> fwd, bwd;  // (L) the arrays of the forward and of the backward pass: the same if they are kept
    float *rstdf;                        // (own)
    float *norm_scratch;                 // rmsnorm_scratch
    float *rope;                         // (positions, R/2, 2)  R of a head's channels are rotated
    float *local_rope = nullptr;         // (positions, R/2, 2)  for layers with a window, if they have another rotation (Gemma 3)
    int32_t *first_position = nullptr;   // (T) zeros, for layers with norms of queries and keys but without rotation
    X *dbranch;  // (own, C)           with norm_after or a residual_multiplier: gradient of the output of a layer's half before its norm, or factor
    float *wide_sums;  // (tp, 2, T)     with wide_qk_norm: the ranks' sums for the norms of queries and of keys
};

// ---- forward --------------------------------------------------------------------------------------------------------------------------

template <class Dev> void Llama<Dev>::input_forward(const Pass &pass) {
    begin_op(Phase::forward, EMBED);
    X *x = residual(0, pass.phase), *const all = all_tokens(acts.output, x);
    embedding_forward(dev, all, Base::embed_w(pass), row.tokens, row.T, config.C, config.V);
    sum_tokens(x, all);
    scale(x, x, embedding_factor(), row.own);
}

// A layer of Llama:     mid = x + attention(ln1(x))     next = mid + feed_forward(ln2(mid))
//
// Its first half computes att, attention's output before the projection. runs(op) begins an op. It is false if the model lacks the op (op_list), and
// in Phase::recompute also if the op's results were kept.
template <class Dev> void Llama<Dev>::attention_half(size_t l, const Pass &pass) {
    const LlamaLayer<X> &w = weights.layer[l];
    const LlamaActs<X> &a = arrays(l, pass);
    const auto runs = [&](Op op) { return Base::runs(op, l, pass.phase); };

    if (runs(LN1)) norm(a.ln1, a.rstd1, residual(l, pass.phase), w.ln1);
    if (runs(QKV)) {
        const X *const input = gather_tokens(acts.input, attention_input(l, pass));
        if (config.part.shares_keys() && !config.has_delta(l)) shared_keys_forward(l, pass, input);
        else linear_forward({pass, l, 0, row.T}, first_matrix(l), projected(a), input, w.qkv);
    }
    if (config.has_delta(l)) return linear_attention(l, pass);
    if (runs(ROPE)) rotate(l, w, a);
    if (runs(ATTENTION)) Base::attention_forward(pass, l, a);
}

// The second half: the projection of attention's output, and the feed-forward.
template <class Dev> void Llama<Dev>::feed_forward_half(size_t l, const Pass &pass) {
    const size_t C = config.C;
    const LlamaLayer<X> &w = weights.layer[l];
    const LlamaActs<X> &a = arrays(l, pass);
    const auto runs = [&](Op op) { return row.T > 0 && Base::runs(op, l, pass.phase); };

    if (runs(GATE)) gate_output(l, w, a);
    if (runs(PROJ)) {
        X *const all = all_tokens(acts.output, a.proj);
        linear_forward({pass, l, 0, row.T}, last_matrix(l), all, attention_output(a), w.o);
        sum_tokens(a.proj, all);
        scale(a.proj, a.proj, config.residual_multiplier, row.own);
    }
    if (runs(POST1)) norm_and_add(a.mid, a.post_rstd1, a.proj, w.post1, residual(l, pass.phase));
    if (runs(LN2)) add_and_norm(l, pass, w, a);
    if (pass.phase == Phase::recompute) return;  // the backward pass recomputes the hidden arrays, tile by tile
    X *next = residual(l + 1, pass.phase), *down = config.norm_after ? a.down : next;
    if (config.has_experts(l)) experts_forward(l, pass, next);
    else {
        const X *const input = gather_tokens(acts.input, hidden_input(a));
        X *const all = all_tokens(acts.output, down);
        for_tiles([&](size_t t, size_t n) {
            hidden_forward(l, pass, input, t, n);
            begin_op(pass.phase, DOWN, l);
            linear_forward({pass, l, t, n}, Linear::down, all + t * C, a.act, w.down);
        });
        sum_tokens(down, all);
        scale(down, down, config.residual_multiplier, row.own);
        if (!config.norm_after) residual_forward(dev, down, down, a.mid, row.own * C);
    }
    if (runs(POST2)) norm_and_add(next, a.post_rstd2, down, w.post2, a.mid);
}

// Computes gate_up and act of tokens [t, t + n) from the input of all tokens.
template <class Dev> void Llama<Dev>::hidden_forward(size_t l, const Pass &pass, const X *input, size_t t, size_t n) {
    const LlamaActs<X> &a = arrays(l, pass);
    if (Base::runs(UP, l, pass.phase))
        linear_forward({pass, l, t, n}, Linear::gate_up, a.gate_up, input + t * config.C, weights.layer[l].gate_up);
    if (Base::runs(ACT, l, pass.phase)) swiglu_forward(dev, a.act, a.gate_up, n, config.F, config.gate);
}

template <class Dev> void Llama<Dev>::final_norm_forward() {
    begin_op(Phase::forward, FINAL_NORM);
    norm(acts.normf, rstdf, residual(config.L, Phase::forward), weights.norm);
    if (!config.reward) scale(acts.normf, acts.normf, 1 / config.logits_scaling, row.own);
}

// ---- the parts of the forward pass in which families differ ---------------------------------------------------------------------------

// Computes mid, the sum of the residual stream and attention's output, and its norm. Where mid is known, because of a norm after attention or because
// the forward pass kept it, only the norm is left.
template <class Dev> void Llama<Dev>::add_and_norm(size_t l, const Pass &pass, const LlamaLayer<X> &w, const LlamaActs<X> &a) {
    const bool mid_is_kept = pass.phase == Phase::recompute && Base::limits.recompute < Recompute::layer;
    if (config.norm_after || mid_is_kept) return norm(a.ln2, a.rstd2, a.mid, w.ln2);
    residual_rmsnorm_forward(dev, a.mid, a.ln2, a.rstd2, residual(l, pass.phase), a.proj, w.ln2, norm_shape());
}

// Calls copy(part, stride, projected part, its stride, columns) for each part of attention's input: q_proj computes a head's queries, then its gates.
template <class Dev> template <class F> void Llama<Dev>::for_heads_and_gates(const LlamaActs<X> &a, F copy) {
    const size_t H = config.H, D = config.D, K = config.KV * D, stride = H * D + 2 * K, wide = stride + H * D;
    for (size_t h = 0; h < H; h++) {
        copy(a.qkv + h * D, stride, a.projected + 2 * h * D, wide, D);
        copy(a.gate + h * D, H * D, a.projected + (2 * h + 1) * D, wide, D);
    }
    copy(a.qkv + H * D, stride, a.projected + 2 * H * D, wide, 2 * K);
}

// The product with the queries' matrix, and with the rows of the rank's head of the keys' and values' matrices.
template <class Dev> void Llama<Dev>::shared_keys_forward(size_t l, const Pass &pass, const X *input) {
    const LlamaLayer<X> &w = weights.layer[l];
    const size_t C = config.C, D = config.D, stride = linear_shape(config, Linear::qkv).OC, Q = stride - 2 * D,
                 first = config.part.kv.first * D;
    X *const out = projected(arrays(l, pass));
    const auto product = [&](X *part, const LinearWeights<X> &of, size_t from, size_t n) {
        matmul_forward(dev, part, input, of.weight + from * C, of.bias ? of.bias + from : nullptr, row.T, C, n, stride);
    };
    product(out, w.qkv, 0, Q);
    product(out + Q, w.k, first, D);
    product(out + Q + D, w.v, first, D);
    in_parts(
        row.T,
        [&](size_t t, size_t n) {
            this->linears_.adapters_forward(Linear::qkv, out + t * stride, input + t * C, {pass, l, t, n});
        },
        matmul_run(dev));
}

// Multiplies attention's output by its gates; in linear attention also norms it.
template <class Dev> void Llama<Dev>::gate_output(size_t l, const LlamaLayer<X> &w, const LlamaActs<X> &a) {
    const size_t Q = config.H * config.D;
    if (config.has_delta(l)) gated_rmsnorm_forward(dev, a.gated, a.att, a.gate, w.delta.norm, delta_norm_shape());
    else sigmoid_gate_forward(dev, a.gated, a.att, a.gate, row.T, Q, Q);
}

// Linear attention by the gated delta rule: att = gated_delta(silu(conv(qkv)))
template <class Dev> void Llama<Dev>::linear_attention(size_t l, const Pass &pass) {
    const DeltaWeights<X> &w = weights.layer[l].delta;
    const LlamaActs<X> &a = arrays(l, pass);
    const DeltaActs<X> &d = a.delta;
    const auto runs = [&](Op op) { return Base::runs(op, l, pass.phase); };

    if (runs(GATES)) {
        const X *const input = all_tokens(acts.input, attention_input(l, pass));  // QKV has gathered them
        linear_forward({pass, l, 0, row.T}, Linear::delta_z, a.gate, input, w.z);
        linear_forward({pass, l, 0, row.T}, Linear::delta_ba, d.ba, input, w.ba);
        delta_gates_forward(dev, d.gates, d.ba, w.A_log, w.dt_bias, row.T, config.delta.Hv);
    }
    const DeltaGates<const float> gates{d.gates.g, d.gates.beta};
    const DeltaShape shape = delta_shape(row.T);
    const size_t width = config.delta.row();
    if (pass.keys == Keys::ring) {
        DeltaRing ring = Base::delta_ring(pass);
        const bool is_known = pass.phase == Phase::recompute;
        if (runs(CONV)) ring_conv_forward(dev, ring, pieces(a), a.qkv, a.projected, w.conv, row.T, width, is_known);
        if (runs(ATTENTION)) ring_delta_forward(dev, ring, pieces(a), a.att, d.states, d.scratch, a.qkv, gates, shape);
        return;
    }
    const DeltaCache<X> cache = Base::delta_cache(l);
    if (pass.keys == Keys::prompts) {
        if (runs(CONV)) {
            causal_conv_forward(dev, a.qkv, a.projected, w.conv, row.piece_pos, row.T, width);
            conv_store(dev, cache.columns, a.projected, row.piece_pos, cache.slots, row.T, width);
        }
        if (runs(ATTENTION))
            gated_delta_forward(dev, a.att, d.states, d.scratch, a.qkv, gates, row.piece_pos, shape,
                                DeltaStates<float>{cache.states, cache.slots});
        return;
    }
    if (runs(CONV)) causal_conv_decode(dev, a.qkv, cache.columns, a.projected, w.conv, cache.slots, row.T, width);
    if (runs(ATTENTION)) gated_delta_decode(dev, a.att, cache.states, a.qkv, gates, cache.slots, shape);
}

// Rotates a layer's queries and keys in place; some families norm them first.
template <class Dev> void Llama<Dev>::rotate(size_t l, const LlamaLayer<X> &w, const LlamaActs<X> &a) {
    if (config.output_gate)
        for_heads_and_gates(a, [&](X *part, size_t stride, const X *of_projected, size_t wide, size_t C) {
            copy_rows(dev, part, stride, of_projected, wide, row.T, C);
        });
    if (!config.rotates(l) && !config.qk_norm) return;
    if (config.wide_qk_norm) wide_qk_norm_forward(w, a);
    const X *q_norm = config.wide_qk_norm ? nullptr : w.q_norm;
    qk_norm_rope_forward(dev, a.qkv, a.qk_raw, a.qk_rstd, QkWeights<const X>{q_norm, w.k_norm}, rope_of(l), positions_of(l),
                         qk_shape());
}

// Norms each token's queries as one vector, and its keys as another.
template <class Dev> void Llama<Dev>::wide_qk_norm_forward(const LlamaLayer<X> &w, const LlamaActs<X> &a) {
    const WideNormShape q = wide_shape(config.H, config.whole_H()), k = wide_shape(config.KV, config.whole_KV());
    const size_t T = row.T, Q = q.C;
    float *const own = Base::own_floats(wide_sums, 2 * T);
    wide_norm_squares(dev, own, a.qkv, q);
    wide_norm_squares(dev, own + T, a.qkv + Q, k);
    Base::gather_floats(wide_sums, 2 * T);
    wide_norm_forward(dev, a.qkv, a.qk_raw, a.qk_rstd, w.q_norm, wide_sums, q);
    wide_norm_forward(dev, a.qkv + Q, a.qk_raw + T * Q, a.qk_rstd + T, w.k_norm, wide_sums + T, k);
}

// Calls f(first, tokens) for each tile of a layer with experts; the tokens may include other ranks'.
template <class Dev> template <class F> void Llama<Dev>::for_expert_tiles(size_t l, F f) {
    Base::for_tiles([&](size_t t, size_t n) { f(t, Base::expert_tokens(l, t, n, traffic[l])); }, Base::most_own,
                    Base::expert_tile);
}

// A feed-forward of experts, with the residual sum.
template <class Dev> void Llama<Dev>::experts_forward(size_t l, const Pass &pass, X *next) {
    const LlamaActs<X> &a = arrays(l, pass);
    for_expert_tiles(l, [&](size_t t, const ExpertTokens &n) {
        hidden_forward(l, pass, t, n);
        begin_op(pass.phase, DOWN, l);
        experts.down(pass, a.experts, weights.layer[l].experts, next + t * config.C, a.mid + t * config.C, n);
    });
}

// Computes the hidden arrays of the experts.
template <class Dev> void Llama<Dev>::hidden_forward(size_t l, const Pass &pass, size_t t, const ExpertTokens &n) {
    const LlamaActs<X> &a = arrays(l, pass);
    if (Base::runs(UP, l, pass.phase)) experts.up(pass, a.experts, weights.layer[l].experts, hidden_input(a) + t * config.C, n);
    if (pass.phase == Phase::forward) Base::add_routing(pass, a.experts.probs, a.experts.chosen, n);
    if (Base::runs(ACT, l, pass.phase)) experts.activate(a.experts, n);
}

// ---- backward -------------------------------------------------------------------------------------------------------------------------

template <class Dev> void Llama<Dev>::final_norm_backward() {
    begin_op(Phase::backward, FINAL_NORM);
    if (!config.reward) scale(acts.dx, acts.dx, 1 / config.logits_scaling, row.own);
    norm_backward(acts.dx, gradients.norm, nullptr, acts.dx, residual(config.L, Phase::forward), weights.norm, rstdf);
}

// dx is first the gradient of the layer's output and finally the gradient of its input. An input's gradient overwrites the input,
// which linear_backward no longer needs.
template <class Dev> void Llama<Dev>::feed_forward_half_backward(size_t l, const Pass &pass) {
    const size_t C = config.C;
    const LlamaLayer<X> &w = weights.layer[l];
    const LlamaLayer<float> &dw = gradients.layer[l];
    const LlamaActs<X> &a = bwd[l];
    const auto runs = [&](Op op) { return row.T > 0 && Base::runs(op, l, pass.phase); };

    X *dx = acts.dx, *dinput = hidden_input(a);
    if (runs(POST2)) norm_backward(dbranch, dw.post2, nullptr, dx, a.down, w.post2, a.post_rstd2);
    if (config.has_experts(l)) experts_backward(l, pass);
    else {
        X *const dhalf = branch_gradient(), *const dout = all_tokens(acts.output, dhalf);
        X *const input = all_tokens(acts.input, dinput);  // which its gradient overwrites
        auto gathers = Base::begin_gathers(l, dinput, dhalf, Base::recomputes(UP));
        for_tiles([&](size_t t, size_t n) {
            if (Base::recomputes(UP)) await_tokens(gathers.input);
            hidden_forward(l, pass.in(Phase::recompute), input, t, n);
            X *dact = a.act, *dgate_up = a.gate_up;
            begin_op(Phase::backward, DOWN, l);
            await_tokens(gathers.dout);
            linear_backward({pass, l, t, n}, Linear::down, dact, dw.down, dout + t * C, a.act, w.down);
            begin_op(Phase::backward, ACT, l);
            swiglu_backward(dev, dgate_up, dact, a.gate_up, n, config.F, config.gate);
            begin_op(Phase::backward, UP, l);
            await_tokens(gathers.input);
            linear_backward({pass, l, t, n}, Linear::gate_up, input + t * C, dw.gate_up, dgate_up, input + t * C, w.gate_up);
        });
        sum_tokens(dinput, input);
    }
    if (row.T) add_gradient(runs(LN2), dinput, dw.ln2, a.mid, w.ln2, a.rstd2);
}

template <class Dev> void Llama<Dev>::attention_half_backward(size_t l, const Pass &pass) {
    const LlamaLayer<X> &w = weights.layer[l];
    const LlamaLayer<float> &dw = gradients.layer[l];
    const LlamaActs<X> &a = bwd[l];
    const auto runs = [&](Op op) { return Base::runs(op, l, pass.phase); };

    X *dx = acts.dx;
    if (runs(POST1)) norm_backward(dbranch, dw.post1, nullptr, dx, a.proj, w.post1, a.post_rstd1);
    X *const dhalf = branch_gradient(), *const dout = all_tokens(acts.output, dhalf);
    X *const dinput = attention_input(l, pass), *const input = all_tokens(acts.input, dinput);
    auto gathers = Base::begin_gathers(l, dinput, dhalf);
    begin_op(Phase::backward, PROJ, l);
    await_tokens(gathers.dout);
    linear_backward({pass, l, 0, row.T}, last_matrix(l), a.datt, dw.o, dout, attention_output(a), w.o);
    if (runs(GATE)) gate_output_backward(l, w, dw, a);
    const bool has_dinput = l > 0 || Base::trains_input();  // no trained weights precede the first adapters
    if (config.has_delta(l)) return linear_attention_backward(l, pass, gathers.input, has_dinput);
    begin_op(Phase::backward, ATTENTION, l);
    Base::attention_backward(pass, l, a);
    begin_op(Phase::backward, ROPE, l);
    rotate_backward(l, w, dw, a);
    begin_op(Phase::backward, QKV, l);
    await_tokens(gathers.input);
    if (config.part.shares_keys()) shared_keys_backward(l, pass, input, has_dinput);
    else linear_backward({pass, l, 0, row.T}, Linear::qkv, has_dinput ? input : nullptr, dw.qkv, projected(a), input, w.qkv);
    if (!has_dinput) return;
    sum_tokens(dinput, input);
    add_gradient(runs(LN1), dinput, dw.ln1, residual(l, pass.phase), w.ln1, a.rstd1);
}

// ---- the parts of the backward pass in which families differ --------------------------------------------------------------------------

// Adds the gradient of a half's input, or of its norm, to dx.
template <class Dev>
void Llama<Dev>::add_gradient(bool normed, X *dinput, float *dweight, const X *x, const X *weight, const float *rstd) {
    if (normed) norm_backward(acts.dx, dweight, acts.dx, dinput, x, weight, rstd);
    else residual_forward(dev, acts.dx, acts.dx, dinput, row.own * config.C);
}

// Returns the gradient of a half's output, before its norm or factor and the residual sum.
template <class Dev> typename Dev::X *Llama<Dev>::branch_gradient() {
    if (config.norm_after) return dbranch;
    if (config.residual_multiplier == 1) return acts.dx;
    scale(dbranch, acts.dx, config.residual_multiplier, row.own);
    return dbranch;
}

// The gradient of the input overwrites it. The other ranks add the gradients of the other heads' rows, which are 0 here.
template <class Dev> void Llama<Dev>::shared_keys_backward(size_t l, const Pass &pass, X *input, bool has_dinput) {
    const LlamaLayer<X> &w = weights.layer[l];
    const LlamaLayer<float> &dw = gradients.layer[l];
    const size_t C = config.C, D = config.D, stride = linear_shape(config, Linear::qkv).OC, Q = stride - 2 * D,
                 first = config.part.kv.first * D;
    const X *const dqkv = projected(bwd[l]);
    const bool is_trained = dw.k.weight;
    if (is_trained && !Base::accumulates())
        for (float *whole : {dw.k.weight, dw.v.weight}) this->memory().fill(whole, 0, config.whole_KV() * D * C * sizeof(float));
    in_parts(
        row.T,
        [&](size_t t, size_t n) {
            X *const x = input + t * C;
            const bool add = Base::accumulates() || t > 0;
            const auto weight = [&](const LinearWeights<float> &of, size_t from, size_t columns, const X *dout, bool add) {
                if (is_trained)
                    matmul_backward_weight(dev, of.weight + from * C, of.bias ? of.bias + from : nullptr, dout + t * stride, x, n,
                                           C, columns, add, stride);
            };
            weight(dw.qkv, 0, Q, dqkv, add);
            weight(dw.k, first, D, dqkv + Q, true);
            weight(dw.v, first, D, dqkv + Q + D, true);
            this->linears_.adapters_backward_low(Linear::qkv, dqkv + t * stride, {pass, l, t, n});
            this->linears_.adapters_backward_weight(Linear::qkv, dqkv + t * stride, x, {pass, l, t, n}, add);
            if (!has_dinput) return;
            matmul_backward_input(dev, x, dqkv + t * stride, w.qkv.weight, n, C, Q, stride, false);
            matmul_backward_input(dev, x, dqkv + t * stride + Q, w.k.weight + first * C, n, C, D, stride, true);
            matmul_backward_input(dev, x, dqkv + t * stride + Q + D, w.v.weight + first * C, n, C, D, stride, true);
            this->linears_.adapters_backward_input(Linear::qkv, x, {pass, l, t, n});
        },
        matmul_run(dev));
}

template <class Dev>
void Llama<Dev>::gate_output_backward(size_t l, const LlamaLayer<X> &w, const LlamaLayer<float> &dw, const LlamaActs<X> &a) {
    const size_t Q = config.H * config.D;
    if (config.has_delta(l))
        gated_rmsnorm_backward(dev, a.datt, a.gate, dw.delta.norm, a.delta.scratch, a.datt, a.att, a.gate, w.delta.norm,
                               delta_norm_shape());
    else sigmoid_gate_backward(dev, a.datt, a.gate, a.datt, a.att, a.gate, row.T, Q, Q);
}

// From datt and the gradient of gate to the gradients of the weights and of the layer's input. Three matrices have the same input.
template <class Dev>
void Llama<Dev>::linear_attention_backward(size_t l, const Pass &pass, Request &input_gather, bool has_input) {
    const size_t T = row.T;
    const LlamaLayer<X> &w = weights.layer[l];
    const LlamaLayer<float> &dw = gradients.layer[l];
    const LlamaActs<X> &a = bwd[l];
    const DeltaActs<X> &d = a.delta;
    const DeltaGates<const float> gates{d.gates.g, d.gates.beta}, dgates{d.dgates.g, d.dgates.beta};
    X *const dprojected = a.qkv, *const dinput = has_input ? all_tokens(acts.output, d.dinput) : nullptr;

    DeltaRing ring = Base::delta_ring(pass);
    begin_op(Phase::backward, ATTENTION, l);
    ring_delta_backward(dev, ring, pieces(a), d.dqkv, d.dgates, d.scratch, a.datt, a.qkv, gates, d.states, delta_shape(T));
    begin_op(Phase::backward, CONV, l);
    ring_conv_backward(dev, ring, pieces(a), dprojected, dw.delta.conv, d.scratch, d.dqkv, a.projected, w.delta.conv, T,
                       config.delta.row());
    begin_op(Phase::backward, GATES, l);
    const X *const input = all_tokens(acts.input, attention_input(l, pass));
    await_tokens(input_gather);
    delta_gates_backward(dev, d.ba, dw.delta.A_log, dw.delta.dt_bias, d.scratch, dgates, gates, d.ba, w.delta.A_log,
                         w.delta.dt_bias, T, config.delta.Hv);
    linear_backward({pass, l, 0, T}, Linear::delta_z, dinput, dw.delta.z, a.gate, input, w.delta.z);
    linear_backward({pass, l, 0, T}, Linear::delta_ba, dinput, dw.delta.ba, d.ba, input, w.delta.ba, true);
    begin_op(Phase::backward, QKV, l);
    linear_backward({pass, l, 0, T}, Linear::delta_qkv, dinput, dw.qkv, dprojected, input, w.qkv, true);
    if (!has_input) return;
    sum_tokens(d.dinput, dinput);
    add_gradient(Base::runs(LN1, l, pass.phase), d.dinput, dw.ln1, residual(l, pass.phase), w.ln1, a.rstd1);
}

template <class Dev>
void Llama<Dev>::rotate_backward(size_t l, const LlamaLayer<X> &w, const LlamaLayer<float> &dw, const LlamaActs<X> &a) {
    const X *q_norm = config.wide_qk_norm ? nullptr : w.q_norm;
    if (config.rotates(l) || config.qk_norm)
        qk_norm_rope_backward(dev, a.qkv, QkWeights<float>{dw.q_norm, dw.k_norm}, norm_scratch, a.qk_raw,
                              QkWeights<const X>{q_norm, w.k_norm}, a.qk_rstd, rope_of(l), positions_of(l), qk_shape());
    if (config.wide_qk_norm) wide_qk_norm_backward(w, dw, a);
    if (config.output_gate)
        for_heads_and_gates(a, [&](const X *part, size_t stride, X *of_projected, size_t wide, size_t C) {
            copy_rows(dev, of_projected, wide, part, stride, row.T, C);
        });
}

template <class Dev> void Llama<Dev>::experts_backward(size_t l, const Pass &pass) {
    const size_t C = config.C;
    const ExpertWeights<X> &w = weights.layer[l].experts;
    const ExpertWeights<float> &dw = gradients.layer[l].experts;
    const ExpertActs<X> &a = bwd[l].experts;
    for_expert_tiles(l, [&](size_t t, const ExpertTokens &n) {
        hidden_forward(l, pass.in(Phase::recompute), t, n);
        const bool add = Base::accumulates() || t > 0;
        X *const input = hidden_input(bwd[l]) + t * C;
        begin_op(Phase::backward, DOWN, l);
        experts.down_backward(pass, a, w, dw, acts.dx + t * C, n, add);
        begin_op(Phase::backward, ACT, l);
        experts.activate_backward(a, n);
        begin_op(Phase::backward, UP, l);
        experts.up_backward(pass, a, w, dw, input, input, Base::balance(), row.copies + n.first, n, add);
    });
}

template <class Dev>
void Llama<Dev>::wide_qk_norm_backward(const LlamaLayer<X> &w, const LlamaLayer<float> &dw, const LlamaActs<X> &a) {
    const WideNormShape q = wide_shape(config.H, config.whole_H()), k = wide_shape(config.KV, config.whole_KV());
    const size_t T = row.T, Q = q.C;
    const X *const k_raw = a.qk_raw + T * Q;
    float *const own = Base::own_floats(wide_sums, 2 * T);
    wide_norm_dots(dev, own, a.qkv, a.qk_raw, w.q_norm, q);
    wide_norm_dots(dev, own + T, a.qkv + Q, k_raw, w.k_norm, k);
    Base::gather_floats(wide_sums, 2 * T);
    wide_norm_backward(dev, a.qkv, dw.q_norm, norm_scratch, a.qk_raw, w.q_norm, a.qk_rstd, wide_sums, q);
    wide_norm_backward(dev, a.qkv + Q, dw.k_norm, norm_scratch, k_raw, w.k_norm, a.qk_rstd + T, wide_sums + T, k);
}

// The gradients of the embedding are summed over ranks as soon as they are complete, a few rows at a time.
template <class Dev> void Llama<Dev>::input_backward() {
    scale(acts.dx, acts.dx, embedding_factor(), row.own);
    const X *const dx = all_tokens(acts.output, acts.dx);
    if (row.T) {
        Request gather = Base::begin_gather(0, acts.output, acts.dx);
        await_tokens(gather);
    }
    Base::sum_gradients(0, true, [&](size_t first, size_t n) {
        begin_op(Phase::backward, EMBED);
        embedding_backward(dev, Base::embed_dw, dx, row.tokens, row.T, config.C, first / config.C, n / config.C);
    });
}

// ---- tensors --------------------------------------------------------------------------------------------------------------------------

static const char *block_of_experts(const ModelConfig &c) { return c.family == "mixtral" ? "block_sparse_moe" : "mlp"; }

// The tensors of a layer's experts: all gates and ups form one matrix, and all down projections another one. They come first, so expert parallelism
// can divide them (llmc/parallel/sharding.h).
template <class S> void add_experts(const ModelConfig &c, ExpertWeights<S> &y, TensorList<S> &t) {
    const ExpertConfig &e = c.experts;
    const bool mixtral = c.family == "mixtral";
    const char *const moe = block_of_experts(c);
    const auto add = [&](size_t i, const char *name, const char *of_mixtral, S **member, std::vector<size_t> shape) {
        t.add(true, format("%s.experts.%zu.%s.weight", moe, i, mixtral ? of_mixtral : name).c_str(), member, shape,
              Tensor::normal, true);
    };
    for (size_t i = 0; i < e.number; i++) {
        add(i, "gate_proj", "w1", i == 0 ? &y.gate_up : nullptr, {e.F, c.C});
        add(i, "up_proj", "w3", nullptr, {e.F, c.C});
    }
    t.end_experts();
    for (size_t i = 0; i < e.number; i++) add(i, "down_proj", "w2", i == 0 ? &y.down : nullptr, {c.C, e.F});
    t.end_experts();
}

// The tensors that all tokens of the layer use: the router, the shared expert and its gate.
template <class S> void add_router(const ModelConfig &c, ExpertWeights<S> &y, TensorList<S> &t) {
    const ExpertConfig &e = c.experts;
    const bool shared = e.shared_F > 0;
    t.add(true, format("%s.gate.weight", block_of_experts(c)).c_str(), &y.router, {e.number, c.C}, Tensor::router, true);
    t.add(shared, "mlp.shared_expert.gate_proj.weight", &y.shared_gate_up, {e.shared_F, c.C}, Tensor::normal, true);
    t.add(shared, "mlp.shared_expert.up_proj.weight", nullptr, {e.shared_F, c.C}, Tensor::normal, true);
    t.add(shared, "mlp.shared_expert.down_proj.weight", &y.shared_down, {c.C, e.shared_F}, Tensor::normal, true);
    t.add(shared, "mlp.shared_expert_gate.weight", &y.shared_gate, {1, c.C}, Tensor::router, true);
}

// The matrices of a layer's attention, and the filters of its convolution.
template <class S> void add_attention(const ModelConfig &c, size_t l, LlamaLayer<S> &y, TensorList<S> &t) {
    const size_t C = c.C, Q = c.H * c.D, K = c.KV * c.D, Hv = c.delta.Hv, row = c.delta.row(), values = c.delta.values();
    const LayerCuts cuts = cuts_of(c);
    const bool apart = c.part.shares_keys();
    const auto normal = Tensor::normal;
    // clang-format off
    if (c.has_delta(l)) {
        t.add(true,  "linear_attn.in_proj_qkv.weight", &y.qkv.weight,      {row, C},                        normal, true, cuts.delta_qkv);
        t.add(true,  "linear_attn.in_proj_z.weight",   &y.delta.z.weight,  {values, C},                     normal, true, cuts.delta_z);
        t.add(true,  "linear_attn.in_proj_b.weight",   &y.delta.ba.weight, {Hv, C},                         normal, true, cuts.delta_heads);
        t.add(true,  "linear_attn.in_proj_a.weight",   nullptr,            {Hv, C},                         normal, true, cuts.delta_heads);
        t.add(true,  "linear_attn.out_proj.weight",    &y.o.weight,        {C, values},                     normal, true, cuts.delta_out);
        t.add(true,  "linear_attn.conv1d.weight",      &y.delta.conv,      {row, 1, conv_taps},             normal, true, cuts.delta_qkv);
        return;
    }
    t.add(c.fused,   "self_attn.qkv_proj.weight",      &y.qkv.weight,      {Q + 2 * K, C},                  normal, true, cuts.qkv);
    if (!c.fused) {
        t.add(true,  "self_attn.q_proj.weight",        &y.qkv.weight,      {c.output_gate ? 2 * Q : Q, C},  normal, true, cuts.q);
        t.add(!apart, "self_attn.k_proj.weight",       nullptr,            {K, C},                          normal, true, cuts.kv);
        t.add(!apart, "self_attn.v_proj.weight",       nullptr,            {K, C},                          normal, true, cuts.kv);
    }
    t.add(true,      "self_attn.o_proj.weight",        &y.o.weight,        {C, Q},                          normal, true, cuts.o);
    // clang-format on
}

// One row per tensor of the Hugging Face files, in memory order, with the member that will point at it. A tensor without a
// member continues the previous matrix: q, k and v are row blocks of one matrix, and so are gate and up. Phi-3's files store
// these matrices whole. Tensors whose gradients are finished together form a unit. Within a layer, tensors with weight decay
// come first.
template <class S> Table llama_table(const ModelConfig &c, LlamaWeights<S> &w, TensorList<S> &t) {
    const size_t C = c.C, V = c.V, F = c.F, Q = c.H * c.D, K = c.KV * c.D;
    const bool apart = c.part.shares_keys();
    const size_t whole_K = c.whole_KV() * c.D;
    const LayerCuts cuts = cuts_of(c);
    const Cut &q = cuts.q, kv = apart ? Cut() : cuts.kv, &hidden = cuts.hidden;
    // Norms initially multiply by 1.
    const auto normal = Tensor::normal, zeros = Tensor::zeros, ones = c.norm_w0 ? zeros : Tensor::ones;
    const char *const norm2 = c.norm_after ? "pre_feedforward_layernorm.weight" : "post_attention_layernorm.weight";
    w.layer.resize(c.L);

    // clang-format off
    //    exists        Hugging Face name                member           shape                            init    decay   cut
    t.begin_unit("", C);
    t.add(true,          "model.embed_tokens.weight",    &t.embed,        {V, C},                          normal, true,   c.part.vocabulary.rows());
    for (size_t l = 0; l < c.L; l++) {
        LlamaLayer<S> &y = w.layer[l];
        t.begin_unit(format("model.layers.%zu.", l));
        if (c.has_experts(l)) add_experts(c, y.experts, t);
        add_attention(c, l, y, t);
        if (c.has_experts(l)) add_router(c, y.experts, t);
        const bool dense = !c.has_experts(l), linear = c.has_delta(l), qk_norm = c.qk_norm && !linear;
        t.add(c.fused,    "mlp.gate_up_proj.weight",      &y.gate_up.weight, {2 * F, C},                    normal, true,  cuts.gate_up);
        if (!c.fused && dense) {
            t.add(true,   "mlp.gate_proj.weight",         &y.gate_up.weight, {F, C},                        normal, true,  hidden);
            t.add(true,   "mlp.up_proj.weight",           nullptr,         {F, C},                          normal, true,  hidden);
        }
        t.add(dense,      "mlp.down_proj.weight",         &y.down.weight,  {C, F},                          normal, true,  cuts.down);
        t.add(apart && !linear, "self_attn.k_proj.weight", &y.k.weight,     {whole_K, C},                    normal, true);
        t.add(apart && !linear, "self_attn.v_proj.weight", &y.v.weight,     {whole_K, C},                    normal, true);
        t.add(c.qkv_bias, "self_attn.q_proj.bias",        &y.qkv.bias,     {Q},                             zeros,  false, q);
        t.add(c.qkv_bias, "self_attn.k_proj.bias",        apart ? &y.k.bias : nullptr, {apart ? whole_K : K}, zeros, false, kv);
        t.add(c.qkv_bias, "self_attn.v_proj.bias",        apart ? &y.v.bias : nullptr, {apart ? whole_K : K}, zeros, false, kv);
        t.add(c.o_bias,   "self_attn.o_proj.bias",        &y.o.bias,       {C},                             zeros,  false);
        t.add(c.mlp_bias, "mlp.gate_proj.bias",           &y.gate_up.bias, {F},                             zeros,  false, hidden);
        t.add(c.mlp_bias, "mlp.up_proj.bias",             nullptr,         {F},                             zeros,  false, hidden);
        t.add(c.mlp_bias, "mlp.down_proj.bias",           &y.down.bias,    {C},                             zeros,  false);
        t.add(qk_norm,    "self_attn.q_norm.weight",      &y.q_norm,       {c.wide_qk_norm ? Q : c.D},      ones,   false, c.wide_qk_norm ? q : Cut());
        t.add(qk_norm,    "self_attn.k_norm.weight",      &y.k_norm,       {c.wide_qk_norm ? K : c.D},      ones,   false, c.wide_qk_norm ? kv : Cut());
        t.add(linear,     "linear_attn.A_log",            &y.delta.A_log,  {c.delta.Hv},               Tensor::rate, false, cuts.delta_heads);
        t.add(linear,     "linear_attn.dt_bias",          &y.delta.dt_bias, {c.delta.Hv},              Tensor::ones, false, cuts.delta_heads);
        t.add(linear,     "linear_attn.norm.weight",      &y.delta.norm,   {c.delta.Dv},               Tensor::ones, false);
        t.add(c.norm_before, "input_layernorm.weight",          &y.ln1,    {C},                             ones,   false);
        t.add(c.norm_after,  "post_attention_layernorm.weight", &y.post1,  {C},                             ones,   false);
        t.add(c.norm_before, norm2,                             &y.ln2,    {C},                             ones,   false);
        t.add(c.norm_after,  "post_feedforward_layernorm.weight", &y.post2, {C},                            ones,   false);
    }
    t.add_head(c);
    t.begin_unit();
    t.add(true,          "model.norm.weight",            &w.norm,         {C},                             ones,   false);
    // clang-format on
    return t.table;
}

static Table llama_table(const ModelConfig &config) {  // only the table, before the arrays exist
    LlamaWeights<float> none;
    TensorList<float> list;
    return llama_table(config, none, list);
}

template <class Dev> void Llama<Dev>::point_weights(TensorList<X> &params, TensorList<float> &grads) {
    llama_table(config, weights, params);
    llama_table(config, gradients, grads);
    if (config.part.rank > 0)  // the first rank of a tensor group adds the biases of sums over the group
        for (size_t l = 0; l < config.L; l++) {
            weights.layer[l].o.bias = weights.layer[l].down.bias = nullptr;
            gradients.layer[l].o.bias = gradients.layer[l].down.bias = nullptr;
        }
    if (is_rehearsal<Dev>) return;
    const size_t positions = Base::limits.positions;
    const auto fill = [&](float *table, const RopeConfig &of) {
        std::vector<float> angles(of.rows(positions) * of.channels(config.D));
        rope_table(angles.data(), of, positions, config.D);
        write(this->memory(), table, angles);
    };
    fill(rope, config.rope);
    if (config.local_rope) fill(local_rope, *config.local_rope);
    if (first_position) write(this->memory(), first_position, std::vector<int32_t>(Base::T_max));
}

// ---- arrays ---------------------------------------------------------------------------------------------------------------------------

template <class Dev>
Llama<Dev>::Llama(Dev dev, const ModelConfig &whole, const ModelLimits &limits)
    : Base(dev, whole, limits, llama_table, op_list), traffic(whole.L), fwd(whole.L), bwd(whole.L) {
    const size_t T = Base::T_max, own = Base::own_max, C = config.C, Q = config.H * config.D;
    Plan &plan = Base::plan_;
    for (size_t l = 0; l < config.L; l++) plan_layer(l);
    plan.transient(&rstdf, "act.rstdf", {own});
    const size_t widest = std::max(C, config.wide_qk_norm ? Q : 2 * config.D);
    if (Base::trains()) plan.transient(&norm_scratch, "norm scratch", {rmsnorm_scratch(dev, widest)});
    plan.add(&rope, "rope table", {config.rope.rows(limits.positions), config.rope.channels(config.D) / 2, 2});
    if (config.local_rope) plan.add(&local_rope, "local rope table", {limits.positions, config.D / 2, 2});
    if (config.qk_norm && std::ranges::count(config.unrotated, true)) plan.add(&first_position, "first position", {T});
    if (config.wide_qk_norm) plan.transient(&wide_sums, "qk norm sums", {limits.ranks.tp, 2, T});
    if ((config.norm_after || config.residual_multiplier != 1) && Base::trains()) plan.transient(&dbranch, "dbranch", {own, C});
}

// An array is recomputed at the last column's level of --recompute and above; below that level it is kept from the forward to
// the backward pass.
template <class Dev> void Llama<Dev>::plan_layer(size_t l) {
    const ModelConfig &c = config;
    const size_t T = Base::T_max, own = Base::own_max, tile = Base::tile, C = c.C, F = c.F, Q = c.H * c.D, K = c.KV * c.D;
    const bool linear = c.has_delta(l);
    const size_t before = c.norm_before ? own : 0, after = c.norm_after ? own : 0, normed = c.qk_norm && !linear ? T : 0,
                 dense = c.has_experts(l) ? 0 : tile;
    LlamaActs<X> &f = fwd[l], &b = bwd[l];
    const auto array = Base::layer_arrays(l);
    using enum Recompute;
    // clang-format off
    //    name       pointers              shape                  recomputed
    array("ln1",     f.ln1, b.ln1,         {before, C},           cheap);
    array("rstd1",   f.rstd1, b.rstd1,     {before},              never);
    array("qkv",     f.qkv, b.qkv,         {T, linear ? c.delta.row() : Q + 2 * K}, linear ? cheap : layer);
    array("qk_raw",  f.qk_raw, b.qk_raw,   {normed, Q + K},       layer);
    array("qk_rstd", f.qk_rstd, b.qk_rstd, {normed, c.H + c.KV},  never);
    array("att",     f.att, b.att,         {T, linear ? c.delta.values() : Q}, never);
    array("lse",     f.lse, b.lse,         {c.H, linear ? 0 : T}, never);
    array("proj",    f.proj, b.proj,       {after, C},            layer);
    array("post_rstd1", f.post_rstd1, b.post_rstd1, {after},      never);
    array("mid",     f.mid, b.mid,         {own, C},              layer);
    array("ln2",     f.ln2, b.ln2,         {before, C},           cheap);
    array("rstd2",   f.rstd2, b.rstd2,     {before},              never);
    array("gate_up", f.gate_up, b.gate_up, {dense, 2 * F},        layer);
    array("act",     f.act, b.act,         {dense, F},            cheap);
    array("down",    f.down, b.down,       {after, C},            never);
    array("post_rstd2", f.post_rstd2, b.post_rstd2, {after},      never);
    // clang-format on
    if (!c.norm_after) Base::plan_.alias(&f.proj, &f.ln2), Base::plan_.alias(&b.proj, &b.ln2);
    if (c.has_experts(l)) plan_experts(l, f.experts, b.experts);
    if (c.output_gate) plan_gates(l, f, b);
    if (linear) plan_delta(l, f, b);
    else Base::plan_attention(l, f, b);
}

template <class Dev> void Llama<Dev>::plan_gates(size_t l, LlamaActs<X> &f, LlamaActs<X> &b) {
    const size_t T = Base::T_max, Q = config.H * config.D, K = config.KV * config.D;
    const size_t width = config.has_delta(l) ? config.delta.values() : Q;
    const auto array = Base::layer_arrays(l);
    array("gate", f.gate, b.gate, {T, width}, Recompute::never);
    array("gated", f.gated, b.gated, {T, width}, Recompute::cheap);
    if (config.has_delta(l)) return array("projected", f.projected, b.projected, {T, config.delta.row()}, Recompute::layer);
    Base::plan_.transient(&f.projected, format("act.%zu.projected", l), {T, 2 * Q + 2 * K});
    if (Base::trains()) Base::plan_.transient(&b.projected, format("act.%zu.projected backward", l), {T, 2 * Q + 2 * K});
}

template <class Dev> void Llama<Dev>::plan_delta(size_t l, LlamaActs<X> &f, LlamaActs<X> &b) {
    const DeltaConfig &c = config.delta;
    const size_t T = Base::T_max;
    const auto array = Base::layer_arrays(l);
    const auto transient = [&](const char *name, auto pointer, std::vector<size_t> shape) {
        Base::plan_.transient(pointer, format("act.%zu.%s", l, name), std::move(shape));
    };
    array("ba", f.delta.ba, b.delta.ba, {T, 2 * c.Hv}, Recompute::never);
    array("decay", f.delta.gates.g, b.delta.gates.g, {T, c.Hv}, Recompute::never);
    array("beta", f.delta.gates.beta, b.delta.gates.beta, {T, c.Hv}, Recompute::never);
    array("states", f.delta.states, b.delta.states, {gated_delta_states(delta_shape(T))}, Recompute::never, true);
    transient("delta scratch", &f.delta.scratch, {gated_delta_scratch(dev, delta_shape(T))});
    if (Base::limits.ranks.sp > 1) plan_pieces(l, f.delta.pieces, b.delta.pieces);
    if (!Base::trains()) return;
    transient("datt", &b.datt, {T, c.values()});
    transient("dqkv", &b.delta.dqkv, {T, c.row()});
    transient("ddecay", &b.delta.dgates.g, {T, c.Hv});
    transient("dbeta", &b.delta.dgates.beta, {T, c.Hv});
    transient("dinput", &b.delta.dinput, {Base::own_max, config.C});
    transient("delta scratch backward", &b.delta.scratch,
              {std::max({gated_delta_scratch(dev, delta_shape(T)), causal_conv_scratch(dev, c.row()),
                         delta_gates_scratch(dev, c.Hv), gated_rmsnorm_scratch(dev, c.Dv)})});
}

// The arrays of a ring's pieces.
template <class Dev> void Llama<Dev>::plan_pieces(size_t l, DeltaPieceActs<X> &f, DeltaPieceActs<X> &b) {
    const DeltaConfig &c = config.delta;
    const size_t P = most_pieces(Base::limits.split_as ? *Base::limits.split_as : config);
    const auto array = Base::layer_arrays(l);
    const auto transient = [&](const char *name, auto pointer, std::vector<size_t> shape) {
        Base::plan_.transient(pointer, format("act.%zu.%s", l, name), std::move(shape));
    };
    array("columns before", f.columns, b.columns, {P, conv_columns, c.row()}, Recompute::never, true);
    array("states before", f.before, b.before, {P, c.Hv, c.Dk, c.Dv}, Recompute::never, true);
    array("transitions", f.transitions, b.transitions, {P, c.Hv, c.Dk, c.Dk}, Recompute::never, true);
    transient("terms", &f.terms, {P, c.Hv, c.Dk, c.Dv});
    transient("passed state", &f.passed, {c.Hv, c.Dk, c.Dv});
    transient("first rows", &f.rows, {2, 2 * conv_columns, c.row()});
    if (!Base::trains()) return;
    transient("terms backward", &b.terms, {P, c.Hv, c.Dk, c.Dv});
    transient("gradients behind", &b.behind, {P, c.Hv, c.Dk, c.Dv});
    transient("passed gradient", &b.passed, {c.Hv, c.Dk, c.Dv});
    transient("first rows backward", &b.rows, {3, 2 * conv_columns, c.row()});
    transient("dcolumns", &b.dcolumns, {P, conv_columns, c.row()});
    transient("zeros", &b.zeros, {conv_columns, c.row()});
}

template <class Dev> void Llama<Dev>::plan_experts(size_t l, ExpertActs<X> &f, ExpertActs<X> &b) {
    const ExpertConfig &c = config.experts;
    const size_t tile = Base::expert_tile, C = config.C, E = c.number, K = c.chosen, N = Base::limits.ranks.expert_parallel,
                 F = c.F, S = c.shared_F, gated = S ? tile : 0, R = c.rows(N, tile), runs = ceil_div(tile, expert_run(dev, N)),
                 divided = N > 1 ? tile * K : 0;  // rows of this rank's tokens
    const auto array = Base::layer_arrays(l);
    using enum Recompute;
    // clang-format off
    array("probs",          f.probs, b.probs,                   {tile, E},                                layer);
    array("chosen",         f.chosen, b.chosen,                 {tile, K},                                layer);
    array("weights",        f.weights, b.weights,               {tile, K},                                layer);
    array("starts",         f.starts, b.starts,                 {runs, E + 1},                            none);
    array("counts",         f.counts, b.counts,                 {E},                                      none);
    array("row_of",         f.row_of, b.row_of,                 {tile, K},                                none);
    array("token_of",       f.token_of, b.token_of,             {tile, K},                                none);
    array("rows",           f.input, b.input,                   {R, C},                                   none);
    array("expert gate_up", f.gate_up, b.gate_up,               {R, 2 * F},                               layer);
    array("expert act",     f.act, b.act,                       {R, F},                                   cheap);
    array("all counts",     f.all_counts, b.all_counts,         {divided ? N : 0, E},                     none);
    array("held starts",    f.held_starts, b.held_starts,       {divided ? runs : 0, E / N + 1},          none);
    array("own rows",       f.own, b.own,                       {divided, C},                             none);
    array("gate",           f.gate, b.gate,                     {gated},                                  layer);
    array("shared gate_up", f.shared_gate_up, b.shared_gate_up, {gated, 2 * S},                           layer);
    array("shared act",     f.shared_act, b.shared_act,         {gated, S},                               cheap);
    // clang-format on
    const auto transient = [&](const char *name, auto pointer, std::vector<size_t> shape) {
        Base::plan_.transient(pointer, format("act.%zu.%s", l, name), std::move(shape));
    };
    transient("shared", &f.shared, {gated, C});
    if (!Base::trains()) return;
    transient("expert dact", &b.dact, {R, F});
    transient("shared dact", &b.dshared, {gated, S});
    transient("dweights", &b.dweights, {tile, K + 1});
    transient("dlogits", &b.dlogits, {tile, E});
    transient("dgate", &b.dgate, {gated});
    transient("own weights", &b.own_weights, {divided});
    transient("held weights", &b.held_weights, {divided ? R : 0});
}

// ---- ops ------------------------------------------------------------------------------------------------------------------------------

template <class Dev> OpList Llama<Dev>::op_list(const ModelConfig &c) {
    const size_t C = c.C, F = c.F, Q = c.H * c.D, K = c.KV * c.D;
    const size_t raw = c.qk_norm * (Q + K);  // queries and keys before their norm, which are also stored
    const ExpertConfig &e = c.experts;
    const bool frozen = c.lora.rank > 0;
    // in, out: elements per row.
    const auto experts = [&](Linear matrix, Linear shared, size_t in, size_t out) {
        const auto [IC, OC] = linear_shape(c, matrix);
        const auto [shared_IC, shared_OC] = linear_shape(c, shared);
        std::vector<CostOf> costs = {cost::grouped(e.number, e.chosen, IC, OC, frozen), cost::elements(in, out),
                                     cost::adapters(c, matrix), cost::adapters(c, shared)};
        if (e.shared_F) costs.push_back(cost::grouped(1, 1, shared_IC, shared_OC, frozen));
        return costs;
    };
    const size_t moved = e.chosen * C;  // elements of a token's rows
    const bool once_more = !frozen || std::ranges::count(adapted_modules(c), Linear::experts_gate_up, &LinearModule::matrix);
    std::vector<CostOf> up = experts(Linear::experts_gate_up, Linear::shared_gate_up, 2 * moved, 3 * moved);
    up.push_back(cost::grouped(1, 1, C, e.number + (e.shared_F > 0), frozen));  // the router, and the shared expert's gate
    up.push_back(cost::exchange(e, C, once_more ? 2 : 1, e.number, 0));
    std::vector<CostOf> down = experts(Linear::experts_down, Linear::shared_down, moved + 2 * C, 2 * moved + 4 * e.chosen * e.F);
    down.push_back(cost::exchange(e, C, 1, 0, 2));  // also sends weights there and their gradients back
    const size_t hidden = e.chosen * e.F + e.shared_F;
    const DeltaConfig &d = c.delta;
    const size_t values = d.values(),
                 gated = c.output_gate ? 2 * (2 * Q + 2 * K) : 0;  // queries, gates, keys and values are moved apart
    const CostOf nothing = cost::elements(0, 0);
    const std::vector<bool> &linear = d.layers, &sparse = e.layers;
    using enum Recompute;
    std::vector<LayerOp> ops(POST2 + 1);
    // clang-format off
    //               name        recomputed  cost (llmc/model/op_list.h), exists
    ops[LN1]       = {"norm 1",     cheap,   cost::own_tokens(cost::elements(2 * C, 4 * C)), c.norm_before};
    ops[QKV]       = {"qkv",        layer,   cost::by_layer(linear, cost::linear(c, Linear::qkv), cost::linear(c, Linear::delta_qkv))};
    ops[GATES]     = {"gates",      never,   cost::by_layer(linear, nothing, cost::sum({cost::linear(c, Linear::delta_z), cost::linear(c, Linear::delta_ba)})), d.Hk > 0};
    ops[CONV]      = {"convolution", cheap,  cost::by_layer(linear, nothing, cost::elements(2 * d.row(), 3 * d.row())), d.Hk > 0};
    ops[ROPE]      = {"rope",       layer,   cost::by_layer(linear, cost::elements(2 * (Q + K) + raw + gated, 2 * (Q + K) + raw + gated), nothing)};
    ops[ATTENTION] = {"attention",  never,   cost::by_layer(linear, cost::attention(Q, K), cost::delta_rule(d))};
    ops[GATE]      = {"output gate", cheap,  cost::by_layer(linear, cost::elements(3 * Q, 5 * Q), cost::elements(3 * values, 5 * values)), c.output_gate};
    ops[PROJ]      = {"proj",       layer,   cost::by_layer(linear, cost::linear(c, Linear::o), cost::linear(c, Linear::delta_out))};
    ops[POST1]     = {"post-norm 1", layer,  cost::own_tokens(cost::elements(3 * C, 3 * C)), c.norm_after};  // including the residual stream
    ops[LN2]       = {"norm 2",     cheap,   cost::own_tokens(c.norm_after ? cost::elements(2 * C, 4 * C) : cost::residual_norm(C)), c.norm_before};
    ops[UP]        = {"up",         layer,   cost::by_layer(sparse, cost::linear(c, Linear::gate_up), cost::own_tokens(cost::sum(up)))};
    ops[ACT]       = {"activation", cheap,   cost::by_layer(sparse, cost::elements(3 * F, 5 * F), cost::own_tokens(cost::elements(3 * hidden, 5 * hidden)))};
    ops[DOWN]      = {"down",       never,   cost::by_layer(sparse, cost::linear(c, Linear::down, c.norm_after ? 0 : C), cost::own_tokens(cost::sum(down)))};  // including the residual stream
    ops[POST2]     = {"post-norm 2", never,  cost::own_tokens(cost::elements(3 * C, 3 * C)), c.norm_after};  // including the residual stream
    // clang-format on
    return {.layer = ops, .attention = ATTENTION};
}

// ---- main -----------------------------------------------------------------------------------------------------------------------------

// This file is compiled three times, and the objects are linked into one program: by g++ for main and the CPU; by g++, in
// parallel, for the rehearsals of the memory plan (llmc/core/rehearsal.h); and by nvcc for CUDA (or by g++, with the emulator
// instead of the GPU: dev/emulator/README.md). The base class is compiled in llmc/model/decoder.cu.
#ifndef LLMC_NO_MAIN  // tests include this file in a single unit
#ifdef CUDA_HALF
#include "llmc/app/cuda_models.cuh"  // defines: make_cuda_device
Device cuda_device(const Options &options, const ModelFactory &cpu, Comm &host, bool own_gpu, std::unique_ptr<Comm> &gpu_comm) {
    return make_cuda_device<Llama>(options, cpu, host, own_gpu, gpu_comm);
}
#elif defined LLMC_REHEARSALS
template void Decoder<CpuF32>::rehearse_as<Llama>(Touches &, const Calls &);
template void Decoder<CpuBf16>::rehearse_as<Llama>(Touches &, const Calls &);
#else
extern template void Decoder<CpuF32>::rehearse_as<Llama>(Touches &, const Calls &);
extern template void Decoder<CpuBf16>::rehearse_as<Llama>(Touches &, const Calls &);
int main(int argc, char **argv) { return run_program<Llama>("train_llama", argc, argv); }
#endif
#endif
