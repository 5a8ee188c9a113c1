// The feed-forward of a mixture of experts (Shazeer et al., 2017, arXiv:1701.06538; Jiang et al., "Mixtral of experts", 2024, arXiv:2401.04088), for n tokens of a
// row: each goes to K of E experts, and their outputs are summed with the router's weights. No token is dropped. In Qwen2-MoE all tokens go to one more expert,
// the shared one, whose weight is a gate's.
//
//   p = softmax(x Wr^T)     y = sum_{k of the K largest} weight_k expert_k(x) + sigmoid(x . wg) shared(x)     expert(x) = (silu(x Wg^T) * (x Wu^T)) Wd^T
//
// The rows of an expert are one block (../ops/expert_rows.h), so that its products are matrix products (../ops/grouped_matmul.h). Tokens are
// processed in runs (matmul_run): no bit depends on how many runs a call has.
#pragma once
#include "../ops/expert_rows.h"
#include "../ops/grouped_matmul.h"
#include "../ops/loss.h"
#include "../ops/matmul.h"
#include "../ops/router.h"
#include "../ops/swiglu.h"
#include "config.h"

// The weights of a layer's experts (S = X), or their gradients (S = float). Of the shared expert they are null if there is none.
template <class S> struct ExpertWeights {
    S *router;          // (E, C)
    S *gate_up;         // (E, 2*F, C)
    S *down;            // (E, C, F)
    S *shared_gate;     // (1, C)
    S *shared_gate_up;  // (2*S, C)   S: the shared expert's size
    S *shared_down;     // (C, S)
};

// The arrays of `tile` tokens, with R = tile * K rows.
template <class X> struct ExpertActs {
    float *probs;                    // (tile, E)
    int32_t *chosen, *row_of;        // (tile, K)
    float *weights;                  // (tile, K)
    int32_t *starts;                 // (runs, E + 1)
    int32_t *token_of;               // (R)         in the token's run
    int32_t *counts;                 // (E)
    X *input;                        // (R, C)      the rows of x; also of y and of its gradient
    X *gate_up, *act;                // (R, 2*F), (R, F)
    float *gate;                     // (tile)      the shared expert's weight
    X *shared_gate_up, *shared_act;  // (tile, 2*S), (tile, S)
    X *shared;                       // (tile, C)
    // of the backward pass
    X *dact, *dshared;   // (R, F), (tile, S)
    float *dweights;     // (tile, K + 1)  then those of the gate
    X *dlogits, *dgate;  // (tile, E), (tile)
};

template <class Dev> class Experts {
    using X = typename Dev::X;

  public:
    Experts(Dev dev, const ModelConfig &config) : dev(dev), c(config.experts), C(config.C) {}

    // Each op is computed for n tokens, of which x (n, C) is the input. up() routes them, activate() follows it, and down() computes out = residual + y.
    void up(const ExpertActs<X> &a, const ExpertWeights<X> &w, const X *x, size_t n) const;
    void activate(const ExpertActs<X> &a, size_t n) const;
    void down(const ExpertActs<X> &a, const ExpertWeights<X> &w, X *out, const X *residual, size_t n) const;

    // The same ops backward. The gradients of weights are added to, or overwritten if not `accumulate`; none of frozen ones, which are null. dx may be x.
    // documents (n) are the tokens', below 0 for padding. balance (E): router.h, or null
    void down_backward(const ExpertActs<X> &a, const ExpertWeights<X> &w, const ExpertWeights<float> &dw, const X *dout, size_t n,
                       bool accumulate) const;
    void activate_backward(const ExpertActs<X> &a, size_t n) const;
    void up_backward(const ExpertActs<X> &a, const ExpertWeights<X> &w, const ExpertWeights<float> &dw, X *dx, const X *x,
                     const float *balance, const int32_t *documents, size_t n, bool accumulate) const;

  private:
    // Calls f(first token, tokens, the arrays from there on) for each run.
    template <class F> void for_runs(ExpertActs<X> a, size_t n, F f) const {
        in_parts(
            n,
            [&](size_t t, size_t m) {
                f(t, m, a);
                const size_t E = c.number, K = c.chosen, rows = m * K;
                a.probs += m * E, a.chosen += rows, a.row_of += rows, a.weights += rows, a.starts += E + 1, a.token_of += rows;
                a.input += rows * C, a.gate_up += rows * 2 * c.F, a.act += rows * c.F, a.dact += rows * c.F;
                a.gate += m, a.shared_gate_up += m * 2 * c.shared_F, a.shared_act += m * c.shared_F, a.shared += m * C;
                a.dshared += m * c.shared_F, a.dweights += m * (K + 1), a.dlogits += m * E, a.dgate += m;
            },
            is_rehearsal<Dev> ? std::max<size_t>(n, 1) : matmul_run(dev));
    }

    const Dev dev;
    const ExpertConfig &c;
    const size_t C;
};

