#include "row.h"

#include <algorithm>

#include "../core/common.h"

static Row empty_row(size_t tokens, size_t documents) {  // with room for as many
    Row row{};
    for (auto *v : {&row.tokens, &row.doc_pos, &row.doc_begin}) v->reserve(round_up(tokens, row_multiple));
    row.doc_offsets.reserve(documents + 1);
    row.documents.reserve(documents);
    row.doc_offsets.push_back(0);
    return row;
}

static void append_token(Row &row, int32_t id, size_t pos) {
    row.doc_pos.push_back(int32_t(pos));
    row.doc_begin.push_back(int32_t(row.doc_offsets.back()));
    row.tokens.push_back(id);
}

// Appends a document without its first `shared` tokens. An empty mask means that no token is a target. The first token of a
// document is never a target, because no token precedes it.
static void append_document(Row &row, size_t number, std::span<const int32_t> tokens, std::span<const uint8_t> mask,
                            size_t shared = 0) {
    for (size_t t = shared; t < tokens.size(); t++) {
        if (t > shared && !mask.empty() && mask[t]) {
            row.predictors.push_back(int32_t(row.tokens.size() - 1));
            row.targets.push_back(tokens[t]);
            row.target_documents.push_back(int32_t(row.documents.size()));
        }
        append_token(row, tokens[t], t);
    }
    row.documents.push_back(number);
    row.doc_offsets.push_back(row.tokens.size());
}

static void append_padding(Row &row, size_t multiple) {
    row.T = round_up(row.tokens.size(), multiple);
    while (row.tokens.size() < row.T)
        append_token(row, 0, (row.tokens.size() - row.doc_offsets.back()) % row_multiple);  // any position in the rope table
}

// Calls f(number, document, shared) for each document of these samples. shared: the tokens that it shares with the last document that shares none.
template <class F> static void for_each_document(const Samples &data, std::span<const size_t> samples, bool share_prompts, F f) {
    std::vector<int32_t> prompt;  // of that document
    for (size_t s : samples)
        for (size_t i = data.first(s); i < data.first(s + 1); i++) {
            const Document document = data.document(i);
            const size_t n = share_prompts ? prompt_length(document) : 0;
            const bool same =
                n > 1 && n < document.tokens.size() && std::ranges::equal(std::span(document.tokens).first(n), prompt);
            f(i, document, same ? n - 1 : 0);
            if (!same) prompt.assign(document.tokens.begin(), document.tokens.begin() + ptrdiff_t(n));
        }
}

// Notes that the next document of the row, of `tokens` tokens, lacks its first `shared` ones.
static void share_prompt(Row &row, size_t shared, size_t tokens) {
    const size_t begin = row.doc_offsets.back(), documents = row.documents.size();
    if (shared == 0) return;
    if (row.shared.empty() || row.shared.back().end != begin)
        row.shared.push_back({row.doc_offsets[documents - 1], shared, begin});
    row.shared.back().end = begin + tokens - shared;
}

Row make_row(const Samples &data, std::span<const size_t> samples, bool share_prompts) {
    size_t tokens = 0;
    for (size_t s : samples) tokens += data.sample_length(s);
    Row row = empty_row(tokens, 2 * samples.size());
    for_each_document(data, samples, share_prompts, [&](size_t i, const Document &document, size_t shared) {
        share_prompt(row, shared, document.tokens.size());
        append_document(row, i, document.tokens, document.mask, shared);
    });
    append_padding(row, row_multiple);
    return row;
}

Row at_ends(Row row) {
    const size_t documents = row.documents.size();
    row.predictors.resize(documents), row.targets.assign(documents, 0), row.target_documents.resize(documents);
    for (size_t i = 0; i < documents; i++)
        row.predictors[i] = int32_t(row.doc_offsets[i + 1] - 1), row.target_documents[i] = int32_t(i);
    return row;
}

Row make_row(const std::vector<std::vector<int32_t>> &documents, const std::vector<std::vector<uint8_t>> &masks) {
    size_t tokens = 0;
    for (const auto &document : documents) tokens += document.size();
    Row row = empty_row(tokens, documents.size());
    for (size_t i = 0; i < documents.size(); i++)
        append_document(row, i, documents[i], masks.empty() ? std::span<const uint8_t>() : masks[i]);
    append_padding(row, row_multiple);
    return row;
}

Row outline(const Samples &data, std::span<const size_t> samples, bool share_prompts) {
    Row row{};
    row.doc_offsets.push_back(0);
    const auto append = [&](size_t i, size_t tokens, size_t shared) {
        share_prompt(row, shared, tokens);
        row.doc_offsets.push_back(row.doc_offsets.back() + tokens - shared);
        row.documents.push_back(i);
    };
    if (share_prompts)
        for_each_document(data, samples, true,
                          [&](size_t i, const Document &document, size_t shared) { append(i, document.tokens.size(), shared); });
    else
        for (size_t s : samples)
            for (size_t i = data.first(s); i < data.first(s + 1); i++) append(i, data.length(i), 0);
    row.T = round_up(row.doc_offsets.back(), row_multiple);
    return row;
}

Row pad_row(Row row, size_t ranks) {
    append_padding(row, row_multiple * ranks);
    return row;
}

// Calls f(j, t) for each predictor of a rank: its index in the row, and its position in the rank's part.
template <class F> static void for_each_predictor(const Row &row, std::span<const size_t> positions, F f) {
    for (size_t t = 0; t < positions.size(); t++) {
        const auto found = std::lower_bound(row.predictors.begin(), row.predictors.end(), int32_t(positions[t]));
        if (found != row.predictors.end() && size_t(*found) == positions[t]) f(size_t(found - row.predictors.begin()), t);
    }
}

Row local_row(const Row &row, std::span<const size_t> positions) {
    Row local{positions.size(), {}, {}, row.doc_begin, row.doc_offsets, row.shared, row.documents, {}, {}, {}};
    for (size_t p : positions) {
        local.tokens.push_back(row.tokens[p]);
        local.doc_pos.push_back(row.doc_pos[p]);
    }
    for_each_predictor(row, positions, [&](size_t j, size_t t) {
        local.predictors.push_back(int32_t(t));
        local.targets.push_back(row.targets[j]);
    });
    return local;
}

std::vector<size_t> local_predictors(const Row &row, std::span<const size_t> positions) {
    std::vector<size_t> numbers;
    for_each_predictor(row, positions, [&](size_t j, size_t) { numbers.push_back(j); });
    return numbers;
}
