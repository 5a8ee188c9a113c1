#include "output.h"

#include <fcntl.h>
#include <fnmatch.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <sstream>
#include <tuple>

#include "../core/common.h"
#include "../core/json.h"
#include "../io/hf.h"
#include "../parallel/comm.h"
#include "checkpoint.h"
#include "run.h"

namespace fs = std::filesystem;
using nlohmann::json;

static const char *const list_name = "run_files.json";
static const char *const temporary_suffix = ".tmp";

static const char *const event_files = "events.out.tfevents.*";  // TensorBoard's files, in a directory for each run

static bool matches(const std::string &name, std::initializer_list<const char *> patterns) {
    return std::any_of(patterns.begin(), patterns.end(), [&](const char *p) { return fnmatch(p, name.c_str(), 0) == 0; });
}

// The files that make a directory a model, an adapter or a checkpoint.
static bool makes_whole(const std::string &name) {
    return matches(name, {"config.json", "adapter_config.json", "trainer_state.json", "evaluation.json"});
}

// The file names that runs use in directories.
static bool is_written_by_runs(std::string name) {
    if (name.ends_with(temporary_suffix)) name.resize(name.size() - strlen(temporary_suffix));
    return is_model_file(name) ||
           matches(name, {"trainer_state.json", "optimizer.json", "optimizer-[0-9]*-of-[0-9]*.safetensors", "evaluation.json",
                          "policy_state.json", "next_answers.jsonl", "answers.jsonl", "answers.safetensors",
                          "[0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9]*.jsonl", event_files});
}

static std::string shown(const fs::path &path, const fs::file_status &status) {
    return path.filename().string() + (fs::is_directory(status) ? "/" : "");
}

// ---- directories ----------------------------------------------------------------------------------------------------------------------

static std::vector<fs::path> written_in(const std::string &dir) {
    std::vector<fs::path> files;
    std::error_code error;
    if (fs::is_symlink(dir, error)) return {};
    for (fs::recursive_directory_iterator it(dir, error), end; !error && it != end; it.increment(error)) {
        const fs::path name = it->path().filename(), parent = it->path().parent_path();
        const bool own = it.depth() == 0 || matches(parent.filename(), {"critic", "additional_chat_templates"});
        if (!fs::is_directory(it->symlink_status()) && (own ? is_written_by_runs(name) : matches(name, {event_files})))
            files.push_back(it->path());
    }
    return files;
}

// Removes the files of runs from a directory, and the directory itself if it is then empty.
static void remove_written(const std::string &dir) {
    std::error_code error;
    if (fs::is_symlink(dir, error)) {  // the user has moved it and left a link
        fs::remove(dir);
        return;
    }
    auto files = written_in(dir);
    std::ranges::stable_partition(files, [](const fs::path &file) { return makes_whole(file.filename()); });
    for (const fs::path &file : files)
        if (!fs::remove(file, error) && error)
            die("cannot remove %s: %s\n  fix: give this run permission to write there", file.c_str(), error.message().c_str());
    std::vector<fs::path> directories = {dir};
    for (fs::recursive_directory_iterator it(dir, error), end; !error && it != end; it.increment(error))
        if (fs::is_directory(it->symlink_status())) directories.push_back(it->path());
    for (size_t i = directories.size(); i-- > 0;) fs::remove(directories[i], error);  // only removes empty ones
}

// Moves the user's files out of a directory that a run will replace.
static void move_rest(const std::string &from, const std::string &to) {
    std::error_code error;
    if (!fs::exists(to)) fs::rename(from, to, error);
    std::vector<fs::path> rest;
    for (const auto &entry : fs::directory_iterator(from, error)) rest.push_back(entry.path());
    for (const fs::path &path : rest)
        if (const fs::path moved = fs::path(to) / path.filename(); !fs::exists(fs::symlink_status(moved)))
            fs::rename(path, moved, error);
    fs::remove(from, error);
}

static void remove_leftover(const std::string &path) {
    remove_written(path + temporary_suffix);
    if (fs::is_directory(path + temporary_suffix)) move_rest(path + temporary_suffix, path);
}

