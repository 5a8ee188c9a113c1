// trainer_state.json of a checkpoint: where the run was, besides weights and optimizer, and what it was a run of.
#pragma once
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "spikes.h"

struct Totals {
    size_t samples = 0, tokens = 0, targets = 0, skipped = 0, restarts = 0;
    double step_seconds = 0, seconds = 0;  // of steps; of everything, before the last restart
};

struct TrainerState {
    size_t step, cursor;  // of the data loader
    size_t steps;         // of the whole run
    size_t skips_in_a_row;
    Totals totals;
    LossSpikes spikes;
    std::string task, data, data_fingerprint;
    nlohmann::ordered_json options;
};

void write_trainer_state(const std::string &dir, const TrainerState &state);

// Of the checkpoint `dir`. A file that is damaged, or of a run that `now` cannot go on with, is refused. Options that differ and
// may are told to note(line).
TrainerState read_trainer_state(const std::string &dir, const TrainerState &now,
                                const std::function<void(const std::string &)> &note);
