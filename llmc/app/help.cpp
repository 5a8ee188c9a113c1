#include "help.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "../core/common.h"
#include "../train/preference.h"
#include "rules.h"

static constexpr size_t column = 36, width = 120;  // first column of the texts; longest line
static constexpr size_t one_screen = 35;           // a task with at most this number of flags shows them all

static const char *about(Task task) {
    switch (task) {
        case DEMO:
            return "The bundled demo trains a small model on bundled text.\n"
                   "Tasks, each with its own --help: pretrain, sft, dpo, rm, distill, grpo, ppo, eval, generate, merge;\n"
                   "show (samples of your data, with the trained tokens), plot and report (the log of a run).";
        case PRETRAIN: return "Train on all tokens of plain text.";
        case SFT: return "Supervised fine-tuning: train on the responses of chats or of prompts with completions.";
        case DPO:
            return "Train on pairs of a better and a worse answer (DPO and related losses), or on single judged answers (KTO).";
        case RM: return "Train a reward model on pairs of a better and a worse answer.";
        case DISTILL:
            return "Learn the distributions of a teacher, in the model's own answers or in given ones: on-policy distillation, GKD.";
        case GRPO: return "Learn from rewards of sampled answers: GRPO and related estimators.";
        case PPO: return "Learn from rewards of sampled answers with a critic.";
        case EVAL: return "Compute loss, accuracy and entropy of a model on a data file.";
        case GENERATE: return "Continue prompts.";
        case MERGE: return "Add an adapter to the weights of its model.";
    }
    return "";
}

// Returns "  --name default" with its text in a second column, wrapped to the width.
static std::string entry(const std::string &name, const std::string &text) {
    std::string out = "  --" + name;
    size_t at = out.size();  // the column of the last line
    if (at + 1 > column) out += '\n', at = 0;
    out.append(column - at, ' '), at = column;
    for (size_t begin = 0; begin < text.size();) {
        const size_t end = std::min(text.find(' ', begin), text.size());
        if (at > column && at + 1 + end - begin > width) out += '\n' + std::string(column, ' '), at = column;
        if (at > column) out += ' ', at++;
        out += text.substr(begin, end - begin), at += end - begin, begin = end + 1;
    }
    return out + '\n';
}

// Returns "a | b".
static std::string listed(const std::vector<std::string> &names) {
    std::string out;
    for (const std::string &name : names) out += (out.empty() ? "" : " | ") + name;
    return out;
}

std::string help(const std::string &program, Task task, bool all) {
    const auto defaults = to_json(default_options(task), task);
    const auto valid = valid_names(task);
    const bool every_flag = all || defaults.size() <= one_screen;
    const std::string name = program + (task == DEMO ? "" : std::string(" ") + task_name(task));
    std::string out = std::string(about(task)) + "\nusage: " + name + " [--flag value]...\n\n", subject;
    const auto add = [&](const char *flag, unsigned tasks, std::string text) {
        if (!(tasks & task) || (!every_flag && !(tasks & COMMON))) return;
        if (const size_t at = text.find("{losses}"); at != text.npos) text.replace(at, strlen("{losses}"), preference_names());
        if (const auto names = valid.find(flag); names != valid.end()) text = listed(names->second) + ": " + text;
        const std::string value = to_text(defaults[flag]);
        out += subject +
               entry(flag + (value.empty() || value == "false" ? "" : " " + value), all ? text : text.substr(0, text.find("; ")));
        subject.clear();
    };
#define SUBJECT(text) subject = text "\n";
#define OPT(type, name, value, tasks, text, ...) add(#name, tasks, text);
#include "../train/options.def"
    out += "\n" + entry("config FILE", "flags in JSON or YAML, or another trainer's file; the command line takes precedence");
    if (!all) return out + entry("help all", format("all %zu flags", defaults.size()));
    out += entry("convert", "print the command in this program's own names, with notes on differences, and exit");
    return out +
           entry(
               "from NAME",
               "read the command in the names, and with the defaults, of trl, openrlhf, axolotl, llamafactory, swift or megatron");
}

std::string help_of_show(const std::string &program) {
    return format(
               "Print samples of --data as a task trains on them, with their trained tokens marked. Any command that trains can be shown.\n"
               "usage: %s show [pretrain|sft|dpo|rm|distill|grpo|ppo] [--flag value]...        without a task: sft\n\n",
               program.c_str()) +
           entry(format("max_samples %zu", shown_samples), "number of samples to print") +
           "and the flags of the task: " + program + " sft --help\n";
}
