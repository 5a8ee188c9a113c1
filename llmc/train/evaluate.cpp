#include "evaluate.h"

#include <chrono>

void share(Comm &comm, std::vector<double> &values) {
    constexpr size_t part = 4096;  // number of values that every rank gathers from every other at a time
    for (size_t first = 0; first < values.size(); first += part) {
        const auto begin = values.begin() + ptrdiff_t(first),
                   end = values.begin() + ptrdiff_t(std::min(values.size(), first + part));
        const auto sums = comm.sum(std::vector<double>(begin, end));
        std::copy(sums.begin(), sums.end(), begin);
    }
}

std::vector<double> document_sums(const Row &row, std::span<const double> values) {
    std::vector<double> sums(row.documents.size());
    for (size_t n = 0; n < values.size(); n++) sums[size_t(row.target_documents[n])] += values[n];
    return sums;
}

std::vector<double> evaluate_documents(const ModelConfig &config, Model &model, const Row &row) {
    return config.reward ? model.evaluate(at_ends(row)) : document_sums(row, model.evaluate(row));
}

void backward_documents(const ModelConfig &config, Model &model, const Row &row, const std::vector<float> &d_values, bool last) {
    if (config.reward) return model.backward(d_values, 0, last);
    std::vector<float> weights;  // of the row's targets
    for (int32_t document : row.target_documents) weights.push_back(d_values[size_t(document)]);
    model.backward(weights, 0, last);
}

// Calls f with each of this ring's rows of these samples, and reports progress.
template <class F>
static void for_rows_of(const Run &run, const ModelSpec &spec, const Samples &data, std::span<const size_t> samples, F f) {
    auto told = std::chrono::steady_clock::now();
    for_own_rows(run, spec, data, pack_samples(data, samples, run.options.row_tokens, run.share_prompts),
                 [&](const Row &row, size_t i, size_t count) {
                     if (const auto now = std::chrono::steady_clock::now(); now - told > std::chrono::seconds(10)) {
                         run.say("  %zu of %zu rows", i, count);
                         told = now;
                     }
                     f(row);
                 });
}

std::vector<double> document_values(const Run &run, const ModelSpec &spec, Model &model, const Samples &data,
                                    std::span<const size_t> samples) {
    std::vector<double> all(data.documents());
    for_rows_of(run, spec, data, samples, [&](const Row &row) {
        const auto values = evaluate_documents(spec.config, model, row);
        for (size_t i = 0; run.mesh->is_first_of_row() && i < values.size(); i++) all[row.documents[i]] = values[i];
    });
    share(run.comm, all);
    return all;
}

std::vector<std::vector<double>> target_values(const Run &run, const ModelSpec &spec, Model &model, const Samples &data,
                                               std::span<const size_t> samples, bool base) {
    std::vector<size_t> next(data.documents());  // in `all`: the first target of each document
    for (size_t i = 1; i < next.size(); i++) next[i] = next[i - 1] + data.targets(i - 1);
    std::vector<double> all(data.total_targets());
    const std::vector<size_t> first = next;
    for_rows_of(run, spec, data, samples, [&](const Row &row) {
        const auto values = base ? model.evaluate_base(row) : model.evaluate(row);
        for (size_t n = 0; run.mesh->is_first_of_row() && n < values.size(); n++)
            all[next[row.documents[size_t(row.target_documents[n])]]++] = values[n];
    });
    share(run.comm, all);
    std::vector<std::vector<double>> out;
    for (size_t i = 0; i < first.size(); i++)
        out.emplace_back(all.begin() + ptrdiff_t(first[i]), all.begin() + ptrdiff_t(first[i] + data.targets(i)));
    return out;
}
