// The ops of a training step: their names, their costs, and the lowest level of recomputation at which the backward pass recomputes them. A model
// lists the ops of its layers; the ops around the layers are the same for all models. Recomputation, --profile and MFU follow from this list.
#pragma once
#include <algorithm>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "../data/dataloader.h"
#include "../ops/attention_types.h"
#include "../ops/gated_delta.h"
#include "../parallel/split.h"
#include "config.h"

enum class Phase : size_t { forward, both, recompute, backward, step };  // both: the head's loss and gradients, which are one op
constexpr size_t phases = 5;
constexpr const char *phase_names[phases] = {"forward", "both", "recompute", "backward", ""};

// The activations that the forward pass keeps for the backward pass, which recomputes the rest. Keeping less saves memory, costs time, and changes no
// bit.
enum class Recompute {
    none,
    cheap,  // norms and the activation are recomputed
    layer,  // all but layer inputs, attention's output and lse
    never,  // not a level of a run: marks an op that no level recomputes, or an array that every level keeps
};

// The sizes of a row, and the properties of the model's layout that affect costs.
struct Work {
    size_t T, N;                   // tokens, predictors
    std::vector<double> scores;    // (L) the scores (query, key) that each layer's mask lets through
    size_t element = 4;            // bytes of a weight or an activation
    size_t gradient = 4;           // bytes of a parameter's gradient between micro-steps
    size_t moment = 4;             // bytes of one of the optimizer's moments
    size_t bucket = 0;             // parameters of the bucket that an op works on; 0: all parameters
    bool head_in_buckets = false;  // the head's gradient is computed apart from the loss, in several buckets
    Recompute recompute = Recompute::none;
    size_t parameters = 0, cleared = 0;       // of this rank: updated in a step; with gradients that are cleared before a step
    size_t without_v = 0;                     // updated by Muon, with one moment
    double muon_flops = 0;                    // for the products of Muon's update on this rank
    size_t tensor_ranks = 1;                  // ranks that divide tensors, and the tokens between them
    size_t expert_ranks = 1, expert_run = 1;  // ranks that divide experts; tokens that they exchange at a time
};

// Computes the sizes of a row. With `padding` the padding counts as one more document, because the ops compute it; model FLOPs exclude it.
inline Work work_of(const ModelConfig &c, const Row &row, bool padding) {
    Work w{padding ? row.T : row.doc_offsets.back(), row.predictors.size(), {}};
    for (size_t l = 0; l < c.L; l++) w.scores.push_back(scores_of_row(row, c.window[l], padding));
    return w;
}

// The cost of an op.
//
//   flops: only multiplications and additions of matrix products. T rows and an (IC, OC) matrix take 2*T*IC*OC forward and twice that
//   backward, for the gradients of input and weight; for attention see ../ops/attention_types.h. The head is only multiplied in rows with a target,
//   and in a reward model in the last row of each document. The products that a step calls have these FLOPs: test/test_flops.cpp counts them in a
//   rehearsal.
//
//   bytes: every input is read once and every output is written once, the least that any implementation must move. Vectors (norm weights,
//   biases, rstd, lse, positions) and intermediate arrays (float sums of attention) do not count. The head's logits are a separate member. Gradients
//   of weights are float and accumulate: 8 bytes per element. Gradients that are summed over ranks count once. COPY, which goes between host and
//   device, and FETCH_PARAMS, which waits for parameters from other ranks or a store, count as 0.
struct Cost {
    double flops, bytes;
    double logits = 0;   // bytes of the head's logits: traffic between its products, which does not overlap with them
    double rounded = 0;  // bytes moved by rounding the operands of a layer's matrix to FP8, before the product
    double grouped = 0;  // the part of the FLOPs in experts' products, which have their own rate
    double sent = 0;     // bytes that this rank sends to other ranks' experts and tokens, if all experts have equal loads
};
using CostOf = std::function<Cost(const Work &, Phase, size_t layer)>;

