#include "lora.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
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
    const LayerCuts cuts = cuts_of(c);
    using enum Linear;
    if (c.gpt2())
        return {{"attn.c_attn", qkv, 0, Q + 2 * K, C, cuts.qkv},
                {"attn.c_proj", o, 0, C, Q, cuts.o},
                {"mlp.c_fc", gate_up, 0, F, C, cuts.hidden},
                {"mlp.c_proj", down, 0, C, F, cuts.down}};
    if (c.fused)
        return {{"self_attn.qkv_proj", qkv, 0, Q + 2 * K, C, cuts.qkv},
                {"self_attn.o_proj", o, 0, C, Q, cuts.o},
                {"mlp.gate_up_proj", gate_up, 0, 2 * F, C, cuts.gate_up},
                {"mlp.down_proj", down, 0, C, F, cuts.down}};
    const size_t gated = c.output_gate ? 2 * Q : Q;  // rows of q_proj
    const bool shared = c.part.shares_keys();
    std::vector<LinearModule> modules = {{"self_attn.q_proj", qkv, 0, gated, C, cuts.q},
                                         {"self_attn.k_proj", qkv, gated, K, C, cuts.kv, shared},
                                         {"self_attn.v_proj", qkv, gated + K, K, C, cuts.kv, shared},
                                         {"self_attn.o_proj", o, 0, C, Q, cuts.o}};
    if (const DeltaConfig &d = c.delta; d.Hk)
        modules.insert(modules.end(), {{"linear_attn.in_proj_qkv", delta_qkv, 0, d.row(), C, cuts.delta_qkv},
                                       {"linear_attn.in_proj_z", delta_z, 0, d.values(), C, cuts.delta_z},
                                       {"linear_attn.in_proj_b", delta_ba, 0, d.Hv, C, cuts.delta_heads},
                                       {"linear_attn.in_proj_a", delta_ba, d.Hv, d.Hv, C, cuts.delta_heads},
                                       {"linear_attn.out_proj", delta_out, 0, C, d.values(), cuts.delta_out}});
    const auto add = [&](const char *gate, const char *up, const char *down, Linear in, Linear out, size_t width,
                         const Cut &rows = {}, const Cut &columns = {}) {
        modules.insert(modules.end(),
                       {{gate, in, 0, width, C, rows}, {up, in, width, width, C, rows}, {down, out, 0, C, width, columns}});
    };
    const ExpertConfig &e = c.experts;
    if (e.number == 0 || std::ranges::count(e.layers, false))
        add("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", gate_up, Linear::down, F, cuts.hidden, cuts.down);
    if (e.number && c.family == "mixtral")
        add("block_sparse_moe.experts.w1", "block_sparse_moe.experts.w3", "block_sparse_moe.experts.w2", experts_gate_up,
            experts_down, e.F);
    else if (e.number)
        add("mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj", experts_gate_up, experts_down, e.F);
    if (e.shared_F)
        add("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj", shared_gate_up,
            shared_down, e.shared_F);
    return modules;
}

LinearShape linear_shape(const ModelConfig &c, Linear matrix) {
    const size_t Q = c.H * c.D, K = c.KV * c.D;
    switch (matrix) {
        case Linear::qkv: return {c.C, (c.output_gate ? 2 * Q : Q) + 2 * K};
        case Linear::o: return {Q, c.C};
        case Linear::delta_qkv: return {c.C, c.delta.row()};
        case Linear::delta_z: return {c.C, c.delta.values()};
        case Linear::delta_ba: return {c.C, 2 * c.delta.Hv};
        case Linear::delta_out: return {c.delta.values(), c.C};
        case Linear::gate_up: return {c.C, c.gpt2() ? c.F : 2 * c.F};
        case Linear::down: return {c.F, c.C};
        case Linear::experts_gate_up: return {c.C, 2 * c.experts.F};
        case Linear::experts_down: return {c.experts.F, c.C};
        case Linear::shared_gate_up: return {c.C, 2 * c.experts.shared_F};
        case Linear::shared_down: break;
    }
    return {c.experts.shared_F, c.C};
}

