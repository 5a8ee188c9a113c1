// The log file: the lines that a resumed run keeps.
#include <cmath>
#include <sstream>

#include "../llmc/train/logger.h"
#include "errors.h"

static std::string text_of(const std::string &path) {
    std::ostringstream out;
    out << std::ifstream(path).rdbuf();
    return out.str();
}

static const char *const earlier =
    "{\"task\":\"sft\"}\n{\"step\":1,\"loss\":3}\n{\"step\":2,\"loss\":2}\n{\"step\":2,\"eval_loss\":2}\n"
    "{\"step\":3,\"loss\":1}\n{\"step\":4,\"lo";

TEST(Logger, ResumingDropsLaterStepsAndTheLineOfACrash) {
    const TemporaryFile file("log.jsonl");
    file.write(earlier);
    {
        Logger logger(file.path, true, 2);
        logger.write({{"step", 3}, {"loss", 1.5}});
    }
    EXPECT_EQ(
        text_of(file.path),
        "{\"task\":\"sft\"}\n{\"step\":1,\"loss\":3}\n{\"step\":2,\"loss\":2}\n{\"step\":2,\"eval_loss\":2}\n{\"step\":3,\"loss\":1.5}\n");
}

TEST(Logger, WithoutALastNewlineAWholeLineIsKept) {
    const TemporaryFile file("log.jsonl");
    file.write("{\"step\":1}");
    Logger(file.path, true, 1).write({{"step", 2}});
    EXPECT_EQ(text_of(file.path), "{\"step\":1}\n{\"step\":2}\n");
}

TEST(Logger, ANewRunStartsANewFile) {
    const TemporaryFile file("log.jsonl");
    file.write(earlier);
    Logger(file.path, false, 0).write({{"task", "sft"}});
    EXPECT_EQ(text_of(file.path), "{\"task\":\"sft\"}\n");
}

TEST(Logger, NotANumberBecomesNull) {
    const TemporaryFile file("log.jsonl");
    Logger(file.path, false, 0).write({{"loss", NAN}, {"text", "a\n\"b\""}});
    EXPECT_EQ(text_of(file.path), "{\"loss\":null,\"text\":\"a\\n\\\"b\\\"\"}\n");
}

TEST(Logger, AStepShowsMfuWhereItIsKnown) {
    const TemporaryFile file("log.jsonl");
    Logger logger(file.path, false, 0);
    nlohmann::ordered_json line = {{"step", 1},  {"loss", 2},   {"grad_norm", 1}, {"lr", 0.1},
                                   {"tok_s", 5}, {"step_s", 1}, {"mfu", 0.4123}};
    const auto shown = [&] {
        testing::internal::CaptureStdout();
        logger.show_step(line, 2);
        return testing::internal::GetCapturedStdout();
    };
    EXPECT_NE(shown().find("5 tok/s  mfu 41.2 %"), std::string::npos);
    line["mfu"] = nullptr;
    EXPECT_EQ(shown().find("mfu"), std::string::npos);
}

TEST(Logger, WhatCannotBeSyncedIsNoError) {
    Logger logger("/dev/null", false, 0);
    logger.write({{"step", 1}});
    EXPECT_NO_THROW(logger.sync());
}

TEST(Logger, WhereItCannotWriteItSaysSo) {
    expect_error([] { Logger("/nonexistent/log.jsonl", false, 0); }, {"/nonexistent/log.jsonl", "fix: "});
    expect_error([] { Logger("/dev/full", false, 0).write({{"step", 1}}); }, {"/dev/full", "fix: "});
}
