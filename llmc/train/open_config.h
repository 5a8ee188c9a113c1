// Reads a model directory's configuration and tokenizer into a ModelSpec. These functions are collective over all ranks, unless a comment says
// otherwise.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "run.h"

// Runs `work` on the `chosen` ranks and returns its result there, and "" on the others. The chosen ranks report progress, so that the work may take
// longer than --comm_timeout.
std::string while_others_wait(const Run &run, bool chosen, const std::function<std::string()> &work);

// Turns the name of a model on the hub into the directory that one rank of each host fetches it to (../data/hub.h); other names stay as they are.
void find_model(const Run &run, std::string &name);

// Returns the directory of the tokenizer of `dir` with --add_tokens, which one rank of each host writes; empty if there are none to add.
std::string tokenizer_with_tokens(const Run &run, const std::string &dir);

// These functions are local to the calling rank.
// Reads text by the tokenizer of `dir` from now on. If it has more tokens than the model, and training or an adapter may use them, the model gets their
// rows (weights_of).
void use_tokenizer(const Run &run, ModelSpec &model, const std::string &dir);
void grow_vocabulary(const Run &run, ModelSpec &model, size_t rows, const std::string &whose);
// Dies if the model belongs to the other trainer.
void expect_own_family(const Run &run, const ModelConfig &config, const std::string &name);
size_t weight_bits(const Options &o);                           // by --load_in; 0: the run's dtype
ModelSpec open_config(const Run &run, const std::string &dir);  // without ranks
// Returns the division into ranks that the flags ask for, with rings of `sp`. Dies if it does not divide the model's heads.
Ranks ranks_of(const Run &run, const ModelConfig &config, size_t world, size_t sp);

// Returns the model in `dir`, or run.model if `dir` is empty. Dies if its tokenizer differs from run.model's; the message names `flag`.
ModelSpec spec_beside(const Run &run, const std::string &dir, const char *flag);
