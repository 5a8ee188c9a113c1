// Opens what a directory says of a model: its configuration and its tokenizer, as a ModelSpec. All ranks call these functions together, unless one
// says otherwise.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "run.h"

// Returns what `work` returns on the ranks that are `chosen`, and nothing on the others, which are told that it goes on: it may take longer than
// --comm_timeout.
std::string while_others_wait(const Run &run, bool chosen, const std::function<std::string()> &work);

// Turns the name of a model on the hub into the directory that one rank of each host fetches it to (../data/hub.h); other names stay as they are.
void find_model(const Run &run, std::string &name);

// These concern the calling rank alone.
void expect_own_family(const Run &run, const ModelConfig &config, const std::string &name);  // dies if another program trains it
size_t weight_bits(const Options &o);                           // of --load_in; 0: in the type of the run
ModelSpec open_config(const Run &run, const std::string &dir);  // without ranks
// Returns ranks as the flags say, with `sp` of them in a ring. Dies if the model's heads do not suit them.
Ranks ranks_of(const Run &run, const ModelConfig &config, size_t world, size_t sp);

// Returns another model that reads the same tokens as run.model, of directory `dir`, or run.model itself if that is empty. Dies if their tokenizers
// differ; `flag` is the one that names the directory.
ModelSpec spec_beside(const Run &run, const std::string &dir, const char *flag);

inline constexpr const char *head_name = "lm_head.weight";
const char *embedding_name(const ModelConfig &config);
