// Saves of a training run in its output directory (output.h): a trial before its first step, checkpoints, the best model and the last model.
#pragma once
#include <functional>
#include <optional>
#include <string>

#include "run_log.h"
#include "training.h"

// All ranks make all calls together.
class Saves {
  public:
    Saves(const Run &run, Training &training);

    // Reads the checkpoint that the run resumes from, and returns `state` with its progress.
    TrainerState resume(const TrainerState &state);
    // Prepares the output directory for the steps after `step`. All kinds of files that the run will save are written once and read back, so a long
    // run does not fail at its first save. Only then does --overwrite remove the earlier run.
    void begin(size_t step);
    void save_checkpoint(TrainerState state, RunLog &log);
    bool keep_best(size_t step, double loss);  // saves the model unless an earlier model has an equal or smaller loss
    void finish();                             // writes the model into the output directory itself

    std::optional<size_t> saved() const { return saved_; }  // the step of the newest checkpoint in the output directory
    size_t every() const { return every_; }                 // steps between checkpoints; 0: no checkpoints
    const Best &best() const { return best_; }
    std::string best_path() const;

  private:
    void write_directory(const std::string &name, const std::function<void(const std::string &)> &fill);
    void save_model(const std::string &dir);
    void save_states(const std::string &dir);
    void try_saving();
    void claim_names(size_t step);
    void find_best(size_t step);

    const Run &run_;
    const Options &o_;
    Training &training_;
    OutputDirectory *const output_;  // null except on the main rank
    const size_t every_;
    std::optional<size_t> saved_;
    std::string export_dtype_;
    Best best_;
};
