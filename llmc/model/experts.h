// The feed-forward layer of a mixture of experts (Shazeer et al., 2017, arXiv:1701.06538; Jiang et al., "Mixtral of experts", 2024,
// arXiv:2401.04088), for n tokens of a packed row. Each token goes to K of E experts, and the router's weights sum their outputs. No token is
// dropped. In Qwen2-MoE every token also goes to a shared expert, which a gate weights.
//
//   p = softmax(x Wr^T)     y = sum_{k of the K largest} weight_k expert_k(x) + sigmoid(x . wg) shared(x)     expert(x) = (silu(x Wg^T) * (x Wu^T)) Wd^T
//
// The rows of an expert are contiguous (../ops/expert_rows.h), so its products are matrix products (../ops/grouped_matmul.h). Tokens are processed in
// runs (matmul_run); the number of runs changes no bit of the result.
//
// Each product may have adapters (linear_layers.h). An expert's adapters see only the expert's rows.
//
// Under expert parallelism each of N ranks holds E / N of a layer's experts, and rows travel to the ranks of their experts and back
// (../parallel/expert_exchange.h). The N ranks make the same calls, each with any number of tokens. A rank's arrays have room for all rows that the
// tokens of N ranks can send to its experts.
#pragma once
#include "../ops/expert_rows.h"
#include "../ops/grouped_matmul.h"
#include "../ops/loss.h"
#include "../ops/matmul.h"
#include "../ops/router.h"
#include "../ops/swiglu.h"
#include "../parallel/expert_exchange.h"
#include "config.h"
#include "linear_layers.h"

// The weights of a layer's experts (S = X), or their gradients (S = float), for this rank's E / N experts. The shared expert's are null without one.
template <class S> struct ExpertWeights {
    S *router;          // (E, C)
    S *gate_up;         // (E / N, 2*F, C)
    S *down;            // (E / N, C, F)
    S *shared_gate;     // (1, C)
    S *shared_gate_up;  // (2*S, C)   S: the shared expert's size
    S *shared_down;     // (C, S)
};

// The arrays of `tile` tokens, with R rows of the rank's experts: R = tile * K, or under expert parallelism tile * N * min(K, E / N).
template <class X> struct ExpertActs {
    float *probs;              // (tile, E)
    int32_t *chosen, *row_of;  // (tile, K)
    float *weights;            // (tile, K)
    int32_t *starts;           // (runs, E + 1)
    int32_t *token_of;         // (tile, K)   relative to the run's first token
    int32_t *counts;           // (E)
    X *input;                  // (R, C)      the rows of x; later the rows of y, or of its gradient
    // under expert parallelism
    int32_t *all_counts;             // (N, E)
    int32_t *held_starts;            // (runs, E / N + 1)  for the rank's experts
    X *own;                          // (tile * K, C)      the rows of the rank's tokens
    X *gate_up, *act;                // (R, 2*F), (R, F)
    float *gate;                     // (tile)      the shared expert's weight
    X *shared_gate_up, *shared_act;  // (tile, 2*S), (tile, S)
    X *shared;                       // (tile, C)
    // for the backward pass
    X *dact, *dshared;   // (R, F), (tile, S)
    float *dweights;     // (tile, K + 1)  in each run the router's K per token, then the gate's
    X *dlogits, *dgate;  // (tile, E), (tile)
    float *own_weights,
        *held_weights;  // (tile * K), (R)  weights in the order of rows, later their gradients; under expert parallelism
};

