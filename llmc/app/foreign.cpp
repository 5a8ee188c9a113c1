#include "foreign.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>

#include "../core/common.h"

static constexpr ForeignName foreign_names[] = {
#define NAMES(whose, names, values, answer, text) {whose, names, values, Answer::answer, text},
#define VALUE(flag, theirs, ours)
#include "foreign.def"
};

static std::string lower(std::string text) {
    for (char &c : text) c = char(std::tolower(static_cast<unsigned char>(c)));
    return text;
}

static bool lists(const char *names, const std::string &name) {
    const auto all = CLI::detail::split(names, ',');
    return std::any_of(all.begin(), all.end(), [&](const std::string &one) { return lower(one) == lower(name); });
}

static const ForeignName *find_exactly(const std::string &name, const std::string &value) {
    for (const ForeignName &f : foreign_names)
        if (lists(f.names, name) && (!*f.values || lists(f.values, value))) return &f;
    return nullptr;
}

const ForeignName *find_foreign(const std::string &name, const std::string &value) {
    const bool nested =
        lists("trl,fsdp_config,parallelism_config,deepspeed_config,special_tokens", name.substr(0, name.find('.')));
    // "a.b.c", "b.c", "c"; then "a.b" and "b", which may be keys that hold others; then "a"
    for (size_t end = name.size(); end != name.npos && end > 0; end = name.rfind('.', end - 1))
        for (size_t at = 0; at < end; at = std::min(name.find('.', at), name.size()) + 1)
            if (const ForeignName *f = find_exactly(name.substr(at, end - at), value))
                if (at == 0 || nested || f->answer == Answer::NOTE || f->answer == Answer::NO) return f;
    return nullptr;
}

// ---- the way back ----------------------------------------------------------------------------------------------------------------

// OpenRLHF's names with dots are aliases of our flags.
static std::string openrlhf_name(const std::string &flag) {
    std::string found;
#define OPT(type, name, value, tasks, aliases, help)                      \
    if (flag == #name)                                                    \
        for (const std::string &alias : CLI::detail::split(aliases, ',')) \
            if (found.empty() && alias.find('.') != alias.npos) found = alias;
#include "../train/options.def"
    return found;
}

// Returns their name and value for a flag of ours, or two empty texts.
static std::pair<std::string, std::string> name_of(Whose whose, const std::string &flag, const std::string &value) {
    std::string theirs = value;
    for (const ForeignValue &v : foreign_values)
        if (flag == v.flag && value == v.ours) {
            theirs = v.theirs;
            break;
        }
    if (whose == OPENRLHF)
        if (const std::string name = openrlhf_name(flag); !name.empty()) return {name, value};
    for (const ForeignName &f : foreign_names) {
        if (!(f.whose & whose)) continue;
        const std::string name = CLI::detail::split(f.names, ',')[0];
        if (f.answer == Answer::IS && lists(f.text, flag)) return {name, theirs};
        if (f.answer == Answer::SETS && *f.values && f.text == flag + " " + value)
            return {name, CLI::detail::split(f.values, ',')[0]};
    }
    return {};
}

static std::string program_of(Whose whose, Task task) {
    const std::string name = task == PRETRAIN ? "sft" : task_name(task);
    if (whose == OPENRLHF && (task & RL)) return "python3 -m openrlhf.cli.train_ppo_ray";
    if (whose == OPENRLHF) return "deepspeed --module openrlhf.cli.train_" + name;
    return "trl " + (task == RM ? "reward" : name);
}

std::string command_as(Whose whose, Task task, const FlagValues &flags, size_t world) {
    FlagValues theirs;
    std::string missing;
    size_t ring = 1, batch = 0;
    for (const auto &[flag, value] : flags)
        if (flag == "ring_attn_size") ring = size_t(atoll(value.c_str()));
    for (const auto &[flag, value] : flags) {
        if (flag == "train_batch_size" && whose != OPENRLHF) batch = size_t(atoll(value.c_str()));
        if (const auto found = name_of(whose, flag, value); !found.first.empty()) theirs.push_back(found);
        else if (flag == "ranks" && whose == TRL) theirs.emplace_back("num_processes", value);
        else if (!batch || flag != "train_batch_size") missing += "\n# has no equivalent there: --" + flag + " " + value;
    }
    if (batch) {
        const size_t samples = batch * ring / world;  // of a step on one rank
        theirs.emplace_back(whose == TRL ? "per_device_train_batch_size" : "micro_batch_size", "1");
        theirs.emplace_back("gradient_accumulation_steps", std::to_string(samples));
        if (samples * world != batch * ring)
            missing += format("\n# a step of %zu samples cannot be shared by %zu ranks there", batch, world / ring);
    }
    std::string text = whose == AXOLOTL ? "" : program_of(whose, task);
    if (whose == AXOLOTL && task == DPO) theirs.insert(theirs.begin(), {"rl", "dpo"});
    if (whose == AXOLOTL && task == RM) theirs.insert(theirs.begin(), {"reward_model", "true"});
    for (const auto &[name, value] : theirs)
        if (whose != AXOLOTL) text += " --" + name + " " + value;
        else if (name == "datasets") text += "datasets:\n  - path: " + value + "\n";
        else text += name + ": " + value + "\n";
    if (whose == AXOLOTL && !text.empty()) text.pop_back();
    return text + missing;
}
