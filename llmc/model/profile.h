// For --profile: measures the time of each op of a training step and compares it with the device's peak.
#pragma once
#include <array>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "../core/arena.h"
#include "../core/timeline.h"
#include "op_list.h"

struct Peaks {  // per second
    double flops, bytes;
};

// Measures each op as the time between two marks on the device's timeline, and sums the times by op and pass. The first step is a warm-up, and does
// not count if others follow. An op lasts until the next one begins, so time in which the device waits for the host counts for the previous op.
class Profiler {
  public:
    Profiler(std::unique_ptr<Timeline> timeline, const Peaks &peaks, const OpList &ops, const ModelConfig &config,
             const Work &layout)
        : timeline_(std::move(timeline)), peaks_(peaks), ops_(ops), config_(config), layout_(layout), sums_(ops.size()) {}

    void begin_step();
    // Called before the ops of a row; each of sp ranks computes an equal share of it.
    void begin_row(const Row &row, size_t sp);
    // Called when an op of the step begins. tokens: of the row; 0 means all. Ops outside a step, in an evaluation, are not recorded. For bucket see
    // Work.
    void begin(Phase phase, size_t op, size_t layer, size_t bucket = 0, size_t tokens = 0);
    void end_step();            // waits for the device
    std::string table() const;  // the result as a printed table

  private:
    struct Entry {
        Phase phase;
        size_t op;  // index in the OpList
        Cost cost;
    };
    struct Total {
        size_t count = 0;
        double seconds = 0, flops = 0, bytes = 0, roofline = 0;  // roofline: the shortest time that the peaks allow
    };
    struct Sums {
        size_t steps = 0;
        double seconds = 0, model_flops = 0;  // seconds by the host's clock
        std::vector<std::array<Total, phases>> op;
        explicit Sums(size_t ops) : op(ops) {}
    };
    std::string line(const char *op, const char *phase, const Total &total, double all) const;

    std::unique_ptr<Timeline> timeline_;
    Peaks peaks_;
    OpList ops_;
    ModelConfig config_;
    Work layout_;  // with the sizes of a row still 0
    bool in_step_ = false;
    Work work_{};
    std::vector<Entry> entries_;  // the step's ops
    std::chrono::steady_clock::time_point start_;
    double model_flops_ = 0;  // the step's
    size_t steps_ = 0;
    Sums sums_;
};
