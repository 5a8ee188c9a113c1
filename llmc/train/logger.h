// The log of a run, one JSON object per line, and its output for people: on a terminal one line that is redrawn, otherwise plain lines.
#pragma once
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>

class Logger {
  public:
    // Appends to `path`. Lines with a step beyond `resumed_step` belong to a future that never happened and are dropped, and so is text that a crash or
    // the end of a run that now goes on has left. Nothing is dropped where `resumed_step` is `other_run`.
    static constexpr size_t other_run = size_t(-1);
    Logger(const std::string &path, bool resume, size_t resumed_step);
    ~Logger();
    Logger(const Logger &) = delete;

    void write(const nlohmann::ordered_json &line);
    void sync();                                                            // written lines survive a power cut
    void show_step(const nlohmann::ordered_json &line, size_t steps);       // shows a progress bar and the time left
    __attribute__((format(printf, 2, 3))) void say(const char *text, ...);  // prints a line that is not part of the log

  private:
    std::string path_;
    FILE *file_;
    bool terminal_, bar_ = false;
    double seconds_ = 0;  // the time of the steps shown, from which the time left follows
    size_t shown_ = 0;
};
