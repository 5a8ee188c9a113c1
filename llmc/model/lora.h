// Adapters of linear layers (LoRA): the modules that can have adapters, their tensors, their costs, and PEFT's adapter_config.json. docs/lora.md
// derives the formulas.
//
//   y = x W^T + scale * drop(x) A^T B^T        W (OC, IC) frozen     A (rank, IC), B (OC, rank) trained
#pragma once
#include <string>
#include <vector>

#include "../core/common.h"
#include "config.h"
#include "op_list.h"
#include "table.h"

// The matrices of a layer that can have adapters, as stored in memory. GPT-2's feed-forward has no gate: its gate_up is only up. Layers with experts
// (experts.h) have the matrices of each expert and of a shared expert instead of gate_up and down. Layers with linear attention have the matrices
// delta_... instead of qkv and o.
enum class Linear {
    qkv,
    o,
    delta_qkv,
    delta_z,
    delta_ba,
    delta_out,
    gate_up,
    down,
    experts_gate_up,
    experts_down,
    shared_gate_up,
    shared_down
};
inline constexpr size_t linear_matrices = 12;
inline bool of_delta(Linear matrix) { return Linear::delta_qkv <= matrix && matrix <= Linear::delta_out; }
inline bool of_attention(Linear matrix) { return matrix == Linear::qkv || matrix == Linear::o || of_delta(matrix); }
inline bool of_experts(Linear matrix) { return matrix == Linear::experts_gate_up || matrix == Linear::experts_down; }

// A linear layer of the Hugging Face model: rows [first, first + OC) of such a matrix. In a matrix of experts, each expert has this module.
struct LinearModule {
    const char *name;  // "self_attn.q_proj", "mlp.experts.gate_proj"; layer_name() is its prefix
    Linear matrix;
    size_t first, OC, IC;
    Cut cut =
        {};  // of its weight, under tensor parallelism: of B's rows, or of A's columns. The rank has the other factor whole.
    bool shared = false;  // more ranks than key heads: the rank has all rows of B, and uses those of the cut
};
bool has_module(const ModelConfig &config, size_t l, const LinearModule &module);  // true if layer l has it
size_t copies(const ModelConfig &config, const LinearModule &module);              // modules per layer: one, or one per expert
std::string copy_name(const LinearModule &module, size_t i);                       // "mlp.experts.3.gate_proj"
struct LinearShape {
    size_t IC, OC;
};
std::string layer_name(const ModelConfig &config, size_t l);  // "model.layers.3."
std::vector<LinearModule> linear_modules(const ModelConfig &config);
// Returns the targets, with each regular expression replaced by the names of the modules that it matches.
std::vector<std::string> without_expressions(const ModelConfig &config, const std::vector<std::string> &targets);
LinearShape linear_shape(const ModelConfig &config, Linear matrix);
std::vector<LinearModule> adapted_modules(const ModelConfig &config);  // the modules named by config.lora.targets
size_t trained_parameters(const ModelConfig &config);  // parameters of the adapters and of modules trained in full
// Dies if the model in `dir` cannot have these adapters, which the flags describe or, if given, this adapter_config.json.
void check_lora(const ModelConfig &config, const std::string &dir, const std::string &adapter_config = "");

// Reads and writes PEFT's adapter_config.json. Reading ends in an error that names the setting if we cannot compute it as PEFT does. `reward`: the
// adapter belongs to a reward model. `notes` gets a sentence about settings without effect that it does not know.
LoraConfig read_lora(const std::string &dir, const ModelConfig &config, bool &reward, std::vector<std::string> &notes);
// Adds adapters to a model's configuration. If head and embedding are tied and one of them is trained, they become two tensors, as in PEFT.
void set_lora(ModelConfig &config, const LoraConfig &lora);
// Adds the modules that are trained in full: embed_tokens (GPT-2: wte) and lm_head, with or without a path before the name. Returns the first other
// name.
std::string read_modules(LoraConfig &lora, const std::vector<std::string> &names);
void write_lora(const std::string &dir, const ModelConfig &config, const std::string &base);

// ---- tensors --------------------------------------------------------------------------------------------------------------------------

template <class S> struct LinearWeights {
    S *weight, *bias;  // (OC, IC), (OC) or null
};
template <class S> struct Adapter {
    S *a, *b;  // (rank, IC), (OC, rank)   for experts (E / N, rank, IC), (E / N, OC, rank)   null in layers without the module
};
template <class S> using Adapters = std::vector<std::vector<Adapter<S>>>;  // (L)(adapted modules)

// Lists the trained tensors. The table has the units of the base's table; units without a trained tensor are empty. The embedding and the head are
// set if they are trained; a reward model's head always is.
template <class S> Table lora_table(const ModelConfig &c, const Table &base, Adapters<S> &adapters, TensorList<S> &t) {
    const size_t r = c.lora.rank;
    const auto modules = adapted_modules(c);
    t.table.positions = base.positions, t.table.head = base.head;
    adapters.assign(c.L, std::vector<Adapter<S>>(modules.size()));
    for (size_t u = 0; u < base.units.size(); u++) {
        const bool is_embedding = u == 0 && c.lora.embedding, is_head = u == base.head && (c.reward || c.lora.head),
                   is_layer = u > 0 && u <= c.L;
        t.begin_unit(is_layer ? layer_name(c, u - 1) : "", is_embedding || is_head ? c.C : 0);
        if (is_embedding) t.add(true, embedding_name(c), &t.embed, {c.V, c.C}, Tensor::normal, true, c.part.vocabulary.rows());
        if (is_head) t.add_head_tensor(c);
        if (!is_layer) continue;
        const auto add = [&](const LinearModule &m, const char *name, S **member, std::vector<size_t> shape, Tensor::Init init,
                             Cut cut) {
            for (size_t e = 0; e < copies(c, m); e++)
                t.add(true, (copy_name(m, e) + name).c_str(), e == 0 ? member : nullptr, shape, init, true, cut);
            if (of_experts(m.matrix)) t.end_experts();
        };
        // The experts' tensors come first, as in the model's own table. Cut tensors are the last: one bucket (../parallel/sharding.h).
        for (const auto &[experts, cuts] : {std::pair(true, false), {false, false}, {false, true}})
            for (size_t i = 0; i < modules.size(); i++) {
                const LinearModule &m = modules[i];
                Adapter<S> &adapter = adapters[u - 1][i];
                if (of_experts(m.matrix) != experts || !has_module(c, u - 1, m)) continue;
                const Cut a = m.cut.dim == 1 ? m.cut : Cut(), b = m.cut.dim == 0 && !m.shared ? m.cut : Cut();
                if ((a.dim >= 0) == cuts) add(m, ".lora_A.weight", &adapter.a, {r, m.IC}, Tensor::lora_a, a);
                if ((b.dim >= 0) == cuts)
                    add(m, ".lora_B.weight", &adapter.b, {m.shared ? m.cut.whole : m.OC, r}, Tensor::lora_b, b);
                if (!m.shared || cuts) continue;
                t.table.tensors.back().product = false;  // the products overwrite some rows
                if (adapter.b) adapter.b += m.cut.first * r;
            }
    }
    return t.table;
}

// ---- costs ----------------------------------------------------------------------------------------------------------------------------

namespace cost {
// The cost of the products with a matrix's adapters. The backward pass recomputes x A^T, and computes four more small products.
CostOf adapters(const ModelConfig &c, Linear matrix);
// The cost of a product with a layer's matrix and its adapters, if there are any. The gradient of a frozen matrix is not computed.
CostOf linear(const ModelConfig &c, Linear matrix, size_t more = 0);
}  // namespace cost
