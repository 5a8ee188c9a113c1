#include "split.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>

#include "../core/common.h"

void check_sp_mode(SpMode mode, size_t ranks, size_t H, size_t KV, size_t head_stride) {
    if (mode == SpMode::gather && (head_stride == 0 || KV % head_stride))
        die("--ring_attn_head_stride %zu does not divide the model's %zu KV heads (it counts KV heads, not query heads)\n  fix: "
            "--ring_attn_head_stride 1",
            head_stride, KV);
    if (mode == SpMode::ulysses && H % ranks)
        die("--sp_mode ulysses: %zu query heads cannot be dealt to %zu ranks\n  fix: --sp_mode ring or --sp_mode gather, which work with any "
            "number of heads",
            H, ranks);
}

// ---- work

// Counts the scores (q, k) with k <= q, for q in [q0, q1) and k in [k0, k1). Positions may be negative.
static uint64_t causal_scores(int64_t q0, int64_t q1, int64_t k0, int64_t k1) {
    const auto triangle = [](int64_t n) { return n > 0 ? uint64_t(n) * uint64_t(n + 1) / 2 : 0; };
    return triangle(q1 - k0) - triangle(q1 - k1) - (triangle(q0 - k0) - triangle(q0 - k1));
}

// Calls f(begin, end) for each document that lacks the shared prompt.
template <class F> static void each_without(const Row &row, const SharedPrompt &p, F f) {
    const auto begins = sharers(row, p);
    for (size_t i = 1; i < begins.size(); i++) f(begins[i], i + 1 < begins.size() ? begins[i + 1] : p.end);
}

// Calls f(queries, keys, gap) for each document and its own keys, and for each document and the prompt that it lacks. In the whole document a query is
// `gap` positions closer to these keys than in the row.
template <class F> static void each_visible(const Row &row, bool padding, F f) {
    struct Range {
        size_t begin, end;
    };
    const std::vector<size_t> &at = row.doc_offsets;
    for (size_t d = 0; d + 1 < at.size(); d++)
        if (const Range document{at[d], at[d + 1]}; at[d] < at[d + 1]) f(document, document, 0);
    if (const Range rest{at.back(), row.T}; padding && at.back() < row.T) f(rest, rest, 0);
    for (const SharedPrompt &p : row.shared) {
        const Range prompt{p.begin, p.begin + p.length};
        each_without(row, p, [&](size_t begin, size_t end) { f(Range{begin, end}, prompt, begin - prompt.end); });
    }
}

// Counts the scores of queries [q0, q1) and keys [k0, k1), at positions in the same document.
static uint64_t visible_scores(int64_t q0, int64_t q1, int64_t k0, int64_t k1, size_t window) {
    const int64_t w = int64_t(window);
    return causal_scores(q0, q1, k0, k1) - (w ? causal_scores(q0 - w, q1 - w, k0, k1) : 0);
}

std::vector<uint64_t> scores_of_pieces(const Row &row, size_t size, size_t window) {
    const size_t n = ceil_div(row.T, size);
    std::vector<uint64_t> scores(n * n);
    each_visible(row, true, [&](auto queries, auto keys, size_t gap) {
        for (size_t i = queries.begin / size; i * size < queries.end; i++)
            for (size_t j = keys.begin / size; j <= i && j * size < keys.end; j++) {
                const size_t q0 = std::max(queries.begin, i * size), q1 = std::min(queries.end, (i + 1) * size),
                             k0 = std::max(keys.begin, j * size), k1 = std::min(keys.end, (j + 1) * size);
                scores[i * n + j] += visible_scores(int64_t(q0 - gap), int64_t(q1 - gap), int64_t(k0), int64_t(k1), window);
            }
    });
    return scores;
}

double scores_of_row(const Row &row, size_t window, bool padding) {
    uint64_t sum = 0;
    each_visible(row, padding, [&](auto queries, auto keys, size_t gap) {
        sum += visible_scores(int64_t(queries.begin - gap), int64_t(queries.end - gap), int64_t(keys.begin), int64_t(keys.end),
                              window);
    });
    return double(sum);
}

