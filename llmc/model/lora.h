// Adapters of linear layers (LoRA): which modules of a layer may have them, their tensors, their costs, and PEFT's adapter_config.json. docs/lora.md
// derives the decoder's description of them.
//
//   y = x W^T + scale * drop(x) A^T B^T        W (OC, IC) frozen     A (rank, IC), B (OC, rank) trained
#pragma once
#include <string>
#include <vector>

#include "../core/common.h"
#include "config.h"
#include "op_list.h"
#include "table.h"

// The matrices of a layer that adapters may belong to, as stored in memory. GPT-2's feed-forward has no gate: its gate_up is up alone.
enum class Linear { qkv, o, gate_up, down };

// A linear layer of the Hugging Face model: rows [first, first + OC) of such a matrix.
struct LinearModule {
    const char *name;  // "self_attn.q_proj"; layer_name() is its prefix
    Linear matrix;
    size_t first, OC, IC;
};
struct LinearShape {
    size_t IC, OC;
};
std::string layer_name(const ModelConfig &config, size_t l);  // "model.layers.3."
std::vector<LinearModule> linear_modules(const ModelConfig &config);
// Targets with each regular expression replaced by the names of the modules that it matches.
std::vector<std::string> without_expressions(const ModelConfig &config, const std::vector<std::string> &targets);
LinearShape linear_shape(const ModelConfig &config, Linear matrix);
std::vector<LinearModule> adapted_modules(const ModelConfig &config);  // the modules named by config.lora.targets
size_t trained_parameters(const ModelConfig &config);                  // in the adapters and in the modules trained with them
void check_lora(const ModelConfig &config, const std::string &dir);    // dies if the model in `dir` cannot have such adapters

// PEFT's adapter_config.json. Reading refuses, by name, what we cannot compute as PEFT does. `reward` says that the adapter belongs to a reward model.
LoraConfig read_lora(const std::string &dir, const ModelConfig &config, bool &reward);
// Gives a model adapters. If head and embedding are tied and one of them is trained, they become two tensors, as in PEFT.
void set_lora(ModelConfig &config, const LoraConfig &lora);
// Adds the modules that are trained in full: embed_tokens (GPT-2: wte) and lm_head, with or without a path before the name. Returns the first other name.
std::string read_modules(LoraConfig &lora, const std::vector<std::string> &names);
void write_lora(const std::string &dir, const ModelConfig &config, const std::string &base);

// ---- tensors --------------------------------------------------------------------------------------------------------------------------

template <class S> struct LinearWeights {
    S *weight, *bias;  // (OC, IC), (OC) or null
};
template <class S> struct Adapter {
    S *a, *b;  // (rank, IC), (OC, rank)
};
template <class S> using Adapters = std::vector<std::vector<Adapter<S>>>;  // (L)(adapted modules)

// Lists the trained tensors. The table has the units of the base's table; units without a trained tensor are empty. The embedding and the head are set if they
// are trained, as a reward model's head always is.
template <class S> Table lora_table(const ModelConfig &c, const Table &base, Adapters<S> &adapters, TensorList<S> &t) {
    const size_t r = c.lora.rank;
    const auto modules = adapted_modules(c);
    t.table.positions = base.positions, t.table.head = base.head;
    adapters.assign(c.L, {});
    for (size_t u = 0; u < base.units.size(); u++) {
        const bool is_embedding = u == 0 && c.lora.embedding, is_head = u == base.head && (c.reward || c.lora.head),
                   is_layer = u > 0 && u <= c.L;
        t.begin_unit(is_layer ? layer_name(c, u - 1) : "", is_embedding || is_head ? c.C : 0);
        if (is_embedding) t.add(true, embedding_name(c), &t.embed, {c.V, c.C}, Tensor::normal, true);
        if (is_head) t.add_head_tensor(c);
        if (!is_layer) continue;
        for (const LinearModule &m : modules) {
            Adapter<S> adapter;
            t.add(true, format("%s.lora_A.weight", m.name).c_str(), &adapter.a, {r, m.IC}, Tensor::lora_a, true);
            t.add(true, format("%s.lora_B.weight", m.name).c_str(), &adapter.b, {m.OC, r}, Tensor::lora_b, true);
            adapters[u - 1].push_back(adapter);
        }
    }
    return t.table;
}

// ---- costs ----------------------------------------------------------------------------------------------------------------------------

namespace cost {
// A product with a layer's matrix and its adapters, or the product alone if there are none. The gradient of a frozen matrix is not computed. The
// backward pass computes x A^T once more, and then four small products.
CostOf linear(const ModelConfig &c, Linear matrix, size_t more = 0);
}  // namespace cost
