// Checkpoints: a directory is there whole or not at all, the optimizer's state comes back bit for bit, and only what is ours is removed.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>

#include "../llmc/core/file.h"
#include "../llmc/core/rng.h"
#include "../llmc/io/checkpoint.h"
#include "prepared.h"

static HostMemory memory;

namespace fs = std::filesystem;

namespace {

struct Checkpoint : testing::Test {
    const std::string dir = testing::TempDir() + "llmc_checkpoint_" + std::to_string(getpid());

    void SetUp() override { fs::create_directories(dir); }
    void TearDown() override { fs::remove_all(dir); }

    std::set<std::string> names() const {
        std::set<std::string> out;
        for (const auto &entry : fs::directory_iterator(dir)) out.insert(entry.path().filename());
        return out;
    }
    void make(const std::vector<const char *> &directories) const {
        for (const char *name : directories)
            write_file((fs::create_directories(dir + "/" + name), dir + "/" + name + "/file"), "x");
    }
};

struct Moments {  // of an optimizer, on the heap
    std::vector<float> master, m, v;

    explicit Moments(size_t n, uint32_t stream = 0) : master(n), m(n), v(n) {
        for (auto *x : {&master, &m, &v}) {
            const Random random{1, Purpose::test, stream++};
            for (size_t i = 0; i < n; i++) (*x)[i] = float(random.normal(i));
        }
    }
    OptimizerState state() { return {master.data(), m.data(), v.data(), master.size(), &memory}; }
};

}  // namespace

TEST_F(Checkpoint, TheOptimizerComesBackBitForBit) {
    Moments saved(100003), loaded(100003, 9);
    saved.m[0] = -0.0f, saved.m[1] = 1e-42f, saved.v[100002] = 3e38f;
    save_optimizer(dir, saved.state());
    verify_optimizer(dir, saved.state());
    load_optimizer(dir, loaded.state());
    EXPECT_EQ(memcmp(loaded.master.data(), saved.master.data(), 100003 * sizeof(float)), 0);
    EXPECT_EQ(memcmp(loaded.m.data(), saved.m.data(), 100003 * sizeof(float)), 0);
    EXPECT_EQ(memcmp(loaded.v.data(), saved.v.data(), 100003 * sizeof(float)), 0);
}

TEST_F(Checkpoint, VerifyNoticesAFlippedBit) {
    Moments saved((size_t(1) << 20) + 77);  // more than one piece is read back
    save_optimizer(dir, saved.state());
    const std::string path = dir + "/optimizer.safetensors";
    const size_t size = fs::file_size(path), data = size - 3 * saved.m.size() * sizeof(float);
    for (const size_t at : {data, data + size / 2, size - 1}) {
        std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
        file.seekg(std::streamoff(at));
        const int byte = file.get();
        const auto put = [&](int value) { file.seekp(std::streamoff(at)), file.put(char(value)), file.flush(); };
        put(byte ^ 1);
        const char *tensor = at == data ? "master" : at == size - 1 ? "tensor v" : "tensor m";
        expect_contains(error_of([&] { verify_optimizer(dir, saved.state()); }), {path, tensor, "fix: "});
        put(byte);
        verify_optimizer(dir, saved.state());
    }
}

TEST_F(Checkpoint, AnOptimizerOfAnotherSizeIsRefused) {
    Moments saved(100), other(101);
    save_optimizer(dir, saved.state());
    expect_contains(error_of([&] { load_optimizer(dir, other.state()); }), {"optimizer.safetensors", "(100)", "(101)"});
    fs::resize_file(dir + "/optimizer.safetensors", fs::file_size(dir + "/optimizer.safetensors") - 1);
    expect_contains(error_of([&] { load_optimizer(dir, saved.state()); }), {"optimizer.safetensors"});
}

TEST_F(Checkpoint, ADirectoryAppearsWhole) {
    make({"step_2", "step_2.tmp"});  // of an earlier run and of its crash
    write_directory(dir + "/step_2", [&](const std::string &to) {
        EXPECT_NE(to, dir + "/step_2");
        EXPECT_TRUE(fs::is_empty(to));
        EXPECT_TRUE(fs::exists(dir + "/step_2/file"));  // still the old one
        write_file(to + "/new", "y");
    });
    EXPECT_EQ(names(), std::set<std::string>({"step_2"}));
    EXPECT_TRUE(fs::exists(dir + "/step_2/new"));
    EXPECT_FALSE(fs::exists(dir + "/step_2/file"));
}

TEST_F(Checkpoint, NothingRemainsAfterAnError) {
    make({"step_1"});
    EXPECT_EQ(error_of([&] {
                  write_directory(dir + "/step_1", [&](const std::string &to) {
                      write_file(to + "/half", "y");
                      die("the disk is full");
                  });
              }),
              "the disk is full");
    EXPECT_EQ(names(), std::set<std::string>({"step_1"}));
    EXPECT_TRUE(fs::exists(dir + "/step_1/file"));  // untouched
    expect_contains(error_of([&] { write_directory("/dev/null/step_1", [](const std::string &) {}); }), {"/dev/null/step_1"});
}

TEST_F(Checkpoint, TheLatestIsTheOneWithTheMostSteps) {
    EXPECT_EQ(latest_checkpoint(dir), "");
    EXPECT_EQ(latest_checkpoint(dir + "/absent"), "");
    make({"step_11.tmp", "step_trial", "step_012"});
    EXPECT_EQ(latest_checkpoint(dir), "");
    make({"step_9", "step_10"});
    EXPECT_EQ(latest_checkpoint(dir), dir + "/step_10");  // though a crash came before `latest` was written
}

TEST_F(Checkpoint, PruningKeepsTheNewestAndWhatIsNotOurs) {
    make({"step_2", "step_10", "step_9", "step_100", "step_11.tmp", "step_trial", "step_trial.tmp", "step_5_notes", "step_",
          "step_-3", "step_007", "other"});
    write_file(dir + "/step_1", "a file");
    prune_checkpoints(dir, 2);
    EXPECT_EQ(names(),
              std::set<std::string>({"step_10", "step_100", "step_5_notes", "step_", "step_-3", "step_007", "other", "step_1"}));
    prune_checkpoints(dir, 2);
    EXPECT_EQ(names().size(), 8u);
}

TEST_F(Checkpoint, WhatLiesBeyondAResumedStepGoes) {
    make({"step_2", "step_4", "step_6", "other"});
    set_latest(dir, 6);
    remove_checkpoints_beyond(dir, 4);
    EXPECT_EQ(names(), std::set<std::string>({"step_2", "step_4", "other", "latest"}));
    EXPECT_EQ(latest_checkpoint(dir), dir + "/step_4");
    remove_checkpoints_beyond(dir, 0);
    EXPECT_EQ(names(), std::set<std::string>({"other"}));
}
