// Products of activations with the layers' matrices and with their adapters, if there are any (lora.h):
//
//   y = x W^T + scale * drop(x) A^T B^T        W (OC, IC)   A (rank, IC), B (OC, rank)
//
// The pointers of a call point at n tokens of a layer, beginning with token t of the row. docs/lora.md derives the backward pass.
//
// The products of experts are in experts.h, which only calls the adapters' part: the same formula for the rows of an expert, with its own A and B.
//
// With Pass::fp8 the products with W are in FP8 (../ops/fp8.h), but not the products with adapters. Activations are rounded one matmul_run of tokens at
// a time, so a scale does not depend on other tokens of a call; W is rounded whole, before each product.
#pragma once
#include <algorithm>

#include "../core/arena.h"
#include "../ops/dropout.h"
#include "../ops/fp8.h"
#include "../ops/grouped_matmul.h"
#include "../ops/layout.h"
#include "../ops/matmul.h"
#include "lora.h"
#include "pass.h"

// The rows of a product: n tokens of layer l, beginning with token t of the row, or n rows of these tokens, sorted by expert.
struct LayerRows {
    const Pass &pass;
    size_t l, t, n;
    const int32_t *starts = nullptr;  // (experts + 1)  of the rank's experts; null: the rows are tokens
    size_t experts = 1;

    RowGroups groups() const { return {starts, experts, n}; }
};

template <class Dev> class LinearLayers {
  public:
    using X = typename Dev::X;

    LinearLayers(Dev dev, const ModelConfig &config) : dev(dev), config(config), modules(adapted_modules(config)) {
        for (size_t i = 0; i < linear_matrices; i++) shapes[i] = linear_shape(config, Linear(i));
    }
    void plan(Plan &plan, size_t T, size_t expert_rows, bool trains);
    void plan_fp8(Plan &plan, size_t T, bool trains);
    void forward(const LayerRows &rows, Linear matrix, X *out, const X *x, LinearWeights<X> w);
    // Computes the gradients of the trained weights and of the input. dx may alias x; dx and dw's pointers may be null. With `accumulate` the
    // weights' gradients are added to the gradients of earlier rows. With `add_dx` the input's gradient is added to that of other matrices, and dx
    // may not alias x.
    void backward(const LayerRows &rows, Linear matrix, X *dx, LinearWeights<float> dw, const X *dout, const X *x,
                  LinearWeights<X> w, bool accumulate, bool add_dx = false);
    // The adapters' parts of these functions: out += ..., dx += ..., and the gradients of A and B, which accumulate if `add`. backward_low() must be
    // called before the other backward functions.
    void adapters_forward(Linear matrix, X *out, const X *x, const LayerRows &rows);
    void adapters_backward_low(Linear matrix, const X *dout, const LayerRows &rows);
    void adapters_backward_weight(Linear matrix, const X *dout, const X *x, const LayerRows &rows, bool add);
    void adapters_backward_input(Linear matrix, X *dx, const LayerRows &rows);
    bool adapts(Linear matrix) const { return std::ranges::count(modules, matrix, &LinearModule::matrix); }
    bool drops(const Pass &pass) const { return pass.key && config.lora.dropout > 0; }

    Adapters<X> adapters;
    Adapters<float> gradients;
    const int32_t *documents = nullptr;  // (T) number of the document in its file, with dropout
    const int32_t *positions = nullptr;  // (T) in the document

  private:
    DropoutMask mask_of(const LinearModule &module, const LayerRows &rows) const;
    const X *adapter_input(size_t i, const X *x, const LayerRows &rows);
    // Products of tokens with one matrix, or of each expert's rows with the expert's matrix.
    void product(const LayerRows &rows, X *out, const X *x, const X *w, size_t IC, size_t OC, size_t ld = 0, bool add = false);
    void product_weight(const LayerRows &rows, float *dw, const X *dout, const X *x, size_t IC, size_t OC, bool add,
                        size_t ld = 0);
    void product_input(const LayerRows &rows, X *dx, const X *dout, const X *w, size_t IC, size_t OC, size_t ld = 0,
                       bool add = false);
    template <class F> void for_adapters(Linear matrix, F f) const;
    void round(Fp8Matrix q, const X *x, size_t rows, size_t columns, bool turned = false) {
        fp8_scale(dev, q, x, rows, columns);
        fp8_round(dev, q, x, rows, columns, turned);
    }
    void base_forward(const LayerRows &rows, X *out, const X *x, LinearWeights<X> w, LinearShape shape);
    void base_backward_weight(const LayerRows &rows, LinearWeights<float> dw, const X *dout, const X *x, LinearShape shape,
                              bool accumulate);
    void base_backward_input(const LayerRows &rows, X *dx, const X *dout, LinearShape shape, const X *w, bool add);

    const Dev dev;
    const ModelConfig &config;
    const std::vector<LinearModule> modules;  // the modules with adapters
    LinearShape shapes[linear_matrices];
    X *dropped;             // (matmul_run, the widest input)            with dropout: the input of an adapter
    X *low, *dlow;          // (rows, rank), (.., 3 * rank)              x A^T; its gradients, for all modules of a matrix
    Fp8Matrix left, right;  // the operands of a product in FP8: tokens, or gradients; and W, or x
};

