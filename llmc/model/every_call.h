// All calls of a model that a task makes, once each: a rehearsal of them finds when each op runs (decoder_plan.h), and the check of a GPU compares their
// results (../app/gpu_check.h).
#pragma once
#include <map>
#include <string>
#include <vector>

#include "model.h"

// Trains on, evaluates and generates from a row of these documents, as far as limits.mode and limits.cache_pages allow. Every token after the first of a
// document is a target. Generation takes the first tokens of the row as prompts of equal length, at most limits.sequences of them, then one more token of
// each. The cache pages of sequence i begin at page i * limits.sequence_pages. Returns the values that the host gets, by name.
std::map<std::string, std::vector<double>> make_every_call(Model &model, const std::vector<std::vector<int32_t>> &documents,
                                                           const ModelConfig &config, const ModelLimits &limits);

// Trains for two steps of a number of equal rows. The second begins with unfinished transfers of the first.
void make_two_steps(Model &model, const std::vector<std::vector<int32_t>> &documents, const ModelConfig &config,
                    size_t micro_steps);
