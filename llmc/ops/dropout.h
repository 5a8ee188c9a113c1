// Dropout (Srivastava et al., JMLR 2014) on the input rows of an adapter (LoRA), with a scale.
//
//   dropout_forward (dev, out, x, mask, T, C)       out[t,c] = scale * x[t,c] where the mask keeps it, else 0
//   dropout_backward(dev, dx, dout, mask, T, C)     dx[t,c] += scale * dout[t,c] where the mask keeps it
//
//   x, out, dx, dout (T, C) X     out may alias x     mask.documents, mask.positions (T), which may be null if nothing is dropped
//
// The mask is a function of its seed, the number of the token's document, the token's position in the document, and the channel (Philox). So it does
// not depend on the packing of documents into rows or on ranks, and recomputation draws the same mask. A block of four random words serves four
// channels; a word below `threshold` drops its channel.
#pragma once
#include <cstddef>
#include <cstdint>
#include <tuple>

#include "../core/device.h"
#include "../core/rng.h"

struct DropoutMask {
    float scale = 1;
    uint32_t threshold = 0;  // 2^32 times the probability of dropping a channel
    uint64_t seed = 0;
    const int32_t *documents = nullptr, *positions = nullptr;  // (T) of the tokens
    size_t first = 0;                                          // number of x's first channel, if x has some of the channels

    auto pointers() const { return std::tuple(documents, positions); }  // ../core/rehearsal.h

    static constexpr size_t group = 4;  // channels of a block
    HOST_DEVICE Counter words(size_t t, size_t channel) const {
        return Random{seed, Purpose::dropout, uint32_t(channel / group)}.block(uint64_t(uint32_t(documents[t])) << 32 |
                                                                               uint32_t(positions[t]));
    }
};

// Calls f(i, factor) for each element, where factor is the scale, or 0 if the mask drops the element.
template <class F> void dropout_each(int threads, const DropoutMask &mask, size_t T, size_t C, F f) {
    constexpr size_t group = DropoutMask::group;
#pragma omp parallel for num_threads(threads)
    for (size_t t = 0; t < T; t++) {
        if (mask.threshold == 0) {
            for (size_t c = 0; c < C; c++) f(t * C + c, mask.scale);
            continue;
        }
        for (size_t c = 0; c < C;) {
            const Counter words = mask.words(t, mask.first + c);
            for (size_t i = (mask.first + c) % group; i < group && c < C; i++, c++)
                f(t * C + c, words[int(i)] < mask.threshold ? 0.0f : mask.scale);
        }
    }
}

template <class X> void dropout_forward(Cpu<X> dev, X *out, const X *x, DropoutMask mask, size_t T, size_t C) {
    dropout_each(dev.threads, mask, T, C, [=](size_t i, float factor) { out[i] = factor == 0 ? 0.0f : factor * float(x[i]); });
}

template <class X> void dropout_backward(Cpu<X> dev, X *dx, const X *dout, DropoutMask mask, size_t T, size_t C) {
    dropout_each(dev.threads, mask, T, C, [=](size_t i, float factor) { dx[i] = float(dx[i]) + factor * float(dout[i]); });
}

REHEARSED(dropout_forward);
REHEARSED(dropout_backward);
