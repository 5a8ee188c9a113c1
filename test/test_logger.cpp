// The log file.
#include <cmath>
#include <sstream>

#include "../llmc/train/logger.h"
#include "errors.h"

static std::string text_of(const std::string &path) {
    std::ostringstream out;
    out << std::ifstream(path).rdbuf();
    return out.str();
}

// A resumed run removes the lines of later steps and an incomplete last line.
TEST(Logger, LinesThatARunKeeps) {
    const std::string two =
                          "{\"task\":\"sft\"}\n{\"step\":1,\"loss\":3}\n{\"step\":2,\"loss\":2}\n{\"step\":2,\"eval_loss\":2}\n",
                      earlier = two + "{\"step\":3,\"loss\":1}\n{\"step\":4,\"lo", line = "{\"step\":9}\n";
    const struct {
        std::string before;
        bool resumes;
        size_t step;
        std::string kept;
        bool within_step = false;
    } rows[] = {{earlier, true, 2, two},
                {earlier, true, 2, two.substr(0, two.find("{\"step\":2,\"eval")), true},
                {earlier, false, 0, ""},
                {"{\"step\":1}", true, 1, "{\"step\":1}\n"}};
    for (const auto &[before, resumes, step, kept, within_step] : rows) {
        const TemporaryFile file("log.jsonl");
        file.write(before);
        Logger(file.path, resumes, step, within_step).write({{"step", 9}});
        EXPECT_EQ(text_of(file.path), kept + line);
    }
    const TemporaryFile file("log.jsonl");
    Logger(file.path, false, 0).write({{"loss", NAN}, {"text", "a\n\"b\""}});
    EXPECT_EQ(text_of(file.path), "{\"loss\":null,\"text\":\"a\\n\\\"b\\\"\"}\n");
}

TEST(Logger, StepShowsMfuIfItIsKnown) {
    Logger logger("/dev/null", false, 0);
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
    EXPECT_NO_THROW(logger.sync());  // although /dev/null cannot be synced
}

TEST(Logger, FileThatCannotBeWrittenIsNamed) {
    expect_error([] { Logger("/nonexistent/log.jsonl", false, 0); }, {"/nonexistent/log.jsonl", "fix: "});
    expect_error([] { Logger("/dev/full", false, 0).write({{"step", 1}}); }, {"/dev/full", "fix: "});
}
