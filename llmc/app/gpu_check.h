// The check of a GPU before the first step: every op runs on small fixed inputs on the GPU and on the CPU, and both must agree. What a driver, a
// compiler or a GPU gets wrong is then a message that names an op, instead of a model that learns nothing.
//
// run_ops() is compiled for both. Results are compared array by array: no element may differ by more than a share of the largest value that the
// CPU has in the array. The share allows for roundings in another order, of outputs and of what is rounded on the way (P and dS of attention);
// a kernel that is wrong errs by the size of its values.
#pragma once
#include <cmath>
#include <string>
#include <vector>

#include "../core/memory.h"
#include "../core/rng.h"
#include "../ops/adamw.h"
#include "../ops/attention.h"
#include "../ops/attention_decode.h"
#include "../ops/dropout.h"
#include "../ops/embedding.h"
#include "../ops/gelu.h"
#include "../ops/gradients.h"
#include "../ops/layernorm.h"
#include "../ops/layout.h"
#include "../ops/loss.h"
#include "../ops/matmul.h"
#include "../ops/muon.h"
#include "../ops/noise.h"
#include "../ops/qk_norm_rope.h"
#include "../ops/quantise.h"
#include "../ops/reduce.h"
#include "../ops/residual.h"
#include "../ops/rmsnorm.h"
#include "../ops/sample.h"
#include "../ops/score.h"
#include "../ops/swiglu.h"

struct OpResult {
    const char *op, *array;
    std::vector<float> values;
};
using OpResults = std::vector<OpResult>;

OpResults cpu_op_results(const std::string &dtype);  // "f32" or "bf16"

// Returns how many ops agree, or dies with the first that does not. `rounded`: products are of bf16 or TF32.
size_t compare_ops(const OpResults &gpu, const OpResults &cpu, bool rounded, const std::string &device);

// Whether the option gpu_check (always | once | never) asks for a check. `once` remembers in the user's cache which GPUs have passed with this
// driver, program and dtype: `key` names all but the program.
bool gpu_check_is_due(const std::string &option, const std::string &key);
void remember_gpu_check(const std::string &key);

// Arrays on a device, filled with the same numbers on every device, and what ops have made of them.
template <class Dev> class OpRun {
  public:
    using X = typename Dev::X;

    explicit OpRun(Dev device) : dev(device), memory_(make_memory(device)) {
        matmul_use_scratch(dev, room<std::byte>(std::max<size_t>(matmul_scratch(dev), 1)));
    }
    ~OpRun() {
        matmul_use_scratch(dev, nullptr);
        for (const auto &[p, bytes] : arrays_) memory_->release(p, bytes);
    }
    OpRun(const OpRun &) = delete;
    OpRun &operator=(const OpRun &) = delete;

    template <class T> T *room(size_t n) {  // of zeros
        std::byte *const p = memory_->allocate(n * sizeof(T));
        arrays_.emplace_back(p, n * sizeof(T));
        return reinterpret_cast<T *>(p);
    }
    template <class T> T *copy(const std::vector<T> &values) {
        T *const p = room<T>(values.size());
        write(*memory_, p, values);
        return p;
    }
    template <class T = X> T *numbers(size_t n) {  // normal
        std::vector<T> values(n);
        const Random random{1, Purpose::test, filled_++};
        for (size_t i = 0; i < n; i++) values[i] = T(float(random.normal(i)));
        return copy(values);
    }
    template <class T> void keep(const char *op, const char *array, const T *p, size_t n) {
        const std::vector<T> values = read(*memory_, p, n);
        OpResult &result = results.emplace_back(OpResult{op, array, {}});
        for (const T &value : values) result.values.push_back(float(value));
    }

    const Dev dev;
    OpResults results;

  private:
    std::unique_ptr<Memory> memory_;
    std::vector<std::pair<std::byte *, size_t>> arrays_;
    uint32_t filled_ = 0;
};

// ---- the ops --------------------------------------------------------------------------------------------------------------------------

