// How the ranks of a run share a model's work: what its plan, its rows and its messages depend on.
#pragma once
#include <string>
#include <vector>

#include "../io/hf.h"
#include "../parallel/split.h"

// Numbers alone, so that a plan can be made for ranks that are not there. world = dp * sp, as in mesh.h.
struct Ranks {
    size_t world = 1, rank = 0, sp = 1;
    SpMode sp_mode = SpMode::ring;
    size_t head_stride = 1;  // gather: KV heads at a time
    int zero_stage = 0;
    size_t bucket_bytes = size_t(1) << 30;  // of gradients of an embedding or head that are made at a time, at stage 2
    double flops = 1e14, bandwidth = 5e10;  // of AttentionCost: constants that decide between layouts, never measured

    size_t dp() const { return world / sp; }
    size_t sp_rank() const { return rank % sp; }
};

// The kinds of layers that a model has: all that see whole documents, and all with its window.
std::vector<LayerKind> layer_kinds(const ModelConfig &config);
size_t kind_of(const ModelConfig &config, size_t layer);  // its index

// How a ring's ranks share a row that pad_row() has padded for them. element: bytes of a key's.
SequenceSplit split_row(const ModelConfig &config, const Ranks &ranks, size_t element, const Row &row);

// The rows, by samples, that this rank's ring takes, one in each micro-step; empty in one where it has none (deal_rows).
std::vector<std::vector<size_t>> own_rows(const ModelConfig &config, const Ranks &ranks, const PreparedData &data,
                                          const std::vector<std::vector<size_t>> &rows);

// For people: the mesh in one line, and what each rank of a ring gets of a row.
std::string mesh_line(const Ranks &ranks);
std::string pieces_table(const SequenceSplit &split);
