// The effect of an answer's length on its reward R, before advantages are computed. l: tokens of the answer, m: the most tokens allowed.
//
//   overlong          R - factor * min(max(l - (m - b), 0), b) / b    a penalty for the last b tokens: Yu et al., "DAPO", 2025, arXiv:2503.14476, eq. 13
//   stop properly     c R if 0 <= c <= 1, c if c < 0                  for an answer that was cut off, after the overlong penalty: OpenRLHF
#pragma once
#include <algorithm>
#include <cstddef>

#include "../core/common.h"
#include "rollouts.h"

struct ShapingOptions {
    size_t longest;                             // m
    size_t overlong_buffer = 0;                 // b; 0: no penalty
    double overlong_factor = 1, stop_coef = 1;  // factor, c
};

inline void check_options(const ShapingOptions &o) {
    if (o.overlong_buffer > o.longest)
        die("--overlong_buffer %zu is more than --max_new_tokens %zu\n  fix: lower --overlong_buffer", o.overlong_buffer,
            o.longest);
    if (!(o.overlong_factor >= 0 && o.overlong_factor <= largest_reward))
        die("--overlong_buffer %zu,%g: the penalty must be 0 or more, and at most %g\n  fix: 1, by default", o.overlong_buffer,
            o.overlong_factor, largest_reward);
    if (!(o.stop_coef <= 1 && o.stop_coef >= -largest_reward))
        die("--stop_properly_coef %g must be at most 1\n  fix: give a factor from 0 to 1 for the reward of an answer that was cut off, or a negative reward",
            o.stop_coef);
}

inline double shaped_reward(const ShapingOptions &o, double reward, size_t tokens, bool truncated) {
    if (!has_reward(reward)) return no_reward;
    if (const double b = double(o.overlong_buffer); b > 0)
        reward -= o.overlong_factor * std::clamp(double(tokens) - (double(o.longest) - b), 0.0, b) / b;
    if (!truncated) return reward;
    return o.stop_coef < 0 ? o.stop_coef : o.stop_coef * reward;
}
