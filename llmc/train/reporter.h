// Hands the log of a run on as it grows: scripts/report.py in a process of its own.
#pragma once
#include <sys/types.h>

#include <string>

class Reporter {
  public:
    // where: tensorboard, wandb or trackio; to: a directory for TensorBoard, else the name of a project. The log has its first line. If that process cannot
    // do its work, such as for want of the Python package, it says so, and the run goes on: the log has everything.
    Reporter(const std::string &where, const std::string &log, const std::string &to);
    Reporter(const Reporter &) = delete;
    ~Reporter();  // a log without a summary will not grow

    // Waits until all is handed on. The log has its summary. Returns whether nothing went wrong; the process has said what.
    bool finish();

  private:
    pid_t process_;
};