namespace cost {
// A product of T rows with an (IC, OC) matrix. The forward pass reads or writes `more` further elements per token.
inline CostOf product(size_t IC, size_t OC, size_t more = 0) {
    return [=, IC = double(IC), OC = double(OC), more = double(more)](const Work &w, Phase phase, size_t) -> Cost {
        const double T = double(w.T), s = double(w.element);
        if (phase == Phase::backward) return {4 * T * IC * OC, s * (2 * T * IC + IC * OC + T * OC) + 8 * IC * OC};
        return {2 * T * IC * OC, s * (T * IC + IC * OC + T * OC + more * T)};
    };
}
// An op without products that moves this many elements per token.
inline CostOf elements(size_t forward, size_t backward) {
    return [=](const Work &w, Phase phase, size_t) -> Cost {
        return {0, double(w.element * w.T * (phase == Phase::backward ? backward : forward))};
    };
}
// Attention with Q = H*D and K = KV*D elements per token.
inline CostOf attention(size_t Q, size_t K) {
    return [Q = double(Q), K = double(K)](const Work &w, Phase phase, size_t l) -> Cost {
        const double T = double(w.T), s = double(w.element);
        if (phase == Phase::backward) return {attention_backward_flops * w.scores[l] * Q, s * T * (4 * Q + 4 * K)};
        return {attention_flops * w.scores[l] * Q, s * T * (2 * Q + 2 * K)};
    };
}
// Linear attention by the gated delta rule.
inline CostOf delta_rule(const DeltaConfig &d) {
    return [s = DeltaShape{1, d.Hk, d.Hv, d.Dk, d.Dv, 0}, values = d.values()](const Work &w, Phase phase, size_t) -> Cost {
        const double heads = double(w.T * s.Hv), bytes = double(w.element * w.T);
        if (phase == Phase::backward) return {heads * gated_delta_backward_flops(s), bytes * double(2 * s.row() + values)};
        return {heads * gated_delta_flops(s), bytes * double(s.row() + values)};
    };
}
// Products of T tokens with the (IC, OC) matrices of the K experts, among E, that each token chooses. Few tokens read only some of the matrices.
// frozen: the matrices have no gradients.
inline CostOf grouped(size_t E, size_t K, size_t IC, size_t OC, bool frozen) {
    return [=, IC = double(IC), OC = double(OC)](const Work &w, Phase phase, size_t) -> Cost {
        const size_t held = ceil_div(E, w.expert_ranks);  // of a matrix of which all tokens go to one, all ranks have all
        const double R = double(w.T * K), s = double(w.element), matrix = IC * OC,
                     read = double(std::min(held, w.T * K)) * matrix;
        const double product = 2 * R * matrix, both = (frozen ? 1 : 2) * product;
        if (phase != Phase::backward) return {.flops = product, .bytes = s * (R * (IC + OC) + read), .grouped = product};
        const double moved = s * (R * ((frozen ? 1 : 2) * IC + OC) + read);
        return {.flops = both, .bytes = moved + (frozen ? 0 : 8 * double(held) * matrix), .grouped = both};
    };
}
// The rows of C elements that go to other ranks if experts are divided (../parallel/expert_exchange.h): once forward, and `times` times backward,
// with `floats` numbers each. Forward also sends the row counts of `counted` experts.
inline CostOf exchange(const ExpertConfig &e, size_t C, size_t times, size_t counted, size_t floats) {
    return [=, K = e.chosen](const Work &w, Phase phase, size_t) -> Cost {
        const double others = double(w.expert_ranks - 1), rows = double(w.T * K) * others / double(w.expert_ranks);
        const double row = double(C * w.element),
                     numbers = others * double(counted * sizeof(int32_t) * ceil_div(w.T, w.expert_run));
        if (phase == Phase::backward) return {.flops = 0, .bytes = 0, .sent = rows * (double(times) * row + double(4 * floats))};
        return {.flops = 0, .bytes = 0, .sent = rows * row + numbers};
    };
}
// The cost of an op on the tokens that the rank norms, under tensor parallelism.
inline CostOf own_tokens(CostOf of) {
    return [of = std::move(of)](const Work &w, Phase phase, size_t l) {
        Work own = w;
        own.T = ceil_div(w.T, w.tensor_ranks);
        return of(own, phase, l);
    };
}
// Returns the cost of an op that consists of several.
inline CostOf sum(std::vector<CostOf> of) {
    return [of = std::move(of)](const Work &w, Phase phase, size_t l) {
        Cost total{0, 0};
        for (const CostOf &cost : of) {
            const Cost c = cost(w, phase, l);
            total.flops += c.flops, total.bytes += c.bytes, total.logits += c.logits, total.sent += c.sent;
            total.rounded += c.rounded, total.grouped += c.grouped;
        }
        return total;
    };
}
// The cost of an op that is another one in some layers; without these layers the list is empty.
inline CostOf by_layer(const std::vector<bool> &layers, CostOf usual, CostOf other) {
    if (layers.empty()) return usual;
    return [layers, usual = std::move(usual), other = std::move(other)](const Work &w, Phase phase, size_t l) {
        return layers[l] ? other(w, phase, l) : usual(w, phase, l);
    };
}
// A residual sum and its norm. If the sum is kept, recomputation reads it and only computes the norm.
inline CostOf residual_norm(size_t C) {
    return [C](const Work &w, Phase phase, size_t) -> Cost {
        const bool alone = phase == Phase::recompute && w.recompute < Recompute::layer;
        return {0, double(w.element * w.T * C * (alone ? 2 : 4))};
    };
}
}  // namespace cost

