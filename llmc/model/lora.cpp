#include "lora.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>

#include "../core/common.h"
#include "../core/json.h"

using nlohmann::json;

double LoraConfig::scale() const { return alpha / (rslora ? std::sqrt(double(rank)) : double(rank)); }

static const char *layers_of(const ModelConfig &c) { return c.gpt2() ? "transformer.h." : "model.layers."; }

std::string layer_name(const ModelConfig &c, size_t l) { return layers_of(c) + std::to_string(l) + "."; }

std::vector<LinearModule> linear_modules(const ModelConfig &c) {
    const size_t C = c.C, F = c.F, Q = c.H * c.D, K = c.KV * c.D;
    using enum Linear;
    if (c.gpt2())
        return {{"attn.c_attn", qkv, 0, 3 * C, C},
                {"attn.c_proj", o, 0, C, C},
                {"mlp.c_fc", gate_up, 0, F, C},
                {"mlp.c_proj", down, 0, C, F}};
    if (c.fused)
        return {{"self_attn.qkv_proj", qkv, 0, Q + 2 * K, C},
                {"self_attn.o_proj", o, 0, C, Q},
                {"mlp.gate_up_proj", gate_up, 0, 2 * F, C},
                {"mlp.down_proj", down, 0, C, F}};
    std::vector<LinearModule> modules = {{"self_attn.q_proj", qkv, 0, Q, C},
                                         {"self_attn.k_proj", qkv, Q, K, C},
                                         {"self_attn.v_proj", qkv, Q + K, K, C},
                                         {"self_attn.o_proj", o, 0, C, Q}};
    if (c.experts.number) return modules;  // the feed-forward differs between layers, and an expert has no adapters
    modules.insert(modules.end(),
                   {{"mlp.gate_proj", gate_up, 0, F, C}, {"mlp.up_proj", gate_up, F, F, C}, {"mlp.down_proj", down, 0, C, F}});
    return modules;
}

LinearShape linear_shape(const ModelConfig &c, Linear matrix) {
    const size_t Q = c.H * c.D, K = c.KV * c.D;
    switch (matrix) {
        case Linear::qkv: return {c.C, Q + 2 * K};
        case Linear::o: return {Q, c.C};
        case Linear::gate_up: return {c.C, c.gpt2() ? c.F : 2 * c.F};
        case Linear::down: break;
    }
    return {c.F, c.C};
}

static std::string short_name(const LinearModule &m) { return std::string(m.name).substr(std::string(m.name).find('.') + 1); }

// A target is the name of a module, with or without its prefix; all-linear is all of them.
static bool is_target(const LinearModule &m, const std::string &target) {
    return target == "all-linear" || target == m.name || target == short_name(m);
}

// The shortest names that mean these modules and no others: "q_proj", but of GPT-2, which has two modules c_proj, "attn.c_proj" if it is one of them.
static std::vector<std::string> target_names(const ModelConfig &c, const std::vector<LinearModule> &modules) {
    std::vector<std::string> names;
    for (const LinearModule &m : modules) {
        const auto count = [&](const std::vector<LinearModule> &of) { return std::ranges::count(of, short_name(m), short_name); };
        const std::string name = count(modules) == count(linear_modules(c)) ? short_name(m) : m.name;
        if (std::ranges::find(names, name) == names.end()) names.push_back(name);
    }
    return names;
}

// PEFT takes a text that is no name for a regular expression, of a module with its layer: it matches the whole of model.layers.3.self_attn.q_proj.
static bool is_expression(const std::string &target) { return target.find_first_of("\\[](){}*+?|^$") != target.npos; }

std::vector<std::string> without_expressions(const ModelConfig &c, const std::vector<std::string> &targets) {
    std::vector<std::string> out;
    for (const std::string &target : targets) {
        if (!is_expression(target)) {
            out.push_back(target);
            continue;
        }
        std::regex expression;
        try {
            expression = target;
        } catch (const std::regex_error &error) {
            die("the target \"%s\" is no regular expression: %s\n  fix: the names of modules", target.c_str(), error.what());
        }
        for (const LinearModule &m : linear_modules(c)) {
            size_t layers = 0;
            for (size_t l = 0; l < c.L; l++) layers += std::regex_match(layer_name(c, l) + m.name, expression);
            if (layers != 0 && layers != c.L)
                die("the target \"%s\" matches %s of %zu layers, but the model has %zu, and all or none of them have an adapter\n  fix: an expression for all layers",
                    target.c_str(), m.name, layers, c.L);
            if (layers) out.push_back(m.name);
        }
        if (out.empty())
            die("the target \"%s\" matches no linear layer of the model, such as %s%s\n  fix: all-linear, or names",
                target.c_str(), layer_name(c, 0).c_str(), linear_modules(c)[0].name);
    }
    return out;
}

std::vector<LinearModule> adapted_modules(const ModelConfig &c) {
    std::vector<LinearModule> out;
    if (c.lora.rank == 0) return out;
    for (const LinearModule &m : linear_modules(c))
        if (std::ranges::any_of(c.lora.targets, [&](const std::string &target) { return is_target(m, target); }))
            out.push_back(m);
    return out;
}

