// The memory of a run: planned, printed, allocated once. Every array that lives longer than one op is declared with the time it
// lives, counted in ops of a step; arrays whose lives do not overlap may share bytes.
//
//     Plan plan;
//     plan.add(&acts.ln1, "act.0.ln1", {T, C}, first_op, last_op);     // the pointer is set when the arena is made
//     plan.place();                                                    // offsets; plan.bytes() is what one allocation must hold
//     Arena arena(plan, memory);
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "dtype.h"
#include "memory.h"

struct Segment {
    std::string name;  // "act.12.qkv": the numbers are layers, and the printed table sums over them
    const char *dtype;
    std::vector<size_t> shape;
    size_t bytes;
    size_t first, last;  // alive in all ops of [first, last]
    void **pointer;
    size_t offset;  // from the start of the arena, set by place()
};

class Plan {
  public:
    static constexpr size_t alignment = 64;
    static constexpr size_t always = size_t(-1) / 2;  // as `last`: alive for the whole run

    template <class T>
    void add(T **pointer, std::string name, std::vector<size_t> shape, size_t first = 0, size_t last = always) {
        const char *dtype = dtype_name<T> ? dtype_name<T> : sizeof(T) == 4 ? "i32" : "u8";
        add(reinterpret_cast<void **>(pointer), std::move(name), dtype, sizeof(T), std::move(shape), first, last);
    }

    // A second name for an array that was added.
    template <class T> void alias(T **pointer, T **added) {
        aliases_.push_back({reinterpret_cast<void **>(pointer), reinterpret_cast<void **>(added)});
    }

    // What was added so far is the model's state: weights, gradients, optimizer. The rest is activations and buffers.
    void end_state() { state_ = segments_.size(); }

    // First fit, largest first, against the segments whose lives overlap. With guards nothing shares and 256 bytes stay free
    // behind every segment.
    void place(bool guards = false);

    size_t bytes() const { return bytes_; }  // of the placed arena
    size_t sum() const;                      // of all segments, had they not shared
    size_t state_bytes() const;              // of the state, which lives always; bytes() - state_bytes(): activations and buffers
    bool guards() const { return guards_; }
    const std::vector<Segment> &segments() const { return segments_; }
    std::string table() const;  // one line per array, layers summed

  private:
    void add(void **pointer, std::string name, const char *dtype, size_t element, std::vector<size_t> shape, size_t first,
             size_t last);
    friend class Arena;

    std::vector<Segment> segments_;
    std::vector<std::pair<void **, void **>> aliases_;
    size_t bytes_ = 0, state_ = 0;  // state_: segments
    bool guards_ = false;
};

// One allocation that holds a placed plan, is 0 at first, and into which it points every declared pointer. Plan and memory must outlive
// the arena.
class Arena {
  public:
    Arena(const Plan &plan, Memory &memory);
    ~Arena();
    Arena(const Arena &) = delete;
    Arena &operator=(const Arena &) = delete;

    void check_guards() const;     // dies naming the array behind whose end somebody wrote
    void poison_dead(size_t now);  // --poison: fills with NaN every byte that no segment alive at `now` owns (not with guards)

    // --detect_anomaly. What a segment holds before its first op is left over from others: clear_new makes it 0. Then nonfinite can tell the
    // first element that is not finite among the segments alive at `now` that an op of `layer` may have written: those of the layer and of the
    // next, and those of no layer; not the state, nor what is no float. Empty if there is none.
    void clear_new(size_t now);
    std::string nonfinite(size_t now, size_t layer) const;

  private:
    const Plan &plan_;
    Memory &memory_;
    std::byte *base_;
};