double row_cost(const Row &row, std::span<const LayerKind> kinds, size_t H, size_t D, double flops_per_token) {
    const AttentionCost unit{H, 0, D, 0, 1, 1};
    double sum = flops_per_token * double(row.T);
    for (const LayerKind &kind : kinds) {
        const double scores = scores_of_row(row, kind.window, true);
        sum += double(kind.layers) * (unit.forward(scores) + unit.backward(scores));
    }
    return sum;
}

// ---- shared prompts

PromptSplit split_prompts(const Row &row, size_t window) {
    PromptSplit out{{}, row.doc_begin};
    for (const SharedPrompt &p : row.shared) {
        const Piece prompt{p.begin, p.begin + p.length, 0};
        const size_t begin = sharers(row, p)[1];
        std::fill(out.first_key.begin() + ptrdiff_t(begin), out.first_key.begin() + ptrdiff_t(p.end), int32_t(p.begin));
        if (window == 0) out.parts.push_back({prompt, {begin, p.end, 0}});
        else
            each_without(row, p, [&](size_t begin, size_t end) {
                for (size_t q = begin; q < end; q++) {
                    const size_t keys = size_t(row.doc_pos[q]) + 1;  // of the whole document
                    out.first_key[q] = int32_t(p.begin + keys - std::min(keys, window));
                }
                out.parts.push_back({prompt, {begin, end, 0}});  // in another document the first key may be an earlier one
            });
    }
    return out;
}

// ---- dealing pieces

const char *name_of(Layout layout) {
    return layout == Layout::contiguous ? "contiguous" : layout == Layout::zigzag ? "zigzag" : "longest first";
}

static std::vector<size_t> deal_longest_first(std::span<const uint64_t> work, size_t ranks) {
    std::vector<size_t> order(work.size()), owner(work.size(), ranks), count(ranks);
    std::vector<uint64_t> load(ranks);
    std::iota(order.begin(), order.end(), size_t(0));
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return work[a] > work[b]; });
    for (size_t i : order) {
        const auto stranger = [&](size_t r) {
            return !((i > 0 && owner[i - 1] == r) || (i + 1 < owner.size() && owner[i + 1] == r));
        };
        const auto rating = [&](size_t r) { return std::tuple(count[r] == pieces_per_rank, load[r], stranger(r), r); };
        size_t best = 0;
        for (size_t r = 1; r < ranks; r++)
            if (rating(r) < rating(best)) best = r;
        owner[i] = best, count[best]++, load[best] += work[i];
    }
    return owner;
}

static std::vector<size_t> deal_pieces(Layout layout, std::span<const uint64_t> work, size_t ranks) {
    if (layout == Layout::longest_first) return deal_longest_first(work, ranks);
    std::vector<size_t> owner(work.size());
    for (size_t i = 0; i < owner.size(); i++) {
        const size_t half = i / (pieces_per_rank / 2);
        owner[i] = layout == Layout::contiguous ? i / pieces_per_rank : std::min(half, 2 * ranks - 1 - half);
    }
    return owner;
}

static void append(Pieces &pieces, Piece piece) {
    if (pieces.count) {
        Piece &last = pieces.piece[pieces.count - 1];
        if (last.end == piece.begin && last.offset + last.end - last.begin == piece.offset) {
            last.end = piece.end;
            return;
        }
    }
    pieces.piece[pieces.count++] = piece;
}

// ---- what travels

