// The loader selects the samples of an optimizer step, and packs them into the rows that execute it.
//
// A step is defined by its samples. Packing only affects the execution of the step, so loss and gradient depend neither on row_tokens nor on
// ranks. A checkpoint contains one number of the loader's state, the cursor: the number of samples drawn since the start.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "row.h"
#include "samples.h"

// Packs the given samples by best-fit decreasing. Returns a list of samples for each row, for make_row. A packed row has at most
// row_tokens tokens before its padding. With share_prompts samples with the same prompt stay together as far as a row holds them.
std::vector<std::vector<size_t>> pack_samples(const Samples &data, std::span<const size_t> samples, size_t row_tokens,
                                              bool share_prompts = false);

struct LoaderOptions {
    size_t batch_size = 128;  // samples of a step
    size_t batch_tokens = 0;  // unless 0, replaces batch_size: samples fill this token budget; a batch has at least one sample
    size_t row_tokens = 2048;
    bool share_prompts = false;
    size_t max_samples = 0;    // only the first max_samples samples of the file are used; 0: all
    double eval_fraction = 0;  // share of the samples held out for evaluation, drawn before shuffling
    uint64_t seed = 42;
    bool shuffle = true;
};

struct Step {
    const Samples *data;                    // the data of the samples
    size_t begin;                           // number of samples drawn before this step
    size_t epoch;                           // from 0
    std::vector<size_t> samples;            // in the order of the epoch's permutation
    std::vector<std::vector<size_t>> rows;  // samples of each packed row, for make_row
    size_t tokens;                          // without padding
    size_t target_tokens;                   // the denominator of the step's loss
};

class DataLoader {
  public:
    DataLoader(const Samples &data, const LoaderOptions &options);

    // Returns the next step. Epochs follow one another without end. A step never spans two epochs, so the last step of an epoch may be smaller.
    Step next();
    size_t steps(size_t epochs) const;  // number of steps in the first `epochs` epochs

    const Samples &data() const { return data_; }
    size_t used() const { return train_.size() + eval_.size(); }  // number of samples in use, from the beginning of the file
    size_t cursor() const { return cursor_; }
    void seek(size_t cursor) { cursor_ = cursor; }

    const std::vector<size_t> &train_samples() const { return train_; }  // in file order
    const std::vector<size_t> &eval_samples() const { return eval_; }    // in file order; empty if eval_fraction is 0

  private:
    std::vector<size_t> order(size_t epoch) const;
    size_t step_end(std::span<const size_t> order, size_t begin) const;

    const Samples &data_;
    LoaderOptions options_;
    std::vector<size_t> train_, eval_;
    size_t cursor_ = 0;
    size_t order_epoch_ = 0;  // the epoch whose permutation order_ is
    std::vector<size_t> order_;
};
