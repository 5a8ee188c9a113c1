// Uniform noise on the embeddings of tokens in training (NEFTune, Jain et al., ICLR 2024, arXiv:2310.05914).
//
//   noise_forward(dev, x, noise, T, C)     x[t,c] += noise.magnitudes[t] * u, with u uniform in [-1, 1]
//
//   x (T, C) X     noise.magnitudes, .documents, .positions (T)
//
// u is a function of the noise's seed, the number of the token's document, the token's position in the document, and the channel (Philox). So it does
// not depend on the packing of documents into rows or on ranks. A block of four random words serves four channels. The noise is a constant term, so
// the gradient of x equals the gradient of the sum, and there is no backward pass.
#pragma once
#include <cstddef>
#include <cstdint>
#include <tuple>

#include "../core/device.h"
#include "../core/rng.h"

struct TokenNoise {
    uint64_t seed = 0;
    const float *magnitudes = nullptr;                         // (T)
    const int32_t *documents = nullptr, *positions = nullptr;  // (T) of the tokens

    auto pointers() const { return std::tuple(magnitudes, documents, positions); }  // ../core/rehearsal.h

    static constexpr size_t group = 4;  // channels of a block
    HOST_DEVICE Counter words(size_t t, size_t c) const {
        return Random{seed, Purpose::noise, uint32_t(c / group)}.block(uint64_t(uint32_t(documents[t])) << 32 |
                                                                       uint32_t(positions[t]));
    }
    HOST_DEVICE static float uniform(uint32_t word) { return float(int32_t(word)) * 0x1p-31f; }
};

template <class X> void noise_forward(Cpu<X> dev, X *x, TokenNoise noise, size_t T, size_t C) {
    constexpr size_t group = TokenNoise::group;
#pragma omp parallel for num_threads(dev.threads)
    for (size_t t = 0; t < T; t++)
        for (size_t c = 0; c < C; c += group) {
            const Counter words = noise.words(t, c);
            for (size_t i = 0; i < group && c + i < C; i++) {
                X &value = x[t * C + c + i];
                value = float(value) + noise.magnitudes[t] * TokenNoise::uniform(words[int(i)]);
            }
        }
}

REHEARSED(noise_forward);
