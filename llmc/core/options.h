// Parses the command line. The flags themselves, one line each, are in options.def.
//
//     train_llama | train_gpt2 pretrain|sft|dpo|rm|eval|generate [--flag value | --flag=value]...        no task: the demo, with --plan sft
//
// `-` and `_` in a flag's name are the same. A boolean is --flag, --flag true or --flag false. --config FILE.json holds flags, too;
// the command line wins. A flag that the task does not have, a misspelled one and a value out of range end the run with a message.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

enum Task : unsigned { DEMO = 1, PRETRAIN = 2, SFT = 4, EVAL = 8, GENERATE = 16, DPO = 32, RM = 64 };
constexpr unsigned PAIRS = DPO | RM;  // tasks whose samples are pairs of documents
constexpr unsigned TRAINING = DEMO | PRETRAIN | SFT | PAIRS;
constexpr unsigned ALL_TASKS = TRAINING | EVAL | GENERATE;
constexpr unsigned PREPARE = 1u << 31;  // not a task: says that the flag is handed on to data/prepare.py

const char *task_name(Task);  // "sft"

using Betas = std::array<double, 2>;
using Names = std::vector<std::string>;
using Numbers = std::vector<double>;

struct Options {
#define OPT(type, name, value, tasks, aliases, help) type name = value;
#include "options.def"
};

struct Parsed {
    Task task;
    Options options;                 // checked; defaults of the task filled in, row_tokens never 0
    bool default_max_len = false;    // --max_len was not given, so that it is to be no more than the model has positions
    std::vector<std::string> notes;  // lines to show at the start: what a flag of OpenRLHF means here, which defaults differ
    std::string help;                // unless empty, --help was given: print this text and exit with code 0
};

// Parses argv without the program's name; dies on a user's error. `bundled` are the arguments of a run without a task, to which the given ones are
// added; if it is empty, such a run is the demo.
Parsed parse(const std::string &program, const std::vector<std::string> &arguments, const std::vector<std::string> &bundled = {});

Options default_options(Task);                                  // a task's defaults, before any flag is read
nlohmann::ordered_json to_json(const Options &, Task);          // the task's flags, for the run log; --config reads it back
std::vector<std::string> prepare_flags(const Options &, Task);  // {"--input_key", "question", ...} for data/prepare.py
