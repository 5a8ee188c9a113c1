// The values of documents, by a model that is not trained now.
#pragma once
#include <span>
#include <vector>

#include "run.h"

// Returns the sum of each document's values, which are those of the row's predictors.
std::vector<double> document_sums(const Row &row, std::span<const double> values);

// Evaluates a row. Returns a value for each of its documents: the sum of its targets' nll, or its score by a reward model.
std::vector<double> evaluate_documents(const ModelConfig &config, Model &model, const Row &row);

// Evaluates the documents of these samples. Returns [i] = the value of document i, the same on all ranks. Adds to take_sums().
std::vector<double> document_values(const Run &run, Model &model, const Samples &data, std::span<const size_t> samples);

// Returns [i] = the nll of each target of document i, by a language model or by the base of its adapters, the same on all ranks.
std::vector<std::vector<double>> target_values(const Run &run, Model &model, const Samples &data, std::span<const size_t> samples,
                                               bool base = false);

void share(Comm &comm, std::vector<double> &values);  // replaces each element by its sum over ranks; the vector may be long