void remove_directory(const std::string &path) {
    std::error_code error;
    remove_leftover(path);
    if (!fs::exists(fs::symlink_status(path))) return;
    fs::rename(path, path + temporary_suffix, error);
    if (error) die("cannot remove %s: %s\n  fix: give this run permission to write there", path.c_str(), error.message().c_str());
    remove_leftover(path);
}

// Renames `from` to `to`. If `to` exists, the two are exchanged, so a complete directory has the name at every moment.
static void rename_directory(const std::string &from, const std::string &to) {
    try {
        if (renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) == 0) {
            remove_written(from);
            move_rest(from, to);
        } else {  // `to` does not exist, or the file system cannot exchange
            remove_written(to);
            move_rest(to, from);
            fs::rename(from, to);
        }
    } catch (const fs::filesystem_error &e) {
        die("cannot write %s: %s%s", to.c_str(), e.code().message().c_str(), other_place);
    }
    sync_directory(fs::path(to).parent_path());
}

void write_directory(Comm &comm, const std::string &path, const std::function<void(const std::string &)> &fill) {
    const std::string temporary = path + temporary_suffix;
    const auto on_rank_0 = [&](const std::function<void()> &f) { agree(comm, [&] { comm.rank == 0 ? f() : void(); }); };
    const auto remove = [&] {
        try {
            remove_written(temporary);
        } catch (const std::exception &) {  // another error is already being thrown
        }
    };
    try {
        on_rank_0([&] {
            std::error_code error;
            remove_written(temporary);
            fs::create_directories(temporary, error);
            if (error) die("cannot create %s: %s%s", temporary.c_str(), error.message().c_str(), other_place);
        });
        fill(temporary);
        agree(comm, [&] { sync_directory(temporary); });  // its files were synced when they were closed
        on_rank_0([&] { rename_directory(temporary, path); });
    } catch (const AgreedError &) {
        on_rank_0(remove);  // no rank returns before the directory is removed
        throw;
    } catch (...) {
        if (comm.rank == 0) remove();
        throw;
    }
}

// ---- the list -------------------------------------------------------------------------------------------------------------------------

// Creates the directory, unless it exists or is a link to a directory.
static const std::string &made(const std::string &path) {
    std::error_code error;
    if (fs::exists(path, error) && !fs::is_directory(path, error))
        die("--output_dir %s is a file\n  fix: give a directory; it may be new", path.c_str());
    if (fs::is_symlink(path, error) && !fs::exists(path, error))
        die("--output_dir %s is a link to %s, which does not exist\n  fix: create that directory, or give another --output_dir",
            path.c_str(), fs::read_symlink(path, error).c_str());
    fs::create_directories(path, error);
    if (error && !fs::is_directory(path))
        die("cannot create --output_dir %s: %s\n  fix: give a directory that you may write to", path.c_str(),
            error.message().c_str());
    return path;
}

OutputDirectory::OutputDirectory(const std::string &path) : path_(made(path)), lock_(path_) {
    std::vector<std::string> found;
    std::error_code error;
    for (const auto &entry : fs::directory_iterator(path_, error))
        if (const std::string name =
                shown(entry.path(), entry.symlink_status());  // skips files that systems put into directories
            !matches(name, {"lost+found/", ".nfs*", ".DS_Store", "run_files.json.tmp"}))
            found.push_back(name);
    if (error)
        die("--output_dir %s: cannot read: %s\n  fix: give a directory that you may write to", path_.c_str(),
            error.message().c_str());
    if (fs::exists(path_of(list_name))) read_list();
    else adopt_earlier_run();
    if (found.empty() || !names_.empty() || fs::exists(path_of(list_name))) return;
    std::sort(found.begin(), found.end());
    std::string some;
    for (size_t i = 0; i < std::min<size_t>(found.size(), 3); i++) some += (i ? ", " : "") + found[i];
    if (found.size() > 3) some += format(" and %zu more", found.size() - 3);
    die("--output_dir %s holds files that no run wrote: %s\n  fix: give a new or empty directory", path_.c_str(), some.c_str());
}