template <class Dev> void Experts<Dev>::up(const ExpertActs<X> &acts, const ExpertWeights<X> &w, const X *x, size_t n) const {
    const size_t E = c.number, K = c.chosen;
    for_runs(acts, n, [&](size_t t, size_t m, const ExpertActs<X> &a) {
        const X *const x_t = x + t * C, *const no_bias = nullptr;
        matmul_forward(dev, a.probs, x_t, w.router, no_bias, m, C, E);  // the logits
        router_forward(dev, a.probs, a.chosen, a.weights, a.probs, m, E, K, c.normed);
        sort_by_expert(dev, a.starts, a.counts, a.row_of, a.token_of, a.chosen, m, E, K);
        gather_rows(dev, a.input, x_t, a.token_of, m * K, m * K, C);
        grouped_matmul_forward(dev, a.gate_up, a.input, w.gate_up, a.starts, E, m * K, C, 2 * c.F);
        if (c.shared_F == 0) return;
        matmul_forward(dev, a.gate, x_t, w.shared_gate, no_bias, m, C, 1);
        gate_forward(dev, a.gate, a.gate, m);
        matmul_forward(dev, a.shared_gate_up, x_t, w.shared_gate_up, no_bias, m, C, 2 * c.shared_F);
    });
}

template <class Dev> void Experts<Dev>::activate(const ExpertActs<X> &a, size_t n) const {
    swiglu_forward(dev, a.act, a.gate_up, n * c.chosen, c.F);
    if (c.shared_F) swiglu_forward(dev, a.shared_act, a.shared_gate_up, n, c.shared_F);
}

template <class Dev>
void Experts<Dev>::down(const ExpertActs<X> &acts, const ExpertWeights<X> &w, X *out, const X *residual, size_t n) const {
    const size_t E = c.number, K = c.chosen;
    for_runs(acts, n, [&](size_t t, size_t m, const ExpertActs<X> &a) {
        X *const out_t = out + t * C;
        const X *base = residual + t * C, *const no_bias = nullptr;
        if (c.shared_F) {
            const int32_t *const in_place = nullptr;
            matmul_forward(dev, a.shared, a.shared_act, w.shared_down, no_bias, m, c.shared_F, C);
            combine_rows(dev, out_t, base, a.shared, a.gate, in_place, m, 1, C);
            base = out_t;
        }
        grouped_matmul_forward(dev, a.input, a.act, w.down, a.starts, E, m * K, c.F, C);
        combine_rows(dev, out_t, base, a.input, a.weights, a.row_of, m, K, C);
    });
}

