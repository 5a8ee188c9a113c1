// The definition of a loss spike.
#include <gtest/gtest.h>

#include "../llmc/core/rng.h"
#include "../llmc/train/spikes.h"

static double noise(uint64_t i) { return 0.1 * (Random{7, Purpose::test, 1}.uniform(i) - 0.5); }

TEST(Spikes, MeanAndVarianceOfTheFirstWindow) {
    LossSpikes spikes;
    double sum = 0, squares = 0;
    for (size_t i = 0; i < LossSpikes::window; i++) {
        const double loss = 3 + noise(i);
        sum += loss, squares += loss * loss;
        spikes.add(loss);
    }
    const double n = LossSpikes::window, mean = sum / n;
    EXPECT_NEAR(spikes.mean, mean, 1e-12);
    EXPECT_NEAR(spikes.variance, squares / n - mean * mean, 1e-12);
}

TEST(Spikes, JumpIsASpikeAndAFallOrADriftIsNot) {
    LossSpikes spikes;
    for (size_t i = 0; i < 300; i++) {
        EXPECT_FALSE(spikes.add(3 - 0.0005 * double(i) + noise(i))) << i;
        EXPECT_TRUE(i != 200 || spikes.add(4));
        EXPECT_TRUE(i != 250 || !spikes.add(0.5));
    }
    EXPECT_EQ(spikes.count, 1u);
    LossSpikes first_steps;
    for (size_t i = 0; i < LossSpikes::settled; i++) EXPECT_FALSE(first_steps.add(i % 2 ? 1 : 100));
}

TEST(Spikes, LossThatStaysHighBecomesUsual) {
    LossSpikes spikes;
    for (size_t i = 0; i < 200; i++) spikes.add((i < 100 ? 2 : 5) + noise(i % 100));
    EXPECT_GE(spikes.count, 1u);
    EXPECT_LE(spikes.count, 5u);
}
