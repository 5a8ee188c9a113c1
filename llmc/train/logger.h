// The log of a run, one JSON object a line, and what a person sees of it: on a terminal one line that is redrawn, else plain lines.
#pragma once
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>

class Logger {
  public:
    // Appends to `path`. Lines with a step beyond `resumed_step` belong to a future that never happened and are dropped.
    Logger(const std::string &path, bool resume, size_t resumed_step);
    ~Logger();
    Logger(const Logger &) = delete;

    void write(const nlohmann::ordered_json &line);
    void sync();                                                            // what was written survives a power cut
    void show_step(const nlohmann::ordered_json &line, size_t steps);       // with a bar and the time left
    __attribute__((format(printf, 2, 3))) void say(const char *text, ...);  // a line for the person only

  private:
    std::string path_;
    FILE *file_;
    bool terminal_, bar_ = false;
    double seconds_ = 0;  // of the steps shown, for the time left
    size_t shown_ = 0;
};
