#include "checkpoint.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "../core/common.h"
#include "../core/file.h"
#include "safetensors.h"

namespace fs = std::filesystem;

void write_directory(const std::string &path, const std::function<void(const std::string &)> &fill) {
    const std::string temporary = path + ".tmp";
    std::error_code error;
    fs::remove_all(temporary, error);
    fs::create_directories(temporary, error);
    if (error) die("cannot create %s: %s", temporary.c_str(), error.message().c_str());
    try {
        fill(temporary);
        sync_directory(temporary);
        fs::remove_all(path);
        fs::rename(temporary, path);
        sync_directory(fs::path(path).parent_path());
    } catch (const fs::filesystem_error &e) {
        fs::remove_all(temporary, error);
        die("cannot write %s: %s", path.c_str(), e.code().message().c_str());
    } catch (...) {
        fs::remove_all(temporary, error);
        throw;
    }
}

static const char *const optimizer_file = "/optimizer.safetensors";

void save_optimizer(const std::string &dir, const OptimizerState &state) {
    const Metadata metadata = {{"begin", "0"}, {"end", std::to_string(state.count)}};
    SafetensorsWriter writer(dir + optimizer_file, {{"master", {state.count}, "F32"}, {"m", {state.count}, "F32"}, {"v", {state.count}, "F32"}}, metadata);
    writer.write("master", state.master);
    writer.write("m", state.m);
    writer.write("v", state.v);
    writer.finish();
}

void load_optimizer(const std::string &dir, const OptimizerState &state) {
    const SafetensorsFile file(dir + optimizer_file);
    for (auto [name, to] : {std::pair{"master", state.master}, {"m", state.m}, {"v", state.v}}) {
        file.expect_shape(name, {state.count});
        file.read(name, to);
    }
}

void verify_optimizer(const std::string &dir, const OptimizerState &state) {
    const SafetensorsFile file(dir + optimizer_file);
    constexpr size_t chunk = size_t(1) << 20;
    std::vector<float> back(std::min(chunk, state.count));
    for (auto [name, in_memory] : {std::pair{"master", state.master}, {"m", state.m}, {"v", state.v}})
        for (size_t i = 0; i < state.count; i += chunk) {
            const size_t n = std::min(chunk, state.count - i);
            file.read_part(name, i, n, back.data());
            if (memcmp(back.data(), in_memory + i, n * sizeof(float)))
                die("%s was written but reads back differently (tensor %s, near element %zu)\n  fix: another disk; this one loses data",
                    file.path().c_str(), name, i);
        }
}

std::string checkpoint_path(const std::string &output_dir, size_t step) { return format("%s/step_%zu", output_dir.c_str(), step); }

std::string latest_checkpoint(const std::string &output_dir) {
    std::ifstream file(output_dir + "/latest");
    std::string name;
    return std::getline(file, name) && fs::is_directory(output_dir + "/" + name) ? output_dir + "/" + name : "";
}

void set_latest(const std::string &output_dir, size_t step) { write_file(output_dir + "/latest", format("step_%zu\n", step)); }

// The steps of the checkpoints in a directory, rising. What a crash left of one that was being written is removed.
static std::vector<size_t> checkpoint_steps(const std::string &output_dir) {
    std::vector<size_t> steps;
    std::vector<fs::path> leftovers;
    for (const auto &entry : fs::directory_iterator(output_dir)) {
        const std::string name = entry.path().filename();
        if (!entry.is_directory() || !name.starts_with("step_")) continue;
        size_t step;
        const char *digits = name.data() + 5, *end = name.data() + name.size();
        const auto [rest, error] = std::from_chars(digits, end, step);
        const bool number = error == std::errc() && checkpoint_path(output_dir, step) == output_dir + "/" + std::string(name.data(), rest);
        if (number && rest == end) steps.push_back(step);
        else if ((number && !strcmp(rest, ".tmp")) || name == "step_trial" || name == "step_trial.tmp") leftovers.push_back(entry.path());
    }
    for (const fs::path &path : leftovers) fs::remove_all(path);
    std::sort(steps.begin(), steps.end());
    return steps;
}

void prune_checkpoints(const std::string &output_dir, size_t max_num) {
    const auto steps = checkpoint_steps(output_dir);
    for (size_t i = 0; i + max_num < steps.size(); i++) fs::remove_all(checkpoint_path(output_dir, steps[i]));
}

void remove_checkpoints_beyond(const std::string &output_dir, size_t step) {
    if (fs::is_directory(checkpoint_path(output_dir, step))) set_latest(output_dir, step);
    else fs::remove(output_dir + "/latest");
    for (size_t later : checkpoint_steps(output_dir))
        if (later > step) fs::remove_all(checkpoint_path(output_dir, later));
}
