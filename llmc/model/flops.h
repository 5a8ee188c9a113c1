// The ops of a training step and their cost: the floating-point operations of each, and the bytes that it must move at least.
#pragma once
#include <vector>

#include "../data/dataloader.h"
#include "config.h"

// clang-format off
enum Op : size_t {
    LN1, QKV, ROPE, ATTENTION, PROJ, LN2, UP, ACT, DOWN, LAYER_OPS,                     // the ops of a layer, in the order of the forward pass
    EMBED = LAYER_OPS, FINAL_NORM, HEAD, COPY, ZERO_GRAD, GRAD_NORM, ADAMW,            // the ops of a row, and of a step
    GRAD_SUM, PARAM_GATHER, OPS                                                        // messages among ranks
};
constexpr const char *op_names[OPS] = {
    "norm 1", "qkv", "rope", "attention", "proj", "norm 2", "up", "activation", "down",
    "embedding", "final norm", "head, loss", "copies", "zero gradients", "gradient norm", "adamw", "gradient sum", "gather params"};
// clang-format on

enum class Pass : size_t { forward, both, recompute, backward, step };  // both: loss and gradients of the head, which are one op
constexpr size_t passes = 5;
constexpr const char *pass_names[passes] = {"forward", "both", "recompute", "backward", ""};

// The sizes of a row, and the properties of the model's layout that costs depend on.
struct Work {
    size_t T, N;                 // tokens, targets; of a reward model, documents
    std::vector<double> scores;  // (L) the scores (query, key) that each layer's mask lets through
    size_t element = 4;          // bytes of a weight or an activation
    size_t moment = 4;           // bytes of one of AdamW's moments
    size_t bucket = 0;           // the parameters of the bucket that an op works on; 0: it works on all
    bool keeps_mid = true;       // the residual stream after attention is kept, not recomputed
};

// The number of (query, key) scores of a document of n tokens under the causal mask, where a query sees the last `window` keys (0: all).
inline double attention_scores(size_t n, size_t window) {
    const double w = double(window == 0 ? n : std::min(n, window));
    return w * (w + 1) / 2 + (double(n) - w) * w;
}

// Computes the sizes of a row. With `padding` its padding counts as one more document, since the ops compute it; model FLOPs leave it out.
inline Work work_of(const ModelConfig &c, const Row &row, bool padding) {
    std::vector<size_t> ends(row.doc_offsets.begin() + 1, row.doc_offsets.end());
    if (padding) ends.push_back(row.T);
    Work w{ends.empty() ? 0 : ends.back(), row.predictors.size(), std::vector<double>(c.L)};
    for (size_t l = 0; l < c.L; l++)
        for (size_t i = 0, begin = 0; i < ends.size(); begin = ends[i++])
            w.scores[l] += attention_scores(ends[i] - begin, c.window[l]);
    return w;
}

struct Cost {
    double flops, bytes;
};

