// Checkpoints: OUTPUT_DIR/step_N/ holds the model as a Hugging Face directory, the optimizer's state by global element offsets, and
// trainer_state.json. A checkpoint is written as step_N.tmp, synced and renamed, and renamed again before it is removed:
// a directory named step_N is complete, unless it only holds the user's files (output.h).
//
// All ranks write, and any number of ranks can read: each rank writes its part of the optimizer into a separate file, and optimizer.json lists the
// elements of each file. So OUTPUT_DIR must be a directory that all ranks see.
#pragma once
#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "../parallel/optimizer_state.h"

struct Comm;

// The file is JSON with an additional field "checksum", the checksum of its content. Reading dies if the content has changed; `fix` ends the message.
void write_checked_json(const std::string &path, nlohmann::json value);
nlohmann::json read_checked_json(const std::string &path, const std::string &fix);

// Returns the end of a message about a damaged checkpoint `dir`, or a directory in it: "\n  fix: ...", to resume from the previous checkpoint.
std::string other_checkpoint(const std::string &dir);

// All ranks call these functions, and an error on one rank is an error on all.
//
// optimizer-00003-of-00008.safetensors   rank 3's parts in order: "master" (the parameters), "m", "v" (without Muon's elements), all F32.
//                                        Of the ranks with the same parts the first writes; if every rank has everything, rank 0.
// optimizer.json                         {"version": 1, "elements", "files": [{"name", "bytes", "header", "parts": [{"global", "count",
//                                        "master": [...], "m": [...], "v": [...]}]}]}: XXH3 checksums of the file's header, and of each 2^20
//                                        elements of a part in each tensor; and its own checksum
//
// A reader verifies the data that it uses, in whole blocks of 2^20 elements. With another number of ranks a rank reads little more than its own
// parts; with the same number it reads exactly these.
void save_optimizer(Comm &comm, const std::string &dir, const OptimizerState &state);
void load_optimizer(Comm &comm, const std::string &dir, const OptimizerState &state);
// The ranks that divided tensors when the checkpoint was written, for Model::optimizer_state().
size_t tensor_ranks_of(Comm &comm, const std::string &dir);
void verify_optimizer(Comm &comm, const std::string &dir,
                      const OptimizerState &state);  // compares the files with `state`, bit by bit

inline constexpr const char *trial_name = "step_trial";  // before its first step a run writes and reads this checkpoint
std::string checkpoint_path(const std::string &output_dir, size_t step);
std::optional<size_t> step_of(const std::string &name);  // 12 for "step_12", nothing for other names
std::vector<size_t> checkpoint_steps(
    const std::string &output_dir);                            // in increasing order; of directories with files of a checkpoint
std::string latest_checkpoint(const std::string &output_dir);  // empty if there is none
