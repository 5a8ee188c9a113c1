// The options of a run. The flags themselves, one line each, are in options.def; ../app/command_line.h reads them.
#pragma once
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "../model/op_list.h"
#include "../ops/settings.h"
#include "../parallel/split.h"
#include "choices.h"

template <> inline constexpr const char *choice_names<Moments> = "f32, bf16, 8bit";
template <> inline constexpr const char *choice_names<Recompute> = "none, cheap, layer";
template <> inline constexpr const char *choice_names<SpMode> = "ring, gather, ulysses";

enum Task : unsigned {
    DEMO = 1,
    PRETRAIN = 2,
    SFT = 4,
    EVAL = 8,
    GENERATE = 16,
    DPO = 32,
    RM = 64,
    GRPO = 128,
    PPO = 256,
    MERGE = 512,
    DISTILL = 1024
};
constexpr unsigned PAIRS = DPO | RM;  // tasks whose samples are pairs of documents
constexpr unsigned RL = GRPO | PPO;   // tasks that learn from rewards of answers
constexpr unsigned TRAINING = DEMO | PRETRAIN | SFT | PAIRS | DISTILL | RL;
constexpr unsigned ALL_TASKS = TRAINING | EVAL | GENERATE;
constexpr unsigned PREPARE = 1u << 31;  // not a task: the flag is passed on to data/prepare.py
constexpr unsigned COMMON = 1u << 30;   // not a task: the flag is in --help and not only in `--help all`

const char *task_name(Task);  // "sft"

using Betas = std::array<double, 2>;
using Names = std::vector<std::string>;
using Numbers = std::vector<double>;
struct Texts : std::vector<std::string> {  // any texts, which may contain commas
    using vector::vector;
};

// A number of optimizer steps, or, below 1, a share of all steps of the run, as in transformers. Each flag defines the meaning of -1.
struct Steps {
    double value;
    Steps(double v = 0) : value(v) {}
    operator double() const { return value; }
    size_t of(size_t all) const { return value <= 0 ? 0 : size_t(value < 1 ? std::ceil(value * double(all)) : value); }
};
void to_json(nlohmann::ordered_json &, const Steps &);  // 50, not 50.0

struct StartedByHand {  // from --rank R/N; 0 processes without it
    int64_t rank = 0, processes = 0;
};

struct Options {
#define OPT(type, name, value, tasks, ...) type name = value;
#include "options.def"
};

struct Teacher {
    std::string name, model;  // model: a directory or a name on the hub
};

bool learns_unpaired(const Options &);              // a loss of --loss_type learns from single answers with a judgement
bool estimates_kl(const Options &);                 // kto: each step begins with an estimate of the KL divergence
size_t documents_of_sample(const Options &, Task);  // 2 for pairs
StartedByHand started_by_hand(const Options &);
std::vector<Teacher> teachers_of(const Options &);              // --teacher_model; a single one has no name
Options default_options(Task);                                  // a task's defaults, before any flag is read
nlohmann::ordered_json to_json(const Options &, Task);          // the task's flags, for the run log; --config reads it back
std::string to_text(const nlohmann::ordered_json &value);       // a flag's value as on the command line
std::vector<std::string> prepare_flags(const Options &, Task);  // {"--input_key", "question", ...} for data/prepare.py
