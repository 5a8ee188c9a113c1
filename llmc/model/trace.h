// Observes the ops of a step: --profile measures them; --debug fills dead arrays with NaN when an op begins, and searches the op's output for values
// that are not finite; the GPU check (../app/gpu_check.h) compares the output; a rehearsal (../core/rehearsal.h) records the op. A decoder reports
// the beginning of each op, and of each message and copy between two ops.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "../core/arena.h"
#include "../core/rehearsal.h"
#include "profile.h"

// The first value that is not finite: the number of previous ops, and a text that names the op, the array and the element.
struct Anomaly {
    size_t ops = SIZE_MAX;
    std::string what;
};

class Trace {
  public:
    explicit Trace(const OpList &ops) : ops_(ops) {}

    void rehearse(Touches &log) { log_ = &log; }
    void use_times(const std::map<OpKey, size_t> &times) { times_ = times; }  // from a rehearsal
    const std::map<OpKey, size_t> &times() const { return times_; }
    void watch(Arena &arena, bool poison) { arena_ = &arena, poison_ = poison; }
    void profile(std::unique_ptr<Profiler> profiler) { profiler_ = std::move(profiler); }
    // Calls f after each op, while every array that a later op reads still has its values. Arrays are zeroed when their lifetime begins, so an
    // element that no op writes is 0.
    void inspect(std::function<void(const OpKey &)> f) { inspect_ = std::move(f); }
    void end_inspection() { inspect_running(), inspect_ = nullptr, running_.reset(); }  // called after the last op
    void detect_anomaly() {
        inspect([this](const OpKey &op) { find_anomaly(op); });
    }
    std::string describe(const OpKey &op) const;  // "backward, layer 3, attention"
    Profiler *profiler() const { return profiler_.get(); }
    const Anomaly &anomaly() const { return anomaly_; }
    bool is_on() const { return profiler_ || poison_ || inspect_; }

    void begin_row(const Row &whole, size_t sp) {
        if (profiler_) profiler_->begin_row(whole, sp);
    }
    void begin_pass() {
        if (log_) log_->begin_row();
        poisoned_.reset();
    }
    void begin(Phase phase, size_t op, size_t layer, size_t bucket = 0) {  // bucket: Work::bucket
        const OpKey key{size_t(phase), op, layer};
        if (log_) log_->begin(key, phase != Phase::step, bucket);
        if (inspect_) begin_inspected(key);
        if (poison_) arena_->poison_dead(time_of(key), std::exchange(poisoned_, time_of(key)));
        if (profiler_) profiler_->begin(phase, op, layer, bucket, tile);
    }
    // Records a message, a copy, or the dequantisation of weights, between two ops. `layer` is the unit, for weights or gradients.
    // The transfer may write over arrays that the previous op used last, so that op is inspected first.
    void pause(Phase phase, RowOp op, size_t layer = 0, size_t bucket = 0) {
        if (log_) log_->pause({size_t(phase), ops_.number(op), layer}, bucket);
        inspect_running();
    }
    void begin_transfer(Phase phase, RowOp op, size_t layer = 0, size_t bucket = 0) {
        pause(phase, op, layer, bucket);
        if (profiler_) profiler_->begin(phase, ops_.number(op), layer, bucket);
    }

    size_t tile = 0;  // number of tokens of the following ops; 0: the whole row

  private:
    void inspect_running();
    void begin_inspected(const OpKey &now);
    void find_anomaly(const OpKey &op);
    size_t time_of(const OpKey &op) const;

    const OpList &ops_;
    Arena *arena_ = nullptr;
    std::unique_ptr<Profiler> profiler_;
    bool poison_ = false;
    std::optional<size_t> poisoned_;  // time of this row's last op; arrays that were already dead then are NaN
    std::function<void(const OpKey &)> inspect_;
    Touches *log_ = nullptr;
    std::map<OpKey, size_t> times_;
    std::optional<OpKey> running_;  // the last op that began
    bool inspected_ = false;        // true if this op has been inspected; if not, it is when the next op or transfer begins
    size_t searched_ = 0;           // number of ops so far
    Anomaly anomaly_;
};