// The arrays of adapters hold one run of tokens, or of the experts' rows, for any length of the row.
template <class Dev> void LinearLayers<Dev>::plan(Plan &plan, size_t T, size_t expert_rows, bool trains) {
    const size_t run = std::min(T, matmul_run(dev)), r = config.lora.rank;
    size_t n = run, widest = 0, most = 0;
    for (const LinearModule &m : modules) {
        if (of_experts(m.matrix)) n = std::max(n, expert_rows);
        widest = std::max(widest, m.IC);
        most = std::max(most, size_t(std::ranges::count(modules, m.matrix, &LinearModule::matrix)));
    }
    plan.add(&low, "adapters' products", {n, r});
    if (!trains) return;
    plan.add(&dlow, "adapters' gradients", {n, most * r});
    if (config.lora.dropout == 0) return;
    plan.add(&dropped, "adapters' inputs", {run, widest});
}

template <class Dev> void LinearLayers<Dev>::plan_fp8(Plan &plan, size_t T, bool trains) {
    const size_t n = std::min(T, matmul_run(dev));
    size_t tokens = 0, weights = 0;
    for (const auto [IC, OC] : shapes) {
        tokens = std::max(tokens, n * (trains ? std::max(IC, OC) : IC));
        weights = std::max({weights, IC * OC, trains ? n * IC : 0});
    }
    plan.add(&left.values, "fp8 tokens", {tokens * fp8_bytes(dev)});
    plan.add(&right.values, "fp8 weights", {weights * fp8_bytes(dev)});
    plan.add(&left.scale, "fp8 scale of tokens", {2});
    plan.add(&right.scale, "fp8 scale of weights", {2});
}

template <class Dev>
void LinearLayers<Dev>::base_forward(const LayerRows &rows, X *out, const X *x, LinearWeights<X> w, LinearShape shape) {
    const auto [IC, OC] = shape;
    if (!rows.pass.fp8) return matmul_forward(dev, out, x, w.weight, w.bias, rows.n, IC, OC);
    round(right, w.weight, OC, IC);
    in_parts(
        rows.n,
        [&, IC = IC, OC = OC](size_t t, size_t part) {
            round(left, x + t * IC, part, IC);
            fp8_product(dev, out + t * OC, left, right, w.bias, part, IC, OC, false);
        },
        matmul_run(dev));
}

// Computes the gradients for at most one run of tokens. In FP8 `left` has the scale of dout, which both products round; the first also transposes it.
template <class Dev>
void LinearLayers<Dev>::base_backward_weight(const LayerRows &rows, LinearWeights<float> dw, const X *dout, const X *x,
                                             LinearShape shape, bool accumulate) {
    const auto [IC, OC] = shape;
    const size_t n = rows.n;
    if (!rows.pass.fp8) return matmul_backward_weight(dev, dw.weight, dw.bias, dout, x, n, IC, OC, accumulate);
    const X *const no_bias = nullptr;
    fp8_round(dev, left, dout, n, OC, true);
    round(right, x, n, IC, true);
    fp8_product(dev, dw.weight, left, right, no_bias, OC, n, IC, accumulate);
    if (dw.bias) matmul_bias_backward(dev, dw.bias, dout, n, OC, OC);
}

