// What fits into memory: plans of a run's model for other levels of recomputation, lengths of rows and sizes of rings.
#pragma once
#include <memory>
#include <string>
#include <utility>

#include "run.h"

inline constexpr std::pair<const char *, Recompute> recompute_levels[] = {
    {"none", Recompute::none}, {"cheap", Recompute::cheap}, {"layer", Recompute::layer}};

// Returns the bytes available to the plans of this machine's ranks: free memory minus the reserve.
size_t usable_memory(const Run &run, const Memory &memory);

// Returns the limits of a model beside one with these limits, without room for the cache of generation. One that generates has no ranks.
ModelLimits co_resident_limits(ModelLimits limits, Mode mode = Mode::train);

// Returns a co-resident model with a placed plan.
std::unique_ptr<Model> co_resident_model(const Run &run, const CoResidentModel &other, const ModelLimits &limits);

// Return the bytes that a rank with this model needs, in memory and in stores: its plan and the plans of run.co_residents.
size_t rank_bytes(const Run &run, Model &model, const ModelLimits &limits);
size_t rank_store_bytes(const Run &run, Model &model, const ModelLimits &limits);

// Returns a model whose plan is placed. --recompute auto takes the first level whose plan fits into `memory` bytes, or else the last.
std::unique_ptr<Model> plan_model(const Run &run, const std::string &recompute, ModelLimits &limits, size_t memory);

size_t documents_of_sample(const Run &run);  // 2 of a pair

// Returns the most tokens up to `limit`, in one row and in one sample, whose plan fits into `memory` bytes of a rank, or 0 if not even the
// shortest row fits. The ranks of a ring share the row.
size_t most_tokens(const Run &run, const std::string &recompute, ModelLimits limits, size_t memory, size_t limit);

// Returns the same as a value of --max_len, where a row has room for one sample.
size_t longest_sample(const Run &run, const std::string &recompute, const ModelLimits &limits, size_t memory, size_t limit);

// Returns whether the plan fits into the memory that a rank may take. All ranks call it.
bool fits(const Run &run, ModelLimits limits);

// Returns the smallest ring, of more ranks than now, with which the plan fits, or 0 if there is none.
size_t larger_ring(const Run &run, ModelLimits limits, size_t memory);
