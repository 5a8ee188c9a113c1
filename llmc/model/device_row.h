// This rank's part of a packed row, on the device.
#pragma once
#include <array>
#include <optional>
#include <span>
#include <vector>

#include "../core/arena.h"
#include "../core/memory.h"
#include "../data/dataloader.h"
#include "../ops/attention_types.h"
#include "../parallel/split.h"
#include "config.h"
#include "model.h"

struct DeviceRow {
    DeviceRow(const ModelConfig &config, const ModelLimits &limits) : config_(config), limits_(limits) {}

    size_t T = 0, N = 0;
    size_t shard = 0, own_begin = 0,
           own = 0;                  // under tensor parallelism a rank norms `own` of the tokens, at most `shard` of them
    std::vector<size_t> numbers;     // (N) index of each predictor among the whole row's predictors, on the host
    size_t predictors_of_whole = 0;  // number of predictors of the whole row
    std::optional<SequenceSplit> split;
    int32_t *tokens;   // (T) numbers among the rank's tokens of the vocabulary; outside of [0, V): another rank's
    int32_t *doc_pos;  // (T) position in the document
    // With linear attention (../parallel/delta_ring.h); the last three in a ring only.
    int32_t *piece_pos = nullptr;                                 // (T)
    int32_t *starts = nullptr, *ends = nullptr, *seen = nullptr;  // (T), (T), (pieces, 6)
    std::vector<PieceBorder> borders;
    int32_t *documents;         // (T) number of the document in its file, with dropout or noise; below 0: padding
    int32_t *copies;            // (T) with experts: the documents that a token stands for; 0: padding
    float *magnitudes;          // (T) magnitude of each token's noise
    int32_t *first_key;         // (sp*T) the first key that each position of the whole row sees; (sequences) for generated tokens
    int32_t *first_key_window;  // (sp*T) the same for layers with a sliding window
    TileCuts cuts = {};         // cuts of the whole row
    std::array<PromptParts, 2> prompts;  // that documents of the whole row share; the second for layers with a sliding window
    int32_t *predictors;                 // (N) the positions whose logits predict the targets
    int32_t *targets;                    // (N) numbered as tokens are
    float *weights;                      // (N) dL/dnll; for a reward model dL/dscore
    float entropy_weight;                // dL/dentropy of each predictor

    void plan(Plan &plan, size_t T_max);
    void clear() { T = own_begin = own = 0; }   // no row
    void load(const Row &row, Memory &memory);  // loads a row without padding or division
    // Loads this rank's part of a row that pad_row() has padded. element: bytes of X
    void load_part(const Row &whole, size_t element, Memory &memory);
    // Computes the first visible key of each position of a whole row, without and with the sliding window, and the cuts.
    void load_first_keys(const Row &whole, Memory &memory);
    // Loads each token's document, for dropout and noise, and the magnitude of its noise.
    void load_documents(const Row &whole, bool noise, Memory &memory);
    void load_copies(const Row &whole, Memory &memory);
    // Loads this rank's part of the derivatives.
    void load_weights(std::span<const float> of_whole, float entropy_weight, Memory &memory);

  private:
    void load_pieces(const Row &whole, Memory &memory);

    int32_t *cuts_;                           // on the device
    std::array<int32_t *, 2> prompt_keys_{};  // PromptParts::first_key
    const ModelConfig &config_;
    const ModelLimits &limits_;
};
