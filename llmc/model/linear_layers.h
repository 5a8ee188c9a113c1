// The products of activations with the matrices of the layers, and with the adapters that these may have (lora.h):
//
//   y = x W^T + scale * drop(x) A^T B^T        W (OC, IC)   A (rank, IC), B (OC, rank)
//
// The pointers of a call belong to n tokens of a layer, from token t of the row on. docs/lora.md derives the backward pass.
//
// With in_fp8 the products with W are in FP8 (../ops/fp8.h), the products with adapters are not. Activations are rounded a matmul_run of tokens at a time, so
// that a scale does not depend on the other tokens of a call; W is rounded whole, before each product.
#pragma once
#include <algorithm>
#include <optional>

#include "../core/arena.h"
#include "../ops/dropout.h"
#include "../ops/fp8.h"
#include "../ops/layout.h"
#include "../ops/matmul.h"
#include "lora.h"

template <class Dev> class LinearLayers {
  public:
    using X = typename Dev::X;

    LinearLayers(Dev dev, const ModelConfig &config) : dev(dev), config(config), modules(adapted_modules(config)) {
        for (Linear matrix : {Linear::qkv, Linear::o, Linear::gate_up, Linear::down})
            shapes[size_t(matrix)] = linear_shape(config, matrix);
    }
    void plan(Plan &plan, size_t T, bool trains);
    void plan_fp8(Plan &plan, size_t T, bool trains);
    void forward(size_t l, Linear matrix, X *out, const X *x, LinearWeights<X> w, size_t t, size_t n);
    // Computes the gradients of the trained weights, and the input's, which may overwrite the input; dx and dw's pointers may be null. With `accumulate` the
    // weights' gradients are added to the gradients of earlier rows.
    void backward(size_t l, Linear matrix, X *dx, LinearWeights<float> dw, const X *dout, const X *x, LinearWeights<X> w,
                  size_t t, size_t n, bool accumulate);
    bool drops() const { return adapters_are_on && dropout_key && config.lora.dropout > 0; }

    Adapters<X> adapters;
    Adapters<float> gradients;
    bool adapters_are_on = true;  // false: the model is the base alone
    bool in_fp8 = false;
    std::optional<uint64_t> dropout_key;  // none: nothing is dropped
    const int32_t *documents = nullptr;   // (T) number of the document in its file, with dropout
    const int32_t *positions = nullptr;   // (T) in the document

  private:
    DropoutMask mask_of(size_t l, const LinearModule &module, size_t t) const;
    const X *adapter_input(size_t l, size_t i, const X *x, size_t t, size_t n);
    template <class F> void for_adapters(Linear matrix, F f) const;
    void round(Fp8Matrix q, Fp8Format format, const X *x, size_t rows, size_t columns, bool turned = false) {
        fp8_scale(dev, q, format, x, rows, columns, 0);
        fp8_round(dev, q, format, x, rows, columns, 0, turned);
    }
    void base_forward(X *out, const X *x, LinearWeights<X> w, size_t n, LinearShape shape);
    void base_backward_weight(LinearWeights<float> dw, const X *dout, const X *x, size_t n, LinearShape shape, bool accumulate);
    void base_backward_input(X *dx, const X *dout, size_t n, LinearShape shape, const X *w);

    const Dev dev;
    const ModelConfig &config;
    const std::vector<LinearModule> modules;  // that have adapters
    LinearShape shapes[4];
    X *dropped;             // (matmul_run, the widest input)            with dropout: the input of an adapter
    X *low, *dlow;          // (matmul_run, rank), (.., 3 * rank)        x A^T, and the gradients of all of a matrix
    Fp8Matrix left, right;  // the operands of a product in FP8: tokens, or gradients; and W, or x
};

