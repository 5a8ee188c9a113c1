#include "options.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "../core/common.h"
#include "preference.h"

const char *task_name(Task task) {
    switch (task) {
        case DEMO: return "demo";
        case PRETRAIN: return "pretrain";
        case SFT: return "sft";
        case DPO: return "dpo";
        case RM: return "rm";
        case DISTILL: return "distill";
        case GRPO: return "grpo";
        case PPO: return "ppo";
        case EVAL: return "eval";
        case GENERATE: return "generate";
        case MERGE: return "merge";
    }
    return "";
}

bool learns_unpaired(const Options &o) { return std::ranges::any_of(o.loss_type, is_unpaired); }

bool estimates_kl(const Options &o) { return std::ranges::count(o.loss_type, "kto") > 0; }

size_t documents_of_sample(const Options &o, Task task) { return task & PAIRS && !learns_unpaired(o) ? 2 : 1; }

StartedByHand started_by_hand(const Options &o) {
    StartedByHand out;
    char more;
    if (o.rank.empty()) return out;
    if (o.rank.find_first_not_of("0123456789/") != o.rank.npos || o.rank.size() > 12 ||
        sscanf(o.rank.c_str(), "%" SCNd64 "/%" SCNd64 "%c", &out.rank, &out.processes, &more) != 2 || out.rank >= out.processes)
        die("--rank \"%s\" is not R/N, process R of N with R from 0 to N - 1\n  fix: --rank 0/2 for the first of two processes",
            o.rank.c_str());
    return out;
}

std::vector<Teacher> teachers_of(const Options &o) {
    std::vector<Teacher> out;
    for (const std::string &text : o.teacher_model) {
        const size_t name = o.teacher_model.size() > 1 ? text.find('=') : std::string::npos;
        out.push_back(name == std::string::npos ? Teacher{"", text} : Teacher{text.substr(0, name), text.substr(name + 1)});
    }
    return out;
}

Options default_options(Task task) {
    Options o;
    if (task == SFT) o.learning_rate = 5e-6;
    if (task == DPO) o.learning_rate = 1e-6;
    if (task == RM) o.learning_rate = 9e-6;
    if (task & (RL | DISTILL)) o.learning_rate = 1e-6, o.temperature = 1;
    if (task & RL) o.n = 8;
    if (task == PPO) o.advantage_estimator = Estimator::gae, o.n = 1;
    if (task & PAIRS) o.max_len = 512;
    if (task == PRETRAIN) o.truncation = "split";
    if (task == DEMO) {
        o.train_batch_size = 64;
        o.max_epochs = 8;
        o.learning_rate = 2e-3;
        o.output_dir = "out/demo";
        o.ring_attn_size = 0;  // 0 means 2 if the number of ranks is even
    }
    return o;
}

void to_json(nlohmann::ordered_json &json, const Steps &steps) {
    if (steps.value == std::floor(steps.value)) json = int64_t(steps.value);
    else json = steps.value;
}

template <class T> static const T &plain(const T &value) { return value; }
template <Choice E> static std::string plain(const E &value) { return name_of(value); }
template <Choice E> static std::string plain(const Auto<E> &value) { return name_of(value); }

nlohmann::ordered_json to_json(const Options &options, Task task) {
    nlohmann::ordered_json json = nlohmann::ordered_json::object();
#define OPT(type, name, value, tasks, ...) \
    if (task & (tasks)) json[#name] = plain(options.name);
#include "options.def"
    return json;
}

std::string to_text(const nlohmann::ordered_json &value) {
    if (value.is_string()) return value;
    if (!value.is_array()) return value.dump();
    std::string out;
    for (const nlohmann::ordered_json &v : value) out += (out.empty() ? "" : ",") + to_text(v);
    return out;
}

std::vector<std::string> prepare_flags(const Options &options, Task task) {
    std::vector<std::string> out;
    const nlohmann::ordered_json json = to_json(options, task);
    const auto add = [&](const char *name) {
        if (const std::string value = to_text(json[name]); !value.empty())
            out.insert(out.end(), {std::string("--") + name, value});
    };
#define OPT(type, name, value, tasks, ...) \
    if (((tasks)&PREPARE) && ((tasks)&task)) add(#name);
#include "options.def"
    return out;
}
