// A packed row, and all functions that shape one: documents are concatenated, padded for the ranks of a ring, and cut into the ranks' parts. The
// loader selects the samples of a row (dataloader.h), and the split selects the positions of a rank (../parallel/split.h).
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "samples.h"

constexpr size_t row_multiple = 64;  // rows are padded to a multiple of this, so tiles of matmul and attention divide them

// Documents with the same prompt whose row has it once. The first one is complete, and the others follow it up to `end`. They lack their first `length`
// tokens, which are the first one's tokens [begin, begin + length). That is the prompt without its last token: each document has its own, which
// predicts the document's first target.
struct SharedPrompt {
    size_t begin, length, end;
};

// A packed row (packed sequence): documents laid end to end, then padding up to T, which is one more document of tokens 0 without targets.
struct Row {
    size_t T;
    std::vector<int32_t> tokens;      // (T)
    std::vector<int32_t> doc_pos;     // (T) position of the token in its document, for rope
    std::vector<int32_t> doc_begin;   // (T) position in the row of the beginning of the token's document, for attention
    std::vector<size_t> doc_offsets;  // (documents + 1) position in the row of each document's beginning, then of the padding's
    std::vector<SharedPrompt> shared = {};  // in the order of the row
    std::vector<size_t> documents;          // (documents) the number of each in the file
    std::vector<int32_t> predictors;        // (N) the predictors, increasing: t where t+1 is a target in the same document
    std::vector<int32_t> targets;           // (N) the token at t+1
    std::vector<int32_t> target_documents;  // (N) the document of the row that the predictor belongs to (its segment id)
};

// The places in the row where the documents begin that share a prompt.
inline std::span<const size_t> sharers(const Row &row, const SharedPrompt &p) {
    return {std::ranges::lower_bound(row.doc_offsets, p.begin), std::ranges::lower_bound(row.doc_offsets, p.end)};
}

// With share_prompts successive documents with the same prompt share it.
Row make_row(const Samples &data, std::span<const size_t> samples, bool share_prompts = false);

// Returns the row for a reward model: the predictors are replaced by the last position of each document, where its score is computed.
Row at_ends(Row row);

// Returns T, doc_offsets, shared and documents of the row that make_row would return, without tokens; enough to compute its cost.
Row outline(const Samples &data, std::span<const size_t> samples, bool share_prompts = false);

// Makes a row from documents in memory, with numbers 0, 1, ... Without masks no token is a target.
Row make_row(const std::vector<std::vector<int32_t>> &documents, const std::vector<std::vector<uint8_t>> &masks = {});

// Returns the row with its padding extended, so each of `ranks` ranks gets a multiple of row_multiple tokens. For one rank it is unchanged.
Row pad_row(Row row, size_t ranks);

// Returns one rank's part of a padded row, the tokens at `positions`: the tokens, their positions in documents, its predictors and their targets. The
// target of a token may belong to another rank. T, `predictors` and the order of tokens are local; doc_begin, doc_offsets and documents describe the
// whole row, for attention.
Row local_row(const Row &row, std::span<const size_t> positions);

// Returns for each predictor of local_row() its index among the predictors of the whole row.
std::vector<size_t> local_predictors(const Row &row, std::span<const size_t> positions);