bool has_module(const ModelConfig &c, size_t l, const LinearModule &m) {
    const bool dense = m.matrix == Linear::gate_up || m.matrix == Linear::down;
    return of_attention(m.matrix) ? of_delta(m.matrix) == c.has_delta(l) : dense != c.has_experts(l);
}

size_t copies(const ModelConfig &c, const LinearModule &m) { return of_experts(m.matrix) ? c.experts.number : 1; }

std::string copy_name(const LinearModule &m, size_t i) {
    const std::string name = m.name;
    return of_experts(m.matrix) ? name.substr(0, name.rfind('.') + 1) + std::to_string(i) + name.substr(name.rfind('.')) : name;
}

// Returns the names of a module in all layers, and in all experts: "model.layers.3.mlp.experts.5.gate_proj".
static std::vector<std::string> names_in_layers(const ModelConfig &c, const LinearModule &m) {
    std::vector<std::string> names;
    for (size_t l = 0; l < c.L; l++)
        for (size_t i = 0; has_module(c, l, m) && i < copies(c, m); i++) names.push_back(layer_name(c, l) + copy_name(m, i));
    return names;
}

static std::string short_name(const LinearModule &m) { return std::string(m.name).substr(std::string(m.name).rfind('.') + 1); }

// A target is the end of a module's name, as in PEFT. all-linear means all modules, but in a mixture of experts only attention's.
static bool is_target(const ModelConfig &c, const LinearModule &m, const std::string &target) {
    if (target == "all-linear") return c.experts.number == 0 || of_attention(m.matrix);
    return target == m.name || std::string(m.name).ends_with("." + target);
}

// Returns the shortest names that select these modules and no others: "q_proj"; "attn.c_proj" for one of GPT-2's two modules c_proj.
static std::vector<std::string> target_names(const ModelConfig &c, const std::vector<LinearModule> &modules) {
    std::vector<std::string> names;
    for (const LinearModule &m : modules) {
        const auto count = [&](const std::vector<LinearModule> &of) { return std::ranges::count(of, short_name(m), short_name); };
        const std::string name = count(modules) == count(linear_modules(c)) ? short_name(m) : m.name;
        if (std::ranges::find(names, name) == names.end()) names.push_back(name);
    }
    return names;
}

// PEFT treats a text that is not a name as a regular expression for a module with its layer: it must match all of model.layers.3.self_attn.q_proj.
static bool is_expression(const std::string &target) { return target.find_first_of("\\[](){}*+?|^$") != target.npos; }

// Returns the numbers of matched names and of all names of a module, for a message; empty if all or none match.
static std::string some_names(const LinearModule &m, size_t meant, size_t all) {
    if (meant == 0 || meant == all) return "";
    const char *const of = of_experts(m.matrix) ? "experts" : "layers";
    return format("%s of %zu %s, but the model has %zu, and all or none of them have an adapter",
                  of_experts(m.matrix) ? short_name(m).c_str() : m.name, meant, of, all);
}

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
            die("the target \"%s\" is not a regular expression: %s\n  fix: name modules instead", target.c_str(), error.what());
        }
        for (const LinearModule &m : linear_modules(c)) {
            const auto names = names_in_layers(c, m);
            const auto meant =
                size_t(std::ranges::count_if(names, [&](const std::string &name) { return std::regex_match(name, expression); }));
            if (const std::string some = some_names(m, meant, names.size()); !some.empty())
                die("the target \"%s\" matches %s\n  fix: use an expression that matches all or none of them", target.c_str(),
                    some.c_str());
            if (meant) out.push_back(m.name);
        }
        if (out.empty())
            die("the target \"%s\" matches no linear layer of the model, such as %s%s\n  fix: use all-linear, or names of layers",
                target.c_str(), layer_name(c, 0).c_str(), linear_modules(c)[0].name);
    }
    return out;
}

std::vector<LinearModule> adapted_modules(const ModelConfig &c) {
    std::vector<LinearModule> out;
    if (c.lora.rank == 0) return out;
    for (const LinearModule &m : linear_modules(c))
        if (std::ranges::any_of(c.lora.targets, [&](const std::string &target) { return is_target(c, m, target); }))
            out.push_back(m);
    return out;
}

