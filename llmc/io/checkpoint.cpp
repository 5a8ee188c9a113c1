#include "checkpoint.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <optional>
#include <vector>

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
    SafetensorsWriter writer(dir + optimizer_file,
                             {{"master", {state.count}, "F32"}, {"m", {state.count}, "F32"}, {"v", {state.count}, "F32"}},
                             metadata);
    writer.write("master", state.master, *state.memory);
    writer.write("m", state.m, *state.memory);
    writer.write("v", state.v, *state.memory);
    writer.finish();
}

void load_optimizer(const std::string &dir, const OptimizerState &state) {
    const SafetensorsFile file(dir + optimizer_file);
    for (auto [name, to] : {std::pair{"master", state.master}, {"m", state.m}, {"v", state.v}}) {
        file.expect_shape(name, {state.count});
        std::vector<float> part;
        in_parts(state.count, [&](size_t first, size_t n) {
            part.resize(n);
            file.read_part(name, first, n, part.data());
            write(*state.memory, to + first, part);
        });
    }
}

void verify_optimizer(const std::string &dir, const OptimizerState &state) {
    const SafetensorsFile file(dir + optimizer_file);
    std::vector<float> back;
    for (auto [name, in_memory] : {std::pair{"master", state.master}, {"m", state.m}, {"v", state.v}})
        in_parts(state.count, [&](size_t first, size_t n) {
            back.resize(n);
            file.read_part(name, first, n, back.data());
            if (memcmp(back.data(), read(*state.memory, in_memory + first, n).data(), n * sizeof(float)) != 0)
                die("%s was written but reads back differently (tensor %s, near element %zu)\n  fix: another disk; this one loses data",
                    file.path().c_str(), name, first);
        });
}

std::string checkpoint_path(const std::string &output_dir, size_t step) {
    return format("%s/step_%zu", output_dir.c_str(), step);
}

// 12 for "step_12", nothing for other names.
static std::optional<size_t> step_of(const std::string &name) {
    size_t step;
    if (!name.starts_with("step_")) return {};
    const auto parsed = std::from_chars(name.data() + 5, name.data() + name.size(), step);
    if (parsed.ec != std::errc() || name != format("step_%zu", step)) return {};
    return step;
}

static std::vector<size_t> checkpoint_steps(const std::string &output_dir) {  // rising
    std::vector<size_t> steps;
    std::error_code absent;
    for (const auto &entry : fs::directory_iterator(output_dir, absent))
        if (const auto step = step_of(entry.path().filename()); step && entry.is_directory()) steps.push_back(*step);
    std::sort(steps.begin(), steps.end());
    return steps;
}

static void remove_leftovers(const std::string &output_dir) {
    std::vector<fs::path> leftovers;
    for (const auto &entry : fs::directory_iterator(output_dir)) {
        const fs::path name = entry.path().filename();
        if (name.stem() == trial_name || (name.extension() == ".tmp" && step_of(name.stem()))) leftovers.push_back(entry.path());
    }
    for (const fs::path &path : leftovers) fs::remove_all(path);
}

std::string latest_checkpoint(const std::string &output_dir) {
    const auto steps = checkpoint_steps(output_dir);
    return steps.empty() ? "" : checkpoint_path(output_dir, steps.back());
}

void set_latest(const std::string &output_dir, size_t step) { write_file(output_dir + "/latest", format("step_%zu\n", step)); }

void prune_checkpoints(const std::string &output_dir, size_t max_num) {
    remove_leftovers(output_dir);
    const auto steps = checkpoint_steps(output_dir);
    for (size_t i = 0; i + max_num < steps.size(); i++) fs::remove_all(checkpoint_path(output_dir, steps[i]));
}

void remove_checkpoints_beyond(const std::string &output_dir, size_t step) {
    remove_leftovers(output_dir);
    for (size_t later : checkpoint_steps(output_dir))
        if (later > step) fs::remove_all(checkpoint_path(output_dir, later));
    if (fs::is_directory(checkpoint_path(output_dir, step))) set_latest(output_dir, step);
    else fs::remove(output_dir + "/latest");
}