size_t trained_parameters(const ModelConfig &c) {
    size_t count = 0;
    for (const LinearModule &m : adapted_modules(c)) count += c.L * c.lora.rank * (m.IC + m.OC);
    return count + (c.lora.embedding + c.lora.head) * c.V * c.C + (c.reward ? c.C : 0);
}

void check_lora(const ModelConfig &c, const std::string &dir) {
    const LoraConfig &lora = c.lora;
    const auto modules = linear_modules(c);
    std::string names;
    for (const std::string &name : target_names(c, modules)) names += ", " + name;
    for (const std::string &target : lora.targets)
        if (std::ranges::none_of(modules, [&](const LinearModule &m) { return is_target(m, target); }))
            die("--lora_targets has \"%s\", but %s has no linear layer of that name in its layers\n  fix: all-linear%s",
                target.c_str(), dir.c_str(), names.c_str());
    if (lora.targets.empty()) die("--lora_targets is empty\n  fix: all-linear%s", names.c_str());
    for (const LinearModule &m : adapted_modules(c))
        if (lora.rank > std::min(m.IC, m.OC))
            die("--lora_rank %zu is larger than %s of %s, whose weight is (%zu, %zu)\n  fix: a rank of at most %zu, or --lora_targets without %s",
                lora.rank, short_name(m).c_str(), dir.c_str(), m.OC, m.IC, std::min(m.IC, m.OC), short_name(m).c_str());
}

// ---- adapter_config.json --------------------------------------------------------------------------------------------------------------

static const std::string adapter_config = "/adapter_config.json";

// What changes the computation in a way that we have not, and the value that changes nothing. A field may also be absent or null.
static const std::pair<const char *, json> not_in_lora[] = {{"use_dora", false},
                                                            {"ensure_weight_tying", false},
                                                            {"bias", "none"},
                                                            {"rank_pattern", json::object()},
                                                            {"alpha_pattern", json::object()},
                                                            {"layers_to_transform", {}},
                                                            {"layer_replication", {}},
                                                            {"exclude_modules", {}},
                                                            {"target_parameters", {}},
                                                            {"trainable_token_indices", {}},
                                                            {"megatron_config", {}},
                                                            {"alora_invocation_tokens", {}},
                                                            {"lora_bias", false},
                                                            {"use_qalora", false},
                                                            {"use_bdlora", false},
                                                            {"arrow_config", {}},
                                                            {"kasa_config", {}},
                                                            {"monteclora_config", {}},
                                                            {"velora_config", {}}};

// Returns the names of modules that a list of targets means. PEFT may name each module with its layer, "model.layers.1.self_attn.q_proj".
static std::vector<std::string> read_targets(const Fields &fields, const ModelConfig &config) {
    const json *value = fields.find("target_modules");
    if (value && value->is_string()) return without_expressions(config, {*value});
    if (!value || !value->is_array()) fields.refuse("target_modules", "is missing, or no list of names");
    std::map<std::string, std::set<std::string>> layers;  // of each module that is named with its layer
    std::vector<std::string> out;
    for (const json &entry : *value) {
        const std::string name = entry.is_string() ? entry.get<std::string>() : entry.dump(), prefix = layers_of(config);
        const size_t dot = name.starts_with(prefix) ? name.find('.', prefix.size()) : name.npos;
        if (dot == name.npos) out.push_back(name);
        else layers[name.substr(dot + 1)].insert(name.substr(prefix.size(), dot - prefix.size()));
    }
    for (const auto &[name, of] : layers) {
        if (of.size() != config.L)
            fields.refuse("target_modules",
                          format("has %s of %zu layers, but the model has %zu, and all or none of them have an adapter",
                                 name.c_str(), of.size(), config.L));
        out.push_back(name);
    }
    return out;
}

