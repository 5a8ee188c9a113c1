// The log of a run, one JSON object per line, and its readable output: one line that is redrawn on a terminal, otherwise plain lines.
#pragma once
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>

class Logger {
  public:
    // Appends to `path`. If a run is resumed, lines with a step beyond `resumed_step` are removed, and so are a partial line after a crash and the
    // summary of the run that now continues. `within_step`: the checkpoint was saved before the evaluation of this step, whose lines are removed as
    // well. With `resumed_step` = `other_run` nothing is removed.
    static constexpr size_t other_run = size_t(-1);
    Logger(const std::string &path, bool resume, size_t resumed_step, bool within_step = false);
    ~Logger();
    Logger(const Logger &) = delete;

    void write(const nlohmann::ordered_json &line);
    void sync();                                                            // syncs written lines to the disk
    void show_step(const nlohmann::ordered_json &line, size_t steps);       // shows a progress bar and the time left
    __attribute__((format(printf, 2, 3))) void say(const char *text, ...);  // prints a line that is not part of the log

  private:
    void open(const char *mode);
    void find_file();

    std::string path_;
    FILE *file_ = nullptr;
    bool terminal_, bar_ = false;
    double seconds_ = 0;  // time of the shown steps, for the estimate of the remaining time
    size_t shown_ = 0;
};
