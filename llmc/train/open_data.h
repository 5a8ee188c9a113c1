// Opens the files that a run reads samples from. All ranks call these functions together, and an error on one rank is an error on all.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "../data/tokens.h"
#include "run.h"

// Returns a prepared file for `path`, the value of --FLAG (../data/prepare.h). One rank runs prepare.py, with `extra` as further arguments.
std::string prepared_file(const Run &run, Task task, const std::string &flag, const std::string &path,
                          const std::vector<std::string> &extra);
// Dies if a file is not the same for all ranks, or if only some ranks have it. One rank of each process reads the whole files.
void expect_same_files(const Run &run, const std::vector<std::string> &paths);
// Dies unless `own` is the same on all ranks. `own` summarises this rank's view of the file.
void expect_same(const Run &run, const std::string &path, const std::string &own);

std::unique_ptr<PreparedData> open_data(const Run &run, const std::string &path);
// Opens the task's training data, or rollouts.
std::unique_ptr<Samples> open_samples(const Run &run, const std::string &path);

// Dies if a document has more tokens than the model has positions. Local to the calling rank.
void expect_positions(const Run &run, const ModelSpec &model, const Samples &data);
