// The names and values of OpenRLHF, TRL, accelerate and Axolotl, as foreign.def lists them, and what each is here.
#pragma once
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "../train/options.h"

enum Whose : unsigned { OPENRLHF = 1, TRL = 2, AXOLOTL = 4, ACCELERATE = 8 };
enum class Answer { IS, SETS, PART, TOGETHER, NOTE, NO };  // foreign.def says what they mean

struct ForeignName {
    unsigned whose;
    const char *names, *values;  // with commas between
    Answer answer;
    const char *text;
};

// Returns the line for a name without dashes, with any prefix, and a value; null if there is none.
const ForeignName *find_foreign(const std::string &name, const std::string &value);

struct ForeignValue {
    const char *flag, *theirs, *ours;
};
inline constexpr ForeignValue foreign_values[] = {
#define NAMES(whose, names, values, answer, text)
#define VALUE(flag, theirs, ours) {#flag, #theirs, #ours},
#include "foreign.def"
};

using FlagValues = std::vector<std::pair<std::string, std::string>>;  // our flags with their values

// Returns the same run as a command of TRL or OpenRLHF, or as YAML of Axolotl, for `world` ranks. It ends with comments: the flags without an
// equivalent there.
std::string command_as(Whose whose, Task task, const FlagValues &flags, size_t world);

// Flags whose default differs from theirs. (pretrain is compared with SFT, which also trains on plain text.)
struct Difference {
    Whose whose;
    unsigned tasks;
    const char *flag, *theirs;
};
inline constexpr Difference differences[] = {
    {OPENRLHF, PRETRAIN | SFT, "max_epochs", "2"},
    {OPENRLHF, PRETRAIN, "learning_rate", "5e-6"},
    {OPENRLHF, DPO, "learning_rate", "1e-5"},
    {OPENRLHF, PRETRAIN | SFT, "input_key", "\"input\""},
    {OPENRLHF, PRETRAIN | SFT | PAIRS, "truncation", "cut, and the last token replaced by EOS"},
    {OPENRLHF, RM, "eval_fraction", "0.01 without eval_data, of what is trained on"},
    {OPENRLHF, PRETRAIN | SFT | PAIRS | EVAL, "dtype", "bf16"},
    {OPENRLHF, PRETRAIN | SFT, "row_tokens", "8 samples of max_len"},
    {OPENRLHF, DPO, "row_tokens", "8 pairs of 2 * max_len"},
    {OPENRLHF, DPO, "ref_mode", "resident"},
    {OPENRLHF, PRETRAIN | SFT | PAIRS, "zero_stage", "2"},
    {TRL, PRETRAIN | SFT | PAIRS, "max_epochs", "3"},
    {TRL, PRETRAIN | SFT | PAIRS, "train_batch_size", "8 for each device"},
    {TRL, PRETRAIN | SFT, "learning_rate", "2e-5"},
    {TRL, RM, "learning_rate", "1e-4"},
    {TRL, GRPO, "num_episodes", "3"},
    {TRL, GRPO, "train_batch_size", "8 answers for each device"},
    {TRL, GRPO, "rollout_batch_size", "1 for each device"},
    {TRL, GRPO, "max_new_tokens", "512"},
    {TRL, PRETRAIN | SFT | PAIRS | GRPO, "lr_scheduler", "linear"},
    {TRL, PRETRAIN | SFT | PAIRS | GRPO, "lr_warmup_ratio", "0"},
    {TRL, PRETRAIN | SFT | PAIRS | GRPO, "adam_betas", "0.9,0.999"},
    {TRL, PRETRAIN | SFT | PAIRS, "max_len", "1024"},
    {TRL, PRETRAIN | SFT | PAIRS, "truncation", "cut on the right: --truncation keep"},
    {TRL, PRETRAIN | SFT | PAIRS | GRPO, "lora_alpha", "32"},
    {TRL, PRETRAIN | SFT | PAIRS | GRPO, "lora_dropout", "0.05"},
    {TRL, PRETRAIN | SFT | PAIRS | GRPO, "lora_targets", "q_proj,v_proj"},
    {AXOLOTL, PRETRAIN | SFT | PAIRS, "adam_betas", "0.9,0.999"},
    {AXOLOTL, PRETRAIN | SFT | PAIRS, "lr_scheduler", "cosine"},
    {AXOLOTL, PRETRAIN | SFT | PAIRS, "max_len", "512"},
};