void OutputDirectory::read_list() {
    const std::string where = path_of(list_name);
    const json list = read_json(where);
    const Fields fields(list, where);
    const json *written = fields.find("written");
    if (!written || !written->is_array()) fields.refuse("written", "is missing or not a list");
    for (const json &entry : *written) {
        const std::string name = entry.is_string() ? entry.get<std::string>() : "";
        const std::string stem = name.ends_with("/") ? name.substr(0, name.size() - 1) : name;
        if (stem.empty() || stem == "." || stem == ".." || stem.find('/') != std::string::npos)
            fields.refuse("written", "has " + entry.dump() + ", which is not a file name in that directory");
        names_.insert(name);
    }
}

// Lists the files of a run of an earlier version, which did not keep a list.
void OutputDirectory::adopt_earlier_run() {
    std::string first, line, last;
    for (std::ifstream log(path_of("log.jsonl")); std::getline(log, line); last = line)
        if (first.empty()) first = line;
    const auto has_field = [](const std::string &text, const char *field) {
        const json object = json::parse(text, nullptr, false);
        return object.is_object() && object.contains(field);
    };
    const bool logged = has_field(first, "options"), finished = logged && has_field(last, "summary");
    if (!logged && latest_checkpoint(path_).empty()) return;
    std::set<std::string> shards;  // shards of the finished model
    if (const std::string index = path_of(model_files.index); finished && fs::exists(index)) {
        const json listing = read_json(index);
        for (const auto &[tensor, file] : listing.at("weight_map").items()) shards.insert(file);
    }
    for (const auto &entry : fs::directory_iterator(path_)) {
        std::string name = entry.path().filename();
        if (entry.is_directory()) {
            const bool is_written = !written_in(entry.path()).empty();
            if (name.ends_with(temporary_suffix)) name.resize(name.size() - strlen(temporary_suffix));
            if (is_written && (step_of(name) || matches(name, {trial_name, "best", "critic", "rollouts", "tensorboard"})))
                names_.insert(name + "/");
        } else if (matches(name, {"log.jsonl", "latest"}) ||
                   (finished && is_model_file(name) && (!name.starts_with("model-") || shards.contains(name)))) {
            names_.insert(name);
        }
    }
}

void OutputDirectory::write_list() const { write_json(path_of(list_name), {{"written", names_}}); }

static std::string without_slash(const std::string &name) { return name.ends_with("/") ? name.substr(0, name.size() - 1) : name; }

// Unfinished saves of a killed run.
static bool is_unfinished(const std::string &name) {
    return without_slash(name) == model_name || without_slash(name) == trial_name;
}

OutputDirectory::~OutputDirectory() {
    std::error_code error;
    for (const std::string &name : std::vector(names_.begin(), names_.end())) forget(name);
    if (names_.empty()) fs::remove(path_of(list_name), error);
}

bool OutputDirectory::holds_run() const {
    std::error_code error;
    for (const std::string &name : names_) {
        const std::string path = path_of(without_slash(name));
        if (is_unfinished(name)) continue;
        if (!name.ends_with("/") ? fs::exists(path, error)
                                 : !written_in(path).empty() || !written_in(path + temporary_suffix).empty())
            return true;
    }
    return false;
}

bool OutputDirectory::holds_model() const {
    return std::ranges::any_of(names_, [&](const std::string &name) { return makes_whole(name) && fs::exists(path_of(name)); });
}

void OutputDirectory::refuse_input(const char *flag, const std::string &path) const {
    std::error_code error;
    const fs::path input = fs::weakly_canonical(path, error), here = fs::canonical(path_, error);
    if (path.empty() || error) return;
    const fs::path within = input.lexically_relative(here);
    if (within == ".")
        die("--output_dir %s is the directory of --%s itself\n  fix: give another --output_dir", path_.c_str(), flag);
    const std::string first = within.empty() ? "" : within.begin()->string();
    if (has(first) || has(first + "/"))
        die("--%s %s was written by the run that --output_dir %s holds, and would be replaced\n  fix: give another --output_dir",
            flag, path.c_str(), path_.c_str());
}