template <class Dev> class Experts {
    using X = typename Dev::X;

  public:
    // ranks: number of ranks that divide the experts
    Experts(Dev dev, const ModelConfig &config, LinearLayers<Dev> &linears, size_t ranks)
        : dev(dev), c(config.experts), linears(linears), C(config.C), N(ranks), held_E(c.number / ranks), gate(config.gate) {}

    // The ops of the forward pass, for n tokens with input x (n, C). up() routes the tokens and computes gate_up, activate() applies swiglu, and
    // down() computes out = residual + y.
    void up(const Pass &pass, const ExpertActs<X> &a, const ExpertWeights<X> &w, const X *x, const ExpertTokens &n) const;
    void activate(const ExpertActs<X> &a, const ExpertTokens &n) const;
    void down(const Pass &pass, const ExpertActs<X> &a, const ExpertWeights<X> &w, X *out, const X *residual,
              const ExpertTokens &n) const;

    // The ops of the backward pass. They add to the gradients of weights if `accumulate`, and overwrite them otherwise; gradients of frozen weights
    // are null and are skipped. dx may be x. copies (n), balance (E): router.h, or null
    void down_backward(const Pass &pass, const ExpertActs<X> &a, const ExpertWeights<X> &w, const ExpertWeights<float> &dw,
                       const X *dout, const ExpertTokens &n, bool accumulate) const;
    void activate_backward(const ExpertActs<X> &a, const ExpertTokens &n) const;
    void up_backward(const Pass &pass, const ExpertActs<X> &a, const ExpertWeights<X> &w, const ExpertWeights<float> &dw, X *dx,
                     const X *x, const float *balance, const int32_t *copies, const ExpertTokens &n, bool accumulate) const;

  private:
    // A run of tokens, and the rows of this rank's experts in it.
    struct Run {
        size_t first, tokens, rows;
        const int32_t *starts;  // (held_E + 1)
        const ExpertTokens &of;
        ExpertTraffic *traffic;  // null: no expert parallelism

        LayerRows own(const Pass &pass) const { return {pass, of.layer, of.first + first, tokens}; }
        RowGroups held(size_t experts) const { return {starts, experts, rows}; }
        LayerRows held(const Pass &pass, size_t experts) const {
            return {pass, of.layer, of.first + first, rows, starts, experts};
        }
    };

    // Calls f(run, arrays) for each run; the arrays begin at the run's first token.
    template <class F> void for_runs(ExpertActs<X> a, const ExpertTokens &n, F f) const {
        if (N > 1) n.traffic->resize(std::max(n.traffic->size(), ceil_div(n.most, expert_run(dev, N))));
        ExpertTraffic *traffic = N > 1 ? n.traffic->data() : nullptr;
        in_parts(
            n.most,
            [&](size_t t, size_t m) {
                const size_t E = c.number, K = c.chosen, own = m * K, rows = c.rows(N, m);
                Run run{t, t < n.own ? std::min(m, n.own - t) : 0, rows, N > 1 ? a.held_starts : a.starts, n, traffic};
                if (N > 1 && !is_rehearsal<Dev>) run.rows = traffic->rows();
                f(run, a);
                a.probs += m * E, a.chosen += own, a.row_of += own, a.weights += own, a.starts += E + 1, a.token_of += own;
                a.input += rows * C, a.gate_up += rows * 2 * c.F, a.act += rows * c.F, a.dact += rows * c.F;
                a.gate += m, a.shared_gate_up += m * 2 * c.shared_F, a.shared_act += m * c.shared_F, a.shared += m * C;
                a.dshared += m * c.shared_F, a.dweights += m * (K + 1), a.dlogits += m * E, a.dgate += m;
                if (N > 1) a.held_starts += held_E + 1, traffic++;
            },
            is_rehearsal<Dev> ? std::max<size_t>(n.most, 1) : expert_run(dev, N));
    }

    // The rows of the run's tokens, before they travel to the experts and after they return.
    X *own_rows(const ExpertActs<X> &a) const { return N > 1 ? a.own : a.input; }
    void sort(const Run &run, const ExpertActs<X> &a) const {
        sort_by_expert(dev, a.starts, a.counts, a.row_of, a.token_of, a.chosen, run.tokens, c.number, c.chosen);
    }
    void exchange_counts(Run &run, const ExpertActs<X> &a) const;
    template <class T> void to_experts(const Run &run, T *held, const T *own, size_t width) const;
    template <class T> void to_tokens(const Run &run, T *own, const T *held, size_t width) const;
    void gather(const Run &run, const ExpertActs<X> &a, const X *x) const;
    void weigh_backward(const Run &run, const ExpertActs<X> &a) const;

    const Dev dev;
    const ExpertConfig &c;
    LinearLayers<Dev> &linears;
    const size_t C, N, held_E;
    const Gate gate;
};

