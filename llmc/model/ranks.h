// How the ranks of a run share a model's work. Its memory plan, its rows and its messages depend on this.
#pragma once
#include <string>
#include <vector>

#include "../parallel/split.h"
#include "config.h"

// These are numbers alone, so that a plan can be made for ranks that do not run. world = dp * sp, as in mesh.h.
struct Ranks {
    size_t world = 1, rank = 0, sp = 1;
    SpMode sp_mode = SpMode::ring;
    size_t head_stride = 1;  // gather: the number of KV heads at a time
    int zero_stage = 0;
    size_t zero_group = 0;                  // ranks among which ZeRO divides; 0: all
    size_t expert_parallel = 1;             // ranks that divide the experts
    size_t bucket_bytes = size_t(1) << 30;  // at stage 2: the gradients of an embedding or head that are computed at a time
    double flops = 1e14, bandwidth = 5e10;  // for AttentionCost: constants, by which a layout is chosen

    size_t dp() const { return world / sp; }
    size_t group() const { return zero_group ? zero_group : world; }
    size_t sp_rank() const { return rank % sp; }
    size_t communicators() const {
        const size_t of_experts = expert_parallel > 1 ? 1 + (expert_parallel < group()) : 0;
        return world == 1 ? 0 : 1 + (sp > 1) + (group() < world ? 2 : 0) + of_experts;
    }  // of more than one rank: mesh.h
};

// The kinds of layers that a model has: all that see whole documents, and all with its window.
std::vector<LayerKind> layer_kinds(const ModelConfig &config);
size_t kind_of(const ModelConfig &config, size_t layer);  // the index of a layer's kind

// Returns how a ring's ranks share a row, which pad_row() has padded for them. element: bytes of an element of K and V.
SequenceSplit split_row(const ModelConfig &config, const Ranks &ranks, size_t element, const Row &row);

// Returns the samples of the rows that this rank's ring takes, one row in each micro-step. An empty one means that it has none (deal_rows).
std::vector<std::vector<size_t>> own_rows(const ModelConfig &config, const Ranks &ranks, const Samples &data,
                                          const std::vector<std::vector<size_t>> &rows);

// Describe, for people, the mesh in one line, and the part of a row that each rank of a ring gets.
std::string mesh_line(const Ranks &ranks);
std::string pieces_table(const SequenceSplit &split);
