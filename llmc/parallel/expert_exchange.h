// Expert parallelism: ranks divide the experts of a layer. Each token's rows travel to the ranks that hold its experts, and the outputs travel back
// (Lepikhin et al., "GShard", 2020, arXiv:2006.16668). Every rank first tells all others how many of its rows go to each expert, so messages can have
// any length and no row is dropped.
//
// A rank's own rows are sorted by expert (../ops/expert_rows.h). The rows that it receives are sorted by expert, then by source rank, then by token.
// So the order of an expert's sums is fixed, and each message is contiguous at both ends.
//
// Bytes that all W ranks together send for a layer, by formula. Each rank has T tokens with K rows each; (N - 1)/N of the rows go to other ranks; an
// element of X has b bytes:
//
//     forward    tokens; outputs back                               W T K (N-1)/N * 2 C b
//     backward   gradients of outputs; weights; tokens; gradients   W T K (N-1)/N * (3 C b + 8), or (2 C b + 8) without tokens, if gate and up
//                of tokens and of weights back                      are frozen and have no adapters
//     tokens, if the backward pass recomputes the layer             W T K (N-1)/N * C b
//     row counts, whenever tokens are sent forward                  W (N-1) E * 4 for each run of tokens
#pragma once
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "../core/memory.h"
#include "../ops/matmul.h"
#include "mesh.h"

// Tokens that each rank exchanges at a time. Even if one rank receives all their rows, it has no more rows than a run without expert parallelism.
template <class Dev> constexpr size_t expert_run(Dev dev, size_t ranks) { return std::max<size_t>(1, matmul_run(dev) / ranks); }

// The number of rows that each rank has for each expert, in a run of tokens.
class ExpertTraffic {
  public:
    ExpertTraffic() = default;
    // counts (ranks, E). This rank is number `own` among the ranks that divide the experts.
    ExpertTraffic(std::vector<int32_t> counts, size_t ranks, size_t own)
        : counts_(std::move(counts)), ranks_(ranks), own_(own), held_(counts_.size() / ranks / ranks) {}

    // The first row of each of this rank's experts, then the end of the last.
    std::vector<int32_t> starts() const {
        std::vector<int32_t> starts = {0};
        for (size_t i = 0; i < held_; i++) {
            starts.push_back(starts.back());
            for (size_t r = 0; r < ranks_; r++) starts.back() += int32_t(count(r, own_, i));
        }
        return starts;
    }
    size_t rows() const { return size_t(starts().back()); }

    // to_experts sends the rows of this rank's tokens to their experts and receives the rows of this rank's experts; to_tokens is the inverse. A row
    // has `width` elements.
    template <class T> void to_experts(Comm &comm, Payload &sent, T *to, const T *from, size_t width) const {
        send(comm, sent, of_tokens(from, width), of_experts(to, width));
    }
    template <class T> void to_tokens(Comm &comm, Payload &sent, T *to, const T *from, size_t width) const {
        send(comm, sent, of_experts(from, width), of_tokens(to, width));
    }

  private:
    size_t count(size_t from, size_t to, size_t i) const {  // rows of rank `from` for expert i of rank `to`
        return size_t(counts_[(from * ranks_ + to) * held_ + i]);
    }
    // One slice for each rank and each expert that it holds; of_experts: one for each source rank and each expert of this rank.
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
    size_t ranks_ = 1, own_ = 0, held_ = 0;  // held: number of experts per rank
};

// The tokens of a call of a layer with experts. The members from `comm` on are only used under expert parallelism.
struct ExpertTokens {
    size_t layer, first;  // first: position of the first token in this rank's part of the packed row
    size_t own;           // this rank's tokens
    size_t most;          // tokens of the rank that has most of them
    Comm *comm;           // the ranks that divide the experts, or null
    Memory *memory;
    Payload *sent;
    std::vector<ExpertTraffic> *traffic;  // for each run of the layer; the forward pass writes it, the backward pass reads it
};
