// Makes each call of a model that a task can make, once. A rehearsal of these calls finds the time of each op (decoder.cu), and the GPU check
// compares their results (../app/gpu_check.h).
#pragma once
#include <map>
#include <string>
#include <vector>

#include "model.h"

// Trains, evaluates and generates with a row of these documents, as far as limits.mode and limits.cache_pages allow. Every token after the first of a
// document is a target. Generation takes the first tokens of the row as at most limits.sequences prompts of equal length, and adds one token to each.
// The cache pages of sequence i begin at page i * limits.sequence_pages. Returns the values that the host receives, by name.
std::map<std::string, std::vector<double>> make_every_call(Model &model, const std::vector<std::vector<int32_t>> &documents,
                                                           const ModelConfig &config, const ModelLimits &limits);

// The generation among these calls: the logits of one more token after the first tokens of `text`, which has limits.row_tokens.
std::vector<double> generate_once(Model &model, const std::vector<int32_t> &text, const ModelLimits &limits);

// Trains for two steps with a number of equal rows each. The second step begins with unfinished transfers of the first.
void make_two_steps(Model &model, const std::vector<std::vector<int32_t>> &documents, const ModelConfig &config,
                    size_t micro_steps);
