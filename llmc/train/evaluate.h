// The values of documents, by a model that is not trained now.
#pragma once
#include <span>
#include <vector>

#include "run.h"

// Evaluates the documents of these samples. Returns [i] = the value of document i (Model::evaluate), the same on all ranks. Adds to take_sums().
std::vector<double> document_values(const Run &run, Model &model, const PreparedData &data, std::span<const size_t> samples);

void share(Comm &comm, std::vector<double> &values);  // replaces each element by its sum over ranks; the vector may be long