namespace gpu_check {
constexpr size_t T = 40, C = 64, F = 48, V = 53, H = 4, KV = 2, D = 32;  // T tokens in two documents
constexpr float eps = 1e-5f;

inline std::vector<int32_t> positions() {  // in their documents
    std::vector<int32_t> out(T);
    for (size_t t = 0; t < T; t++) out[t] = int32_t(t < 13 ? t : t - 13);
    return out;
}
inline std::vector<int32_t> first_keys() {
    std::vector<int32_t> out(T);
    for (size_t t = 0; t < T; t++) out[t] = t < 13 ? 0 : 13;
    return out;
}
inline std::vector<int32_t> tokens() {  // some more than once
    std::vector<int32_t> out(T);
    for (size_t t = 0; t < T; t++) out[t] = int32_t(t * t % 31);
    return out;
}

template <class Dev> void run_embedding(OpRun<Dev> &r) {
    using X = typename Dev::X;
    const int32_t *ids = r.copy(tokens()), *pos = r.copy(positions());
    X *out = r.template room<X>(T * C);
    const X *w = r.numbers(V * C), *p = r.numbers(T * C), *dout = r.numbers(T * C);
    embedding_forward(r.dev, out, w, ids, T, C);
    r.keep("embedding_forward", "out", out, T * C);
    embedding_forward(r.dev, out, w, ids, p, pos, T, C);
    r.keep("embedding_forward with positions", "out", out, T * C);
    float *dw = r.template room<float>(V * C);
    embedding_backward(r.dev, dw, dout, ids, T, C, 0, V);
    r.keep("embedding_backward", "dw", dw, V * C);
}

template <class Dev> void run_norms(OpRun<Dev> &r) {
    using X = typename Dev::X;
    X *out = r.template room<X>(T * C), *sum = r.template room<X>(T * C);
    float *mean = r.template room<float>(T), *rstd = r.template room<float>(T);
    float *dw = r.template room<float>(C), *dbias = r.template room<float>(C);
    float *scratch = r.template room<float>(rmsnorm_scratch(r.dev, C) + layernorm_scratch(r.dev, C));
    const X *x = r.numbers(T * C), *y = r.numbers(T * C), *w = r.numbers(C), *bias = r.numbers(C), *dout = r.numbers(T * C);
    rmsnorm_forward(r.dev, out, rstd, x, w, T, C, eps);
    r.keep("rmsnorm_forward", "out", out, T * C);
    rmsnorm_backward(r.dev, out, dw, scratch, y, dout, x, w, rstd, T, C);
    r.keep("rmsnorm_backward", "dx", out, T * C);
    r.keep("rmsnorm_backward", "dw", dw, C);
    residual_rmsnorm_forward(r.dev, sum, out, rstd, x, y, w, T, C, eps);
    r.keep("residual_rmsnorm_forward", "sum", sum, T * C);
    r.keep("residual_rmsnorm_forward", "out", out, T * C);
    layernorm_forward(r.dev, out, mean, rstd, x, w, bias, T, C, eps);
    r.keep("layernorm_forward", "out", out, T * C);
    layernorm_backward(r.dev, out, dw, dbias, scratch, y, dout, x, w, mean, rstd, T, C);
    r.keep("layernorm_backward", "dx", out, T * C);
    r.keep("layernorm_backward", "dw", dw, C);
    r.keep("layernorm_backward", "dbias", dbias, C);
    residual_layernorm_forward(r.dev, sum, out, mean, rstd, x, y, w, bias, T, C, eps);
    r.keep("residual_layernorm_forward", "out", out, T * C);
}

template <class Dev> void run_heads(OpRun<Dev> &r) {
    using X = typename Dev::X;
    const size_t row = (H + 2 * KV) * D;
    std::vector<float> angles(T * D);
    rope_table(angles.data(), {.theta = 100}, T, D);
    const float *table = r.copy(angles);
    const int32_t *pos = r.copy(positions());
    X *qkv = r.numbers(T * row), *dqkv = r.numbers(T * row), *raw = r.template room<X>(T * (H + KV) * D);
    const X *wq = r.numbers(D), *wk = r.numbers(D);
    float *rstd = r.template room<float>(T * (H + KV)), *dwq = r.template room<float>(D), *dwk = r.template room<float>(D);
    float *scratch = r.template room<float>(rmsnorm_scratch(r.dev, 2 * D));
    rope_forward(r.dev, qkv, table, pos, T, H + KV, D, row);
    r.keep("rope_forward", "qkv", qkv, T * row);
    rope_backward(r.dev, qkv, table, pos, T, H + KV, D, row);
    r.keep("rope_backward", "dqkv", qkv, T * row);
    qk_norm_rope_forward(r.dev, qkv, raw, rstd, wq, wk, table, pos, T, H, KV, D, eps);
    r.keep("qk_norm_rope_forward", "qkv", qkv, T * row);
    qk_norm_rope_backward(r.dev, dqkv, dwq, dwk, scratch, raw, wq, wk, rstd, table, pos, T, H, KV, D);
    r.keep("qk_norm_rope_backward", "dqkv", dqkv, T * row);
    r.keep("qk_norm_rope_backward", "dwq", dwq, D);
    r.keep("qk_norm_rope_backward", "dwk", dwk, D);
}

template <class Dev> void run_attention(OpRun<Dev> &r) {
    using X = typename Dev::X;
    const size_t row = (H + 2 * KV) * D;
    const AttentionShape shape{T, H, KV, D, 1 / std::sqrt(float(D))};
    const X *qkv = r.numbers(T * row), *dout = r.numbers(T * H * D);
    const auto heads = [&](size_t h) { return Heads<const X>{qkv + h * D, row}; };
    const AttentionInputs<X> in{heads(0), heads(H), heads(H + KV), r.copy(first_keys()), shape};
    const Pieces all{{{0, T, 0}}, 1};
    float *out32 = r.template room<float>(T * H * D), *lse = r.template room<float>(H * T),
          *delta = r.template room<float>(H * T);
    X *out = r.template room<X>(T * H * D), *dqkv = r.template room<X>(T * row);
    float *const scratch = r.template room<float>(attention_scratch(r.dev));
    const AttentionGrads grads{out32, r.template room<float>(T * KV * D), r.template room<float>(T * KV * D)};
    attention_begin(r.dev, out32, lse, shape);
    attention_forward_part(r.dev, out32, lse, in, all, all);
    attention_end(r.dev, out, out32, shape);
    r.keep("attention_forward_part", "out", out, T * H * D);
    r.keep("attention_forward_part", "lse", lse, H * T);
    attention_backward_begin(r.dev, grads, delta, out, dout, shape);
    attention_backward_part(r.dev, grads, scratch, in, delta, lse, dout, all, all);
    attention_backward_end(r.dev, dqkv, grads, shape);
    r.keep("attention_backward_part", "dqkv", dqkv, T * row);
    attention_forward(r.dev, out, out32, lse, in, all);
    r.keep("attention_forward", "out", out, T * H * D);
    r.keep("attention_forward", "lse", lse, H * T);
    attention_backward(r.dev, dqkv, grads, delta, scratch, in, out, dout, lse, all);
    r.keep("attention_backward", "dqkv", dqkv, T * row);

    // A new token for a sequence of 23 keys, which lie in the second page of a cache.
    const size_t pages = 2, keys = 23;
    std::vector<int32_t> slots(keys);
    for (size_t t = 0; t < keys; t++) slots[t] = int32_t(cache_page + t);
    X *cache = r.template room<X>(pages * cache_page * 2 * KV * D);
    cache_store(r.dev, cache, heads(H), heads(H + KV), r.copy(slots), keys, KV, D);
    r.keep("cache_store", "cache", cache, pages * cache_page * 2 * KV * D);
    attention_decode(r.dev, out, r.template room<float>(attention_decode_scratch(r.dev, 1, 1, H, D)), heads(0), cache,
                     r.copy(std::vector<int32_t>{1}), r.copy(std::vector<int32_t>{0}),
                     r.copy(std::vector<int32_t>{int32_t(keys)}), 1, 1, H, KV, D, shape.scale);
    r.keep("attention_decode", "out", out, H * D);
}

template <class Dev> void run_mlp(OpRun<Dev> &r) {
    using X = typename Dev::X;
    X *wide = r.template room<X>(T * 2 * F), *narrow = r.template room<X>(T * F), *dx = r.template room<X>(T * C);
    const X *gate_up = r.numbers(T * 2 * F), *dout = r.numbers(T * F), *x = r.numbers(T * C), *w = r.numbers(F * C),
            *bias = r.numbers(F);
    float *dw = r.template room<float>(F * C), *dbias = r.template room<float>(F);
    swiglu_forward(r.dev, narrow, gate_up, T, F);
    r.keep("swiglu_forward", "out", narrow, T * F);
    swiglu_backward(r.dev, wide, dout, gate_up, T, F);
    r.keep("swiglu_backward", "dgate_up", wide, T * 2 * F);
    gelu_forward<Gelu::tanh>(r.dev, narrow, gate_up, T * F);
    r.keep("gelu_forward", "out", narrow, T * F);
    gelu_backward<Gelu::tanh>(r.dev, narrow, dout, gate_up, T * F);
    r.keep("gelu_backward", "dx", narrow, T * F);
    matmul_forward(r.dev, narrow, x, w, bias, T, C, F);
    r.keep("matmul_forward", "out", narrow, T * F);
    matmul_backward_input(r.dev, dx, dout, w, T, C, F);
    r.keep("matmul_backward_input", "dx", dx, T * C);
    matmul_backward_weight(r.dev, dw, dbias, dout, x, T, C, F, true);
    r.keep("matmul_backward_weight", "dw", dw, F * C);
    r.keep("matmul_backward_weight", "dbias", dbias, F);
    residual_forward(r.dev, narrow, dout, gate_up, T * F);
    r.keep("residual_forward", "out", narrow, T * F);

    std::vector<float> frozen(F * C);
    for (size_t i = 0; i < F * C; i++) frozen[i] = float(i * i % 97) - 48;
    X *matrix = r.template room<X>(F * C);
    const float *const of = fractions(true).of;
    const float *on_device = r.copy(std::vector<float>(of, of + Fractions::count));
    for (const int bits : {4, 8}) {
        const QuantisedArrays q = quantise(bits, frozen, C);
        dequantise(r.dev, matrix,
                   {bits, F, C, r.copy(q.codes), bits == 4 ? r.copy(q.magnitudes) : nullptr, r.copy(q.scales), on_device});
        r.keep("dequantise", "out", matrix, F * C);
    }
}

template <class Dev> void run_losses(OpRun<Dev> &r) {
    using X = typename Dev::X;
    const size_t N = 11;
    std::vector<int32_t> rows(N), targets(N);
    std::vector<float> derivatives(N);
    for (size_t n = 0; n < N; n++)
        rows[n] = int32_t(3 * n + 1), targets[n] = int32_t(7 * n % V), derivatives[n] = 0.1f * float(n + 1);
    const int32_t *predictors = r.copy(rows);
    const float *weights = r.copy(derivatives);
    const HeadLoss loss{predictors, r.copy(targets), weights};
    float *stats = r.template room<float>(5 * N), *dw = r.template room<float>(V * C), *range = r.template room<float>(V * C);
    const HeadStats parts{stats, stats + N, stats + 2 * N, stats + 3 * N, stats + 4 * N};
    const X *x = r.numbers(T * C), *w = r.numbers(V * C);
    X *dx = r.template room<X>(T * C);
    void *const scratch = r.template room<std::byte>(lm_head_scratch(r.dev, N, C, V));
    lm_head(r.dev, parts, dx, dw, scratch, x, w, loss, T, C, V, N, true);
    r.keep("lm_head", "nll", stats, N);
    r.keep("lm_head", "dx", dx, T * C);
    r.keep("lm_head", "dw", dw, V * C);
    lm_head_weight(r.dev, range, scratch, x, w, loss, parts, C, V, N, 0, V);
    r.keep("lm_head_weight", "dw", range, V * C);
    float *scores = r.template room<float>(N), *dscore = r.template room<float>(C);
    score_forward(r.dev, scores, x, w, predictors, C, N);
    r.keep("score_forward", "scores", scores, N);
    score_backward(r.dev, dx, dscore, x, w, predictors, weights, T, C, N);
    r.keep("score_backward", "dx", dx, T * C);
    r.keep("score_backward", "dw", dscore, C);
}

// What random bits decide is the same on both, also which token is drawn.
template <class Dev> void run_random(OpRun<Dev> &r) {
    using X = typename Dev::X;
    std::vector<int32_t> numbers(T);
    for (size_t t = 0; t < T; t++) numbers[t] = t < 13 ? 5 : 2;
    const int32_t *documents = r.copy(numbers), *in_document = r.copy(positions());
    const X *x = r.numbers(T * C);
    X *out = r.template room<X>(T * C), *dx = r.numbers(T * C), *embedded = r.numbers(T * C);
    const DropoutMask mask{1.25f, uint32_t(0.2 * 0x1p32), 3, documents, in_document};
    dropout_forward(r.dev, out, x, mask, T, C);
    r.keep("dropout_forward", "out", out, T * C);
    dropout_backward(r.dev, dx, x, mask, T, C);
    r.keep("dropout_backward", "dx", dx, T * C);
    noise_forward(r.dev, embedded, {4, r.copy(std::vector<float>(T, 0.3f)), documents, in_document}, T, C);
    r.keep("noise_forward", "x", embedded, T * C);

    const size_t rows = 3, draws = 5;
    const Random random{6, Purpose::test, 0};
    std::vector<uint64_t> bits(draws);
    for (size_t i = 0; i < draws; i++) bits[i] = random.bits(i);
    float *logits = r.template numbers<float>(rows * V), *logps = r.template room<float>(draws);
    int32_t *drawn = r.template room<int32_t>(draws);
    const Draws of_rows{r.copy(std::vector<int32_t>{0, 2, 4, 5}), r.copy(bits), r.copy(std::vector<int32_t>{0, 2, 2, 3}),
                        r.copy(std::vector<int32_t>{7, 30, 52})};
    sample(r.dev, drawn, logps, logits, of_rows, {0.8, 40, 0.95, 0.001, 1.2}, V, rows, V, V);
    r.keep("sample", "tokens", drawn, draws);
    r.keep("sample", "logps", logps, draws);
}

template <class Dev> void run_updates(OpRun<Dev> &r) {
    using X = typename Dev::X;
    const size_t n = T * C;
    X *const p = r.numbers(n);
    float *m = r.template room<float>(n), *v = r.template room<float>(n), *sum = r.template numbers<float>(n);
    const float *grads = r.template numbers<float>(n);
    adamw_update(r.dev, Floats<X>{p, r.template room<int16_t>(n)}, m, v, grads, {0.01, 0.9, 0.999, 1e-8, 0.1, 1, 1}, n);
    r.keep("adamw_update", "params", p, n);
    r.keep("adamw_update", "m", m, n);
    r.keep("adamw_update", "v", v, n);
    const auto blockwise = [&](bool negative) {
        return Blockwise{r.template room<uint8_t>(n), r.template room<float>(n), 0, n, negative};
    };
    X *const blockwise_params = r.numbers(n);
    const Blockwise m8 = blockwise(true), v8 = blockwise(false);
    adamw_update(r.dev, Floats<X>{blockwise_params, r.template room<int16_t>(n)}, m8, v8, grads,
                 {0.01, 0.9, 0.999, 1e-8, 0.1, 1, 1}, n);
    r.keep("adamw_update, 8 bits", "params", blockwise_params, n);
    r.keep("adamw_update, 8 bits", "scales of m", m8.scales, m8.blocks());
    const AdamW settings{.lr = 0.01, .beta1 = 0, .beta2 = 0, .eps = 0, .weight_decay = 0.1, .grad_scale = 1, .step = 1};
    X *const u = r.template room<X>(n), *const moved = r.numbers(n);
    muon_momentum(r.dev, u, m, grads, settings, n);
    r.keep("muon_momentum", "m", m, n);
    r.keep("muon_momentum", "u", u, n);
    const size_t k = 16;  // much less than C, so that the iteration makes no rounding much larger
    const OrthogonaliseRoom<X> room{r.template room<X>(k * C), r.template room<X>(k * k), r.template room<X>(k * k),
                                    r.template room<float>(k * k), r.template room<double>(1)};
    for (const bool wide : {true, false}) {
        X *const matrix = r.numbers(k * C);
        orthogonalise(r.dev, matrix, room, wide ? k : C, wide ? C : k);
        r.keep("orthogonalise", wide ? "x" : "x, tall", matrix, k * C);
    }
    muon_update(r.dev, Floats<X>{moved, r.template room<int16_t>(n)}, u, settings, muon_size(T, C), n);
    r.keep("muon_update", "params", moved, n);
    const float norm = float(squared_norm(r.dev, r.template room<double>(squared_norm_scratch(n)), grads, n));
    r.results.push_back({"squared_norm", "sum", {norm}});
    copy_rows(r.dev, p, C, r.numbers(n), C, T / 2, C / 2);
    r.keep("copy_rows", "out", p, n);
    add_rows(r.dev, sum, C, grads, C, T, C);
    r.keep("add_rows", "out", sum, n);
    round_floats(r.dev, p, grads, n);
    r.keep("round_floats", "out", p, n);
    bf16 *const stored = r.template room<bf16>(n);
    round_gradients(r.dev, stored, grads, n, {1, Purpose::gradients, 0}, 3);
    r.keep("round_gradients", "stored", stored, n);
    widen_gradients(r.dev, sum, stored, n);
    r.keep("widen_gradients", "out", sum, n);
}
}  // namespace gpu_check

template <class Dev> OpResults run_ops(Dev dev) {
    OpRun<Dev> run(dev);
    gpu_check::run_embedding(run);
    gpu_check::run_norms(run);
    gpu_check::run_heads(run);
    gpu_check::run_attention(run);
    gpu_check::run_mlp(run);
    gpu_check::run_losses(run);
    gpu_check::run_updates(run);
    gpu_check::run_random(run);
    return std::move(run.results);
}
