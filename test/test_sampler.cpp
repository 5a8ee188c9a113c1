// The sampler: greedy, and the distribution that remains after temperature, top-k and top-p.
#include <gtest/gtest.h>

#include <cmath>
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

TEST(Sampler, AlwaysAToken) {
    const std::vector<float> extreme = {-1e38f, 3e38f, -INFINITY, 3e38f};
    for (double uniform : {0.0, 0.25, 0.75, std::nextafter(1.0, 0.0)})
        for (const Sampling &s :
             {Sampling{.temperature = 0.7}, {.temperature = 1, .top_k = 3}, {.temperature = 1, .top_p = 0.9}}) {
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
