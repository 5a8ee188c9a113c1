// A layer that ranks divide, in float64: with the cuts of its tensors, outputs and gradients equal those of the whole layer, with adapters on all
// matrices. test_ranks.cpp has the program's own arithmetic and messages.
#include <map>

#include "../llmc/model/weights.h"
#include "models.h"
#include "rank_cases.h"
#include "reference_attention.h"
#include "reference_causal_conv.h"
#include "reference_delta_gates.h"
#include "reference_gated_delta.h"
#include "reference_gated_rmsnorm.h"
#include "reference_loss.h"
#include "reference_rmsnorm.h"
#include "reference_swiglu.h"

namespace divided_layers {

using Vector = std::vector<double>;
using Values = std::map<std::string, Vector>;  // of tensors, by name

constexpr size_t V = 101, C = 24, F = 40, D = 6, rank_of_adapters = 3;
constexpr double eps = 1e-6;
const std::vector<size_t> documents = {13, 4, 20};
constexpr size_t T = 37;

static void add(Vector &to, const Vector &x) {
    for (size_t i = 0; i < to.size(); i++) to[i] += x[i];
}

// out += x w^T     out (T, N) with a stride, x (T, K), w (N, K)
static void add_product(double *out, size_t stride, const Vector &x, const double *w, size_t K, size_t N) {
    for (size_t t = 0; t < T; t++)
        for (size_t n = 0; n < N; n++)
            for (size_t k = 0; k < K; k++) out[t * stride + n] += x[t * K + k] * w[n * K + k];
}
// dx += dout w and dw += dout^T x
static void add_gradients(Vector &dx, double *dw, const Vector &dout, const Vector &x, const double *w, size_t K, size_t N) {
    for (size_t t = 0; t < T; t++)
        for (size_t n = 0; n < N; n++)
            for (size_t k = 0; k < K; k++)
                dx[t * K + k] += dout[t * N + n] * w[n * K + k], dw[n * K + k] += dout[t * N + n] * x[t * K + k];
}

// A rank's part of the weights, and their gradients.
struct Part {
    ModelConfig config;
    std::vector<Tensor> tensors;
    Values weights, gradients;

    Part(const ModelConfig &whole, size_t ranks, size_t rank, const Values &of_whole) : config(part_of(whole, ranks, rank)) {
        tensors = table_of(config).tensors;
        const Table adapters = trained_table(config, table_of(config));
        tensors.insert(tensors.end(), adapters.tensors.begin(), adapters.tensors.end());
        for (const Tensor &t : tensors) {
            Vector &own = weights[t.name];
            own.resize(t.count), gradients[t.name].resize(t.count);
            t.for_runs(0, t.count,
                       [&](size_t begin, size_t at, size_t run) { std::copy_n(&of_whole.at(t.name)[begin], run, &own[at]); });
        }
    }
    void add_to(Values &whole) const {
        for (const Tensor &t : tensors) {
            Vector &to = whole[t.name];
            to.resize(t.whole_count());
            t.for_runs(0, t.count, [&](size_t begin, size_t at, size_t run) {
                for (size_t i = 0; i < run; i++) to[begin + i] += gradients.at(t.name)[at + i];
            });
        }
    }