KeyTravel::KeyTravel(std::span<const uint64_t> scores, std::span<const size_t> owner, size_t ranks, size_t size)
    : blocks_(ranks), scores_(ranks * ranks) {
    const size_t n = owner.size();
    for (size_t j = 0; j < n; j++) {
        std::vector<Stop> &block = blocks_[owner[j]];
        Stop stop{{j * size, (j + 1) * size, block.size() * size}, 0, 0};
        for (size_t i = j; i < n; i++) {
            scores_[owner[i] * ranks + owner[j]] += scores[i * n + j];
            if (scores[i * n + j]) stop.hops = std::max(stop.hops, (owner[i] + ranks - owner[j]) % ranks);
        }
        max_hops_ = std::max(max_hops_, stop.hops);
        block.push_back(stop);
    }
    for (auto &block : blocks_) {
        std::stable_sort(block.begin(), block.end(), [](const Stop &a, const Stop &b) { return a.hops > b.hops; });
        for (size_t i = 0; i < block.size(); i++) block[i].packed = i * size;
    }
}

size_t KeyTravel::rows(size_t source, size_t hop) const {
    size_t sum = 0;
    for (const Stop &stop : blocks_[source])
        if (stop.hops >= hop) sum += stop.piece.end - stop.piece.begin;
    return sum;
}

Pieces KeyTravel::keys(size_t source, size_t hop) const {
    std::vector<Piece> there;
    for (const Stop &stop : blocks_[source])
        if (stop.hops >= hop) there.push_back({stop.piece.begin, stop.piece.end, stop.packed});
    std::sort(there.begin(), there.end(), [](const Piece &a, const Piece &b) { return a.begin < b.begin; });
    Pieces pieces{};
    for (const Piece &piece : there) append(pieces, piece);
    return pieces;
}

size_t KeyTravel::row_hops() const {
    size_t sum = 0;
    for (const auto &block : blocks_)
        for (const Stop &stop : block) sum += stop.hops * (stop.piece.end - stop.piece.begin);
    return sum;
}

size_t KeyTravel::last_hop(size_t rank) const {
    size_t hop = blocks_.size() - 1;
    while (hop > 0 && !sees(rank, (rank + blocks_.size() - hop) % blocks_.size())) hop--;
    return hop;
}

// ---- the choice

double estimate_seconds(const KeyTravel &travel, size_t ranks, const AttentionCost &cost) {
    double slowest = 0;
    for (size_t rank = 0; rank < ranks; rank++) {
        double seconds = 0;
        // Step h computes with the block that has made h hops. Meanwhile the next block arrives, and the gradients of the previous
        // block, with as many rows as arrived, go to the next rank or to their owner.
        const auto source = [&](size_t h) { return (rank + ranks - h) % ranks; };
        const auto rows = [&](size_t h) { return h >= 1 && h <= travel.max_hops() ? double(travel.rows(source(h), h)) : 0.0; };
        for (size_t h = 0; h <= travel.max_hops() + 1; h++) {
            const double scores = h <= travel.max_hops() ? double(travel.scores(rank, source(h))) : 0;
            const double coming = cost.kv(rows(h + 1)), leaving = cost.dkv(h ? rows(h - 1) : 0);
            seconds += std::max(cost.forward(scores), coming) + std::max(cost.backward(scores), coming + leaving);
        }
        slowest = std::max(slowest, seconds);
    }
    return slowest;
}

SequenceSplit split_sequence(Layout layout, const Row &row, size_t ranks, std::span<const LayerKind> kinds,
                             const AttentionCost &cost, std::span<const LayerKind> dealt_by) {
    const size_t T = row.T, n = pieces_per_rank * ranks, size = T / n;
    if (T == 0 || T % n) die("a row of %zu tokens cannot be cut into %zu equal pieces", T, n);
    std::vector<std::vector<uint64_t>> scores;
    std::vector<uint64_t> work(n);
    for (const LayerKind &kind : kinds) scores.push_back(scores_of_pieces(row, size, kind.window));
    for (const LayerKind &kind : dealt_by.empty() ? kinds : dealt_by) {
        const auto of_kind = scores_of_pieces(row, size, kind.window);
        for (size_t i = 0; i < n; i++)
            work[i] += kind.layers * std::accumulate(&of_kind[i * n], &of_kind[i * n] + n, uint64_t(0));
    }
    const std::vector<size_t> owner = deal_pieces(layout, work, ranks);
    SequenceSplit split{layout, T, ranks, std::vector<Pieces>(ranks), {}, std::vector<double>(ranks)};
    std::vector<size_t> rows(ranks);
    for (size_t i = 0; i < n; i++) {
        append(split.pieces[owner[i]], {i * size, (i + 1) * size, rows[owner[i]]});
        rows[owner[i]] += size;
        split.work[owner[i]] += double(work[i]);
    }
    for (size_t k = 0; k < kinds.size(); k++) {
        split.travel.emplace_back(scores[k], owner, ranks, size);
        split.seconds += double(kinds[k].layers) * estimate_seconds(split.travel[k], ranks, cost);
    }
    return split;
}

