// Sends the growing log of a run to a tracker, with scripts/report.py in a separate process.
#pragma once
#include <sys/types.h>

#include <string>

class Reporter {
  public:
    // where: tensorboard, wandb or trackio; to: a directory for TensorBoard, else the name of a project. The log must have its first line. If the
    // process fails, for example because the Python package is missing, it prints the reason, and the run continues: the log has all data.
    Reporter(const std::string &where, const std::string &log, const std::string &to);
    Reporter(const Reporter &) = delete;
    ~Reporter();  // if the log has no summary, it will not grow any more

    // Waits until the whole log has been sent. The log must have its summary. Returns false after a failure, which the process has reported.
    bool finish();

  private:
    pid_t process_;
};