// Returns the cost of an op of layer l.
//
//   flops: multiplications and additions of matrix products alone: T rows through an (IC, OC) matrix take 2*T*IC*OC forward, twice that
//   backward, for the gradients of input and weight. Attention: 4*scores*H*D forward (scores, weighted values); 10 backward, which
//   recomputes the scores, as is usual where their (T, T) matrix is never stored. The head is multiplied in the rows with a target only, that
//   of a reward model in the last row of each document.
//
//   bytes: every input is read once and every output written once, which is the least that any implementation must move. Vectors (norm weights,
//   biases, rstd, lse, positions) are left out, intermediate arrays (the head's logits, float sums of attention) as well. Gradients of
//   weights are float and added to: 8 bytes an element. Gradients that are summed over ranks count once. COPY, which goes between
//   host and device, and PARAM_GATHER, which waits for the parameters that other ranks have updated, are left at 0.
inline Cost op_cost(const ModelConfig &c, const Work &w, Pass pass, Op op, size_t l) {
    const double T = double(w.T), N = double(w.N), C = double(c.C), F = double(c.F), V = double(c.V), s = double(w.element);
    const double Q = double(c.H * c.D), K = double(c.KV * c.D), raw = c.qk_norm ? 1 : 0;
    const double gates = c.gpt2() ? 0 : 1, tables = c.gpt2() ? 2 : 1;  // tables: of tokens and of positions
    const bool backward = pass == Pass::backward;
    const auto product = [&](double IC, double OC) -> Cost {
        if (backward) return {4 * T * IC * OC, s * (2 * T * IC + IC * OC + T * OC) + 8 * IC * OC};
        return {2 * T * IC * OC, s * (T * IC + IC * OC + T * OC)};
    };
    const auto parameters = [&](double bytes) -> Cost { return {0, bytes * double(parameter_count(c))}; };
    switch (op) {
        case LN1:
            return {0, s * T * C * (backward ? 4 : 2)};  // backward: x, its gradient (read and written), the output's gradient
        case QKV: return product(C, Q + 2 * K);
        case ROPE: return {0, s * T * (Q + K) * (2 + raw)};  // in place; with QK norms their inputs are stored, too
        case ATTENTION: {
            if (backward) return {10 * w.scores[l] * Q, s * T * (4 * Q + 4 * K)};
            return {4 * w.scores[l] * Q, s * T * (2 * Q + 2 * K)};
        }
        case PROJ: return product(Q, C);
        case LN2: return {0, s * T * C * (pass == Pass::recompute && w.keeps_mid ? 2 : 4)};  // with the residual stream
        case UP: return product(C, (gates + 1) * F);
        case ACT: return {0, s * T * F * (backward ? 3 + 2 * gates : 2 + gates)};
        case DOWN: {
            Cost down = product(F, C);
            if (!backward) down.bytes += s * T * C;  // the residual stream
            return down;
        }
        case EMBED: return {0, T * C * (backward ? tables * (s + 8) : (tables + 1) * s)};
        case FINAL_NORM: return {0, s * T * C * (backward ? 3 : 2)};
        case HEAD: {
            const double R = c.reward ? 1 : V;  // rows
            if (pass == Pass::forward) return {2 * N * C * R, s * (N * C + R * C)};
            if (backward && !c.reward)
                return {4 * N * double(w.bucket),
                        s * (N * C + double(w.bucket)) + 8 * double(w.bucket)};  // the rows of its bucket alone
            return {(backward ? 4 : 6) * N * C * R, s * (N * C + R * C + T * C) + 8 * R * C};
        }
        case ZERO_GRAD: {  // all gradients but those that products overwrite
            const double layer = C * (Q + 2 * K) + Q * C + (gates + 2) * C * F, head = c.reward ? 0 : V * C;
            return {0, 4 * (double(parameter_count(c)) - double(c.L) * layer - head)};
        }
        case GRAD_NORM: return parameters(4);
        case ADAMW:
            return parameters(12 + 4 * double(w.moment));  // reads gradient, weight and both moments; writes all but the gradient
        case GRAD_SUM: return {0, 4 * double(w.bucket)};
        case PARAM_GATHER:
        case COPY:
        case OPS: break;
    }
    return {0, 0};
}

// Model FLOPs of a row in a training step, the numerator of MFU, as they are commonly counted (Chowdhery et al., "PaLM", 2022,
// arXiv:2204.02311, appendix B): 6 for each token and parameter of a matrix that is multiplied, that is 2 forward and 4 backward, and
// 12*scores*H*D for each layer's attention. The lookup in the embedding is not counted. The head is, for every token, though rows
// without a target are left out here: a property of model and data, so that trainers can be compared. That of a reward model is counted
// once for a document. Nor does it count what is computed again, or padding. Unlike in PaLM, scores are only those that the causal mask,
// the documents and the window let through.
inline double model_flops(const ModelConfig &c, const Row &row) {
    Work w = work_of(c, row, false);
    if (!c.reward) w.N = w.T;
    double forward = op_cost(c, w, Pass::forward, HEAD, 0).flops;
    for (size_t l = 0; l < c.L; l++)
        for (size_t op = 0; op < LAYER_OPS; op++) forward += op_cost(c, w, Pass::forward, Op(op), l).flops;
    return 3 * forward;
}
