// How the ranks of a run share a model's work. Its memory plan, its rows and its messages depend on this.
#pragma once
#include <string>
#include <vector>

#include "../parallel/split.h"
#include "config.h"

// Only numbers, so a plan can be made for ranks that do not run. world = dp * sp * tp, as in mesh.h.
struct Ranks {
    size_t world = 1, rank = 0, sp = 1, tp = 1;
    SpMode sp_mode = SpMode::ring;
    size_t head_stride = 1;  // gather: the number of KV heads at a time
    int zero_stage = 0;
    size_t zero_group = 0;                  // number of ranks that ZeRO divides among; 0: all
    size_t expert_parallel = 1;             // ranks that divide the experts
    size_t bucket_bytes = size_t(1) << 30;  // at stage 2: gradients of an embedding or head that are computed at a time
    double flops = 1e14, bandwidth = 5e10;  // constants for AttentionCost, which the choice of a layout uses

    size_t dp() const { return world / (sp * tp); }
    size_t group() const { return zero_group ? zero_group : world; }
    // Of a model that only generates: rows and weights are divided by tensor parallelism alone.
    Ranks of_generation() const { return {.world = tp, .rank = tp_rank(), .tp = tp}; }
    size_t sp_rank() const { return rank / tp % sp; }
    size_t tp_rank() const { return rank % tp; }
    size_t communicators() const {
        const size_t of_experts = expert_parallel > 1 ? 1 + (expert_parallel < group()) : 0;
        return world == 1 ? 0 : 1 + (sp > 1) + (group() < world ? 2 : 0) + of_experts + (tp > 1 ? 1 + (tp < group()) : 0);
    }  // true if communicators of mesh.h have more than one rank
};

// The kinds of layers of a model: layers that see whole documents, and layers with its window. Layers with linear attention count as none, because their
// work is proportional to the tokens.
std::vector<LayerKind> layer_kinds(const ModelConfig &config);
size_t kind_of(const ModelConfig &config, size_t layer);  // the index of a layer's kind

// The most pieces of a row that a rank has. Linear attention passes states from piece to piece, so its models have few.
inline size_t most_pieces(const ModelConfig &deciding) { return deciding.delta.Hk ? 2 : pieces_per_rank; }

// Returns the division of a row among a ring's ranks; pad_row() has padded the row. element: bytes of an element of K and V. A teacher has the layout
// that `as`, its student's configuration, leads to; null: its own.
SequenceSplit split_row(const ModelConfig &config, const Ranks &ranks, size_t element, const Row &row,
                        const ModelConfig *as = nullptr);

// Returns the samples of the rows of this rank's ring, one row per micro-step. An empty row means that the ring has none in this micro-step
// (deal_rows).
std::vector<std::vector<size_t>> own_rows(const ModelConfig &config, const Ranks &ranks, const Samples &data,
                                          const std::vector<std::vector<size_t>> &rows, bool share_prompts = false);

// Return readable descriptions of the mesh, in one line, and of the part of a row on each rank of a ring.
std::string mesh_line(const Ranks &ranks);
std::string pieces_table(const SequenceSplit &split);
