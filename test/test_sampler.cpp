// The sampler: greedy, and the distribution that remains after temperature, top-k and top-p.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <vector>

#include "../llmc/core/rng.h"
#include "../llmc/train/sampler.h"

// How often each token comes out of n evenly spaced uniform numbers: its probability, to 1/n.
static std::vector<double> frequencies(const std::vector<float> &logits, const Sampling &sampling, size_t n = 20000) {
    std::vector<double> out(logits.size());
    for (size_t i = 0; i < n; i++) out[size_t(sample_token(logits, sampling, (double(i) + 0.5) / double(n)))] += 1 / double(n);
    return out;
}

static void expect_distribution(const std::vector<double> &got, std::vector<double> want) {
    double sum = 0;
    for (double p : want) sum += p;
    for (size_t i = 0; i < want.size(); i++) EXPECT_NEAR(got[i], want[i] / sum, 1e-4) << "token " << i;
}

static const std::vector<float> logits = {std::log(0.1f), std::log(0.4f), std::log(0.2f), std::log(0.3f)};

TEST(Sampler, TemperatureZeroTakesTheLikeliestAndTheFirstOfEquals) {
    for (double uniform : {0.0, 0.5, 0.999}) EXPECT_EQ(sample_token(logits, {}, uniform), 1);
    EXPECT_EQ(sample_token(std::vector<float>{1, 3, 3, 2}, {}, 0.9), 1);
}

TEST(Sampler, TemperatureScalesLogits) {
    expect_distribution(frequencies(logits, {.temperature = 1}), {0.1, 0.4, 0.2, 0.3});
    expect_distribution(frequencies(logits, {.temperature = 0.5}), {0.01, 0.16, 0.04, 0.09});
    expect_distribution(frequencies(logits, {.temperature = 1e-300}), {0, 1, 0, 0});
    expect_distribution(frequencies(logits, {.temperature = 1e30}), {1, 1, 1, 1});
}

TEST(Sampler, TopKAndTopP) {
    expect_distribution(frequencies(logits, {.temperature = 1, .top_k = 2}), {0, 0.4, 0, 0.3});
    expect_distribution(frequencies(logits, {.temperature = 1, .top_k = 9}), {0.1, 0.4, 0.2, 0.3});
    expect_distribution(frequencies(logits, {.temperature = 1, .top_p = 0.39}), {0, 1, 0, 0});  // at least one
    expect_distribution(frequencies(logits, {.temperature = 1, .top_p = 0.41}),
                        {0, 0.4, 0, 0.3});  // the one that crosses the border belongs to them
    expect_distribution(frequencies(logits, {.temperature = 1, .top_p = 0.85}), {0, 0.4, 0.2, 0.3});
    expect_distribution(frequencies(logits, {.temperature = 1, .top_k = 3, .top_p = 0.7}),
                        {0, 0.4, 0, 0.3});  // top_p of what top_k left
    expect_distribution(frequencies(logits, {.temperature = 1, .top_k = 1, .top_p = 1e-9}), {0, 1, 0, 0});
}

TEST(Sampler, MinP) {
    expect_distribution(frequencies(logits, {.temperature = 1, .min_p = 0.3}), {0, 0.4, 0.2, 0.3});
    expect_distribution(frequencies(logits, {.temperature = 1, .min_p = 0.7}), {0, 0.4, 0, 0.3});
    expect_distribution(frequencies(logits, {.temperature = 1, .min_p = 1}), {0, 1, 0, 0});
    expect_distribution(frequencies(logits, {.temperature = 0.5, .min_p = 0.3}), {0, 0.16, 0, 0.09});  // after the temperature
    for (const double min_p : {0.2, 0.3, 0.6, 0.8}) {                                                  // with sorting and without
        const auto want = frequencies(logits, {.temperature = 1, .min_p = min_p});
        expect_distribution(frequencies(logits, {.temperature = 1, .top_k = 4, .min_p = min_p}), want);
    }
    // of top_p's tokens, whose probabilities are those among all
    expect_distribution(frequencies(logits, {.temperature = 1, .top_p = 0.85, .min_p = 0.6}), {0, 0.4, 0, 0.3});
}

TEST(Sampler, RepeatedTokensArePenalisedOnce) {
    std::vector<float> got = {2, -2, 0, 1, -1};
    penalise(got, std::vector<int32_t>{1, 0, 0, 2, 1}, 2);
    EXPECT_EQ(got, (std::vector<float>{1, -4, 0, 1, -1}));
    penalise(got, std::vector<int32_t>{4, 3}, 0.5);  // below 1 they become likelier
    EXPECT_EQ(got, (std::vector<float>{1, -4, 0, 2, -0.5}));
    penalise(got, {}, 3);
    EXPECT_EQ(got, (std::vector<float>{1, -4, 0, 2, -0.5}));
}

