#include "logger.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "../core/common.h"
#include "../core/file.h"

static void drop_lines_beyond(const std::string &path, size_t step, bool within_step) {
    std::ifstream file(path);
    std::string kept, line;
    while (std::getline(file, line)) {
        const auto json = nlohmann::json::parse(line, nullptr, false);
        if (!json.is_object() || json.contains("summary"))
            continue;  // a partial line of a crash; the summary of a run that now continues
        const auto at = json.find("step");
        const double of = at == json.end() ? 0 : at->is_number() ? at->get<double>() : INFINITY;
        if (of > double(step) || (within_step && of == double(step) && !json.contains("loss"))) continue;
        kept += line + "\n";
    }
    write_file(path, kept);
}

Logger::Logger(const std::string &path, bool resume, size_t resumed_step, bool within_step)
    : path_(path), terminal_(isatty(STDOUT_FILENO)) {
    if (resume && resumed_step != other_run && std::filesystem::is_regular_file(path))
        drop_lines_beyond(path, resumed_step, within_step);
    open(resume ? "a" : "w");
}

void Logger::open(const char *mode) {
    file_ = fopen(path_.c_str(), mode);
    if (!file_) die("cannot write the log %s: %s\n  fix: --log FILE", path_.c_str(), strerror(errno));
}

// Finds out whether somebody has deleted the log, which is then written again, or has replaced it.
void Logger::find_file() {
    struct stat own, named;
    if (fstat(fileno(file_), &own) != 0 || !S_ISREG(own.st_mode)) return;
    const bool exists = stat(path_.c_str(), &named) == 0;
    if (exists && named.st_ino == own.st_ino && named.st_dev == own.st_dev) return;
    if (!exists) copy_file(format("/proc/self/fd/%d", fileno(file_)), path_);
    fclose(std::exchange(file_, nullptr));
    open("a");
    say("note: %s was %s", path_.c_str(),
        exists ? "replaced: the next lines are appended to the new file" : "deleted: it is written again, with all its lines");
}

Logger::~Logger() {
    if (bar_) printf("\n");
    if (file_) fclose(file_);
}

void Logger::write(const nlohmann::ordered_json &line) {
    find_file();
    const auto replace = nlohmann::ordered_json::error_handler_t::replace;  // a sample may end within a character
    const std::string text = line.dump(-1, ' ', false, replace) + "\n";
    if (fwrite(text.data(), 1, text.size(), file_) != text.size() || fflush(file_) != 0)
        die("cannot write the log %s: %s\n  fix: free space, or --log FILE elsewhere", path_.c_str(), strerror(errno));
}

void Logger::sync() {
    if (fsync(fileno(file_)) != 0 && errno != EINVAL)  // EINVAL: a pipe or a terminal, which cannot be synced
        die("cannot sync the log %s: %s\n  fix: free space, or --log FILE elsewhere", path_.c_str(), strerror(errno));
}

static std::string duration(double seconds) {
    const size_t s = size_t(seconds);
    if (s >= 3600) return format("%zu h %02zu min", s / 3600, s / 60 % 60);
    if (s >= 60) return format("%zu min %02zu s", s / 60, s % 60);
    return format("%zu s", s);
}

void Logger::show_step(const nlohmann::ordered_json &line, size_t steps) {
    const size_t step = line["step"];
    seconds_ += line["step_s"].get<double>(), shown_++;
    const std::string left = duration(seconds_ / double(shown_) * double(steps - step));
    const std::string mfu = line["mfu"].is_null() ? "" : format("  mfu %.1f %%", 100 * line["mfu"].get<double>());
    const std::string reward = line.contains("reward") ? format("  reward %.3f", line["reward"].get<double>()) : "";
    const std::string text = format("step %zu/%zu  loss %.4f%s  norm %.3f  lr %.2e  %.0f tok/s%s", step, steps,
                                    line["loss"].get<double>(), reward.c_str(), line["grad_norm"].get<double>(),
                                    line["lr"].get<double>(), line["tok_s"].get<double>(), mfu.c_str());
    if (!terminal_) {
        printf("%s  %s left\n", text.c_str(), left.c_str());
        fflush(stdout);
        return;
    }
    constexpr size_t width = 24;
    const size_t done = steps ? step * width / steps : width;
    printf("\r[%s%s] %s  %s left \033[K", std::string(done, '#').c_str(), std::string(width - done, ' ').c_str(), text.c_str(),
           left.c_str());
    fflush(stdout);
    bar_ = true;
}

void Logger::say(const char *text, ...) {
    va_list args;
    va_start(args, text);
    printf("%s%s\n", bar_ ? "\n" : "", vformat(text, args).c_str());
    va_end(args);
    fflush(stdout);
    bar_ = false;
}
