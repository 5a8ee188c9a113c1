// Reads a model directory's configuration and tokenizer into a ModelSpec. These functions are collective over all ranks, unless a comment says
// otherwise.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "run.h"

// Runs `work` on the `chosen` ranks and returns its result there, and "" on other ranks. The chosen ranks report progress, so the work may take
// longer than --comm_timeout.
std::string while_others_wait(const Run &run, bool chosen, const std::function<std::string()> &work);

// Replaces the name of a model on the hub by its local directory; one rank of each host downloads it (../data/hub.h). Other names do not change.
void find_model(const Run &run, std::string &name);

// Returns the directory of the tokenizer of `dir` with --add_tokens, which one rank of each host writes; empty if there are no tokens to add.
std::string tokenizer_with_tokens(const Run &run, const std::string &dir);

// These functions are local to the calling rank.
// Sets the tokenizer of `dir` for the model. If it has more tokens than the model, and training or an adapter may use them, the model gets rows for
// them (weights_of).
void use_tokenizer(const Run &run, ModelSpec &model, const std::string &dir);
void grow_vocabulary(const Run &run, ModelSpec &model, size_t rows, const std::string &whose);
// Dies if the model belongs to the other trainer.
void expect_own_family(const Run &run, const ModelConfig &config, const std::string &name);
size_t weight_bits(LoadIn load_in);                             // 0: the run's dtype
ModelSpec open_config(const Run &run, const std::string &dir);  // without ranks
// Returns the division among ranks by the flags, with rings of `sp`. Dies if it does not divide the model's heads.
// Dies if the model cannot have the same bits in generation and training (--exact).
void expect_exact(const Run &run);

// Returns whether rows share prompts (--share_prompts). Dies if they must but cannot.
bool shares_prompts(const Run &run);
Ranks ranks_of(const Run &run, const ModelConfig &config, size_t world, size_t sp);

// Returns the model in `dir`, or run.model if `dir` is empty. Dies if its tokenizer differs from run.model's; the message names `flag`.
ModelSpec spec_beside(const Run &run, const std::string &dir, const char *flag);
