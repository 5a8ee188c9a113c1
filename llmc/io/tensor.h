// An entry of a model's parameter table.
#pragma once
#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

// A rank's part of a tensor under tensor parallelism: rows (dim 0) or columns (dim 1) [first, first + n) of `whole`, where n is the part's own size.
//
// Some files store several matrices in one tensor, for example queries, keys and values. Its rows then have sections, and the part has rows of each of
// them, in proportion to their sizes.
struct Cut {
    int dim = -1;  // -1: the rank has the whole tensor
    size_t first = 0, whole = 0;
    std::vector<size_t> sections = {};  // of the whole; empty: one

    // Calls f(begin, at, rows) for the parts of n rows, [first, first + n), in the sections: `rows` rows of the whole from `begin` on, the first of which
    // is row `at` of the part.
    template <class F> void for_sections(size_t n, F f) const {
        if (sections.empty()) return f(first, size_t(0), n);
        size_t begin = 0, at = 0;
        for (size_t size : sections) {
            const size_t rows = n * size / whole;
            f(begin + first * size / whole, at, rows);
            begin += size, at += rows;
        }
    }
};

// One tensor of the Hugging Face files, and its position in the flat arrays of parameters, gradients and moments. Of a cut tensor, shape and count are
// those of the rank's part.
struct Tensor {
    // residual: GPT-2's projections into the residual stream; score: the head of a reward model, whose shape is (1, C); lora_a, lora_b: both
    // matrices of an adapter; router: it chooses experts, and is neither quantised nor updated by Muon; rate: logarithms of the delta rule's rates of decay
    enum Init { normal, residual, router, ones, zeros, rate, score, lora_a, lora_b };
    std::string name;
    std::vector<size_t> shape;
    Init init;
    bool decay;  // weight decay applies: true for matrices, false for norms and biases
    size_t offset, count;
    bool transposed = false;  // weight files store it as (shape[1], shape[0]), as GPT-2's Conv1D does; checkpoints do not
    bool product = false;     // its gradient is one matrix product, which can overwrite the array; other ops only add to it
    // True for a matrix of a layer or of a layer's adapter, except routers: Muon updates these, and --load_in quantises them.
    bool of_layer = false;
    Cut cut = {};
    size_t number = 0;  // of its first element among those of the whole model, where the parts of a tensor follow one another

    std::vector<size_t> whole_shape() const {
        std::vector<size_t> whole = shape;
        if (cut.dim >= 0) whole[size_t(cut.dim)] = cut.whole;
        return whole;
    }
    size_t whole_count() const { return cut.dim < 0 ? count : count / shape[size_t(cut.dim)] * cut.whole; }
    // Calls f(begin, at, run) for the runs of which elements [first, first + n) consist in the whole tensor: `run` elements from `begin` on, the first
    // of which is element first + at here.
    template <class F> void for_runs(size_t first, size_t n, F f) const {
        if (cut.dim < 0) return f(first, size_t(0), n);
        const size_t row = shape.size() < 2 ? 1 : count / shape[0];
        if (cut.dim == 0)
            return cut.for_sections(shape[0], [&](size_t begin, size_t at, size_t rows) {
                const size_t from = std::max(first, at * row), to = std::min(first + n, (at + rows) * row);
                if (from < to) f(begin * row + from - at * row, from - first, to - from);
            });
        for (size_t at = 0; at < n;) {
            const size_t r = (first + at) / row, column = (first + at) % row, run = std::min(row - column, n - at);
            f(r * cut.whole + cut.first + column, at, run);
            at += run;
        }
    }
};
