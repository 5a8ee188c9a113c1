// dropout in float64, and how far float may be from it.
#pragma once
#include "../llmc/ops/dropout.h"
#include "check.h"

inline bool dropout_keeps(const DropoutMask &mask, int32_t document, int32_t position, size_t c) {
    const Random random{mask.seed, Purpose::dropout, uint32_t(c / 4)};
    return random.block(uint64_t(document) << 32 | uint64_t(position))[int(c % 4)] >= mask.threshold;
}

inline std::vector<double> dropout_reference(const std::vector<double> &before, const std::vector<double> &x,
                                             const DropoutMask &mask, const std::vector<int32_t> &documents,
                                             const std::vector<int32_t> &positions, size_t C) {
    std::vector<double> out(x.size());
    for (size_t i = 0; i < x.size(); i++)
        out[i] = (before.empty() ? 0 : before[i]) +
                 (dropout_keeps(mask, documents[i / C], positions[i / C], i % C) ? double(mask.scale) * x[i] : 0);
    return out;
}

// A product and a sum in float, then one rounding to X.
template <class X>
double dropout_error(const std::vector<double> &before, const std::vector<double> &x, const DropoutMask &mask) {
    const double most = (before.empty() ? 0 : largest(before)) + mask.scale * largest(x);
    return (2 * unit_roundoff<float> + unit_roundoff<X>)*most;
}
