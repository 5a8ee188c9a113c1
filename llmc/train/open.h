// Opens the inputs of a run: data, configurations, models. All ranks call these functions together, and an error of one is an error of all.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "../data/tokens.h"
#include "run.h"

// Returns a prepared file for `path`, which the user gave as --FLAG (../data/prepare.h). One rank runs prepare.py, with `extra` as further arguments.
std::string prepared_file(const Run &run, Task task, const std::string &flag, const std::string &path,
                          const std::vector<std::string> &extra);
// Dies if a file is not the same for all ranks, or if only some have it. One rank of each process reads the files, whole.
void expect_same_files(const Run &run, const std::vector<std::string> &paths);

// Turns the name of a model on the hub into the directory that one rank of each host fetches it to (../data/hub.h); other names stay as they are.
void find_model(const Run &run, std::string &name);
void expect_own_family(const Run &run, const std::string &name);  // dies if run.config is for another program
void expect_adapter_tensor(const Run &run, const class HfWeights &adapter, const std::string &name,
                           const std::vector<size_t> &shape);  // of --adapter; dies if it belongs to another model

// Dies if the directory of run.config, or of --adapter, has an unread tensor that contradicts the computed values.
void expect_known_tensors(const Run &run, const Model &model, const HfWeights &weights);
void expect_known_tensors(const Run &run, const Model &model, const HfWeights &weights, const HfWeights &adapter);

void set_weight_bits(Run &run);                      // of run.config, as --load_in says
void open_config(Run &run, const std::string &dir);  // of the model in `dir`, with its tokenizer's hash
Ranks ranks_of(const Run &run, size_t world,
               size_t sp);  // as the flags say, with `sp` of them in a ring; dies if the heads of run.config do not suit them
void expect_positions(const Run &run,
                      const Samples &data);  // dies if a document has more tokens than run.config has positions
std::unique_ptr<PreparedData> open_data(const Run &run, const std::string &path);  // dies if it is not the same for all ranks
std::unique_ptr<Samples> open_samples(const Run &run,
                                      const std::string &path);  // the training data of the task: such data, or rollouts
size_t rows_capacity(const Samples &data, size_t row_tokens);    // T of the largest row that this data can fill
ModelLimits limits_for(const Run &run, Mode mode, const Samples &data);
size_t available_memory(
    const Run &run);  // bytes that a rank may take: the least that any rank has, measured before one of them takes any
std::unique_ptr<Model> open_model(const Run &run,
                                  ModelLimits limits);  // chooses --recompute auto, allocates, loads or initialises