SequenceSplit choose_split(const Row &row, size_t ranks, std::span<const LayerKind> kinds, const AttentionCost &cost,
                           size_t most_pieces) {
    SequenceSplit best = split_sequence(Layout::contiguous, row, ranks, kinds, cost);
    for (Layout layout : {Layout::zigzag, Layout::longest_first}) {
        if (layout == Layout::longest_first && most_pieces < pieces_per_rank) continue;
        SequenceSplit other = split_sequence(layout, row, ranks, kinds, cost);
        if (other.seconds < best.seconds) best = std::move(other);
    }
    return best;
}

std::vector<PieceBorder> piece_borders(const SequenceSplit &split, std::span<const size_t> doc_offsets) {
    struct Owned {
        size_t begin, end, rank, number;
    };
    std::vector<Owned> owned;
    for (size_t rank = 0; rank < split.ranks; rank++)
        for (size_t i = 0; i < split.pieces[rank].count; i++) {
            const Piece &p = split.pieces[rank].piece[i];
            owned.push_back({p.begin, p.end, rank, i});
        }
    std::ranges::sort(owned, {}, &Owned::begin);
    const auto begins_within = [&](size_t begin, size_t end) {  // a document, or the padding
        const auto at = std::ranges::lower_bound(doc_offsets, begin);
        return at != doc_offsets.end() && *at < end;
    };
    std::vector<PieceBorder> borders;
    for (size_t i = 1; i < owned.size(); i++) {
        const Owned &a = owned[i - 1], &b = owned[i];
        if (begins_within(b.begin, b.begin + 1) || b.begin >= doc_offsets.back()) continue;
        borders.push_back({a.rank, b.rank, a.number, b.number, a.begin > 0 && !begins_within(a.begin, a.end),
                           b.end < split.T && !begins_within(b.begin, b.end + 1)});
    }
    return borders;
}

double SequenceSplit::balance() const {
    return std::accumulate(work.begin(), work.end(), 0.0) / double(ranks) / *std::max_element(work.begin(), work.end());
}

std::vector<size_t> SequenceSplit::positions(size_t rank) const {
    std::vector<size_t> out(local_T());
    for (size_t i = 0; i < pieces[rank].count; i++) {
        const Piece &piece = pieces[rank].piece[i];
        std::iota(out.begin() + long(piece.offset), out.begin() + long(piece.offset + piece.end - piece.begin), piece.begin);
    }
    return out;
}

// ---- rows

std::vector<std::vector<size_t>> deal_rows(std::span<const double> costs, size_t groups) {
    const size_t steps = ceil_div(costs.size(), groups);
    std::vector<size_t> order(costs.size());
    std::iota(order.begin(), order.end(), size_t(0));
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return costs[a] > costs[b]; });
    std::vector<std::vector<size_t>> dealt(groups, std::vector<size_t>(steps, no_row));
    std::vector<double> load(groups);
    for (size_t i = 0; i < order.size(); i++) {
        size_t best = groups;
        for (size_t g = 0; g < groups; g++)
            if (dealt[g][i / groups] == no_row && (best == groups || load[g] < load[best])) best = g;
        dealt[best][i / groups] = order[i];
        load[best] += costs[order[i]];
    }
    return dealt;
}
