// Measures the peaks of this device, the reference of a profile (profile.h).
#pragma once
#include <algorithm>
#include <vector>

#include "../core/arena.h"
#include "../core/rng.h"
#include "../core/timeline.h"
#include "../ops/layout.h"
#include "../ops/matmul.h"
#include "profile.h"

// Calls f once to warm up and then a few times. Returns the shortest time between two marks.
template <class F> double least_seconds(Timeline &timeline, F f) {
    f();
    for (size_t i = 0; i < 5; i++) timeline.mark(nullptr), f();
    timeline.mark(nullptr);
    const auto seconds = timeline.take();
    return *std::min_element(seconds.begin(), seconds.end());
}

// Measures the product of (n, n) matrices of random numbers, because a GPU multiplies zeros faster.
template <class Dev> double product_rate(Dev dev, Memory &memory, Timeline &timeline, size_t n) {
    using X = typename Dev::X;
    X *x, *w, *out;
    std::byte *scratch;
    Plan plan;
    plan.add(&x, "x", {n, n}), plan.add(&w, "w", {n, n}), plan.add(&out, "out", {n, n});
    plan.add(&scratch, "matmul workspace", {matmul_scratch(dev)});
    plan.place();
    const Arena arena(plan, memory);
    matmul_use_scratch(dev, scratch);
    std::vector<X> part(size_t(1) << 20);  // n*n is a multiple of its size
    for (size_t i = 0; i < part.size(); i++) part[i] = float(Random{1, Purpose::init, 0}.uniform(i) - 0.5);
    in_parts(
        n * n, [&](size_t first, size_t) { write(memory, x + first, part), write(memory, w + first, part); }, part.size());
    const double seconds = least_seconds(timeline, [&] { matmul_forward(dev, out, x, w, (const X *)nullptr, n, n, n); });
    matmul_use_scratch(dev, nullptr);
    return 2 * double(n * n * n) / seconds;
}

template <class Dev> double copy_rate(Dev dev, Memory &memory, Timeline &timeline) {
    using X = typename Dev::X;
    constexpr size_t n = size_t(64) << 20;  // several times any cache
    float *from;
    X *to;
    Plan plan;
    plan.add(&from, "from", {n}), plan.add(&to, "to", {n});
    plan.place();
    const Arena arena(plan, memory);
    const double seconds = least_seconds(timeline, [&] { round_floats(dev, to, from, n); });
    return double(n * (sizeof(float) + sizeof(X))) / seconds;
}

// Measures the roofline (Williams et al., "Roofline: an insightful visual performance model", CACM 2009) of this device with the ops of
// training: the rate of a large product, and of a large copy that reads floats and writes X.
template <class Dev> Peaks measure_peaks(Dev dev, Memory &memory, Timeline &timeline) {
    Peaks peaks{0, copy_rate(dev, memory, timeline)};
    // n grows until the product takes long enough to be measured.
    for (double n = 1024, seconds = 0; n <= 8192 && seconds < 0.02; n *= 2) {
        const double rate = product_rate(dev, memory, timeline, size_t(n));
        peaks.flops = std::max(peaks.flops, rate);
        seconds = 2 * n * n * n / rate;
    }
    return peaks;
}
