// Values of documents by a model, outside of training steps.
#pragma once
#include <span>
#include <vector>

#include "../core/signals.h"
#include "run.h"

// Returns the sum of each document's values, given one per predictor of the row.
std::vector<double> document_sums(const Row &row, std::span<const double> values);

// Evaluates a row. Returns a value for each of its documents: the sum of its targets' nll, or its score in a reward model.
std::vector<double> evaluate_documents(const ModelConfig &config, Model &model, const Row &row);

// Runs the backward pass from the derivatives of the loss with respect to the values of the row's documents, which were evaluated last.
void backward_documents(const ModelConfig &config, Model &model, const Row &row, const std::vector<float> &d_values, bool last);

// Evaluates the documents of these samples. Returns [i] = the value of document i, the same on all ranks. Adds to take_sums().
std::vector<double> document_values(const Run &run, const ModelSpec &spec, Model &model, const Samples &data,
                                    std::span<const size_t> samples);

// Returns [i] = the nll of each target of document i, by a language model or the base of its adapters, or each target's value by a critic; the same
// on all ranks.
std::vector<std::vector<double>> target_values(const Run &run, const ModelSpec &spec, Model &model, const Samples &data,
                                               std::span<const size_t> samples, bool base = false);

// Calls f(row, i, count) for each of this ring's `count` rows of a step. All rings have the same number of rows, some of them empty, because at stage
// 3 of ZeRO a pass of the model needs all ranks. After a signal the remaining rows are empty; all ranks then throw Stopped (../core/signals.h).
template <class F>
void for_own_rows(const Run &run, const ModelSpec &spec, const Samples &data, const std::vector<std::vector<size_t>> &rows, F f) {
    const Activity activity("after this row of samples");
    auto own = own_rows(spec.config, spec.ranks, data, rows, run.share_prompts);
    for (size_t i = 0; i < own.size(); i++) {
        const bool stops = run.mesh->max_of_row(asked_to_stop()) > 0;
        if (stops) own[i].clear();
        f(make_row(data, own[i], run.share_prompts), i, own.size());
    }
    agree(run.comm, stop_if_asked);
}

void share(Comm &comm, std::vector<double> &values);  // replaces each element by its sum over ranks; the vector may be long
