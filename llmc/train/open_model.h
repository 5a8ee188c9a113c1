// Plans and opens models: first the memory plan, then weights from a directory or random ones. `model` is the planned model; the run has
// the device, the flags and the ranks that share the memory.
#pragma once
#include <memory>
#include <string>

#include "run.h"

inline constexpr Recompute recompute_levels[] = {Recompute::none, Recompute::cheap, Recompute::layer};

// ---- limits

// Returns the limits from flags, for all models of a run. The caller sets the sizes.
ModelLimits flag_limits(const Options &o);
void set_offload(ModelLimits &limits, const Names &offload);   // from --offload
size_t rows_capacity(const Samples &data, size_t row_tokens);  // T of the largest row that the data can fill
ModelLimits limits_for(const Run &run, Mode mode, const Samples &data);
// Returns why FP8 cannot multiply a model's matrices, which tensor_ranks divide; empty if it can.
std::string obstacle_to_fp8(const ModelConfig &config, size_t tensor_ranks);
// Returns the limits of a second model in memory, without a generation cache. A model that generates has no ranks.
ModelLimits co_resident_limits(ModelLimits limits, const ModelConfig &config, Mode mode);

// ---- plans

// Returns the bytes available to the plans of this machine's ranks: the free memory without the reserve.
size_t usable_memory(const Run &run, const Memory &memory);
// Returns the bytes that a rank may take: the minimum over ranks, before any rank allocates. All ranks call it.
size_t available_memory(const Run &run);

// Returns a model whose plan is placed. --recompute auto takes the first level whose plan fits into `memory` bytes, or the last level if none fits.
// The chunks of the head then take what memory is left, up to most_head_chunk.
std::unique_ptr<Model> plan_model(const Run &run, const ModelSpec &model, Auto<Recompute> recompute, ModelLimits &limits,
                                  size_t memory);
// Returns one of model.co_residents, whose plan is placed.
std::unique_ptr<Model> co_resident_model(const Run &run, const CoResidentModel &other, const ModelLimits &limits);
// Return the bytes that a rank needs, in memory and in stores, for the plan and for model.co_residents.
size_t rank_bytes(const Run &run, const ModelSpec &model, Model &planned, const ModelLimits &limits);
size_t rank_store_bytes(const Run &run, const ModelSpec &model, Model &planned, const ModelLimits &limits);

// Returns the largest number of tokens up to `limit`, in one row and in one sample, whose plan fits into `memory` bytes per rank, or 0 if not even
// the shortest row fits. The ranks of a ring share the row.
size_t most_tokens(const Run &run, const ModelSpec &model, Auto<Recompute> recompute, ModelLimits limits, size_t memory,
                   size_t limit);
// Returns the same as a value of --max_len, for rows with room for one sample.
size_t longest_sample(const Run &run, const ModelSpec &model, Auto<Recompute> recompute, const ModelLimits &limits, size_t memory,
                      size_t limit);
// Returns the smallest larger ring whose plan fits, or 0 if there is none.
size_t larger_ring(const Run &run, const ModelSpec &model, ModelLimits limits, size_t memory);
// Returns true if the plan fits into the memory that a rank may take. All ranks call it.
bool fits(const Run &run, const ModelSpec &model, ModelLimits limits);

// ---- weights

// Opens a model on all ranks together: chooses --recompute auto, allocates, loads or initialises. profile: --profile measures it
std::unique_ptr<Model> open_model(const Run &run, const ModelSpec &model, ModelLimits limits, bool profile = false);

class HfWeights weights_of(const ModelSpec &model);  // the directory's, with the rows and the head that the configuration adds

// Die if unread tensors of the directory show that the model would compute something else, or if the adapter belongs to another model.
void expect_known_tensors(const Run &run, const ModelSpec &model, const Model &opened, const HfWeights &weights);
void expect_known_adapter(const ModelSpec &model, const Model &opened, const HfWeights &adapter);
void expect_adapter_tensor(const ModelSpec &model, const HfWeights &adapter, const std::string &name,
                           const std::vector<size_t> &shape);
