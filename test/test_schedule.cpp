#include "../llmc/train/schedule.h"

#include "../llmc/train/options.h"

#include <gtest/gtest.h>

#include <map>
#include <vector>

// get_last_lr() before each of 13 updates, from transformers 5.23.0: get_scheduler(name, optimizer with lr 2e-4, num_warmup_steps =
// ceil(12 * 0.2), num_training_steps = 12). cosine_with_min_lr: min_lr_rate 0.1. warmup_stable_decay: min_lr_ratio 0.1, num_decay_steps =
// ceil(12 * 0.3).
static const std::map<std::string, std::vector<double>> transformers = {
    {"constant", std::vector<double>(13, 0.0002)},
    {"constant_with_warmup",
     {0.0, 6.666666666666667e-05, 0.00013333333333333334, 0.0002, 0.0002, 0.0002, 0.0002, 0.0002, 0.0002, 0.0002, 0.0002, 0.0002,
      0.0002}},
    {"linear",
     {0.0, 6.666666666666667e-05, 0.00013333333333333334, 0.0002, 0.00017777777777777779, 0.00015555555555555556,
      0.00013333333333333334, 0.00011111111111111112, 8.888888888888889e-05, 6.666666666666667e-05, 4.4444444444444447e-05,
      2.2222222222222223e-05, 0.0}},
    {"cosine",
     {0.0, 6.666666666666667e-05, 0.00013333333333333334, 0.0002, 0.00019396926207859084, 0.0001766044443118978,
      0.00015000000000000001, 0.00011736481776669306, 8.263518223330697e-05, 5.000000000000002e-05, 2.339555568810221e-05,
      6.030737921409169e-06, 0.0}},
    {"cosine_with_min_lr",
     {0.0, 6.666666666666667e-05, 0.00013333333333333334, 0.0002, 0.00019457233587073176, 0.00017894399988070803, 0.000155,
      0.00012562833599002375, 9.437166400997628e-05, 6.500000000000002e-05, 4.1056000119291995e-05, 2.542766412926825e-05,
      2e-05}},
    {"warmup_stable_decay",
     {2e-05, 8e-05, 0.00014, 0.0002, 0.0002, 0.0002, 0.0002, 0.0002, 0.0002, 0.00017363961030678927, 0.00011000000000000002,
      4.6360389693210735e-05, 2e-05}},
};

TEST(Schedule, EqualsTransformersStepByStep) {
    for (const auto &[type, rates] : transformers)
        for (size_t step = 0; step < rates.size(); step++)
            EXPECT_NEAR(learning_rate_at({*find_choice<Scheduler>(type), 2e-4, Steps(0.2).of(12), 0.1, 12, 0.3}, step),
                        rates[step], 2e-4 * 0x1p-51)
                << type << ", step " << step;
}

TEST(Schedule, NoWarmupAndOnlyWarmup) {  // also of transformers
    const std::vector<double> none = {0.0002, 0.000155, 6.500000000000002e-05, 2e-05};
    const std::vector<double> all = {0.0, 6.666666666666667e-05, 0.00013333333333333334, 0.0};
    for (size_t step = 0; step < 4; step++) {
        EXPECT_NEAR(learning_rate_at({Scheduler::cosine_with_min_lr, 2e-4, 0, 0.1, 3, 0}, step), none[step], 2e-4 * 0x1p-51)
            << step;
        EXPECT_NEAR(learning_rate_at({Scheduler::linear, 2e-4, 3, 0.1, 3, 0}, step), all[step], 2e-4 * 0x1p-51) << step;
    }
}

TEST(Schedule, WarmupStepsAreRoundedUpAsInPython) {
    EXPECT_EQ(Steps(0.03).of(100), 3u);
    EXPECT_EQ(Steps(0.07).of(100), 8u);  // 100 * 0.07 is 7.000000000000001
    EXPECT_EQ(Steps(0.03).of(1), 1u);
    EXPECT_EQ(Steps(0).of(100), 0u);
}
