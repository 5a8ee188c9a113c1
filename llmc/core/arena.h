// The memory of a run: planned, printed, allocated once. Every array that lives longer than one op is declared. A rehearsal of the step (rehearsal.h)
// finds the lifetimes of transient arrays, counted in ops of a step, and arrays with disjoint lifetimes may share bytes.
//
//     Plan plan;
//     plan.transient(&acts.ln1, "act.0.ln1", {T, C});                  // the constructor of Arena sets the pointer
//     plan.live(0, first_op, last_op, false);
//     plan.place();                                                    // offsets; plan.bytes() is the size of the allocation
//     Arena arena(plan, memory);
#pragma once
#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "device.h"
#include "memory.h"
#include "store.h"

struct OpKey {  // an op of a step: the numbers of its phase, of the op, and of the layer
    size_t phase, op, layer;
    auto operator<=>(const OpKey &) const = default;
};

struct Segment {
    std::string name;  // "act.12.qkv": the numbers are layers, and the printed table sums over them
    const char *dtype;
    std::vector<size_t> shape;
    size_t bytes;
    size_t first, last;  // alive in all ops of [first, last]
    void **pointer;
    size_t offset;  // from the start of the arena, set by place()
    size_t alignment;
    bool transient = false;  // Plan::transient
    bool guest = false;      // filled from outside before its first op: by other ranks, or with a running sum
};

class Plan {
  public:
    static constexpr size_t alignment = array_alignment;
    static constexpr size_t always = size_t(-1) / 2;  // as `last`: alive for the whole run

    template <class T>
    void add(T **pointer, std::string name, std::vector<size_t> shape, size_t first = 0, size_t last = always) {
        const char *dtype = dtype_name<T> ? dtype_name<T> : sizeof(T) == 4 ? "i32" : "u8";
        add(reinterpret_cast<void **>(pointer), std::move(name), dtype, sizeof(T), std::move(shape), first, last);
    }

    // Adds an array whose lifetime is a range of ops, set by live(). Without live() it is always alive.
    template <class T> void transient(T **pointer, std::string name, std::vector<size_t> shape) {
        const size_t before = segments_.size();
        add(pointer, std::move(name), std::move(shape));
        if (segments_.size() > before) segments_.back().transient = true;
    }
    void live(size_t i, size_t first, size_t last, bool guest) {
        segments_[i].first = first, segments_[i].last = last, segments_[i].guest = guest;
    }

    // Adds a second pointer to an array.
    template <class T> void alias(T **pointer, T **added) {
        aliases_.push_back({reinterpret_cast<void **>(pointer), reinterpret_cast<void **>(added)});
    }

    // Marks the last array as copied to or from a store.
    void travels();

    // Plans `bytes` of a store for the offloaded array `name`, and returns their index.
    size_t add_place(std::string name, size_t bytes);

    // Declares the arrays added so far as the model's state: weights, gradients, optimizer. Later arrays are activations and buffers.
    void end_state() { state_ = segments_.size(); }

    // Assigns offsets to all segments: the largest first, each at the lowest offset without overlap with a segment that lives at the same
    // time. With guards no two segments share bytes, and 256 bytes stay free after each.
    void place(bool guards = false);

    size_t bytes() const { return bytes_; }               // size of the placed arena
    size_t sum() const;                                   // size of all segments if none shared bytes
    size_t state_bytes() const;                           // size of the state, which is always alive
    size_t store_bytes() const { return store_bytes_; }   // size of all places in the store
    size_t store_bytes(const std::string &prefix) const;  // size of the places whose names begin with `prefix`
    bool guards() const { return guards_; }
    const std::vector<Segment> &segments() const { return segments_; }
    const std::vector<std::pair<std::string, size_t>> &places() const { return places_; }  // names and bytes
    std::string table() const;                                                             // one line per array, layers summed
    std::string store_table(const char *where) const;  // the same for the places in the store `where`; empty if there are none

  private:
    void add(void **pointer, std::string name, const char *dtype, size_t element, std::vector<size_t> shape, size_t first,
             size_t last);
    friend class Arena;

    std::vector<Segment> segments_;
    std::vector<std::pair<void **, void **>> aliases_;
    std::vector<std::pair<std::string, size_t>> places_;
    size_t store_bytes_ = 0;
    size_t bytes_ = 0, state_ = 0;  // state_: number of segments that are the model's state
    bool guards_ = false;
};

// The single allocation that holds a placed plan. It is initially 0, and the constructor sets every declared pointer into it. Plan and memory must
// outlive the arena.
class Arena {
  public:
    Arena(const Plan &plan, Memory &memory);
    ~Arena();
    Arena(const Arena &) = delete;
    Arena &operator=(const Arena &) = delete;

    void check_guards() const;  // dies if bytes after an array have been written, and names the array

    // --debug: fills with NaN all bytes that belong to no segment alive at `now`; with `before`, only bytes of segments that were alive then. Does
    // nothing with guards.
    void poison_dead(size_t now, std::optional<size_t> before = {});

    // --debug. Before its first op a segment holds bytes of other arrays; clear_new clears the segments that begin after `before` and up to `now`.
    // Afterwards nonfinite names the first element that is not finite, or returns an empty string. It searches the segments alive at `now` that an op
    // of `layer` may have written: arrays of this layer, of the next one, and of no layer. State and integer arrays are skipped.
    // Both skip guests, whose values may still be in flight.
    void clear_new(size_t before, size_t now);
    std::string nonfinite(size_t now, size_t layer) const;

  private:
    const Plan &plan_;
    Memory &memory_;
    std::byte *base_;
};
