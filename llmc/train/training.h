// Opens a training run before its first step: its output directory, objective, data and model.
#pragma once
#include <memory>
#include <optional>
#include <string>

#include "continuation.h"
#include "objective.h"
#include "output.h"

struct Training {
    std::unique_ptr<OutputDirectory> output;  // on the main rank, locked
    std::string resume_from;                  // the checkpoint to resume from; empty for a new run
    std::unique_ptr<Samples> data, eval_data;
    std::string data_fingerprint;  // hash of the open file; its name may meanwhile belong to another file
    std::unique_ptr<DataLoader> loader;
    std::unique_ptr<Objective> objective;
    std::optional<Continuation> continuation;  // --sample_every
    std::unique_ptr<Model> model;
    size_t steps = 0;    // optimizer steps of the whole run
    size_t planned = 0;  // planned peak memory of the process, in bytes

    bool evaluates() const { return eval_data || !loader->eval_samples().empty(); }
};

// All ranks call it together. run.chat becomes the chat template of the data.
Training open_training(Run &run);
