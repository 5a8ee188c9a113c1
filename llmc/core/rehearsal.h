// A device that computes nothing: a model on it runs its step on made-up addresses, and the device records the arrays of each op. An array is alive
// from its first touch to its last, which is the input of the memory plan. The events of the step, in order, are the input of the prediction of its
// time.
//
//     Rehearsal<CpuF32> dev{cpu, &log}          log: Touches
//     model.allocate(mesh, true, false)         guards: no two arrays share bytes, so an address belongs to one array
//     log.watch(model.plan())
//     model.accumulate(row, 1, true)
//     log.finish()                              lifetimes, the times of the ops, and events
//
// Memory and Store, which have stand-ins here, and Comm (../parallel/rehearsal_comm.h) also touch arrays.
#pragma once
#include <cstring>
#include <map>
#include <memory>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "arena.h"
#include "graphs.h"
#include "memory.h"
#include "store.h"
#include "timeline.h"

// Records the touches of arrays and their times, counted in ops. The time of an op is that of its first occurrence, so all passes share times. A copy
// or message between two ops (pause) has separate times after the first op. A return to an earlier op is a loop, for example over the tiles of a row:
// an array that is alive in a loop is alive from its beginning to its end. Except for loops time never goes back within a pass, so arrays with
// disjoint lifetimes may share bytes.
struct Event {
    enum Kind { row, op, pause, start, wait } kind;  // pause: between two ops, for a transfer     start, wait: of a transfer
    enum Lane { messages, out, in, lanes } lane = messages;  // out, in: copies to and from the store
    OpKey key = {};                                          // of a transfer: the op or pause in which it starts
    // For an op or a pause Work::bucket; for a message the bytes that all ranks of the communicator send; for a copy the place's number.
    size_t amount = 0;
    size_t id = 0;                   // identifies a transfer
    double flops = 0;                // of an op's matrix products
    size_t ranks = 1, distance = 1;  // for messages: the size of the communicator, and the distance of its ranks in the world
};

class Touches {
  public:
    static constexpr uintptr_t base = uintptr_t(1) << 46;  // of the made-up addresses
    struct Lifetime {
        size_t first = SIZE_MAX, last = 0;
        bool in_pause = false;  // first touched between two ops
        bool touched() const { return first != SIZE_MAX; }
    };

    void watch(const Plan &plan);
    void begin_row();                                                   // the next op begins a pass: its repetition is not a loop
    void begin(OpKey op, bool in_order, size_t bucket = 0);             // in_order: a return to it is a loop
    void pause(OpKey transfer, size_t bucket = 0);                      // until the next op
    size_t start_message(size_t bytes, size_t ranks, size_t distance);  // these return the transfer's id
    size_t start_copy(Event::Lane lane, size_t place);
    void product(double flops) { events_[op_event_].flops += flops; }  // of the current op
    void wait(size_t id) { events_.push_back({.kind = Event::wait, .id = id}); }
    void touch(const void *address) { touch(std::span(&address, 1)); }
    void touch(std::span<const void *const> addresses);  // addresses of one call
    void finish();

    const std::vector<Lifetime> &lifetimes() const { return lifetimes_; }  // one for each of plan.segments()
    const std::map<OpKey, size_t> &times() const { return times_; }
    const std::vector<Event> &events() const { return events_; }

  private:
    size_t start(Event event);

    static constexpr size_t none = SIZE_MAX, calls = 1 << 16;  // calls: number of times in a pause
    struct Range {
        uintptr_t begin, end;
        size_t segment;
    };
    std::vector<Range> ranges_;  // sorted
    std::vector<Lifetime> lifetimes_;
    std::map<OpKey, size_t> times_;
    std::vector<std::pair<size_t, size_t>> loops_;
    size_t now_ = none;
    std::vector<Event> events_;
    OpKey op_ = {};               // the current op or pause
    size_t op_event_ = 0;         // its event
    std::vector<size_t> places_;  // first byte of each place in the store, sorted
    size_t transfers_ = 0;        // number of transfers so far
};

