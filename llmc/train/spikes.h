// Finds loss spikes: steps whose loss is far above the earlier losses.
//
//   mean, variance: exponential averages of the losses over about `window` steps, as in West, "Updating mean and variance estimates",
//   CACM 1979, with the weight a = 1 / min(n, window) of the n-th:   d = loss - mean,  mean += a d,  variance = (1 - a) (variance + a d^2)
//   A loss is a spike if at least `settled` losses came before it and it is above mean + limit * sqrt(variance). It still counts in the averages.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>

struct LossSpikes {
    static constexpr size_t window = 100, settled = 20;
    static constexpr double limit = 6;

    size_t seen = 0, count = 0;
    double mean = 0, variance = 0;

    bool add(double loss) {
        const bool spike = seen >= settled && loss > mean + limit * std::sqrt(variance);
        count += spike;
        const double a = 1 / double(std::min(++seen, window)), d = loss - mean;
        mean += a * d;
        variance = (1 - a) * (variance + a * d * d);
        return spike;
    }
};