// The arrays of adapters hold one run of tokens, however long the row is.
template <class Dev> void LinearLayers<Dev>::plan(Plan &plan, size_t T, bool trains) {
    const size_t n = std::min(T, matmul_run(dev)), r = config.lora.rank;
    size_t widest = 0, most = 0;
    for (const LinearModule &m : modules) {
        widest = std::max(widest, m.IC);
        most = std::max(most, size_t(std::ranges::count(modules, m.matrix, &LinearModule::matrix)));
    }
    plan.add(&low, "adapters' products", {n, r});
    if (!trains) return;
    plan.add(&dlow, "adapters' gradients", {n, most * r});
    if (config.lora.dropout == 0) return;
    plan.add(&dropped, "adapters' inputs", {n, widest});
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

template <class Dev> void LinearLayers<Dev>::base_forward(X *out, const X *x, LinearWeights<X> w, size_t n, LinearShape shape) {
    const auto [IC, OC] = shape;
    if (!in_fp8) return matmul_forward(dev, out, x, w.weight, w.bias, n, IC, OC);
    round(right, e4m3, w.weight, OC, IC);
    in_parts(
        n,
        [&, IC = IC, OC = OC](size_t t, size_t part) {
            round(left, e4m3, x + t * IC, part, IC);
            fp8_product(dev, out + t * OC, left, e4m3, right, w.bias, part, IC, OC, false);
        },
        matmul_run(dev));
}

template <class Dev>
void LinearLayers<Dev>::base_backward_weight(LinearWeights<float> dw, const X *dout, const X *x, size_t n, LinearShape shape,
                                             bool accumulate) {
    const auto [IC, OC] = shape;
    if (!in_fp8) return matmul_backward_weight(dev, dw.weight, dw.bias, dout, x, n, IC, OC, accumulate);
    const X *const no_bias = nullptr;
    in_parts(
        n,
        [&, IC = IC, OC = OC](size_t t, size_t part) {
            round(left, e5m2, dout + t * OC, part, OC, true);
            round(right, e4m3, x + t * IC, part, IC, true);
            fp8_product(dev, dw.weight, left, e5m2, right, no_bias, OC, part, IC, accumulate || t > 0);
            if (dw.bias) matmul_bias_backward(dev, dw.bias, dout + t * OC, part, OC, OC);
        },
        matmul_run(dev));
}

// Of at most a run of tokens; in FP8 `right` has W turned.
template <class Dev> void LinearLayers<Dev>::base_backward_input(X *dx, const X *dout, size_t n, LinearShape shape, const X *w) {
    const auto [IC, OC] = shape;
    if (!in_fp8) return matmul_backward_input(dev, dx, dout, w, n, IC, OC);
    const X *const no_bias = nullptr;
    round(left, e5m2, dout, n, OC);
    fp8_product(dev, dx, left, e5m2, right, no_bias, n, OC, IC, false);
}

// The mask by which the inputs of a module's adapter are dropped, from token t of the row on, with the scale of the adapter. Without dropout it has
// the scale alone.
template <class Dev> DropoutMask LinearLayers<Dev>::mask_of(size_t l, const LinearModule &module, size_t t) const {
    const LoraConfig &lora = config.lora;
    if (!drops()) return {float(lora.scale())};
    const Random keys{*dropout_key, Purpose::dropout, stream_of(module.name)};
    return {float(lora.scale() / (1 - lora.dropout)), uint32_t(lora.dropout * 0x1p32), keys.bits(l), documents + t,
            positions + t};
}

// Calls f(module, index among the matrix's adapters, index in the layer) for each adapter of a matrix.
template <class Dev> template <class F> void LinearLayers<Dev>::for_adapters(Linear matrix, F f) const {
    size_t number = 0;
    for (size_t i = 0; adapters_are_on && i < modules.size(); i++)
        if (modules[i].matrix == matrix) f(modules[i], number++, i);
}

// Computes low = scale * drop(x) A^T (n, rank). Returns the input that A was multiplied with: x itself, or `dropped`, which has the scale.
template <class Dev> const typename Dev::X *LinearLayers<Dev>::adapter_input(size_t l, size_t i, const X *x, size_t t, size_t n) {
    const size_t r = config.lora.rank, IC = modules[i].IC;
    const DropoutMask mask = mask_of(l, modules[i], t);
    if (mask.threshold) dropout_forward(dev, dropped, x, mask, n, IC), x = dropped;
    matmul_forward(dev, low, x, adapters[l][i].a, (const X *)nullptr, n, IC, r);
    if (!mask.threshold && mask.scale != 1) dropout_forward(dev, low, low, mask, n, r);
    return x;
}

template <class Dev>
void LinearLayers<Dev>::forward(size_t l, Linear matrix, X *out, const X *x, LinearWeights<X> w, size_t t, size_t n) {
    const auto [IC, OC] = shapes[size_t(matrix)];
    base_forward(out, x, w, n, {IC, OC});
    if (modules.empty()) return;
    in_parts(
        n,
        [&, IC = IC, OC = OC](size_t first, size_t part) {
            for_adapters(matrix, [&](const LinearModule &module, size_t, size_t i) {
                adapter_input(l, i, x + first * IC, t + first, part);
                matmul_forward(dev, out + first * OC + module.first, low, adapters[l][i].b, (const X *)nullptr, part,
                               config.lora.rank, module.OC, OC, true);
            });
        },
        matmul_run(dev));
}

// With u = scale * drop(x) A^T and d = dout B:   dB += dout^T u    dA += scale * d^T drop(x)    dx = dout W + scale * drop(d A)
template <class Dev>
void LinearLayers<Dev>::backward(size_t l, Linear matrix, X *dx, LinearWeights<float> dw, const X *dout, const X *x,
                                 LinearWeights<X> w, size_t t, size_t n, bool accumulate) {
    const auto [IC, OC] = shapes[size_t(matrix)];
    if (dw.weight) base_backward_weight(dw, dout, x, n, {IC, OC}, accumulate || t > 0);
    if (dx && in_fp8) round(right, e4m3, w.weight, OC, IC, true);
    const size_t r = config.lora.rank;
    in_parts(
        n,
        [&, IC = IC, OC = OC](size_t first, size_t part) {
            const X *dout_part = dout + first * OC;
            X *dx_part = dx + first * IC;
            const bool add = accumulate || t + first > 0;
            for_adapters(matrix, [&](const LinearModule &module, size_t number, size_t i) {
                const Adapter<X> &adapter = adapters[l][i];
                const Adapter<float> &d = gradients[l][i];
                const DropoutMask mask = mask_of(l, module, t + first);
                const X *input = adapter_input(l, i, x + first * IC, t + first, part), *dblock = dout_part + module.first;
                X *dlow_i = dlow + number * part * r;
                matmul_backward_weight(dev, d.b, nullptr, dblock, low, part, r, module.OC, add, OC);
                matmul_backward_input(dev, dlow_i, dblock, adapter.b, part, r, module.OC, OC);
                if (!mask.threshold && mask.scale != 1) dropout_forward(dev, dlow_i, dlow_i, mask, part, r);
                matmul_backward_weight(dev, d.a, nullptr, dlow_i, input, part, module.IC, r, add);
            });
            if (!dx) return;
            base_backward_input(dx_part, dout_part, part, {IC, OC}, w.weight);
            for_adapters(matrix, [&](const LinearModule &module, size_t number, size_t i) {
                const DropoutMask mask = mask_of(l, module, t + first);
                const X *a = adapters[l][i].a, *dlow_i = dlow + number * part * r;
                if (!mask.threshold) return matmul_backward_input(dev, dx_part, dlow_i, a, part, IC, r, 0, true);
                matmul_backward_input(dev, dropped, dlow_i, a, part, IC, r);
                dropout_backward(dev, dx_part, dropped, mask, part, IC);
            });
        },
        matmul_run(dev));
}
