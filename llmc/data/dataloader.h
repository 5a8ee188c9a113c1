// Which samples make an optimizer step, and the packed rows that execute it.
//
// A step is defined by its samples. How they are packed into rows only decides how it is executed, so that loss and gradient
// depend neither on row_tokens nor on ranks. All that a checkpoint keeps is the cursor: the samples drawn since the start.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tokens.h"

constexpr size_t row_multiple = 64;  // rows are padded to a multiple of this, which matmul and attention tiles divide

// One packed row: documents laid end to end, then padding up to T as one more document (id 0) without targets.
struct Row {
    size_t T;
    std::vector<int32_t> tokens;      // (T)
    std::vector<int32_t> doc_pos;     // (T) position in the document, for rope
    std::vector<int32_t> doc_begin;   // (T) where in the row the document begins, for attention
    std::vector<size_t> doc_offsets;  // (documents + 1) where in the row each begins, then where the padding does
    std::vector<size_t> documents;    // (documents) their numbers in the file
    std::vector<int32_t> rows;        // (N) predictors, increasing: t where t+1 is a target in the same document
    std::vector<int32_t> targets;     // (N) the token at t+1
    std::vector<int32_t> owners;      // (N) which document of the row each is of
};

Row make_row(const PreparedData &data, std::span<const size_t> samples);

// The row as a reward model reads it: in place of the predictors the last position of each document, which its score is of.
Row at_ends(Row row);

// T, doc_offsets and documents of that row, without its tokens: enough to know what it costs.
Row outline(const PreparedData &data, std::span<const size_t> samples);

// The same from documents in memory, which are then numbers 0, 1, ... Without masks nothing is a target.
Row make_row(const std::vector<std::vector<int32_t>> &documents, const std::vector<std::vector<uint8_t>> &masks = {});

// Best-fit decreasing over the samples given: each list is one row's, for make_row. A packed row has at most row_tokens tokens
// before its padding.
std::vector<std::vector<size_t>> pack_samples(const PreparedData &data, std::span<const size_t> samples, size_t row_tokens);

struct LoaderOptions {
    size_t batch_size = 128;  // samples of a step
    size_t batch_tokens = 0;  // if not 0, instead: samples in order as long as they fit into this many tokens, at least one
    size_t row_tokens = 2048;
    size_t max_samples = 0;    // use only this many, the first of the file; 0 for all
    double eval_fraction = 0;  // share of the samples held out for evaluation, drawn before shuffling
    uint64_t seed = 42;
    bool shuffle = true;
};

struct Step {
    size_t epoch;                           // from 0
    std::vector<size_t> samples;            // in the order of the epoch's permutation
    std::vector<std::vector<size_t>> rows;  // samples of each packed row, for make_row
    size_t tokens;                          // without padding
    size_t target_tokens;                   // the denominator of the step's loss
};

class DataLoader {
  public:
    DataLoader(const PreparedData &data, const LoaderOptions &options);

    // The next step. Epochs follow one another without end; a step never spans two, so an epoch's last may be smaller.
    Step next();
    size_t steps(size_t epochs) const;  // in that many epochs from the start

    size_t used() const { return train_.size() + eval_.size(); }  // samples, the first of the file
    size_t cursor() const { return cursor_; }
    void seek(size_t cursor) { cursor_ = cursor; }

    const std::vector<size_t> &train_samples() const { return train_; }  // in file order
    const std::vector<size_t> &eval_samples() const { return eval_; }    // in file order; empty if eval_fraction is 0

  private:
    std::vector<size_t> order(size_t epoch) const;
    size_t step_end(std::span<const size_t> order, size_t begin) const;

    const PreparedData &data_;
    LoaderOptions options_;
    std::vector<size_t> train_, eval_;
    size_t cursor_ = 0;
    size_t order_epoch_ = 0;  // the epoch that order_ is of
    std::vector<size_t> order_;
};
