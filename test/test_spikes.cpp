// What counts as a loss spike.
#include <gtest/gtest.h>

#include "../llmc/core/rng.h"
#include "../llmc/train/spikes.h"

namespace {

double noise(uint64_t i) { return 0.1 * (Random{7, Purpose::test, 1}.uniform(i) - 0.5); }

}  // namespace

TEST(Spikes, MeanAndVarianceOfAWindowThatIsNotFull) {
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

TEST(Spikes, AJumpCountsAndAFallOrADriftDoesNot) {
    LossSpikes spikes;
    for (size_t i = 0; i < 300; i++) {
        EXPECT_FALSE(spikes.add(3 - 0.0005 * double(i) + noise(i))) << i;
        if (i == 200) {
            EXPECT_TRUE(spikes.add(4));
        }
        if (i == 250) {
            EXPECT_FALSE(spikes.add(0.5));
        }
    }
    EXPECT_EQ(spikes.count, 1u);
}

TEST(Spikes, TheFirstStepsAreNone) {
    LossSpikes spikes;
    for (size_t i = 0; i < LossSpikes::settled; i++) EXPECT_FALSE(spikes.add(i % 2 ? 1 : 100));
}

TEST(Spikes, ALossThatStaysHighBecomesUsual) {
    LossSpikes spikes;
    for (size_t i = 0; i < 100; i++) spikes.add(2 + noise(i));
    for (size_t i = 0; i < 100; i++) spikes.add(5 + noise(i));
    EXPECT_GE(spikes.count, 1u);
    EXPECT_LE(spikes.count, 5u);
}
