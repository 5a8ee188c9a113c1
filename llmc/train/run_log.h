// What a training run says of itself: its log (logger.h), the places that --report_to hands the log to, and lines for people.
#pragma once
#include <chrono>
#include <list>
#include <memory>

#include "logger.h"
#include "reporter.h"
#include "trainer_state.h"
#include "training.h"

// A rank's figures of a step. Seconds are measured by the host's clock; on a GPU the time of queued work counts where the host waits for it.
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
    StepReport report();  // is called once, when the step has ended

  private:
    const Mesh &mesh_;
    Model &model_;
    const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
    std::chrono::steady_clock::time_point update_start_;
    const double comm_before_;
    double comm_before_update_ = 0;
    StepReport report_{};
};

// Every rank has one; the main rank alone writes.
class RunLog {
  public:
    RunLog(const Run &run, const Training &training);

    // Opens the log. A resumed run goes on with the log that it finds, without the lines beyond `step`. Any other run begins a new log, whose first
    // line describes the run.
    void open(size_t step);
    void say_split(const Step &step) const;  // prints how the ranks of a ring share the first row of a step
    // Returns the line of a step, which `state` includes. All ranks call it together.
    nlohmann::ordered_json step_line(const TrainerState &state, const Step &step, const Measured &measured, double norm,
                                     double lr, const StepReport &report) const;
    void write(const nlohmann::ordered_json &line);
    void show_step(const nlohmann::ordered_json &line);                     // for people
    __attribute__((format(printf, 2, 3))) void say(const char *text, ...);  // prints a line that is not part of the log
    void sync();                                                            // written lines survive a power cut
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
    std::list<Reporter> reporters_;   // of its log
};
