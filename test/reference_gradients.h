// Stochastic rounding to bf16 in float64: the neighbours of a float, and the probability of the upper one.
#pragma once
#include "../llmc/ops/gradients.h"
#include "check.h"

struct BetweenBf16 {
    double lower, unit,
        up;  // the neighbour towards 0, with the sign of x; the distance to the next one; the probability of that one
};

inline BetweenBf16 between_bf16(float x) {
    const double unit = std::ldexp(1.0, std::max(std::ilogb(x), -126) - 7);  // 8 significant bits
    const double lower = std::trunc(double(x) / unit) * unit;
    return {lower, std::copysign(unit, x), std::abs(double(x) - lower) / unit};
}