size_t trained_parameters(const ModelConfig &c) {
    size_t count = 0;
    for (const LinearModule &m : adapted_modules(c)) count += names_in_layers(c, m).size() * c.lora.rank * (m.IC + m.OC);
    return count + (c.lora.embedding + c.lora.head) * c.V * c.C + (c.reward ? c.C : 0);
}

// The embedding and the head of a tied model are one matrix, to which PEFT's merge_and_unload adds an adapter twice.
static constexpr const char
    *merge_it = "merge the adapter with PEFT (merge_and_unload), or train another",
    *train_whole = "train another adapter, with embed_tokens and lm_head in modules_to_save and not among the targets";

static std::string fix_of_target(const ModelConfig &c, const std::string &target, const std::string &names) {
    const std::string last = target.substr(target.rfind('.') + 1);
    const bool shared = last == "embed_tokens" || last == "wte" || last == "lm_head";
    return shared ? c.tied ? train_whole : merge_it : "use an adapter of this model, whose targets can be all-linear" + names;
}

void check_lora(const ModelConfig &c, const std::string &dir, const std::string &adapter_config) {
    const LoraConfig &lora = c.lora;
    const bool from_flags = adapter_config.empty();
    const std::string of_targets = from_flags ? "--lora_targets" : adapter_config + ": target_modules",
                      of_rank = from_flags ? "--lora_rank" : adapter_config + ": r";
    const auto modules = linear_modules(c);
    std::string names;
    for (const std::string &name : target_names(c, modules)) names += ", " + name;
    for (const std::string &target : lora.targets)
        if (std::ranges::none_of(modules, [&](const LinearModule &m) { return is_target(c, m, target); }))
            die("%s has \"%s\", but %s has no linear layer of that name in its layers\n  fix: %s", of_targets.c_str(),
                target.c_str(), dir.c_str(), (from_flags ? "all-linear" + names : fix_of_target(c, target, names)).c_str());
    if (lora.targets.empty()) die("%s is empty\n  fix: all-linear%s", of_targets.c_str(), names.c_str());
    size_t halves = 0;  // number of halves of the experts' gate_up among the targets
    for (const LinearModule &m : adapted_modules(c)) {
        halves += m.matrix == Linear::experts_gate_up;
        if (lora.dropout > 0 && c.experts.number && !of_attention(m.matrix))
            die("lora_dropout is %g, but in a mixture of experts adapters of the feed-forward, such as %s, have none, as in PEFT\n  fix: set lora_dropout to 0, or target attention alone",
                lora.dropout, m.name);
        if (lora.rank > std::min(m.IC, m.OC))
            die("%s %zu is larger than %s of %s, whose weight is (%zu, %zu)\n  fix: use a rank of at most %zu, or leave %s out of the targets",
                of_rank.c_str(), lora.rank, short_name(m).c_str(), dir.c_str(), m.OC, m.IC, std::min(m.IC, m.OC),
                short_name(m).c_str());
    }
    if (halves == 1)
        die("the targets include only one of the experts' gate and up projections, which PEFT treats as one matrix\n  fix: target both of them, or neither");
}

// ---- adapter_config.json --------------------------------------------------------------------------------------------------------------

static const std::string adapter_config = "/adapter_config.json";