// All-gathers the number of rows that each rank has for each expert.
template <class Dev> void Experts<Dev>::exchange_counts(Run &run, const ExpertActs<X> &a) const {
    if (N == 1) return;
    const size_t E = c.number;
    run.of.comm->all_gather({a.counts, E}, {a.all_counts, N * E});
    run.of.sent->experts += (N - 1) * E * sizeof(int32_t);
    *run.traffic = {read(*run.of.memory, a.all_counts, N * E), N, size_t(run.of.comm->rank)};
    if (!is_rehearsal<Dev>) run.rows = run.traffic->rows();
}

template <class Dev> template <class T> void Experts<Dev>::to_experts(const Run &run, T *held, const T *own, size_t width) const {
    if (N == 1) return;
    if constexpr (is_rehearsal<Dev>) dev.note(held, own);
    else run.traffic->to_experts(*run.of.comm, *run.of.sent, held, own, width);
}
template <class Dev> template <class T> void Experts<Dev>::to_tokens(const Run &run, T *own, const T *held, size_t width) const {
    if (N == 1) return;
    if constexpr (is_rehearsal<Dev>) dev.note(own, held);
    else run.traffic->to_tokens(*run.of.comm, *run.of.sent, own, held, width);
}

// a.input = the rows of x (tokens, C) for this rank's experts, from all ranks
template <class Dev> void Experts<Dev>::gather(const Run &run, const ExpertActs<X> &a, const X *x) const {
    const size_t rows = run.tokens * c.chosen;
    gather_rows(dev, own_rows(a), x, a.token_of, rows, rows, C);
    to_experts(run, a.input, a.own, C);
}

// weigh_rows_backward; under expert parallelism the weights travel to the experts, and their gradients travel back
template <class Dev> void Experts<Dev>::weigh_backward(const Run &run, const ExpertActs<X> &a) const {
    const size_t K = c.chosen;
    if (N == 1) return weigh_rows_backward(dev, a.dweights, a.dact, a.act, a.weights, a.row_of, run.tokens, K, c.F);
    const int32_t *const in_place = nullptr;
    sort_weights(dev, a.own_weights, a.weights, a.row_of, run.tokens * K);
    to_experts(run, a.held_weights, a.own_weights, 1);
    weigh_rows_backward(dev, a.held_weights, a.dact, a.act, a.held_weights, in_place, run.rows, 1, c.F);
    to_tokens(run, a.own_weights, a.held_weights, 1);
    unsort_weights(dev, a.dweights, a.own_weights, a.row_of, run.tokens * K);
}

template <class Dev>
void Experts<Dev>::up(const Pass &pass, const ExpertActs<X> &acts, const ExpertWeights<X> &w, const X *x,
                      const ExpertTokens &n) const {
    const size_t E = c.number;
    for_runs(acts, n, [&](Run &run, const ExpertActs<X> &a) {
        const X *const x_t = x + run.first * C, *const no_bias = nullptr;
        const size_t m = run.tokens;
        matmul_forward(dev, a.probs, x_t, w.router, no_bias, m, C, E);  // the logits
        router_forward(dev, a.probs, a.chosen, a.weights, a.probs, RouterShape{m, E, c.chosen, c.normed});
        sort(run, a);
        exchange_counts(run, a);
        if (N > 1) write(*run.of.memory, a.held_starts, run.traffic->starts());
        gather(run, a, x_t);
        grouped_matmul_forward(dev, a.gate_up, a.input, w.gate_up, run.held(held_E), C, 2 * c.F);
        linears.adapters_forward(Linear::experts_gate_up, a.gate_up, a.input, run.held(pass, held_E));
        if (c.shared_F == 0) return;
        matmul_forward(dev, a.gate, x_t, w.shared_gate, no_bias, m, C, 1);
        gate_forward(dev, a.gate, a.gate, m);
        matmul_forward(dev, a.shared_gate_up, x_t, w.shared_gate_up, no_bias, m, C, 2 * c.shared_F);
        linears.adapters_forward(Linear::shared_gate_up, a.shared_gate_up, x_t, run.own(pass));
    });
}