LoraConfig read_lora(const std::string &dir, const ModelConfig &config, bool &reward) {
    const std::string path = dir + adapter_config;
    std::error_code unreadable;
    if (!std::filesystem::exists(path, unreadable))
        die("%s has no adapter_config.json\n  fix: the directory of an adapter that PEFT or this program has saved", dir.c_str());
    const json source = read_json(path);
    const Fields fields(source, path);
    if (const std::string type = fields.text("peft_type"); type != "LORA")
        fields.refuse("peft_type", "is \"" + type + "\", but we have LORA\n  fix: an adapter of that type");
    if (const bool turned = fields.boolean("fan_in_fan_out", config.gpt2()); turned != config.gpt2())
        fields.refuse("fan_in_fan_out",
                      format("is %s, but weights of a %s model are stored as (%s)\n  fix: an adapter of this model",
                             turned ? "true" : "false", config.family.c_str(), turned ? "out, in" : "in, out"));
    for (const auto &[name, plain] : not_in_lora)
        if (const json *value = fields.find(name); value && *value != plain)
            fields.refuse(
                name,
                format("is %s, which we do not have\n  fix: merge the adapter with PEFT (merge_and_unload), or train another",
                       value->dump().c_str()));
    LoraConfig lora;
    lora.rank = fields.count("r", 8), lora.alpha = fields.number("lora_alpha", 8),
    lora.dropout = fields.number("lora_dropout", 0);
    lora.rslora = fields.boolean("use_rslora", false);
    lora.targets = read_targets(fields, config);
    const std::string task = fields.text("task_type", "CAUSAL_LM");
    reward = task == "SEQ_CLS";
    if (!reward && task != "CAUSAL_LM") fields.refuse("task_type", "is \"" + task + "\", but we have CAUSAL_LM and SEQ_CLS");
    std::vector<std::string> whole;
    const json *modules = fields.find("modules_to_save");
    for (const json &name : modules && modules->is_array() ? *modules : json::array())
        if (!reward || (name != "score" && name != "classifier"))
            whole.push_back(name.is_string() ? name.get<std::string>() : name.dump());
    if (const std::string unknown = read_modules(lora, whole); !unknown.empty())
        fields.refuse(
            "modules_to_save",
            format("has \"%s\", but only embed_tokens, lm_head and a reward model's score can be trained beside adapters",
                   unknown.c_str()));
    if (reward && lora.head) fields.refuse("modules_to_save", "has lm_head, but a reward model has none");
    ModelConfig adapted = config;
    adapted.lora = lora;
    check_lora(adapted, dir);
    return lora;
}

std::string read_modules(LoraConfig &lora, const std::vector<std::string> &names) {
    for (const std::string &name : names) {
        const std::string last = name.substr(name.rfind('.') + 1);
        if (last == "embed_tokens" || last == "wte") lora.embedding = true;
        else if (last == "lm_head") lora.head = true;
        else return name;
    }
    return "";
}

void set_lora(ModelConfig &config, const LoraConfig &lora) {
    config.lora = lora;
    if (!config.tied || !(lora.embedding || lora.head)) return;
    config.tied = false, config.untied = true;
    config.source["tie_word_embeddings"] = false;
}

void write_lora(const std::string &dir, const ModelConfig &config, const std::string &base) {
    const LoraConfig &lora = config.lora;
    json whole;
    if (lora.embedding) whole.push_back(config.gpt2() ? "wte" : "embed_tokens");
    if (lora.head) whole.push_back("lm_head");
    if (config.reward) whole.push_back("score");
    write_json(dir + adapter_config,
               {{"peft_type", "LORA"},
                {"task_type", config.reward ? "SEQ_CLS" : "CAUSAL_LM"},
                {"base_model_name_or_path", base},
                {"revision", nullptr},
                {"inference_mode", true},
                {"r", lora.rank},
                {"lora_alpha", lora.alpha == std::floor(lora.alpha) ? json(int64_t(lora.alpha)) : json(lora.alpha)},
                {"lora_dropout", lora.dropout},
                {"use_rslora", lora.rslora},
                {"bias", "none"},
                {"fan_in_fan_out", config.gpt2()},
                {"target_modules", target_names(config, adapted_modules(config))},
                {"modules_to_save", whole},
                {"init_lora_weights", true}});
}

// ---- costs ----------------------------------------------------------------------------------------------------------------------------

CostOf cost::linear(const ModelConfig &c, Linear matrix, size_t more) {
    const auto [IC, OC] = linear_shape(c, matrix);
    const CostOf product = [=, product = cost::product(IC, OC, more), IC = double(IC), OC = double(OC)](const Work &w, Pass pass,
                                                                                                        size_t l) {
        Cost cost = product(w, pass, l);
        const double T = double(w.T),
                     gradients = pass == Pass::backward ? 2 * T * OC : 0;           // rounded twice: as stored, and transposed
        cost.rounded = double(2 * w.element + 1) * (T * IC + IC * OC + gradients);  // read for the scale, read again, written
        return cost;
    };
    if (c.lora.rank == 0) return product;
    double in = 0, out = 0, adapters = 0;  // elements that each token has in, and out of, the adapters of this matrix
    for (const LinearModule &m : adapted_modules(c))
        if (m.matrix == matrix) in += double(m.IC), out += double(m.OC), adapters++;
    return [=, r = double(c.lora.rank), IC = double(IC), OC = double(OC)](const Work &w, Pass pass, size_t l) -> Cost {
        const double T = double(w.T), s = double(w.element);
        const bool backward = pass == Pass::backward;
        Cost cost = product(w, pass, l);
        if (backward) cost.flops = 2 * T * IC * OC, cost.bytes = s * (T * IC + IC * OC + T * OC);
        cost.flops += 2 * T * r * (backward ? 3 * in + 2 * out : in + out);
        cost.bytes += s * (backward ? T * (4 * in + 2 * out) : T * (in + 2 * out)) + (backward ? 8 + 2 * s : s) * r * (in + out) +
                      s * T * r * adapters * (backward ? 6 : 2);
        return cost;
    };
}