void OutputDirectory::expect_free(const std::vector<std::string> &names) const {
    for (const std::string &name : names) {
        const bool directory = name.ends_with("/");
        for (const std::string &file : {path_of(without_slash(name)), path_of(without_slash(name)) + temporary_suffix}) {
            const fs::file_status status = fs::symlink_status(file);
            const bool beside =
                directory && fs::is_directory(status) && !file.ends_with(temporary_suffix) && written_in(file).empty();
            if (!has(name) && fs::exists(status) && !beside)  // `beside`: a run may add files there
                die("%s is there, and no run wrote it; this run writes a %s of that name\n  fix: move it away, or give another --output_dir",
                    file.c_str(), directory ? "directory" : "file");
        }
    }
}

void OutputDirectory::claim(const std::vector<std::string> &names) {
    expect_free(names);
    const size_t before = names_.size();
    names_.insert(names.begin(), names.end());
    if (names_.size() > before) write_list();
}

// A name whose directory still holds files of the user stays listed, so a run may write there again.
void OutputDirectory::forget(const std::string &name) {
    for (const std::string &file : {without_slash(name), without_slash(name) + temporary_suffix})
        if (fs::exists(fs::symlink_status(path_of(file)))) return;
    names_.erase(name);
}

void OutputDirectory::remove(const std::string &name) {
    if (!has(name)) return;
    if (name.ends_with("/")) remove_directory(path_of(without_slash(name)));
    else
        for (const std::string &file : {path_of(name), path_of(name) + temporary_suffix}) {
            std::error_code error;
            if (!fs::remove(file, error) && error)
                die("cannot remove %s: %s\n  fix: give this run permission to write there", file.c_str(),
                    error.message().c_str());
        }
    forget(name);
    write_list();
}

void OutputDirectory::clear(const std::string &but) {
    std::vector<std::string> names(names_.begin(), names_.end());
    std::ranges::stable_partition(names, makes_whole);
    for (const std::string &name : names) {
        if (name == but) continue;
        if (!makes_whole(name)) sync_directory(path_);
        remove(name);
    }
}

void OutputDirectory::remove_leftovers() {
    std::error_code error;
    for (const std::string &name : std::vector(names_.begin(), names_.end())) {
        const std::string path = path_of(without_slash(name));
        if (is_unfinished(name)) remove_directory(path);
        else if (name.ends_with("/")) remove_leftover(path);
        else fs::remove(path + temporary_suffix, error);
        for (const fs::path &file : written_in(path))
            if (file.extension() == temporary_suffix) fs::remove(file, error);
        forget(name);
    }
    fs::remove(path_of(list_name) + temporary_suffix, error);
    if (!names_.empty() || fs::exists(path_of(list_name))) write_list();
}

// ---- the model ------------------------------------------------------------------------------------------------------------------------

std::vector<std::string> OutputDirectory::model_in(const std::string &directory) const {
    std::vector<std::string> names;
    for (const auto &entry : fs::directory_iterator(path_of(directory)))
        if (const std::string name = shown(entry.path(), entry.symlink_status()); is_model_file(name) || name.ends_with("/"))
            names.push_back(name);
    return names;
}

void OutputDirectory::publish_model() {
    const std::string from = path_of(model_name);
    std::vector<std::string> names = model_in(model_name);
    claim(names);
    for (const std::string &old : std::vector(names_.begin(), names_.end()))
        if (makes_whole(old)) remove(old);
    sync_directory(path_);
    for (const std::string &old : std::vector(names_.begin(), names_.end()))
        if (is_model_file(old) && !std::count(names.begin(), names.end(), old)) remove(old);
    claim(names);
    std::ranges::stable_partition(names, [](const std::string &file) { return !makes_whole(file); });
    for (const std::string &file : names) {
        if (makes_whole(file)) sync_directory(path_);
        if (file.ends_with("/")) rename_directory(from + "/" + without_slash(file), path_of(without_slash(file)));
        else fs::rename(from + "/" + file, path_of(file));
    }
    sync_directory(path_);
    remove(std::string(model_name) + "/");
}

