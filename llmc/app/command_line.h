// Parses the command line. The flags themselves, one line each, are in ../train/options.def.
//
//     train_llama | train_gpt2 pretrain|sft|dpo|rm|distill|grpo|ppo|eval|generate|merge [--flag value | --flag=value]...        no task: the demo, with --plan sft
//     train_llama | train_gpt2 show [pretrain|sft|dpo|rm|distill|grpo|ppo] [--flag value]...                                    no task: sft
//
// `-` and `_` in a flag's name are equivalent. A boolean is --flag, --flag true or --flag false. --config FILE, JSON or YAML, also holds flags;
// the command line wins. A command of OpenRLHF, TRL, Axolotl, LLaMA-Factory or ms-swift is translated by scripts/port; its first words, a file or
// --from name the trainer. A flag that the task does not have, a misspelled one and a value out of range end the run with a message.
#pragma once
#include <string>
#include <vector>

#include "../train/options.h"

struct Parsed {
    Task task;
    Options options;                 // checked; defaults of the task filled in, row_tokens never 0
    bool default_max_len = false;    // --max_len was not given: it is reduced to the model's positions if necessary
    std::vector<std::string> notes;  // lines to show at the start: the meaning of another trainer's flag, and differing defaults
    bool show = false;               // the task is show: print samples of the data as `task` would train on them
    std::string help;                // unless empty, --help or --convert was given: print this text and exit with code 0
};

// Parses argv without the program's name, which is `program`; dies on a user's error. `bundled` are the arguments of a run without a task, followed by the given ones; if
// it is empty, such a run is the demo.
Parsed parse(const std::string &program, const std::vector<std::string> &arguments, const std::vector<std::string> &bundled = {});
