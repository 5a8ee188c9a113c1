#include "ranks.h"

#include <algorithm>
#include <numeric>

#include "../core/common.h"

std::vector<LayerKind> layer_kinds(const ModelConfig &config) {
    std::vector<LayerKind> kinds;
    for (size_t l = 0; l < config.window.size(); l++) {
        const size_t window = config.window[l];
        auto kind = std::find_if(kinds.begin(), kinds.end(), [&](const LayerKind &k) { return k.window == window; });
        if (kind == kinds.end()) kind = kinds.insert(kind, {window, 0});
        kind->layers += !config.has_delta(l);
    }
    return kinds;
}

size_t kind_of(const ModelConfig &config, size_t layer) {
    const auto kinds = layer_kinds(config);
    size_t k = 0;
    while (kinds[k].window != config.window[layer]) k++;
    return k;
}

SequenceSplit split_row(const ModelConfig &c, const Ranks &ranks, size_t element, const Row &row, const ModelConfig *as) {
    const AttentionCost cost{c.whole_H(), c.whole_KV(), c.D, element, ranks.flops, ranks.bandwidth};
    const auto kinds = layer_kinds(c);
    // With one rank there is no choice. Under ulysses every rank computes attention on the whole row, which must be in order.
    if (ranks.sp == 1 || ranks.sp_mode == SpMode::ulysses) return split_sequence(Layout::contiguous, row, ranks.sp, kinds, cost);
    if (!as) return choose_split(row, ranks.sp, kinds, cost, most_pieces(c));
    return split_sequence(split_row(*as, ranks, element, row).layout, row, ranks.sp, kinds, cost, layer_kinds(*as));
}

std::vector<std::vector<size_t>> own_rows(const ModelConfig &config, const Ranks &ranks, const Samples &data,
                                          const std::vector<std::vector<size_t>> &rows, bool share_prompts) {
    const auto kinds = layer_kinds(config);
    const double flops_per_token = 6 * double(active_parameter_count(config));
    std::vector<double> costs;
    for (const auto &samples : rows)
        costs.push_back(row_cost(outline(data, samples, share_prompts), kinds, config.H, config.D, flops_per_token));
    const auto dealt = deal_rows(costs, ranks.dp());
    std::vector<std::vector<size_t>> own;
    for (size_t row : dealt[ranks.rank / ranks.tp / ranks.sp]) own.push_back(row == no_row ? std::vector<size_t>() : rows[row]);
    return own;
}

std::string mesh_line(const Ranks &r) {
    static const char *const modes[] = {"ring", "gather", "ulysses"};
    std::string line = format("%zu ranks: %zu x data, %zu x sequence", r.world, r.dp(), r.sp);
    if (r.sp > 1) line += format(" (%s)", modes[size_t(r.sp_mode)]);
    if (r.tp > 1) line += format(", %zu x tensor", r.tp);
    line += format(", ZeRO stage %d", r.zero_stage);
    if (r.group() < r.world) line += format(" in groups of %zu", r.group());
    return r.expert_parallel > 1 ? line + format(", experts over %zu", r.expert_parallel) : line;
}

std::string pieces_table(const SequenceSplit &split) {
    const double all = std::accumulate(split.work.begin(), split.work.end(), 0.0);
    std::string out = format("first row: %zu tokens, %s, mean over max of attention work %.3f\n%-6s %8s  %s\n", split.T,
                             name_of(split.layout), split.balance(), "rank", "work", "positions");
    for (size_t r = 0; r < split.ranks; r++) {
        out += format("%-6zu %7.2f%% ", r, 100 * split.work[r] / all);
        for (size_t i = 0; i < split.pieces[r].count; i++)
            out += format(" %zu-%zu", split.pieces[r].piece[i].begin, split.pieces[r].piece[i].end - 1);
        out += "\n";
    }
    out.pop_back();
    return out;
}
