// What a training run needs before its first step: its output directory, its objective, data and model.
#pragma once
#include <memory>
#include <optional>
#include <string>

#include "continuation.h"
#include "objective.h"
#include "output.h"

struct Training {
    std::unique_ptr<OutputDirectory> output;  // on the main rank, locked
    std::string resume_from;                  // the checkpoint that the run goes on from; empty: the run begins
    std::unique_ptr<Samples> data, eval_data;
    std::string data_fingerprint;  // hash of the file that is open; its name may meanwhile belong to another file
    std::unique_ptr<DataLoader> loader;
    std::unique_ptr<Objective> objective;
    std::optional<Continuation> continuation;  // --sample_every
    std::unique_ptr<Model> model;
    size_t steps = 0;    // optimizer steps of the whole run
    size_t planned = 0;  // bytes of memory that the process should hold at its peak

    bool evaluates() const { return eval_data || !loader->eval_samples().empty(); }
};

// All ranks call it together. The template of the data's chats becomes run.chat.
Training open_training(Run &run);