// Settings that change the computation in an unsupported way, with the value, or a list of values, without effect. A field may also be absent
// or null. Other initial values, such as pissa, olora, corda and loftq, change the base as well.
static const std::pair<const char *, json> not_in_lora[] = {{"use_dora", false},
                                                            {"bias", "none"},
                                                            {"init_lora_weights", {true, false, "gaussian", "orthogonal", "eva"}},
                                                            {"layers_to_transform", {}},
                                                            {"layer_replication", {}},
                                                            {"exclude_modules", {}},
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

// All other settings of PEFT 0.21, and those that ms-swift adds: they are read here, or have no effect on a trained adapter.
static const std::set<std::string> other_settings = {
    "peft_type",         "peft_version",        "auto_mapping",   "base_model_name_or_path",
    "revision",          "task_type",           "inference_mode", "r",
    "lora_alpha",        "lora_dropout",        "target_modules", "target_parameters",
    "modules_to_save",   "fan_in_fan_out",      "use_rslora",     "rank_pattern",
    "alpha_pattern",     "ensure_weight_tying", "layers_pattern", "megatron_core",
    "qalora_group_size", "runtime_config",      "loftq_config",   "eva_config",
    "corda_config",      "lora_ga_config",      "lora_dtype",     "lorap_lr_ratio",
    "lorap_emb_lr"};

// Refuses an unknown setting that may change the computation. PEFT would only warn of it. A text is noted.
static std::string unknown_settings(const Fields &fields) {
    std::string names;
    for (const auto &[name, value] : fields.source().items()) {
        if (other_settings.contains(name) || std::ranges::count(not_in_lora, name, &std::pair<const char *, json>::first))
            continue;
        if (value.empty() || value == false || value == "") continue;
        if (!value.is_string())
            fields.refuse(name, "is no setting of LoRA that this program knows\n  fix: leave it out if it has no effect, or " +
                                    std::string(merge_it));
        names += (names.empty() ? "" : ", ") + name;
    }
    return names;
}

// PEFT names the experts beside a shared expert by transformers' parameters, where gate and up are one matrix: their rank and alpha are the sums of both. The
// adapter's tensors belong to single experts in any case.
static constexpr const char *experts_gate_up_name = "mlp.experts.gate_up_proj", *experts_down_name = "mlp.experts.down_proj";
static bool is_named_parameter(const ModelConfig &c, Linear matrix) {
    return c.experts.shared_F && std::ranges::count(adapted_modules(c), matrix, &LinearModule::matrix) > 0;
}
static json number(double x) { return x == std::floor(x) ? json(int64_t(x)) : json(x); }
static json pattern_of(const ModelConfig &c, double each) {
    return is_named_parameter(c, Linear::experts_gate_up) ? json{{R"(.*\.gate_up_proj)", number(2 * each)}} : json::object();
}

static const std::string of_all_experts =
    std::string("one tensor with the adapters of all experts, which is not supported\n  fix: ") + merge_it;

static std::vector<std::string> read_parameters(const Fields &fields) {
    const json *const value = fields.find("target_parameters");
    std::vector<std::string> out;
    for (const json &entry : value && value->is_array() ? *value : json::array())
        out.push_back(entry.is_string() ? entry.get<std::string>() : entry.dump());
    return out;
}

// Returns the names of the modules in a list of targets. PEFT may name each module with its layer, "model.layers.1.self_attn.q_proj".
static std::vector<std::string> read_targets(const Fields &fields, const ModelConfig &config) {
    const auto text = [](const json &entry) { return entry.is_string() ? entry.get<std::string>() : entry.dump(); };
    std::set<std::string> names;
    for (const std::string &parameter : read_parameters(fields)) {
        const std::string end = ".weight";
        if (parameter.ends_with(end)) names.insert(parameter.substr(0, parameter.size() - end.size()));
        else if (parameter != experts_gate_up_name && parameter != experts_down_name)
            fields.refuse("target_parameters", format("has \"%s\", %s", parameter.c_str(), of_all_experts.c_str()));
    }
    const json *value = fields.find("target_modules");
    if (value && value->is_string())
        for (const std::string &name : without_expressions(config, {*value})) names.insert(name);
    else if (value && value->is_array())
        for (const json &entry : *value) names.insert(text(entry));
    else fields.refuse("target_modules", "is missing, or is not a list of names");
    std::vector<std::string> out;
    for (const LinearModule &m : linear_modules(config)) {
        const auto all = names_in_layers(config, m);
        size_t meant = 0;
        for (const std::string &name : all) meant += names.erase(name);
        if (const std::string some = some_names(m, meant, all.size()); !some.empty())
            fields.refuse("target_modules", "has " + some);
        if (meant) out.push_back(m.name);
    }
    out.insert(out.end(), names.begin(), names.end());
    return out;
}

LoraConfig read_lora(const std::string &dir, const ModelConfig &config, bool &reward, std::vector<std::string> &notes) {
    const std::string path = dir + adapter_config;
    std::error_code unreadable;
    if (!std::filesystem::exists(path, unreadable))
        die("%s has no adapter_config.json\n  fix: give the directory of an adapter that PEFT or this program has saved",
            dir.c_str());
    const json source = read_json(path);
    const Fields fields(source, path);
    if (const std::string type = fields.text("peft_type"); type != "LORA")
        fields.refuse("peft_type", "is \"" + type + "\", but only LORA is supported\n  fix: use an adapter of that type");
    if (const bool turned = fields.boolean("fan_in_fan_out", config.gpt2()); turned != config.gpt2())
        fields.refuse("fan_in_fan_out",
                      format("is %s, but weights of a %s model are stored as (%s)\n  fix: use an adapter of this model",
                             turned ? "true" : "false", config.family.c_str(), turned ? "out, in" : "in, out"));
    const auto expect = [&](const char *name, const json &plain, const char *fix) {
        if (const json *value = fields.find(name);
            value && !value->empty() && *value != plain && !(plain.is_array() && std::ranges::count(plain, *value)))
            fields.refuse(name, format("is %s, which is not supported\n  fix: %s", value->dump().c_str(), fix));
    };
    for (const auto &[name, plain] : not_in_lora) expect(name, plain, merge_it);
    expect("ensure_weight_tying", false, config.tied ? train_whole : merge_it);
    if (const std::string names = unknown_settings(fields); !names.empty())
        notes.push_back(format("%s: not read, because LoRA has no such setting: %s", path.c_str(), names.c_str()));
    LoraConfig lora;
    lora.rank = fields.count("r", 8), lora.alpha = fields.number("lora_alpha", 8),
    lora.dropout = fields.number("lora_dropout", 0);
    lora.rslora = fields.boolean("use_rslora", false);
    lora.targets = read_targets(fields, config);
    const std::string task = fields.text("task_type", "CAUSAL_LM");
    reward = task == "SEQ_CLS";
    if (!reward && task != "CAUSAL_LM")
        fields.refuse("task_type", "is \"" + task + "\", but only CAUSAL_LM and SEQ_CLS are supported");
    std::vector<std::string> whole;
    const json *modules = fields.find("modules_to_save");
    for (const json &name : modules && modules->is_array() ? *modules : json::array())
        if (!reward || (name != "score" && name != "classifier"))
            whole.push_back(name.is_string() ? name.get<std::string>() : name.dump());
    if (const std::string unknown = read_modules(lora, whole); !unknown.empty())
        fields.refuse(
            "modules_to_save",
            format("has \"%s\", but only embed_tokens, lm_head and a reward model's score can be trained together with adapters",
                   unknown.c_str()));
    if (reward && lora.head) fields.refuse("modules_to_save", "has lm_head, but a reward model has none");
    ModelConfig adapted = config;
    adapted.lora = lora;
    check_lora(adapted, "the model", path);
    for (const std::string &name : read_parameters(fields))
        if ((name == experts_gate_up_name && !is_named_parameter(adapted, Linear::experts_gate_up)) ||
            (name == experts_down_name && !is_named_parameter(adapted, Linear::experts_down)))
            fields.refuse("target_parameters", format("has \"%s\", %s", name.c_str(), of_all_experts.c_str()));
    expect("rank_pattern", pattern_of(adapted, double(lora.rank)), merge_it);
    expect("alpha_pattern", pattern_of(adapted, lora.alpha), merge_it);
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
    // In mixtures without a shared expert, PEFT takes a module's name in the feed-forward for the experts. It finds the same module of a dense layer by the
    // name of its weight.
    const auto modules = adapted_modules(config);
    json parameters;
    std::vector<std::string> names = target_names(config, modules);
    if (is_named_parameter(config, Linear::experts_gate_up)) parameters.push_back(experts_gate_up_name);
    if (is_named_parameter(config, Linear::experts_down)) parameters.push_back(experts_down_name);
    for (const LinearModule &m : modules)
        if (config.experts.number && !config.experts.shared_F && !of_attention(m.matrix) && !of_experts(m.matrix))
            parameters.push_back(std::string(m.name) + ".weight"), std::erase(names, m.name);
    write_json(dir + adapter_config, {{"peft_type", "LORA"},
                                      {"task_type", config.reward ? "SEQ_CLS" : "CAUSAL_LM"},
                                      {"base_model_name_or_path", base},
                                      {"revision", nullptr},
                                      {"inference_mode", true},
                                      {"r", lora.rank},
                                      {"lora_alpha", number(lora.alpha)},
                                      {"rank_pattern", pattern_of(config, double(lora.rank))},
                                      {"alpha_pattern", pattern_of(config, lora.alpha)},
                                      {"lora_dropout", lora.dropout},
                                      {"use_rslora", lora.rslora},
                                      {"bias", "none"},
                                      {"fan_in_fan_out", config.gpt2()},
                                      {"target_modules", names},
                                      {"target_parameters", parameters},
                                      {"modules_to_save", whole},
                                      {"init_lora_weights", true}});
}

// ---- costs ----------------------------------------------------------------------------------------------------------------------------

// True if no trained weights precede the matrix's adapters in the first layer, whose backward pass then ends there.
static bool ends_backward(const ModelConfig &c, Linear matrix) { return matrix == Linear::qkv && !c.lora.embedding; }

CostOf cost::adapters(const ModelConfig &c, Linear matrix) {
    double in = 0, out = 0, number = 0;  // input and output elements per row of this matrix's adapters
    if (c.lora.rank)
        for (const LinearModule &m : adapted_modules(c))
            if (m.matrix == matrix) in += double(m.IC), out += double(m.OC), number++;
    const size_t E = of_experts(matrix) ? c.experts.number : 1, K = of_experts(matrix) ? c.experts.chosen : 1;
    return [=, r = double(c.lora.rank), first = ends_backward(c, matrix)](const Work &w, Phase phase, size_t l) -> Cost {
        const double rows = double(w.T * K), s = double(w.element);
        const double held = double(ceil_div(E, w.expert_ranks)), read = std::min(held, rows);  // adapters per module
        if (phase != Phase::backward)
            return {2 * rows * r * (in + out), s * (rows * (in + 2 * out) + read * r * (in + out) + 2 * rows * r * number)};
        const Cost weights{
            2 * rows * r * (2 * in + 2 * out),
            s * (rows * (2 * in + 2 * out) + read * r * (in + 2 * out) + 5 * rows * r * number) + 8 * held * r * (in + out)};
        if (first && l == 0) return weights;
        return {weights.flops + 2 * rows * r * in, weights.bytes + s * (rows * 2 * in + read * r * in + rows * r * number)};
    };
}

CostOf cost::linear(const ModelConfig &c, Linear matrix, size_t more) {
    const auto [IC, OC] = linear_shape(c, matrix);
    const CostOf product = [=, product = cost::product(IC, OC, more), IC = double(IC), OC = double(OC)](const Work &w,
                                                                                                        Phase phase, size_t l) {
        Cost cost = product(w, phase, l);
        const double T = double(w.T), read = double(w.element), round = read + 1;   // rounding writes one byte
        cost.rounded = (read + round) * (T * IC + IC * OC);                         // read once for the scale, then rounded
        if (phase == Phase::backward) cost.rounded += (read + 2 * round) * T * OC;  // in memory order, and transposed
        return cost;
    };
    if (c.lora.rank == 0) return product;
    const CostOf frozen = [=, IC = double(IC), OC = double(OC), first = ends_backward(c, matrix)](const Work &w, Phase phase,
                                                                                                  size_t l) -> Cost {
        if (phase == Phase::backward && first && l == 0) return {0, 0};
        const double T = double(w.T), s = double(w.element);
        Cost cost = product(w, phase, l);
        if (phase == Phase::backward) cost.flops = 2 * T * IC * OC, cost.bytes = s * (T * IC + IC * OC + T * OC);
        return cost;
    };
    return cost::sum({frozen, cost::adapters(c, matrix)});
}