template <class Dev>
void LinearLayers<Dev>::base_backward_input(const LayerRows &rows, X *dx, const X *dout, LinearShape shape, const X *w,
                                            bool add) {
    const auto [IC, OC] = shape;
    const size_t n = rows.n;
    if (!rows.pass.fp8) return matmul_backward_input(dev, dx, dout, w, n, IC, OC, 0, add);
    const X *const no_bias = nullptr;
    fp8_round(dev, left, dout, n, OC, false);
    round(right, w, OC, IC, true);
    fp8_product(dev, dx, left, right, no_bias, n, OC, IC, add);
}

template <class Dev>
void LinearLayers<Dev>::product(const LayerRows &rows, X *out, const X *x, const X *w, size_t IC, size_t OC, size_t ld,
                                bool add) {
    const X *const no_bias = nullptr;
    if (!rows.starts) return matmul_forward(dev, out, x, w, no_bias, rows.n, IC, OC, ld, add);
    grouped_matmul_forward(dev, out, x, w, rows.groups(), IC, OC, ld, add);
}
template <class Dev>
void LinearLayers<Dev>::product_weight(const LayerRows &rows, float *dw, const X *dout, const X *x, size_t IC, size_t OC,
                                       bool add, size_t ld) {
    if (!rows.starts) return matmul_backward_weight(dev, dw, nullptr, dout, x, rows.n, IC, OC, add, ld);
    grouped_matmul_backward_weight(dev, dw, dout, x, rows.groups(), IC, OC, add, ld);
}
template <class Dev>
void LinearLayers<Dev>::product_input(const LayerRows &rows, X *dx, const X *dout, const X *w, size_t IC, size_t OC, size_t ld,
                                      bool add) {
    if (!rows.starts) return matmul_backward_input(dev, dx, dout, w, rows.n, IC, OC, ld, add);
    grouped_matmul_backward_input(dev, dx, dout, w, rows.groups(), IC, OC, ld, add);
}

// Returns the dropout mask for the inputs of a module's adapter, with the adapter's scale. Without dropout it only contains the scale. Rows of
// experts have no dropout (check_lora).
template <class Dev> DropoutMask LinearLayers<Dev>::mask_of(const LinearModule &module, const LayerRows &rows) const {
    const LoraConfig &lora = config.lora;
    if (!drops(rows.pass)) return {float(lora.scale())};
    const Random keys{*rows.pass.key, Purpose::dropout, stream_of(module.name)};
    const size_t first_channel = module.cut.dim == 1 ? module.cut.first : 0;
    return {float(lora.scale() / (1 - lora.dropout)),
            uint32_t(lora.dropout * 0x1p32),
            keys.bits(rows.l),
            documents + rows.t,
            positions + rows.t,
            first_channel};
}

// Calls f(module, index among the matrix's adapters, index in the layer) for each adapter of a matrix.
template <class Dev> template <class F> void LinearLayers<Dev>::for_adapters(Linear matrix, F f) const {
    size_t number = 0;
    for (size_t i = 0; i < modules.size(); i++)
        if (modules[i].matrix == matrix) f(modules[i], number++, i);
}

// Computes low = scale * drop(x) A^T (n, rank). Returns the input of A: x itself, or `dropped`, which already includes the scale.
template <class Dev> const typename Dev::X *LinearLayers<Dev>::adapter_input(size_t i, const X *x, const LayerRows &rows) {
    const size_t r = config.lora.rank, IC = modules[i].IC;
    const DropoutMask mask = mask_of(modules[i], rows);
    if (mask.threshold) dropout_forward(dev, dropped, x, mask, rows.n, IC), x = dropped;
    product(rows, low, x, adapters[rows.l][i].a, IC, r);
    if (!mask.threshold && mask.scale != 1) dropout_forward(dev, low, low, mask, rows.n, r);
    return x;
}

