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

template <class F> static void each_document(std::span<const size_t> doc_offsets, size_t T, F f) {
    for (size_t d = 0; d < doc_offsets.size(); d++) {
        const size_t end = d + 1 < doc_offsets.size() ? doc_offsets[d + 1] : T;  // the last document is the padding
        if (doc_offsets[d] < end) f(doc_offsets[d], end);
    }
}

std::vector<uint64_t> scores_of_pieces(std::span<const size_t> doc_offsets, size_t T, size_t size, size_t window) {
    const size_t n = ceil_div(T, size);
    std::vector<uint64_t> scores(n * n);
    each_document(doc_offsets, T, [&](size_t begin, size_t end) {
        for (size_t i = begin / size; i * size < end; i++)
            for (size_t j = begin / size; j <= i; j++) {
                const int64_t q0 = int64_t(std::max(begin, i * size)), q1 = int64_t(std::min(end, (i + 1) * size));
                const int64_t k0 = int64_t(std::max(begin, j * size)), k1 = int64_t(std::min(end, (j + 1) * size));
                const int64_t w = int64_t(window);
                scores[i * n + j] += causal_scores(q0, q1, k0, k1) - (w ? causal_scores(q0 - w, q1 - w, k0, k1) : 0);
            }
    });
    return scores;
}

double row_cost(const Row &row, std::span<const LayerKind> kinds, size_t H, size_t D, double flops_per_token) {
    const AttentionCost unit{H, 0, D, 0, 1, 1};
    double sum = flops_per_token * double(row.T);
    for (const LayerKind &kind : kinds) {
        const double scores = double(scores_of_pieces(row.doc_offsets, row.T, row.T, kind.window)[0]) + shared_scores(row);
        sum += double(kind.layers) * (unit.forward(scores) + unit.backward(scores));
    }
    return sum;
}

// ---- shared prompts

PromptSplit split_prompts(const Row &row) {
    PromptSplit out{{{{0, row.T, 0}}, 1}, {{}, 0}, {{}, 0}, {}, row.doc_begin, tile_cuts(row.doc_offsets, row.T)};
    const auto add = [](Pieces &pieces, size_t begin, size_t end) {
        if (begin < end) pieces.piece[pieces.count++] = {begin, end, begin};
    };
    size_t behind = 0;  // the last shared prompt's documents
    for (const SharedPrompt &p : row.shared) {
        const size_t answers = p.begin + p.length;
        add(out.prompts, behind, answers), add(out.answers, answers, p.end);
        for (size_t begin : sharers(row, p)) {  // each overwrites what the one before has set behind its own end
            const size_t first = std::max(begin, answers);
            std::fill(out.answers_first_key.begin() + ptrdiff_t(first), out.answers_first_key.begin() + ptrdiff_t(p.end),
                      int32_t(first));
        }
        behind = p.end;
    }
    add(out.prompts, behind, row.T);
    std::vector<size_t> begins;  // of documents that are not behind a shared prompt
    for (size_t begin : row.doc_offsets)
        if (begin == row.T || size_t(row.doc_begin[begin]) == begin) begins.push_back(begin);
    out.cuts = tile_cuts(begins, row.T);
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

SequenceSplit split_sequence(Layout layout, std::span<const size_t> doc_offsets, size_t T, size_t ranks,
                             std::span<const LayerKind> kinds, const AttentionCost &cost, std::span<const LayerKind> dealt_by) {
    const size_t n = pieces_per_rank * ranks, size = T / n;
    if (T == 0 || T % n) die("a row of %zu tokens cannot be cut into %zu equal pieces", T, n);
    std::vector<std::vector<uint64_t>> scores;
    std::vector<uint64_t> work(n);
    for (const LayerKind &kind : kinds) scores.push_back(scores_of_pieces(doc_offsets, T, size, kind.window));
    for (const LayerKind &kind : dealt_by.empty() ? kinds : dealt_by) {
        const auto of_kind = scores_of_pieces(doc_offsets, T, size, kind.window);
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

SequenceSplit choose_split(std::span<const size_t> doc_offsets, size_t T, size_t ranks, std::span<const LayerKind> kinds,
                           const AttentionCost &cost, size_t most_pieces) {
    SequenceSplit best = split_sequence(Layout::contiguous, doc_offsets, T, ranks, kinds, cost);
    for (Layout layout : {Layout::zigzag, Layout::longest_first}) {
        if (layout == Layout::longest_first && most_pieces < pieces_per_rank) continue;
        SequenceSplit other = split_sequence(layout, doc_offsets, T, ranks, kinds, cost);
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