// The ops around the layers, and of a step, and the messages among ranks. Their numbers follow the layer's ops.
enum RowOp : size_t {
    EMBED,
    FINAL_NORM,
    HEAD,
    COPY,
    ZERO_GRAD,
    GRAD_NORM,
    ADAMW,
    GRAD_SUM,
    FETCH_PARAMS,
    DEQUANTISE,
    TOKENS,
    ROW_OPS
};
constexpr const char *row_op_names[ROW_OPS] = {"embedding",      "final norm",    "head, loss",   "copies",
                                               "zero gradients", "gradient norm", "optimizer",    "gradient sum",
                                               "fetch params",   "dequantise",    "gather tokens"};

struct LayerOp {
    const char *name;
    Recompute from;  // the backward pass recomputes the op at this level and all higher ones
    CostOf cost;
    bool exists = true;  // false: the model's layers lack the op
};

struct OpList {
    std::vector<LayerOp> layer;  // in the order of the forward pass, which the backward pass reverses
    size_t attention;            // the number of the op that is attention
    size_t embeddings = 1;       // number of tables whose rows are added to form the input of the first layer

    size_t number(RowOp op) const { return layer.size() + op; }
    size_t size() const { return layer.size() + ROW_OPS; }
    bool of_layer(size_t op) const { return op < layer.size(); }
    const char *name(size_t op) const { return of_layer(op) ? layer[op].name : row_op_names[op - layer.size()]; }

    Cost cost(const ModelConfig &c, const Work &w, Phase phase, size_t op, size_t l) const {
        return of_layer(op) ? layer[op].cost(w, phase, l) : row_cost(c, w, phase, RowOp(op - layer.size()));
    }

    // Model FLOPs of a row in a training step, the numerator of MFU, as they are commonly counted (Chowdhery et al., "PaLM", 2022,
    // arXiv:2204.02311, appendix B): 6 for each token and parameter of a matrix that is multiplied (2 forward and 4 backward), and
    // 12*scores*H*D for each layer's attention. The embedding lookup does not count. The head counts for every token, although rows without a
    // target are skipped here, so the figure depends on model and data alone and trainers can be compared. A reward model's head counts
    // once per document. Recomputation and padding do not count. Unlike in PaLM, scores only count if the causal mask, the documents
    // and the window let them through. A frozen matrix has 2 backward, and adapters include their recomputation.
    double model_flops(const ModelConfig &c, const Row &row) const {
        Work w = work_of(c, row, false);
        if (!c.reward) w.N = w.T;
        double flops = (frozen_head(c) ? 2 : 3) * row_cost(c, w, Phase::forward, HEAD).flops;
        for (size_t l = 0; l < c.L; l++)
            for (size_t op = 0; op < layer.size(); op++) {
                const double forward = layer[op].cost(w, Phase::forward, l).flops;
                flops += forward + (op == attention ? 2 * forward : layer[op].cost(w, Phase::backward, l).flops);
            }
        return flops;
    }

  private:
    static bool frozen_head(const ModelConfig &c) { return c.lora.rank > 0 && !c.lora.head && !c.reward; }
    Cost row_cost(const ModelConfig &c, const Work &w, Phase phase, RowOp op) const {
        const double T = double(w.T), N = double(w.N), C = double(c.C), s = double(w.element), tables = double(embeddings);
        const double R = c.reward ? 1 : double(c.V);  // the head's rows
        const bool backward = phase == Phase::backward;
        switch (op) {
            case EMBED: return {0, T * C * (backward ? tables * (s + 8) : (tables + 1) * s)};
            case FINAL_NORM: return {0, s * T * C * (backward ? 3 : 2)};
            case HEAD: {
                // Logits are written by a product, read by the classifier, and written and read again as their gradients by the classifier and two
                // products.
                const double logits =
                    c.reward ? 0 : s * N * (backward ? double(w.bucket) / C : R) * (phase == Phase::forward ? 3 : 8);
                if (phase == Phase::forward) return {2 * N * C * R, s * (N * C + R * C), logits};
                const double bucket = double(w.bucket);
                // Only the rows of its bucket.
                if (backward && !c.reward) return {4 * N * bucket, s * (N * C + bucket) + 8 * bucket, logits};
                if (frozen_head(c) || (!backward && w.head_in_buckets))
                    return {4 * N * C * R, s * (N * C + R * C + T * C), logits};
                return {(backward ? 4 : 6) * N * C * R, s * (N * C + R * C + T * C) + 8 * R * C, logits};
            }
            case ZERO_GRAD: return {0, double(w.gradient * w.cleared)};
            case GRAD_NORM: return {0, double(w.gradient * w.parameters)};
            case ADAMW:  // reads gradient, weight and moments; writes all but the gradient
                return {w.muon_flops,
                        double((8 + w.gradient + 4 * w.moment) * w.parameters) - double(2 * w.moment * w.without_v)};
            case GRAD_SUM: return {0, 4 * double(w.bucket)};
            case DEQUANTISE: return {0, (double(c.weight_bits) / 8 + s) * double(w.bucket)};  // of a layer's weights
            case COPY:
            case FETCH_PARAMS:
            case TOKENS:
            case ROW_OPS: break;
        }
        return {0, 0};
    }
};