template <class Dev> void LinearLayers<Dev>::adapters_forward(Linear matrix, X *out, const X *x, const LayerRows &rows) {
    if (!rows.pass.adapters) return;
    for_adapters(matrix, [&](const LinearModule &module, size_t, size_t i) {
        adapter_input(i, x, rows);
        product(rows, out + module.first, low, adapters[rows.l][i].b, config.lora.rank, module.OC, shapes[size_t(matrix)].OC,
                true);
    });
}

// With u = scale * drop(x) A^T and d = dout B:   dB += dout^T u    dA += scale * d^T drop(x)    dx = dout W + scale * drop(d A)
// This function computes scale * d, or d if drop() already includes the scale.
template <class Dev> void LinearLayers<Dev>::adapters_backward_low(Linear matrix, const X *dout, const LayerRows &rows) {
    const size_t r = config.lora.rank;
    for_adapters(matrix, [&](const LinearModule &module, size_t number, size_t i) {
        const DropoutMask mask = mask_of(module, rows);
        X *const d = dlow + number * rows.n * r;
        product_input(rows, d, dout + module.first, adapters[rows.l][i].b, r, module.OC, shapes[size_t(matrix)].OC);
        if (!mask.threshold && mask.scale != 1) dropout_forward(dev, d, d, mask, rows.n, r);
    });
}

template <class Dev>
void LinearLayers<Dev>::adapters_backward_weight(Linear matrix, const X *dout, const X *x, const LayerRows &rows, bool add) {
    const size_t r = config.lora.rank;
    for_adapters(matrix, [&](const LinearModule &module, size_t number, size_t i) {
        const Adapter<float> &d = gradients[rows.l][i];
        const X *const input = adapter_input(i, x, rows);
        product_weight(rows, d.b, dout + module.first, low, r, module.OC, add || module.shared, shapes[size_t(matrix)].OC);
        product_weight(rows, d.a, dlow + number * rows.n * r, input, module.IC, r, add);
    });
}

template <class Dev> void LinearLayers<Dev>::adapters_backward_input(Linear matrix, X *dx, const LayerRows &rows) {
    const size_t r = config.lora.rank;
    for_adapters(matrix, [&](const LinearModule &module, size_t number, size_t i) {
        const DropoutMask mask = mask_of(module, rows);
        const X *const a = adapters[rows.l][i].a, *const d = dlow + number * rows.n * r;
        if (!mask.threshold) return product_input(rows, dx, d, a, module.IC, r, 0, true);
        product_input(rows, dropped, d, a, module.IC, r);
        dropout_backward(dev, dx, dropped, mask, rows.n, module.IC);
    });
}

template <class Dev>
void LinearLayers<Dev>::forward(const LayerRows &rows, Linear matrix, X *out, const X *x, LinearWeights<X> w) {
    const auto [IC, OC] = shapes[size_t(matrix)];
    base_forward(rows, out, x, w, {IC, OC});
    in_parts(
        rows.n,
        [&, IC = IC, OC = OC](size_t first, size_t n) {
            adapters_forward(matrix, out + first * OC, x + first * IC, {rows.pass, rows.l, rows.t + first, n});
        },
        matmul_run(dev));
}

template <class Dev>
void LinearLayers<Dev>::backward(const LayerRows &rows, Linear matrix, X *dx, LinearWeights<float> dw, const X *dout, const X *x,
                                 LinearWeights<X> w, bool accumulate, bool add_dx) {
    const auto [IC, OC] = shapes[size_t(matrix)];
    in_parts(
        rows.n,
        [&, IC = IC, OC = OC](size_t first, size_t n) {
            const LayerRows part{rows.pass, rows.l, rows.t + first, n};
            const X *const dout_part = dout + first * OC, *const x_part = x + first * IC;
            const bool add = accumulate || part.t > 0;
            if (rows.pass.fp8) fp8_scale(dev, left, dout_part, n, OC);
            if (dw.weight) base_backward_weight(part, dw, dout_part, x_part, {IC, OC}, add);
            adapters_backward_low(matrix, dout_part, part);
            adapters_backward_weight(matrix, dout_part, x_part, part, add);
            if (!dx) return;
            base_backward_input(part, dx + first * IC, dout_part, {IC, OC}, w.weight, add_dx);
            adapters_backward_input(matrix, dx + first * IC, part);
        },
        matmul_run(dev));
}
