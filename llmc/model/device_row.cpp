#include "device_row.h"

#include <algorithm>
#include <cmath>

#include "../parallel/delta_ring.h"

void DeviceRow::plan(Plan &plan, size_t T_max) {
    const bool trains = limits_.mode == Mode::train;
    const size_t positions = std::max(T_max * limits_.ranks.sp, limits_.sequences + limits_.appended);
    plan.add(&tokens, "row.tokens", {T_max});
    plan.add(&doc_pos, "row.doc_pos", {T_max});
    plan.add(&first_key, "row.first_key", {positions});
    plan.add(&first_key_window, "row.first_key_window", {positions});
    plan.add(&cuts_, "row.cuts", {std::max<size_t>(1, TileCuts::most(positions))});
    if (limits_.share_prompts) {
        plan.add(&prompt_keys_[0], "row.prompt_key", {positions});
        plan.add(&prompt_keys_[1], "row.prompt_key_window", {positions});
    }
    if (config_.delta.Hk) plan.add(&piece_pos, "row.piece_pos", {T_max});
    if (config_.delta.Hk && limits_.ranks.sp > 1) {
        plan.add(&starts, "row.starts", {T_max});
        plan.add(&ends, "row.ends", {T_max});
        plan.add(&seen, "row.seen", {most_pieces(limits_.split_as ? *limits_.split_as : config_), 2 * conv_columns});
    }
    plan.add(&predictors, "row.predictors", {T_max});
    plan.add(&targets, "row.targets", {T_max});
    plan.add(&weights, "row.weights", {T_max});
    if (trains && (config_.lora.dropout > 0 || limits_.neftune_alpha > 0)) plan.add(&documents, "row.document", {T_max});
    if (trains && config_.experts.number) plan.add(&copies, "row.copies", {T_max});
    if (trains && limits_.neftune_alpha > 0) plan.add(&magnitudes, "row.noise", {T_max});
}

void DeviceRow::load(const Row &row, Memory &memory) {
    const Ranks &r = limits_.ranks;
    T = row.T, N = row.predictors.size();
    shard = ceil_div(T, r.tp), own_begin = std::min(T, shard * r.tp_rank()), own = std::min(shard, T - own_begin);
    const auto local = [&](std::vector<int32_t> ids) {
        for (int32_t &id : ids) id -= int32_t(config_.part.vocabulary.first);
        return ids;
    };
    write(memory, tokens, local(row.tokens));
    write(memory, doc_pos, row.doc_pos);
    if (piece_pos) write(memory, piece_pos, row.doc_pos);
    borders.clear();
    write(memory, predictors, row.predictors);
    write(memory, targets, local(row.targets));
}

// Returns the row with doc_pos moved to the second table for documents longer than longrope's original positions.
static Row with_long_positions(Row row, const RopeConfig &rope, size_t positions) {
    for (size_t i = 0; i < row.documents.size(); i++)
        if (row.doc_offsets[i + 1] - row.doc_offsets[i] > rope.original_max_position)
            for (size_t p = row.doc_offsets[i]; p < row.doc_offsets[i + 1]; p++) row.doc_pos[p] += int32_t(positions);
    return row;
}

void DeviceRow::load_part(const Row &whole, size_t element, Memory &memory) {
    split = split_row(config_, limits_.ranks, element, whole, limits_.split_as.get());
    const std::vector<size_t> positions = split->positions(limits_.ranks.sp_rank());
    const bool by_length = config_.rope.by_length(limits_.positions);
    load(local_row(by_length ? with_long_positions(whole, config_.rope, limits_.positions) : whole, positions), memory);
    numbers = local_predictors(whole, positions);
    predictors_of_whole = whole.predictors.size();
    load_first_keys(whole, memory);
    if (piece_pos) load_pieces(whole, memory);
}

