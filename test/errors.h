// Checks of errors, and temporary files and directories.
#pragma once
#include <gtest/gtest.h>
#include <unistd.h>

#include <exception>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "../llmc/core/common.h"

// The message of the error thrown by `f`, or "no error".
template <class F> std::string error_of(F f) {
    try {
        f();
    } catch (const std::exception &e) {
        return e.what();
    }
    return "no error";
}

inline void expect_contains(const std::string &text, const std::vector<std::string> &parts) {
    for (const auto &part : parts) EXPECT_NE(text.find(part), std::string::npos) << "\"" << part << "\" is not in: " << text;
}

template <class F> void expect_error(F f, const std::vector<std::string> &parts) { expect_contains(error_of(f), parts); }

inline std::string temporary_path(const std::string &name) {
    return testing::TempDir() + "llmc_" + std::to_string(getpid()) + "_" + name;
}

struct TemporaryFile {
    const std::string path;
    explicit TemporaryFile(const std::string &name) : path(temporary_path(name)) {}
    TemporaryFile(const TemporaryFile &) = delete;
    ~TemporaryFile() { std::filesystem::remove(path); }

    void write(const std::string &bytes) const { std::ofstream(path, std::ios::binary) << bytes; }
};

struct TemporaryDirectory : testing::Test {
    const std::string dir = temporary_path("directory");

    void SetUp() override { std::filesystem::create_directories(dir); }
    void TearDown() override { std::filesystem::remove_all(dir); }
    void put(const std::string &name, const std::string &text) const {
        std::ofstream(dir + "/" + name, std::ios::binary) << text;
    }
};