    // Calls f(module, weight, A, B, their gradients) for the modules of a matrix.
    template <class F> void for_modules(Linear matrix, F f) {
        for (const LinearModule &m : linear_modules(config)) {
            if (m.matrix != matrix) continue;
            const std::string name = layer_name(config, 0) + m.name;
            const size_t row = m.shared ? m.cut.first : 0;  // the first row that the rank uses
            const std::pair<std::string, size_t> tensors[] = {
                {name + ".weight", row * m.IC}, {name + ".lora_A.weight", 0}, {name + ".lora_B.weight", row * rank_of_adapters}};
            double *w[3], *dw[3];
            for (int i = 0; i < 3; i++)
                w[i] = &weights[tensors[i].first][tensors[i].second], dw[i] = &gradients[tensors[i].first][tensors[i].second];
            f(m, w, dw);
        }
    }
    Vector forward(Linear matrix, const Vector &x) {
        const size_t OC = linear_shape(config, matrix).OC;
        Vector out(T * OC);
        for_modules(matrix, [&](const LinearModule &m, double **w, double **) {
            Vector low(T * rank_of_adapters);
            add_product(low.data(), rank_of_adapters, x, w[1], m.IC, rank_of_adapters);
            add_product(&out[m.first], OC, x, w[0], m.IC, m.OC);
            add_product(&out[m.first], OC, low, w[2], rank_of_adapters, m.OC);
        });
        return out;
    }
    Vector backward(Linear matrix, const Vector &dout, const Vector &x) {
        const size_t OC = linear_shape(config, matrix).OC;
        Vector dx(x.size());
        for_modules(matrix, [&](const LinearModule &m, double **w, double **dw) {
            Vector low(T * rank_of_adapters), dlow(low.size()), own(T * m.OC);
            for (size_t t = 0; t < T; t++) std::copy_n(&dout[t * OC + m.first], m.OC, &own[t * m.OC]);
            add_product(low.data(), rank_of_adapters, x, w[1], m.IC, rank_of_adapters);
            add_gradients(dx, dw[0], own, x, w[0], m.IC, m.OC);
            add_gradients(dlow, dw[2], own, low, w[2], rank_of_adapters, m.OC);
            add_gradients(dx, dw[1], dlow, x, w[1], m.IC, rank_of_adapters);
        });
        return dx;
    }
};

// Attention of a part, from the norm of the layer's input, h, to its sum over heads: the forward pass, and the gradient of h.
struct Attention {
    Part &part;
    const AttentionCase shape;
    Vector qkv;
    AttentionReference att;

    explicit Attention(Part &part) : part(part), shape{documents, 0, part.config.H, part.config.KV, D} {}

    Vector forward(const Vector &h) {
        qkv = part.forward(Linear::qkv, h), att = attention_reference(shape, qkv);
        return part.forward(Linear::o, att.out);
    }
    Vector backward(const Vector &dout, const Vector &h) {
        attention_reference_backward(att, shape, qkv, att.out, part.backward(Linear::o, dout, att.out));
        return part.backward(Linear::qkv, att.dqkv, h);
    }
};

// Likewise linear attention.
struct LinearAttention {
    Part &part;
    const DeltaConfig &d = part.config.delta;
    const DeltaShape shape{T, d.Hk, d.Hv, d.Dk, d.Dv, 1e-6f};
    Vector projected, z, ba, qkv, out, gated;
    DeltaGatesReference gates;

    explicit LinearAttention(Part &part) : part(part) {}

    static std::vector<int32_t> positions() {
        std::vector<int32_t> out;
        for (size_t length : documents)
            for (size_t t = 0; t < length; t++) out.push_back(int32_t(t));
        return out;
    }
    static std::string name_of(const char *tensor) { return "model.layers.0.linear_attn." + std::string(tensor); }
    const Vector &weight(const char *tensor) const { return part.weights.at(name_of(tensor)); }
    ConvReference conv(const Vector &dqkv) const {
        return conv_reference(dqkv, projected, weight("conv1d.weight"), positions(), d.row());
    }
    DeltaReference rule(const Vector &dout) const {
        return delta_reference({qkv, gates.g, gates.beta, dout}, positions(), shape);
    }

