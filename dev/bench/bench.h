// Shared by the benchmarks: inputs, a clock, and a heading that names the machine.
#pragma once
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "../../llmc/core/device.h"
#include "../../llmc/core/rng.h"
#include "../../llmc/ops/matmul.h"

using Job = std::function<void()>;

inline double seconds(const Job &work) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Returns the fastest time of each function. A round runs all of them in turn, so other work on the machine slows them down equally.
inline std::vector<double> fastest(int rounds, const std::vector<Job> &works) {
    std::vector<double> best(works.size(), INFINITY);
    for (int round = 0; round < rounds; round++)
        for (size_t i = 0; i < works.size(); i++) best[i] = std::min(best[i], seconds(works[i]));
    return best;
}

template <class X> std::vector<X> noise(size_t n, uint32_t stream) {  // in [-1, 1)
    const Random random{1, Purpose::test, stream};
    std::vector<X> out(n);
    for (size_t i = 0; i < n; i++) out[i] = X(float(2 * random.uniform(i) - 1));
    return out;
}

// The product to which other rates are compared: out = x w^T, all three matrices 2048 x 2048.
template <class Dev> struct PlainMatmul {
    using X = typename Dev::X;
    static constexpr size_t n = 2048;
    static constexpr double flop = 2.0 * n * n * n;
    Dev dev;
    std::vector<X> x = noise<X>(n * n, 1), w = noise<X>(n * n, 2), out = std::vector<X>(n * n);

    explicit PlainMatmul(Dev dev) : dev(dev) {}
    void operator()() { matmul_forward(dev, out.data(), x.data(), w.data(), nullptr, n, n, n); }
};

inline std::string cpu_name() {
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line);)
        if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
    return "unknown CPU";
}

// The only argument of a benchmark is its number of threads.
inline int threads_argument(int argc, char **argv) { return argc > 1 ? std::max(1, atoi(argv[1])) : omp_get_max_threads(); }

inline void heading(const char *what, int threads) {
    printf("\n==== %s: %s, %d threads, matmul: %s\n", what, cpu_name().c_str(), threads, matmul_backend());
}
