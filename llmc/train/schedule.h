// Learning-rate schedules, equal step by step to those of transformers.get_scheduler.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>

#include "../core/common.h"

struct Schedule {
    std::string type;      // "constant" | "constant_with_warmup" | "linear" | "cosine" | "cosine_with_min_lr"
    double learning_rate;  // the peak
    double warmup_ratio;   // share of all steps in which the rate rises linearly from 0; "constant" has none
    double min_lr_ratio;   // cosine_with_min_lr: the last rate, as a share of the peak
    size_t steps;          // the number of steps of the whole training
};

inline size_t warmup_steps(const Schedule &schedule) { return size_t(std::ceil(double(schedule.steps) * schedule.warmup_ratio)); }

// The rate of the update number `step`, counted from 0: with a warmup the first update has rate 0, as in transformers.
inline double learning_rate_at(const Schedule &schedule, size_t step) {
    const size_t warmup = warmup_steps(schedule);
    if (schedule.type == "constant") return schedule.learning_rate;
    if (step < warmup) return schedule.learning_rate * (double(step) / double(warmup));
    if (schedule.type == "constant_with_warmup") return schedule.learning_rate;

    const double decay_steps = schedule.steps > warmup ? double(schedule.steps - warmup) : 1;
    if (schedule.type == "linear")
        return schedule.learning_rate * std::max(0.0, (double(schedule.steps) - double(step)) / decay_steps);
    if (schedule.type != "cosine" && schedule.type != "cosine_with_min_lr")
        die("--lr_scheduler %s is not known\n  fix: constant, constant_with_warmup, linear, cosine or cosine_with_min_lr",
            schedule.type.c_str());
    const double cosine = 0.5 * (1 + std::cos(M_PI * (double(step - warmup) / decay_steps)));
    const double end = schedule.type == "cosine" ? 0 : schedule.min_lr_ratio;
    return schedule.learning_rate * (cosine * (1 - end) + end);
}