template <class Dev> void Experts<Dev>::activate(const ExpertActs<X> &acts, const ExpertTokens &n) const {
    for_runs(acts, n, [&](Run &run, const ExpertActs<X> &a) {
        swiglu_forward(dev, a.act, a.gate_up, run.rows, c.F, gate);
        if (c.shared_F) swiglu_forward(dev, a.shared_act, a.shared_gate_up, run.tokens, c.shared_F, gate);
    });
}

template <class Dev>
void Experts<Dev>::down(const Pass &pass, const ExpertActs<X> &acts, const ExpertWeights<X> &w, X *out, const X *residual,
                        const ExpertTokens &n) const {
    for_runs(acts, n, [&](Run &run, const ExpertActs<X> &a) {
        X *const out_t = out + run.first * C;
        const X *base = residual + run.first * C, *const no_bias = nullptr;
        const size_t m = run.tokens;
        if (c.shared_F) {
            const int32_t *const in_place = nullptr;
            matmul_forward(dev, a.shared, a.shared_act, w.shared_down, no_bias, m, c.shared_F, C);
            linears.adapters_forward(Linear::shared_down, a.shared, a.shared_act, run.own(pass));
            combine_rows(dev, out_t, base, a.shared, a.gate, in_place, m, 1, C);
            base = out_t;
        }
        grouped_matmul_forward(dev, a.input, a.act, w.down, run.held(held_E), c.F, C);
        linears.adapters_forward(Linear::experts_down, a.input, a.act, run.held(pass, held_E));
        to_tokens(run, a.own, a.input, C);
        combine_rows(dev, out_t, base, own_rows(a), a.weights, a.row_of, m, c.chosen, C);
    });
}

template <class Dev>
void Experts<Dev>::down_backward(const Pass &pass, const ExpertActs<X> &acts, const ExpertWeights<X> &w,
                                 const ExpertWeights<float> &dw, const X *dout, const ExpertTokens &n, bool accumulate) const {
    for_runs(acts, n, [&](Run &run, const ExpertActs<X> &a) {
        const X *const dout_t = dout + run.first * C;
        const size_t m = run.tokens;
        const bool add = accumulate || run.first > 0;
        sort(run, a);  // recomputed, because the forward pass only keeps the choices
        if (N > 1) write(*run.of.memory, a.held_starts, run.traffic->starts());
        gather(run, a, dout_t);
        const LayerRows held = run.held(pass, held_E), own = run.own(pass);
        grouped_matmul_backward_input(dev, a.dact, a.input, w.down, run.held(held_E), c.F, C);
        linears.adapters_backward_low(Linear::experts_down, a.input, held);
        linears.adapters_backward_input(Linear::experts_down, a.dact, held);
        weigh_backward(run, a);
        linears.adapters_backward_weight(Linear::experts_down, a.input, a.act, held, add);
        if (dw.down) grouped_matmul_backward_weight(dev, dw.down, a.input, a.act, run.held(held_E), c.F, C, add);
        if (c.shared_F == 0) return;
        const int32_t *const in_place = nullptr;
        float *const dgates = a.dweights + m * c.chosen;
        matmul_backward_input(dev, a.dshared, dout_t, w.shared_down, m, c.shared_F, C);
        linears.adapters_backward_low(Linear::shared_down, dout_t, own);
        linears.adapters_backward_input(Linear::shared_down, a.dshared, own);
        weigh_rows_backward(dev, dgates, a.dshared, a.shared_act, a.gate, in_place, m, 1, c.shared_F);
        linears.adapters_backward_weight(Linear::shared_down, dout_t, a.shared_act, own, add);
        if (dw.shared_down) matmul_backward_weight(dev, dw.shared_down, nullptr, dout_t, a.shared_act, m, c.shared_F, C, add);
    });
}