// Pearson's statistic of counts of `tries` trials, where `want` is proportional to the probabilities; tokens with 0 must not occur.
static double chi_squared(const std::vector<size_t> &counts, const std::vector<double> &want, size_t tries) {
    const double sum = std::accumulate(want.begin(), want.end(), 0.0);
    double out = 0;
    for (size_t i = 0; i < want.size(); i++) {
        if (want[i] == 0) EXPECT_EQ(counts[i], 0u) << "token " << i;
        else out += std::pow(double(counts[i]) - want[i] / sum * double(tries), 2) / (want[i] / sum * double(tries));
    }
    return out;
}

// 10 000 draws with the engine's random numbers, of 40 tokens whose probabilities span a factor of 50. The statistic has at most 39 degrees of
// freedom; with them it is above 90 in 6 of a million experiments (with f degrees it has mean f and variance 2 f).
TEST(Sampler, DrawsFollowTheDistributionOfEachFilter) {
    constexpr size_t V = 40, tries = 10000;
    std::vector<float> logit(V);
    for (size_t v = 0; v < V; v++) logit[v] = 0.1f * float(v * 17 % V);  // no two are equal
    const std::vector<int32_t> occurred = {3, 39, 7, 3};
    uint32_t stream = 0;
    for (const Sampling &s : {Sampling{.temperature = 1},
                              {.temperature = 0.7},
                              {.temperature = 1, .top_k = 12},
                              {.temperature = 1.3, .top_p = 0.8},
                              {.temperature = 1, .min_p = 0.2},
                              {.temperature = 1, .repetition_penalty = 1.5},
                              {.temperature = 0.8, .top_k = 30, .top_p = 0.9, .min_p = 0.1, .repetition_penalty = 1.2}}) {
        std::vector<float> seen = logit;
        penalise(seen, occurred, s.repetition_penalty);
        // The definition: sorted by probability, and cut where the first of the filters ends.
        std::vector<std::pair<double, size_t>> order;
        double all = 0, mass = 0;
        for (size_t v = 0; v < V; v++) order.emplace_back(std::exp(double(seen[v]) / s.temperature), v);
        std::sort(order.rbegin(), order.rend());
        if (s.top_k) order.resize(s.top_k);
        for (const auto &[p, v] : order) all += p;
        std::vector<double> want(V);
        for (const auto &[p, v] : order) {
            if (mass >= s.top_p * all || p < s.min_p * order[0].first) break;
            want[v] = p, mass += p;
        }
        std::vector<size_t> counts(V);
        const Random random{11, Purpose::sampling, stream++};
        for (size_t i = 0; i < tries; i++) counts[size_t(sample_token(seen, s, random.uniform(i)))]++;
        EXPECT_LT(chi_squared(counts, want, tries), 90) << "filter " << stream;
    }
}

// The mass of the tokens up to the sampled one reaches the random number, that of those before does not, but for roundings of sums of 1500 floats.
TEST(Sampler, ManyTokens) {
    std::vector<float> many(1500);
    for (size_t v = 0; v < many.size(); v++) many[v] = float(v * 617 % 1500) * 0.005f;
    for (const double temperature : {0.8, 2.0}) {
        std::vector<double> below = {0};
        for (const float l : many) below.push_back(below.back() + std::exp(double(l) / temperature));
        for (double uniform = 0; uniform < 1; uniform += 1.0 / 4096) {
            const size_t token = size_t(sample_token(many, {.temperature = temperature}, uniform));
            EXPECT_LE(below[token] / below.back(), uniform + 1e-6);
            EXPECT_GE(below[token + 1] / below.back(), uniform - 1e-6);
        }
    }
}

TEST(Sampler, AlwaysAToken) {
    const std::vector<float> extreme = {-1e38f, 3e38f, -INFINITY, 3e38f};
    for (double uniform : {0.0, 0.25, 0.75, std::nextafter(1.0, 0.0)})
        for (const Sampling &s : {Sampling{.temperature = 0.7},
                                  {.temperature = 1, .top_k = 3},
                                  {.temperature = 1, .top_p = 0.9},
                                  {.temperature = 1, .min_p = 1}}) {
            const int32_t token = sample_token(extreme, s, uniform);
            EXPECT_TRUE(token == 1 || token == 3) << token;
        }
    EXPECT_EQ(sample_token(std::vector<float>{-5}, {.temperature = 2}, 0.3), 0);
}

TEST(Sampler, TheSameSeedGivesTheSameTokens) {
    const auto draw = [](uint64_t seed) {
        std::vector<int32_t> out;
        for (size_t n = 0; n < 50; n++)
            out.push_back(sample_token(logits, {.temperature = 1}, Random{seed, Purpose::sampling, 0}.uniform(n)));
        return out;
    };
    EXPECT_EQ(draw(1), draw(1));
    EXPECT_NE(draw(1), draw(2));
}
