// noise in float64, and how far float may be from it.
#pragma once
#include "../llmc/ops/noise.h"
#include "check.h"

inline double uniform_of(const TokenNoise &noise, int32_t document, int32_t position, size_t c) {
    const Random random{noise.seed, Purpose::noise, uint32_t(c / 4)};
    return double(int32_t(random.block(uint64_t(document) << 32 | uint64_t(position))[int(c % 4)])) / 2147483648.0;
}

inline std::vector<double> noise_reference(const std::vector<double> &x, const TokenNoise &noise,
                                           const std::vector<float> &magnitudes, const std::vector<int32_t> &documents,
                                           const std::vector<int32_t> &positions, size_t C) {
    std::vector<double> out(x.size());
    for (size_t i = 0; i < x.size(); i++)
        out[i] = x[i] + double(magnitudes[i / C]) * uniform_of(noise, documents[i / C], positions[i / C], i % C);
    return out;
}

// The word becomes a float, is multiplied and added: three roundings in float, then one to X.
template <class X> double noise_error(const std::vector<double> &x, double magnitude) {
    return (3 * unit_roundoff<float> + unit_roundoff<X>)*(largest(x) + magnitude);
}