    Vector forward(const Vector &h) {
        projected = part.forward(Linear::delta_qkv, h), z = part.forward(Linear::delta_z, h),
        ba = part.forward(Linear::delta_ba, h);
        gates = delta_gates_reference(ba, weight("A_log"), weight("dt_bias"), T, d.Hv);
        qkv = conv(Vector(T * d.row())).out, out = rule(Vector(T * d.values())).out;
        gated = gated_rmsnorm_reference(out, z, weight("norm.weight"), T * d.Hv, d.Dv, eps);
        return part.forward(Linear::delta_out, gated);
    }
    Vector backward(const Vector &dy, const Vector &h) {
        const Vector dgated = part.backward(Linear::delta_out, dy, gated);
        const auto of_norm = gated_rmsnorm_backward_reference(dgated, out, z, weight("norm.weight"), T * d.Hv, d.Dv, eps);
        const DeltaReference of_rule = rule(of_norm.norm.dx);
        const ConvReference of_conv = conv(of_rule.dqkv);
        const auto of_gates =
            delta_gates_backward_reference(of_rule.dg, of_rule.dbeta, ba, weight("A_log"), weight("dt_bias"), T, d.Hv);
        part.gradients[name_of("norm.weight")] = of_norm.norm.dw, part.gradients[name_of("conv1d.weight")] = of_conv.dw;
        part.gradients[name_of("A_log")] = of_gates.dA_log, part.gradients[name_of("dt_bias")] = of_gates.ddt_bias;
        Vector dh = part.backward(Linear::delta_qkv, of_conv.dx, h);
        add(dh, part.backward(Linear::delta_z, of_norm.dz, h));
        add(dh, part.backward(Linear::delta_ba, of_gates.dba, h));
        return dh;
    }
};

struct Result {
    Vector y, dx;
    Values gradients;
};

// Each block reads all of its input on every rank, and its output is the sum of the ranks' parts.
template <class AnyAttention>
static Result layer_of(const ModelConfig &whole, size_t ranks, const Values &weights, const Vector &x, const Vector &dy) {
    std::vector<Part> parts;
    for (size_t rank = 0; rank < ranks; rank++) parts.emplace_back(whole, ranks, rank, weights);
    const std::string layer = layer_name(whole, 0), ln1 = layer + "input_layernorm.weight",
                      ln2 = layer + "post_attention_layernorm.weight";
    std::vector<Vector> gate_up, act;
    std::vector<AnyAttention> att;

    const Vector h = rmsnorm_reference(x, weights.at(ln1), T, C, eps);
    Vector mid = x;
    for (Part &p : parts) {
        att.emplace_back(p);
        add(mid, att.back().forward(h));
    }
    const Vector h2 = rmsnorm_reference(mid, weights.at(ln2), T, C, eps);
    Result result{mid, dy, {}};
    for (Part &p : parts) {
        gate_up.push_back(p.forward(Linear::gate_up, h2));
        act.push_back(swiglu_reference(gate_up.back(), T, p.config.F));
        add(result.y, p.forward(Linear::down, act.back()));
    }

    Vector dh2(T * C), dh(T * C);
    for (size_t r = 0; r < ranks; r++) {
        const Vector dact = parts[r].backward(Linear::down, dy, act[r]);
        add(dh2, parts[r].backward(Linear::gate_up, swiglu_backward_reference(dact, gate_up[r], T, parts[r].config.F), h2));
    }
    const RmsNormGradient norm2 = rmsnorm_backward_reference(dh2, mid, weights.at(ln2), T, C, eps);
    add(result.dx, norm2.dx);
    for (AnyAttention &a : att) add(dh, a.backward(result.dx, h));
    const RmsNormGradient norm1 = rmsnorm_backward_reference(dh, x, weights.at(ln1), T, C, eps);
    add(result.dx, norm1.dx);
    for (const Part &p : parts) p.add_to(result.gradients);
    result.gradients[ln1] = norm1.dw, result.gradients[ln2] = norm2.dw;
    return result;
}

static ModelConfig one_layer(size_t H, size_t KV, bool fused) {
    ModelConfig c = rank_model(fused ? adapted_fused : adapted);
    c.V = V, c.C = C, c.F = F, c.D = D, c.H = H, c.KV = KV, c.L = 1, c.qk_norm = false, c.window = {0};
    c.lora.rank = rank_of_adapters;
    return c;
}

static void expect_near(const std::string &what, const Vector &got, const Vector &want) {
    EXPECT_LE(worst_difference(got, want), 1e-12 * largest(want)) << what;
}

// Compares the layer on 2 to 4 ranks with the whole one, and returns how many of these numbers of ranks can divide it.
template <class AnyAttention> static size_t expect_the_whole(const ModelConfig &config) {
    Values weights;
    const Table base = table_of(config);
    for (const Table &table : {base, trained_table(config, base)})
        for (const Tensor &t : table.tensors)
            weights[t.name] = widen(random_values<float>(t.count, stream_of(t.name), 0.3, t.init == Tensor::ones));
    const Vector x = widen(random_values<float>(T * C, 1)), dy = widen(random_values<float>(T * C, 2));
    const Result want = layer_of<AnyAttention>(config, 1, weights, x, dy);
    size_t divided = 0;
    for (const size_t ranks : {2, 3, 4}) {
        if (!cannot_divide(config, ranks).empty()) continue;
        divided++;
        SCOPED_TRACE(format("%zu query and %zu key heads on %zu ranks", config.H, config.KV, ranks));
        const Result got = layer_of<AnyAttention>(config, ranks, weights, x, dy);
        expect_near("y", got.y, want.y);
        expect_near("dx", got.dx, want.dx);
        for (const auto &[name, gradient] : want.gradients) expect_near(name, got.gradients.at(name), gradient);
    }
    return divided;
}

TEST(DividedLayers, EqualTheWholeInFloat64) {
    size_t divided = 0;
    for (const bool fused : {false, true})
        for (const auto &[H, KV] : {std::pair<size_t, size_t>{4, 4}, {4, 2}, {4, 1}, {9, 3}})
            divided += expect_the_whole<Attention>(one_layer(H, KV, fused));
    EXPECT_EQ(
        divided,
        10 + 6u);  // 4 and 2 heads on 3 ranks, and 9 and 3 on 4, are refused; fused tensors also with fewer key heads than ranks
}

// The sections of one tensor have other sizes: 4 * 8 rows of queries and of keys, and 12 * 16 of values.
TEST(DividedLayers, LinearAttentionEqualsTheWholeInFloat64) {
    ModelConfig config = one_layer(4, 4, false);
    config.output_gate = true, config.delta = {.Hk = 4, .Hv = 12, .Dk = 8, .Dv = 16, .layers = {true}};
    EXPECT_EQ(expect_the_whole<LinearAttention>(config), 2u);  // 4 key heads on 3 ranks are refused
}

// With m the largest logit of all ranks, s the ranks' sum of exp(z - m) and y the target's z - m, which one rank has: loss = log s - y, and
// dz = exp(z - m) / s - [is the target].
TEST(DividedLayers, HeadEqualsTheWholeInFloat64) {
    const Vector x = widen(random_values<float>(T * C, 1)), w = widen(random_values<float>(V * C, 2));
    std::vector<int32_t> rows, targets;
    for (size_t t = 0; t < T; t++) rows.push_back(int32_t(t)), targets.push_back(int32_t(t * 53 % V));
    const HeadResult want = head_reference(x, w, rows, targets, Vector(T, 1), C);
    for (const size_t ranks : {2, 3, 4}) {
        std::vector<Share> shares;
        for (size_t r = 0; r < ranks; r++) shares.push_back(part_of(one_layer(4, 4, false), ranks, r).part.vocabulary);
        std::vector<Vector> z;
        for (const Share &s : shares) add_product(z.emplace_back(T * s.count).data(), s.count, x, &w[s.first * C], C, s.count);
        Vector nll(T), dx(T * C), dw;
        for (size_t t = 0; t < T; t++) {
            double m = -INFINITY, sum = 0, y = 0;
            for (size_t r = 0; r < ranks; r++)
                for (size_t v = 0; v < shares[r].count; v++) m = std::max(m, z[r][t * shares[r].count + v]);
            for (size_t r = 0; r < ranks; r++)
                for (size_t v = 0; v < shares[r].count; v++) {
                    double &logit = z[r][t * shares[r].count + v];
                    if (shares[r].first + v == size_t(targets[t])) y = logit - m;
                    sum += logit = std::exp(logit - m);
                }
            nll[t] = std::log(sum) - y;
            for (size_t r = 0; r < ranks; r++)
                for (size_t v = 0; v < shares[r].count; v++) {
                    double &d = z[r][t * shares[r].count + v];
                    d = d / sum - (shares[r].first + v == size_t(targets[t]));
                }
        }
        for (size_t r = 0; r < ranks; r++) {
            Vector own(shares[r].count * C);
            add_gradients(dx, own.data(), z[r], x, &w[shares[r].first * C], C, shares[r].count);
            dw.insert(dw.end(), own.begin(), own.end());
        }
        SCOPED_TRACE(format("%zu ranks", ranks));
        expect_near("nll", nll, want.nll);
        expect_near("dx", dx, want.dx);
        expect_near("dw", dw, want.dw);
    }
}

}  // namespace divided_layers