// ---- checkpoints ----------------------------------------------------------------------------------------------------------------------

void OutputDirectory::set_latest(size_t step) {
    claim({"latest"});
    write_file(path_of("latest"), format("step_%zu\n", step));
}

void OutputDirectory::prune_checkpoints(size_t max_num) {
    auto steps = checkpoint_steps(path_);
    std::erase_if(steps, [&](size_t step) { return !has(format("step_%zu/", step)); });
    for (size_t i = 0; i + max_num < steps.size(); i++) remove(format("step_%zu/", steps[i]));
}

std::vector<std::string> OutputDirectory::checkpoints_beyond(size_t step, size_t last) const {
    std::vector<std::string> names;
    for (const auto &entry : fs::directory_iterator(path_)) {
        const std::string name = entry.path().filename();
        if (const auto later = step_of(name); later && *later > step && *later <= last) names.push_back(name + "/");
    }
    return names;
}

void OutputDirectory::remove_checkpoints_beyond(size_t step) {
    for (const std::string &name : checkpoints_beyond(step)) remove(name);
    if (fs::is_directory(checkpoint_path(path_, step))) set_latest(step);
    else remove("latest");
}

// ---- inputs and other results ---------------------------------------------------------------------------------------------------------

std::vector<std::pair<const char *, std::string>> inputs_of(const Run &run) {
    const Options &o = run.options;
    std::vector<std::pair<const char *, std::string>> all = {{"model", run.model.dir},   {"adapter", o.adapter},
                                                             {"ref_model", o.ref_model}, {"critic_model", o.critic_model},
                                                             {"rollouts", o.rollouts},   {"prompts", o.prompts}};
    const auto add = [&](const char *flag, const std::string &names) {  // a mixture has several sources, separated by commas
        std::istringstream list(names);
        for (std::string name; std::getline(list, name, ',');) all.emplace_back(flag, name);
    };
    add("data", o.data), add("eval_data", o.eval_data);
    for (const Teacher &teacher : teachers_of(o)) all.emplace_back("teacher_model", teacher.model);
    for (const std::string &name : o.reward) all.emplace_back("reward", name);
    std::erase_if(all, [](const auto &input) {
        std::error_code error;
        return input.second.empty() || !fs::exists(input.second, error);
    });
    return all;
}

void check_results(const Run &run) {
    const Options &o = run.options;
    const bool appends = run.task == EVAL || o.resume != "never";
    // The first bytes of a result file that a run wrote; empty if this run appends to the file.
    const std::tuple<const char *, std::string, const char *> results[] = {{"scores", o.scores, "{\"document\":"},
                                                                           {"timeline", o.timeline, "{\n  \"arrays\":"},
                                                                           {"log", o.log, appends ? "" : "{\"task\":"}};
    std::error_code error;
    for (const auto &[flag, path, beginning] : results) {
        if (path.empty() || !fs::exists(path, error)) continue;
        if (fs::is_directory(path, error)) die("--%s %s is a directory\n  fix: give a file; it may be new", flag, path.c_str());
        if (!fs::is_regular_file(path, error)) continue;
        for (const auto &[input, from] : inputs_of(run)) {
            const bool within =
                fs::equivalent(fs::canonical(path, error).parent_path(), from, error) && is_model_file(fs::path(path).filename());
            if (within || fs::equivalent(path, from, error))
                die("--%s %s is what --%s reads\n  fix: give another file", flag, path.c_str(), input);
        }
        std::string first(strlen(beginning), '\0');
        std::ifstream(path).read(first.data(), std::streamsize(first.size()));
        if (fs::file_size(path, error) > 0 && first != beginning)
            die("--%s %s exists, and no run wrote it\n  fix: give another file, or move this one away", flag, path.c_str());
    }
    if (run.task & TRAINING && !o.overwrite && !appends && fs::is_regular_file(o.log, error) && fs::file_size(o.log, error) > 0)
        die("--log %s already holds the log of a run\n  fix: use --overwrite to replace it, or give another file", o.log.c_str());
}
