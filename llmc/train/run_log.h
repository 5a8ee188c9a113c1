// The output of a training run: its log (logger.h), the trackers of --report_to, and readable lines.
#pragma once
#include <chrono>
#include <list>
#include <memory>

#include "logger.h"
#include "reporter.h"
#include "trainer_state.h"
#include "training.h"

// A rank's figures for a step. Seconds are by the host's clock; on a GPU the time of queued work counts where the host waits for it.
struct StepReport {
    double seconds, comm_seconds, update_seconds;
    Payload sent;
    size_t peak_mem;
};

// Measures a step from its construction to report().
class StepMeter {
  public:
    StepMeter(const Mesh &mesh, Model &model);
    void begin_update();
    void end_update();
    StepReport report();  // called once, when the step has ended

  private:
    const Mesh &mesh_;
    Model &model_;
    const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
    std::chrono::steady_clock::time_point update_start_;
    const double comm_before_;
    double comm_before_update_ = 0;
    StepReport report_{};
};

// Every rank has one; only the main rank writes.
class RunLog {
  public:
    RunLog(const Run &run, const Training &training);

    // Opens the log. A resumed run continues the existing log, without the lines beyond `step` (see Logger). Any other run begins a new log, and its first line
    // describes the run.
    void open(size_t step, bool within_step);
    void say_split(const Step &step) const;  // prints how the ranks of a ring share the first row of a step
    // Returns the log line of a step; `state` already includes the step. All ranks call it together.
    nlohmann::ordered_json step_line(const TrainerState &state, const Step &step, const Measured &measured, double norm,
                                     double lr, const StepReport &report) const;
    void write(const nlohmann::ordered_json &line);
    void show_step(const nlohmann::ordered_json &line);                     // prints it in readable form
    __attribute__((format(printf, 2, 3))) void say(const char *text, ...);  // prints a line that is not part of the log
    void sync();                                                            // syncs written lines to the disk
    // Writes the last line, waits until trackers have the log, and prints the run's summary.
    void finish(const TrainerState &state, const Best &best, const std::string &best_path);

  private:
    void describe_run();
    nlohmann::ordered_json mfu(const Step &step, double seconds) const;
    void add_reports(nlohmann::ordered_json &line, const StepReport &own) const;

    const Run &run_;
    const Options &o_;
    const Training &training_;
    const double peak_;               // FLOP/s of the device; 0: not known
    std::unique_ptr<Logger> logger_;  // on the main rank
    std::list<Reporter> reporters_;   // trackers of the log
};
