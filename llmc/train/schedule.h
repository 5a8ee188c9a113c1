// Learning-rate schedules, equal step by step to transformers.get_scheduler.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>

#include "choices.h"

struct Schedule {
    Scheduler type;
    double learning_rate;  // the peak
    size_t warmup;         // steps of the linear warm-up from 0; constant has none
    double min_lr_ratio;   // cosine_with_min_lr, warmup_stable_decay: the last rate, as a share of the peak
    size_t steps;          // the number of steps of the whole training
    double decay_ratio;    // warmup_stable_decay: share of all steps, at the end, in which the rate decays
};

// The rate stays at its peak and decays at the end, so a run can be extended from a checkpoint before the decay (Hu et al., "MiniCPM", 2024,
// arXiv:2404.06395). Returns a share of the peak.
inline double warmup_stable_decay(const Schedule &schedule, size_t step) {
    const size_t decay = size_t(std::ceil(double(schedule.steps) * schedule.decay_ratio));
    const size_t falls_from = schedule.steps - std::min(schedule.steps, decay);
    double share = 1;
    if (step < schedule.warmup) share = double(step) / double(schedule.warmup);
    else if (step >= schedule.steps) share = 0;
    else if (step > falls_from) share = 0.5 * (1 + std::cos(M_PI * (double(step - falls_from) / double(decay))));
    return share * (1 - schedule.min_lr_ratio) + schedule.min_lr_ratio;
}

// Returns the rate of update number `step`, counted from 0: with a warm-up the first update has rate 0, as in transformers.
inline double learning_rate_at(const Schedule &schedule, size_t step) {
    const size_t warmup = schedule.warmup;
    if (schedule.type == Scheduler::constant) return schedule.learning_rate;
    if (schedule.type == Scheduler::warmup_stable_decay) return schedule.learning_rate * warmup_stable_decay(schedule, step);
    if (step < warmup) return schedule.learning_rate * (double(step) / double(warmup));
    if (schedule.type == Scheduler::constant_with_warmup) return schedule.learning_rate;

    const double decay_steps = schedule.steps > warmup ? double(schedule.steps - warmup) : 1;
    if (schedule.type == Scheduler::linear)
        return schedule.learning_rate * std::max(0.0, (double(schedule.steps) - double(step)) / decay_steps);
    const double cosine = 0.5 * (1 + std::cos(M_PI * (double(step - warmup) / decay_steps)));
    const double end = schedule.type == Scheduler::cosine ? 0 : schedule.min_lr_ratio;
    return schedule.learning_rate * (cosine * (1 - end) + end);
}