template <class Dev> void Experts<Dev>::activate_backward(const ExpertActs<X> &acts, const ExpertTokens &n) const {
    for_runs(acts, n, [&](Run &run, const ExpertActs<X> &a) {
        swiglu_backward(dev, a.gate_up, a.dact, a.gate_up, run.rows, c.F, gate);
        if (c.shared_F) swiglu_backward(dev, a.shared_gate_up, a.dshared, a.shared_gate_up, run.tokens, c.shared_F, gate);
    });
}

template <class Dev>
void Experts<Dev>::up_backward(const Pass &pass, const ExpertActs<X> &acts, const ExpertWeights<X> &w,
                               const ExpertWeights<float> &dw, X *dx, const X *x, const float *balance, const int32_t *copies,
                               const ExpertTokens &n, bool accumulate) const {
    const size_t E = c.number, K = c.chosen, S = c.shared_F;
    for_runs(acts, n, [&](Run &run, const ExpertActs<X> &a) {
        const X *const x_t = x + run.first * C, *const no_base = nullptr;
        X *const dx_t = dx + run.first * C;
        const float *const equal = nullptr;
        const size_t m = run.tokens;
        const bool add = accumulate || run.first > 0;
        router_backward(dev, a.dlogits, a.dweights, a.probs, a.chosen, a.weights, balance, copies + run.first,
                        RouterShape{m, E, K, c.normed});
        if (dw.router) matmul_backward_weight(dev, dw.router, nullptr, a.dlogits, x_t, m, C, E, add);
        const LayerRows held = run.held(pass, held_E), own = run.own(pass);
        if (dw.gate_up || linears.adapts(Linear::experts_gate_up)) gather(run, a, x_t);
        if (dw.gate_up) grouped_matmul_backward_weight(dev, dw.gate_up, a.gate_up, a.input, run.held(held_E), C, 2 * c.F, add);
        linears.adapters_backward_low(Linear::experts_gate_up, a.gate_up, held);
        linears.adapters_backward_weight(Linear::experts_gate_up, a.gate_up, a.input, held, add);
        grouped_matmul_backward_input(dev, a.input, a.gate_up, w.gate_up, run.held(held_E), C, 2 * c.F);
        linears.adapters_backward_input(Linear::experts_gate_up, a.input, held);
        to_tokens(run, a.own, a.input, C);
        if (S) gate_backward(dev, a.dgate, a.dweights + m * K, a.gate, m);
        if (dw.shared_gate) matmul_backward_weight(dev, dw.shared_gate, nullptr, a.dgate, x_t, m, C, 1, add);
        if (dw.shared_gate_up) matmul_backward_weight(dev, dw.shared_gate_up, nullptr, a.shared_gate_up, x_t, m, C, 2 * S, add);
        linears.adapters_backward_low(Linear::shared_gate_up, a.shared_gate_up, own);
        linears.adapters_backward_weight(Linear::shared_gate_up, a.shared_gate_up, x_t, own, add);

        // dx may be x, which nothing reads from here on.
        combine_rows(dev, dx_t, no_base, own_rows(a), equal, a.row_of, m, K, C);
        matmul_backward_input(dev, dx_t, a.dlogits, w.router, m, C, E, 0, true);
        if (S == 0) return;
        matmul_backward_input(dev, dx_t, a.dgate, w.shared_gate, m, C, 1, 0, true);
        matmul_backward_input(dev, dx_t, a.shared_gate_up, w.shared_gate_up, m, C, 2 * S, 0, true);
        linears.adapters_backward_input(Linear::shared_gate_up, dx_t, own);
    });
}