void DeviceRow::load_pieces(const Row &whole, Memory &memory) {
    const Pieces &own = split->pieces[limits_.ranks.sp_rank()];
    std::vector<int32_t> position(T), at_start(T, -1), at_end(T, -1), before;
    for (size_t i = 0; i < own.count; i++) {
        const Piece &p = own.piece[i];
        const int32_t *const of_whole = &whole.doc_pos[p.begin];
        for (size_t t = 0; t < p.end - p.begin; t++) position[p.offset + t] = std::min(int32_t(t), of_whole[t]);
        for (int32_t j = 0; j < int32_t(conv_columns);
             j++)  // tokens before the piece, as if the row began with the first of them
            before.push_back(std::clamp(of_whole[0] - int32_t(conv_columns) + j, 0, j));
        before.insert(before.end(), of_whole, of_whole + conv_columns);
    }
    write(memory, piece_pos, position);
    if (!starts) return;
    borders = piece_borders(*split, whole.doc_offsets);
    for (const PieceBorder &b : borders) {
        if (const Piece &p = own.piece[b.to_piece]; b.to == limits_.ranks.sp_rank()) at_start[p.offset] = int32_t(b.to_piece);
        if (const Piece &p = own.piece[b.from_piece]; b.from == limits_.ranks.sp_rank())
            at_end[p.offset + p.end - p.begin - 1] = int32_t(b.from_piece);
    }
    write(memory, starts, at_start), write(memory, ends, at_end), write(memory, seen, before);
}

void DeviceRow::load_documents(const Row &whole, bool noise, Memory &memory) {
    std::vector<int32_t> of_whole(whole.T, -1), own;  // -1: padding
    std::vector<float> magnitude_of_whole(whole.T, 0), own_magnitudes;
    for (size_t i = 0; i < whole.documents.size(); i++) {
        const ptrdiff_t begin = ptrdiff_t(whole.doc_offsets[i]), end = ptrdiff_t(whole.doc_offsets[i + 1]);
        const double magnitude =
            double(limits_.neftune_alpha * config_.embedding_multiplier) / std::sqrt(double(end - begin) * double(config_.C));
        std::fill(of_whole.begin() + begin, of_whole.begin() + end, int32_t(whole.documents[i]));
        std::fill(magnitude_of_whole.begin() + begin, magnitude_of_whole.begin() + end, float(magnitude));
    }
    for (size_t p : split->positions(limits_.ranks.sp_rank()))
        own.push_back(of_whole[p]), own_magnitudes.push_back(magnitude_of_whole[p]);
    write(memory, documents, own);
    if (noise) write(memory, magnitudes, own_magnitudes);
}

void DeviceRow::load_copies(const Row &whole, Memory &memory) {
    std::vector<int32_t> of_whole(whole.T, 0), own;
    std::fill(of_whole.begin(), of_whole.begin() + ptrdiff_t(whole.doc_offsets.back()), 1);
    for (const SharedPrompt &p : whole.shared)
        std::fill_n(of_whole.begin() + ptrdiff_t(p.begin), p.length, int32_t(sharers(whole, p).size()));
    for (size_t p : split->positions(limits_.ranks.sp_rank())) own.push_back(of_whole[p]);
    write(memory, copies, own);
}

void DeviceRow::load_first_keys(const Row &whole, Memory &memory) {
    const int32_t window = int32_t(*std::max_element(config_.window.begin(), config_.window.end()));
    std::vector<int32_t> first(whole.doc_begin.begin(), whole.doc_begin.end()), cut = tile_cuts(whole.doc_offsets, whole.T);
    write(memory, first_key, first);
    for (size_t p = 0; p < first.size(); p++) first[p] = std::max(first[p], int32_t(p) - window + 1);
    write(memory, first_key_window, first);
    if (limits_.graphs)
        cut.resize(TileCuts::most(whole.T), INT32_MAX);  // a recorded launch needs the same number of blocks for every row
    write(memory, cuts_, cut);
    cuts = {cuts_, cut.size()};
    for (PromptParts &p : prompts) p.parts.clear();
    if (whole.shared.empty()) return;
    for (const size_t of : {size_t(0), size_t(window)}) {
        const PromptSplit split = split_prompts(whole, of);
        int32_t *const first = prompt_keys_[of > 0];
        write(memory, first, split.first_key);
        prompts[of > 0] = {split.parts, first};
    }
}

void DeviceRow::load_weights(std::span<const float> of_whole, float entropy, Memory &memory) {
    std::vector<float> own(N);
    for (size_t n = 0; n < N; n++) own[n] = of_whole[numbers[n]];
    write(memory, weights, own);
    entropy_weight = entropy;
}