template <class Dev>
void Experts<Dev>::down_backward(const ExpertActs<X> &acts, const ExpertWeights<X> &w, const ExpertWeights<float> &dw,
                                 const X *dout, size_t n, bool accumulate) const {
    const size_t E = c.number, K = c.chosen;
    for_runs(acts, n, [&](size_t t, size_t m, const ExpertActs<X> &a) {
        const X *const dout_t = dout + t * C;
        const bool add = accumulate || t > 0;
        sort_by_expert(dev, a.starts, a.counts, a.row_of, a.token_of, a.chosen, m, E, K);  // once more: only choices are kept
        gather_rows(dev, a.input, dout_t, a.token_of, m * K, m * K, C);
        grouped_matmul_backward_input(dev, a.dact, a.input, w.down, a.starts, E, m * K, c.F, C);
        weigh_rows_backward(dev, a.dweights, a.dact, a.act, a.weights, a.row_of, m, K, c.F);
        if (dw.down) grouped_matmul_backward_weight(dev, dw.down, a.input, a.act, a.starts, E, m * K, c.F, C, add);
        if (c.shared_F == 0) return;
        const int32_t *const in_place = nullptr;
        matmul_backward_input(dev, a.dshared, dout_t, w.shared_down, m, c.shared_F, C);
        weigh_rows_backward(dev, a.dweights + m * K, a.dshared, a.shared_act, a.gate, in_place, m, 1, c.shared_F);
        if (dw.shared_down) matmul_backward_weight(dev, dw.shared_down, nullptr, dout_t, a.shared_act, m, c.shared_F, C, add);
    });
}

template <class Dev> void Experts<Dev>::activate_backward(const ExpertActs<X> &a, size_t n) const {
    swiglu_backward(dev, a.gate_up, a.dact, a.gate_up, n * c.chosen, c.F);
    if (c.shared_F) swiglu_backward(dev, a.shared_gate_up, a.dshared, a.shared_gate_up, n, c.shared_F);
}

template <class Dev>
void Experts<Dev>::up_backward(const ExpertActs<X> &acts, const ExpertWeights<X> &w, const ExpertWeights<float> &dw, X *dx,
                               const X *x, const float *balance, const int32_t *documents, size_t n, bool accumulate) const {
    const size_t E = c.number, K = c.chosen, S = c.shared_F;
    for_runs(acts, n, [&](size_t t, size_t m, const ExpertActs<X> &a) {
        const X *const x_t = x + t * C, *const no_base = nullptr;
        X *const dx_t = dx + t * C;
        const float *const equal = nullptr;
        const bool add = accumulate || t > 0;
        router_backward(dev, a.dlogits, a.dweights, a.probs, a.chosen, a.weights, balance, documents + t, m, E, K, c.normed);
        if (dw.router) matmul_backward_weight(dev, dw.router, nullptr, a.dlogits, x_t, m, C, E, add);
        if (dw.gate_up) {
            gather_rows(dev, a.input, x_t, a.token_of, m * K, m * K, C);
            grouped_matmul_backward_weight(dev, dw.gate_up, a.gate_up, a.input, a.starts, E, m * K, C, 2 * c.F, add);
        }
        if (S) gate_backward(dev, a.dgate, a.dweights + m * K, a.gate, m);
        if (dw.shared_gate) matmul_backward_weight(dev, dw.shared_gate, nullptr, a.dgate, x_t, m, C, 1, add);
        if (dw.shared_gate_up) matmul_backward_weight(dev, dw.shared_gate_up, nullptr, a.shared_gate_up, x_t, m, C, 2 * S, add);

        grouped_matmul_backward_input(dev, a.input, a.gate_up, w.gate_up, a.starts, E, m * K, C, 2 * c.F);
        combine_rows(dev, dx_t, no_base, a.input, equal, a.row_of, m, K, C);
        matmul_backward_input(dev, dx_t, a.dlogits, w.router, m, C, E, 0, true);
        if (S == 0) return;
        matmul_backward_input(dev, dx_t, a.dgate, w.shared_gate, m, C, 1, 0, true);
        matmul_backward_input(dev, dx_t, a.shared_gate_up, w.shared_gate_up, m, C, 2 * S, 0, true);
    });
}
