// The end of a training run by SIGINT, SIGTERM, SIGUSR1 or SIGHUP. The rule:
//
//   - The handler prints at once what the run finishes first, and remembers the signal. A second signal ends the process at once.
//   - A rank leaves work in which it sends no message by stop_if_asked(), which throws Stopped: sampling, after a token; a worker, without its answer.
//   - Passes of the model may need all ranks, so they go on, with empty rows (for_own_rows in train/evaluate.h).
//   - At the end of such work the ranks meet in agree() (parallel/comm.h): if one of them throws Stopped, all do. So a signal to any rank stops all
//     ranks in the same step, and agreement costs one short message a step, not one a token.
//   - The trainer catches Stopped, and saves a checkpoint without the step that was left. A resumed run makes this step again from its beginning.
#pragma once
#include "common.h"

struct Stopped : Error {
    int signal;
    explicit Stopped(int signal) : Error("stopped by a signal"), signal(signal) {}
};

// Catches the signals during its lifetime, but not a SIGHUP that nohup has set to ignored.
class CaughtSignals {
  public:
    explicit CaughtSignals(bool is_main_rank);  // this thread's rank; the main rank prints
    CaughtSignals(const CaughtSignals &) = delete;
    ~CaughtSignals();
};

// Names the work of a scope, on the thread that creates it, for the line that the handler prints: "the run stops WHEN".
class Activity {
  public:
    enum Kind { may_be_left, is_finished };  // is_finished: in this scope the thread does not stop
    explicit Activity(const char *when, Kind kind = may_be_left);
    Activity(const Activity &) = delete;
    ~Activity();

  private:
    const char *const outer_;
    const bool outer_finishes_;
};

bool asked_to_stop();
void stop_if_asked();  // throws Stopped if a signal has arrived

// SIGINT ends the program even if a shell has set it to ignored, as it does for jobs in the background of a script. Called at the program's start.
void expect_interrupts();
