// What watches the ops of a step: --profile measures them, --detect_anomaly examines what each of them has written, --poison fills the arrays with NaN
// that are dead when it begins. A decoder tells when each op begins, and when the messages and copies between two ops do.
#pragma once
#include <memory>
#include <optional>
#include <string>

#include "../core/arena.h"
#include "clock.h"
#include "profile.h"

// The first value that is not finite: the number of ops before it, and a text that names the op, the array and the element.
struct Anomaly {
    size_t ops = SIZE_MAX;
    std::string what;
};

class Trace {
  public:
    explicit Trace(const OpList &ops) : ops_(ops) {}

    void watch(Arena &arena, bool poison) { arena_ = &arena, poison_ = poison; }
    void profile(std::unique_ptr<Profiler> profiler) { profiler_ = std::move(profiler); }
    void detect_anomaly() { examines_ = true; }
    Profiler *profiler() const { return profiler_.get(); }
    const Anomaly &anomaly() const { return anomaly_; }
    bool is_on() const { return profiler_ || poison_ || examines_; }

    void begin_row(const Row &whole, size_t sp) {
        if (profiler_) profiler_->begin_row(whole, sp);
    }
    void begin(const Moment &now, size_t bucket = 0) {  // bucket: Work::bucket
        if (examines_) examine(now);
        if (poison_) arena_->poison_dead(now.time);
        if (profiler_) profiler_->begin(now.pass, now.op, now.layer, bucket, tile);
    }
    // Messages and copies lie between two ops, and so does the writing out of quantised weights. They change no lifetime.
    void begin_transfer(Pass pass, RowOp op, size_t layer = 0, size_t bucket = 0) {
        if (profiler_) profiler_->begin(pass, ops_.number(op), layer, bucket);
    }

    size_t tile = 0;  // how many tokens the ops that begin work on; 0: on all of the row

  private:
    void examine(const Moment &now);

    const OpList &ops_;
    Arena *arena_ = nullptr;
    std::unique_ptr<Profiler> profiler_;
    bool poison_ = false, examines_ = false;
    std::optional<Moment> running_;  // the op that runs now, if it is to be examined
    size_t examined_ = 0;            // the number of ops so far
    Anomaly anomaly_;
};
