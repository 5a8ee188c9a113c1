// Gradients that are stored in bf16 and computed in float (../parallel/zero.h): they become floats before a backward pass, which adds to them, and
// are rounded stochastically afterwards. With rounding to nearest, a sum would not change if a micro-step adds less than half a unit in its last
// place.
//
//   widen_gradients(dev, out, stored, n)               out[i] = stored[i]
//   round_gradients(dev, stored, x, n, random, first)  stored[i] = x[i] rounded stochastically, by bits that are a function of (random, first + i)
//
//   out, x (n) float     stored (n) bf16     first: the number of element 0 in the model     nothing may alias
#pragma once
#include <algorithm>
#include <cstddef>

#include "../core/common.h"
#include "../core/device.h"
#include "../core/rng.h"

// A block of Philox serves a group of eight elements, 16 bits each. Groups begin at multiples of eight of the element numbers in the model, so an
// element has the same bits in any array.
constexpr size_t rounding_group = 8;
HOST_DEVICE inline uint32_t rounding_bits(const Counter &block, size_t number) {
    return block.word[number % rounding_group / 2] >> number % 2 * 16 & 0xffff;
}

template <class X> void widen_gradients(Cpu<X> dev, float *out, const bf16 *stored, size_t n) {
#pragma omp parallel for simd num_threads(dev.threads)
    for (size_t i = 0; i < n; i++) out[i] = stored[i];
}

template <class X> void round_gradients(Cpu<X> dev, bf16 *stored, const float *x, size_t n, Random random, size_t first) {
    const size_t begin = first / rounding_group, end = ceil_div(first + n, rounding_group);
#pragma omp parallel for num_threads(dev.threads)
    for (size_t group = begin; group < end; group++) {
        const Counter block = random.block(group);
        const size_t last = std::min(first + n, (group + 1) * rounding_group);
        for (size_t number = std::max(first, group * rounding_group); number < last; number++)
            stored[number - first] = round_stochastically(x[number - first], rounding_bits(block, number));
    }
}

REHEARSED(widen_gradients);
REHEARSED(round_gradients);
