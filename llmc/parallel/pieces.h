// Arrays of a rank's shard that are in a store between uses (--offload): AdamW's moments, the parameters. They are cut into pieces, and each piece of
// each array has a place in the store. There are three ways to read pieces into memory:
//
//   reach(piece), finish()      for a pass through the shard, such as the optimizer's: into three windows in turn. One piece is in use, while the next
//                               one is read and the previous one is written
//   open(piece), keep()         into one window, in any order, to load and to save
//   bring(unit, to), wait(unit) all pieces of a unit (sharding.h), into memory outside the windows; only for the first added array
//
// After reach() and open() the arrays hold one piece: the elements of the shard from begin() on. A piece that was never offloaded is 0.
#pragma once
#include <algorithm>
#include <cstring>
#include <deque>
#include <set>
#include <string>
#include <vector>

#include "../core/arena.h"
#include "../core/common.h"
#include "../core/memory.h"
#include "../core/store.h"
#include "sharding.h"

// Pieces have this many elements, or fewer at the end of a unit.
constexpr size_t offload_piece = size_t(4) << 20;

class ShardPieces {
  public:
    ShardPieces() = default;  // nothing is offloaded
    // Cuts a shard at the borders of units, and into pieces of `most` elements, rounded up to whole pages. 0: nothing is offloaded.
    ShardPieces(const Sharding &sharding, size_t most) {
        if (most == 0) return;
        const std::vector<size_t> &units = sharding.unit_begins;
        for (size_t u = 0; u + 1 < units.size(); u++) {
            of_unit_.push_back(pieces_.size());
            in_parts(
                units[u + 1] - units[u],
                [&](size_t first, size_t n) {
                    pieces_.push_back({units[u] + first, n});
                    largest_ = std::max(largest_, n);
                },
                round_up(most, store_alignment));
        }
        of_unit_.push_back(pieces_.size());
    }

    // Plans the places of an array's pieces.
    template <class T> void add(Plan &plan, T **array, const std::string &name) {
        arrays_.push_back({name, sizeof(T), array});
        for (const Piece &p : pieces_) arrays_.back().places.push_back(plan.add_place(name, p.count * sizeof(T)));
    }
    // Plans the windows of all arrays.
    void plan_windows(Plan &plan, bool transient) {
        for (Array &a : arrays_)
            for (size_t i = 0; i < std::min(windows, pieces_.size()); i++) {
                const auto window = &a.windows[i];
                if (transient) plan.transient(window, a.name + ", window", {largest_ * a.element});
                else plan.add(window, a.name + ", window", {largest_ * a.element});
                plan.travels();
            }
    }
    void use(Store &store, Memory &memory) { store_ = &store, memory_ = &memory; }

    bool any() const { return !pieces_.empty(); }
    size_t begin() const { return begin_; }

    // Divides elements [begin, begin + count) of the shard at the borders of pieces, and calls f(piece, first, n) for the n elements from begin +
    // first on.
    template <class F> void in_pieces(size_t begin, size_t count, F f) const {
        if (!any()) return f(0, 0, count);
        auto p = std::upper_bound(pieces_.begin(), pieces_.end(), begin, [](size_t x, const Piece &p) { return x < p.begin; });
        for (size_t first = 0, n; first < count; first += n, p++) {
            n = std::min(count - first, p[-1].begin + p[-1].count - (begin + first));
            f(size_t(p - pieces_.begin()) - 1, first, n);
        }
    }

    // Skipped pieces are also read and written. A pass may end before the last piece.
    void reach(size_t piece) {
        if (!any()) return;
        for (; reached_ <= piece; reached_++) {
            if (reached_ > 0) offload(reached_ - 1, (reached_ - 1) % windows);
            for (; prefetched_ < std::min(reached_ + 2, pieces_.size()); prefetched_++) {
                if (prefetched_ >= windows) wait_for(prefetched_ - windows);
                prefetch(prefetched_, prefetched_ % windows);
            }
        }
        wait_for(piece);
        point_at(piece, piece % windows);
    }
    void finish() {
        if (reached_ > 0) offload(reached_ - 1, (reached_ - 1) % windows);
        // Other arrays may need the windows.
        for (size_t p = prefetched_ - std::min(prefetched_, windows); p < prefetched_; p++) wait_for(p);
        reached_ = prefetched_ = 0;
        close();
    }

    void open(size_t piece) {
        if (!any()) return;
        if (open_ != piece) prefetch(piece, 0), wait_for(piece), open_ = piece;
        point_at(piece);
    }
    void keep() {
        if (any()) offload(open_, 0), wait_for(open_);
    }
    // The windows may have been used by other arrays since the last open().
    void close() { open_ = none; }
    // Sets the arrays as open(piece) would, without copies.
    void point_at(size_t piece, size_t window = 0) {
        if (!any()) return;
        begin_ = pieces_[piece].begin;
        for (const Array &a : arrays_) memcpy(a.array, &a.windows[window], sizeof(void *));
    }

    void bring(size_t unit, void *to) {
        const Array &a = arrays_.front();
        const size_t begin = pieces_[of_unit_[unit]].begin;
        for (size_t p = of_unit_[unit]; p < of_unit_[unit + 1]; p++)
            prefetch(a, p, static_cast<std::byte *>(to) + (pieces_[p].begin - begin) * a.element);
    }
    void wait(size_t unit) {
        for (size_t p = of_unit_[unit]; p < of_unit_[unit + 1]; p++) store_->wait(arrays_.front().places[p]);
    }

  private:
    static constexpr size_t windows = 3, none = SIZE_MAX;

    struct Piece {
        size_t begin, count;  // elements of the shard
    };
    struct Array {
        std::string name;
        size_t element;                                 // bytes
        void *array;                                    // T **
        std::byte *windows[ShardPieces::windows] = {};  // (largest_) each
        std::vector<size_t> places = {};                // (pieces) in the store
    };

    size_t bytes_of(const Array &a, size_t piece) const { return round_up(pieces_[piece].count * a.element, store_alignment); }
    void prefetch(const Array &a, size_t piece, void *to) {
        if (offloaded_.contains(piece)) store_->prefetch(a.places[piece], to, bytes_of(a, piece));
        else memory_->fill(to, 0, bytes_of(a, piece));
    }
    // The next two functions start to copy a piece of all arrays; the third waits for the copies.
    void prefetch(size_t piece, size_t window) {
        for (const Array &a : arrays_) prefetch(a, piece, a.windows[window]);
    }
    void offload(size_t piece, size_t window) {
        for (const Array &a : arrays_) store_->offload(a.places[piece], a.windows[window], bytes_of(a, piece));
        offloaded_.insert(piece);
    }
    void wait_for(size_t piece) {
        for (const Array &a : arrays_) store_->wait(a.places[piece]);
    }

    std::vector<Piece> pieces_;
    std::vector<size_t> of_unit_;  // (units + 1) the first piece of each unit
    size_t largest_ = 0;           // elements of a piece
    std::deque<Array> arrays_;     // a deque, because a plan points at the members
    std::set<size_t> offloaded_;   // pieces
    size_t begin_ = 0;
    size_t reached_ = 0, prefetched_ = 0;  // in a pass: pieces before these numbers have been reached, or are being read
    size_t open_ = none;
    Store *store_ = nullptr;
    Memory *memory_ = nullptr;
};
