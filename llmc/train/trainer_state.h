// trainer_state.json of a checkpoint: the progress of the run (except weights and optimizer), and its model, data and options.
#pragma once
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "spikes.h"

struct Totals {
    size_t samples = 0, tokens = 0, targets = 0, skipped = 0, restarts = 0;
    double step_seconds = 0, seconds = 0;  // time of steps; total time before the last restart
};

// The model with the smallest evaluation loss so far. It is saved in best/, together with these numbers.
struct Best {
    size_t step = 0;  // 0: no such model
    double loss = 0;
};

struct TrainerState {
    size_t step, cursor;              // cursor: see DataLoader
    size_t begun_step, begun_cursor;  // at the beginning of the iteration, the steps between two evaluations or saves at most
    bool steps_done;                  // of the iteration; its evaluation is not
    size_t steps;                     // number of steps of the whole run
    size_t skips_in_a_row;
    size_t worse_in_a_row;  // evaluations since the best one
    Totals totals;
    LossSpikes spikes;
    std::string task, data, data_fingerprint;
    nlohmann::ordered_json options;
};

void write_trainer_state(const std::string &dir, const TrainerState &state);

// Returns `now` with the progress from the checkpoint `dir`. Dies if its file is damaged, or belongs to a run that `now` cannot continue.
// Calls note(line) for each option that is allowed to differ and does.
TrainerState read_trainer_state(const std::string &dir, const TrainerState &now,
                                const std::function<void(const std::string &)> &note);
