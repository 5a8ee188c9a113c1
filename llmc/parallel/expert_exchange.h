// Expert parallelism: ranks divide the experts of a layer, and each token's rows go to the ranks that have its experts, and back (Lepikhin et al., "GShard",
// 2020, arXiv:2006.16668). Every rank first tells all how many of its rows go to each expert; so messages have any lengths, and no row is dropped.
//
// A rank's own rows are sorted by expert (../ops/expert_rows.h). The rows that it gets are sorted by its experts, those of an expert by the ranks that they
// come from, and those of a rank by their tokens. So an expert's sums have a fixed order, and each message comes from one place and goes to one.
//
// Bytes that all W ranks together send for a layer, if each has T tokens with K rows, of which (N - 1)/N go to other ranks, and b bytes an element of X:
//
//     forward    tokens, and outputs back                              W T K (N-1)/N * 2 C b
//     backward   gradients of outputs, tokens if gate and up are trained, or their adapters,  W T K (N-1)/N * (3 C b + 8), frozen (2 C b + 8)
//                gradients of tokens back; weights, and gradients back
//     tokens once more                                                 W T K (N-1)/N * C b, if the backward pass recomputes the layer
//     numbers of rows, whenever tokens are sent forward                W (N-1) E * 4 for each run of tokens
#pragma once
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "../core/memory.h"
#include "../ops/matmul.h"
#include "mesh.h"

// The tokens that ranks exchange at a time: so few that all rows that one rank may get of them are no more than those of a run on one rank.
template <class Dev> constexpr size_t expert_run(Dev dev, size_t ranks) { return std::max<size_t>(1, matmul_run(dev) / ranks); }

// How many rows the ranks have for each expert, in a run of tokens.
class ExpertTraffic {
  public:
    ExpertTraffic() = default;
    // counts (ranks, E), of rank `own` among those that divide the experts
    ExpertTraffic(std::vector<int32_t> counts, size_t ranks, size_t own)
        : counts_(std::move(counts)), ranks_(ranks), own_(own), held_(counts_.size() / ranks / ranks) {}

    // Where the rows of this rank's experts begin, and where they end.
    std::vector<int32_t> starts() const {
        std::vector<int32_t> starts = {0};
        for (size_t i = 0; i < held_; i++) {
            starts.push_back(starts.back());
            for (size_t r = 0; r < ranks_; r++) starts.back() += int32_t(count(r, own_, i));
        }
        return starts;
    }
    size_t rows() const { return size_t(starts().back()); }

    // From rows of this rank's tokens to those of its experts, and from there back. A row has `width` elements.
    template <class T> void to_experts(Comm &comm, Payload &sent, T *to, const T *from, size_t width) const {
        send(comm, sent, of_tokens(from, width), of_experts(to, width));
    }
    template <class T> void to_tokens(Comm &comm, Payload &sent, T *to, const T *from, size_t width) const {
        send(comm, sent, of_experts(from, width), of_tokens(to, width));
    }

  private:
    size_t count(size_t from, size_t to, size_t i) const {  // of rank `from`, for expert i of rank `to`
        return size_t(counts_[(from * ranks_ + to) * held_ + i]);
    }
    // One slice for each rank and expert of the rank that computes.
    template <class T> std::vector<Slice> of_tokens(T *rows, size_t width) const {
        std::vector<Slice> slices;
        for (size_t r = 0; r < ranks_; r++)
            for (size_t i = 0; i < held_; rows += count(own_, r, i++) * width)
                slices.push_back({rows, count(own_, r, i) * width});
        return slices;
    }
    template <class T> std::vector<Slice> of_experts(T *rows, size_t width) const {
        std::vector<Slice> slices(ranks_ * held_);
        for (size_t i = 0; i < held_; i++)
            for (size_t r = 0; r < ranks_; rows += count(r++, own_, i) * width)
                slices[r * held_ + i] = {rows, count(r, own_, i) * width};
        return slices;
    }
    void send(Comm &comm, Payload &sent, const std::vector<Slice> &from, const std::vector<Slice> &to) const {
        for (size_t i = 0; i < from.size(); i++) sent.experts += i / held_ == own_ ? 0 : from[i].bytes();
        comm.exchange_all(from, to);
    }

    std::vector<int32_t> counts_;
    size_t ranks_ = 1, own_ = 0, held_ = 0;  // held: experts of a rank
};

// The tokens of a call of a layer with experts: the rank's own, and those of the rank that has most of them. Only where ranks divide experts is the rest used.
struct ExpertTokens {
    size_t layer, first;  // of the row's tokens
    size_t own, most;
    Comm *comm;  // those ranks; null: there are none
    Memory *memory;
    Payload *sent;
    std::vector<ExpertTraffic> *traffic;  // of the layer's runs: forward passes write it, and backward passes read it
};