template <class Dev> struct Rehearsal {
    using X = typename Dev::X;
    Dev real;  // the real device, for sizes
    Touches *log;

    template <class... A> void note(const A &...arguments) const {
        std::vector<const void *> addresses;
        addresses.reserve(2 * sizeof...(A));  // growing in steps took a third of the time of --plan
        (add(addresses, arguments), ...);
        log->touch(addresses);
    }
    // The FLOPs of a product whose first three sizes are its rows, inputs and outputs.
    template <class... A> void note_product(const A &...arguments) const {
        std::vector<double> sizes;
        sizes.reserve(sizeof...(A));
        (add_size(sizes, arguments), ...);
        log->product(2 * sizes[0] * sizes[1] * sizes[2]);
    }

  private:
    template <class T> static void add(std::vector<const void *> &addresses, const T &argument) {
        if constexpr (std::is_pointer_v<T>) addresses.push_back(argument);
        else if constexpr (requires { argument.pointers(); })
            std::apply([&](auto... p) { (addresses.push_back(p), ...); }, argument.pointers());
        else
            static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T> || std::is_null_pointer_v<T>,
                          "a struct says which pointers it has: pointers()");
    }
    template <class T> static void add_size(std::vector<double> &sizes, const T &argument) {
        if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) sizes.push_back(double(argument));
        else if constexpr (requires { argument.R; }) sizes.push_back(double(argument.R));  // rows in groups
    }
};

template <class Dev> constexpr bool is_rehearsal = false;
template <class Dev> constexpr bool is_rehearsal<Rehearsal<Dev>> = true;

class RehearsalMemory final : public Memory {
  public:
    explicit RehearsalMemory(Touches &log) : log_(log) {}
    std::string device() const override { return "rehearsal"; }
    size_t available() const override { return SIZE_MAX; }
    size_t process() const override { return 0; }
    size_t peak() const override { return 0; }
    std::byte *allocate(size_t) override { return reinterpret_cast<std::byte *>(Touches::base); }
    void release(std::byte *, size_t) override {}
    void fill(void *to, uint8_t, size_t) override { log_.touch(to); }
    void write(void *to, const void *, size_t) override { log_.touch(to); }
    void read(void *host, const void *from, size_t bytes) override {
        log_.touch(from);
        if (bytes) memset(host, 0, bytes);  // without bytes `host` may be null
    }

  private:
    Touches &log_;
};

class RehearsalStore final : public Store {  // a copy touches its array when it begins, and at its wait
  public:
    explicit RehearsalStore(Touches &log) : log_(log) {}
    std::string name() const override { return "rehearsal"; }
    void offload(size_t place, const void *from, size_t) override { start(Event::out, place, from); }
    void prefetch(size_t place, void *to, size_t) override { start(Event::in, place, to); }
    void wait(size_t place) override {
        const auto [array, id] = std::exchange(copies_[place], {});
        log_.wait(id), log_.touch(array);
    }

  private:
    struct Copy {
        const void *array = nullptr;
        size_t id = 0;
    };
    void start(Event::Lane lane, size_t place, const void *array) {
        copies_[place] = {array, log_.start_copy(lane, place)};
        log_.touch(array);
    }

    Touches &log_;
    std::map<size_t, Copy> copies_;  // copies in flight, by place
};

template <class D> std::unique_ptr<Memory> make_memory(const Rehearsal<D> &dev) {
    return std::make_unique<RehearsalMemory>(*dev.log);
}
template <class D> std::unique_ptr<Store> make_store(const Rehearsal<D> &dev, const std::string &, size_t, double) {
    return std::make_unique<RehearsalStore>(*dev.log);
}
template <class D> std::unique_ptr<Graphs> make_graphs(const Rehearsal<D> &) { return nullptr; }
template <class D> std::unique_ptr<Timeline> make_timeline(const Rehearsal<D> &) { return std::make_unique<HostTimeline>(); }
