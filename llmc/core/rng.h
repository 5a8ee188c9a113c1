// Random numbers without state: every number is a pure function of (seed, purpose, stream, index), so it does not depend on ranks,
// threads or the step at which a run was resumed. The function is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC
// 2011).
#pragma once
#include <cmath>
#include <cstdint>
#include <string_view>
#include <tuple>

#include "dtype.h"

enum class Purpose : uint32_t {
    init = 1,
    shuffle = 2,
    sampling = 3,
    holdout = 4,
    test = 5,
    rounding = 6,
    dropout = 7,
    gradients = 8,
    noise = 9
};

struct Counter {  // input and output of Philox: 128 bits. std::array cannot be used in kernels
    uint32_t word[4];

    HOST_DEVICE uint32_t operator[](int i) const { return word[i]; }
    bool operator==(const Counter &) const = default;
};

HOST_DEVICE inline Counter philox4x32(Counter c, uint32_t key0, uint32_t key1) {
    for (int round = 0; round < 10; round++) {
        const uint64_t a = uint64_t(0xD2511F53) * c[0], b = uint64_t(0xCD9E8D57) * c[2];
        c = {{uint32_t(b >> 32) ^ c[1] ^ key0, uint32_t(b), uint32_t(a >> 32) ^ c[3] ^ key1, uint32_t(a)}};
        key0 += 0x9E3779B9;
        key1 += 0xBB67AE85;
    }
    return c;
}

struct Random {
    uint64_t seed;
    Purpose purpose;
    // of a tensor (init), epoch (shuffle), prompt (sampling), step (rounding), group of channels (dropout, noise), rank (gradients)
    uint32_t stream;

    HOST_DEVICE Counter block(uint64_t index) const {
        return philox4x32({{uint32_t(index), uint32_t(index >> 32), stream, uint32_t(purpose)}}, uint32_t(seed),
                          uint32_t(seed >> 32));
    }
    uint64_t bits(uint64_t index) const {
        const auto b = block(index);
        return uint64_t(b[1]) << 32 | b[0];
    }
    double uniform(uint64_t index) const { return double(bits(index) >> 11) * 0x1p-53; }  // in [0, 1)
    double normal(uint64_t index) const {                                                 // Box-Muller
        const auto b = block(index);
        const double u = (double(b[0]) + 1) * 0x1p-32, v = double(b[1]) * 0x1p-32;
        return std::sqrt(-2 * std::log(u)) * std::cos(6.283185307179586 * v);
    }
    uint64_t below(uint64_t index, uint64_t n) const { return uint64_t((unsigned __int128)bits(index) * n >> 64); }
    auto pointers() const { return std::tuple(); }  // rehearsal.h
};

// Returns a stream number for a name (FNV-1a), for tensors.
inline uint32_t stream_of(std::string_view name) {
    uint32_t h = 2166136261u;
    for (char c : name) h = (h ^ uint8_t(c)) * 16777619u;
    return h;
}
