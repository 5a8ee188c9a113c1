// For --profile: measures the time of each op of a training step and compares it with the device's peak.
#pragma once
#include <array>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "../core/arena.h"
#include "../core/rng.h"
#include "../core/timeline.h"
#include "../ops/layout.h"
#include "../ops/matmul.h"
#include "op_list.h"

struct Peaks {  // per second
    double flops, bytes;
};

// Measures the roofline (Williams et al., "Roofline: an insightful visual performance model", CACM 2009) of this device with the ops of
// training: the rate of a large product, and of a large copy that reads floats and writes X.
template <class Dev> Peaks measure_peaks(Dev dev, Memory &memory, Timeline &timeline);

// Measures ops as the time between marks on the device's timeline, and sums it by op and pass. The first step is a warm-up and left out if others
// follow. An op lasts until the next one begins, so time in which the device waits for the host counts for the op before.
class Profiler {
  public:
    Profiler(std::unique_ptr<Timeline> timeline, const Peaks &peaks, const OpList &ops, const ModelConfig &config,
             const Work &layout)
        : timeline_(std::move(timeline)), peaks_(peaks), ops_(ops), config_(config), layout_(layout), sums_(ops.size()) {}

    void begin_step();
    void begin_row(const Row &row,
                   size_t sp);  // the next ops belong to this row, of which each of sp ranks computes an equal share
    // An op of the step begins, for `tokens` tokens of the row; 0: for all. Outside of a step, in an evaluation, it is not recorded. For bucket see Work.
    void begin(Pass pass, size_t op, size_t layer, size_t bucket = 0, size_t tokens = 0);
    void end_step();            // waits for the device
    std::string table() const;  // the result as a printed table

  private:
    struct Entry {
        Pass pass;
        size_t op;  // its number in the OpList
        Cost cost;
    };
    struct Total {
        size_t count = 0;
        double seconds = 0, flops = 0, bytes = 0, roofline = 0;  // roofline: the shortest time that the peaks allow
    };
    struct Sums {
        size_t steps = 0;
        double seconds = 0, model_flops = 0;  // seconds: by the host's clock
        std::vector<std::array<Total, passes>> op;
        explicit Sums(size_t ops) : op(ops) {}
    };
    std::string line(const char *op, const char *pass, const Total &total, double all) const;

    std::unique_ptr<Timeline> timeline_;
    Peaks peaks_;
    OpList ops_;
    ModelConfig config_;
    Work layout_;  // a Work in which the sizes of a row are still 0
    bool in_step_ = false;
    Work work_{};
    std::vector<Entry> entries_;  // the step's ops
    std::chrono::steady_clock::time_point start_;
    double model_flops_ = 0;  // the step's
    size_t steps_ = 0;
    Sums sums_;
};

// ---- measuring ------------------------------------------------------------------------------------------------------------------------

// Calls f once to warm up and then a few times. Returns the shortest time between two marks.
template <class F> double least_seconds(Timeline &timeline, F f) {
    f();
    for (size_t i = 0; i < 5; i++) timeline.mark(nullptr), f();
    timeline.mark(nullptr);
    const auto seconds = timeline.take();
    return *std::min_element(seconds.begin(), seconds.end());
}

// Measures the product of (n, n) matrices of random numbers, since a GPU multiplies zeros faster.
template <class Dev> double product_rate(Dev dev, Memory &memory, Timeline &timeline, size_t n) {
    using X = typename Dev::X;
    X *x, *w, *out;
    std::byte *scratch;
    Plan plan;
    plan.add(&x, "x", {n, n}), plan.add(&w, "w", {n, n}), plan.add(&out, "out", {n, n});
    plan.add(&scratch, "matmul workspace", {matmul_scratch(dev)});
    plan.place();
    const Arena arena(plan, memory);
    matmul_use_scratch(dev, scratch);
    std::vector<X> part(size_t(1) << 20);  // n*n is a multiple of its size
    for (size_t i = 0; i < part.size(); i++) part[i] = float(Random{1, Purpose::init, 0}.uniform(i) - 0.5);
    in_parts(
        n * n, [&](size_t first, size_t) { write(memory, x + first, part), write(memory, w + first, part); }, part.size());
    const double seconds = least_seconds(timeline, [&] { matmul_forward(dev, out, x, w, (const X *)nullptr, n, n, n); });
    matmul_use_scratch(dev, nullptr);
    return 2 * double(n * n * n) / seconds;
}

template <class Dev> double copy_rate(Dev dev, Memory &memory, Timeline &timeline) {
    using X = typename Dev::X;
    constexpr size_t n = size_t(64) << 20;  // several times any cache
    float *from;
    X *to;
    Plan plan;
    plan.add(&from, "from", {n}), plan.add(&to, "to", {n});
    plan.place();
    const Arena arena(plan, memory);
    const double seconds = least_seconds(timeline, [&] { round_floats(dev, to, from, n); });
    return double(n * (sizeof(float) + sizeof(X))) / seconds;
}

template <class Dev> Peaks measure_peaks(Dev dev, Memory &memory, Timeline &timeline) {
    Peaks peaks{0, copy_rate(dev, memory, timeline)};
    for (double n = 1024, seconds = 0; n <= 8192 && seconds < 0.02;
         n *= 2) {  // grows until the product takes long enough to be measured
        const double rate = product_rate(dev, memory, timeline, size_t(n));
        peaks.flops = std::max(peaks.flops, rate);
        seconds = 2 * n * n * n / rate;
    }
    return peaks;
}
