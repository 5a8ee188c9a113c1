// Checkpoints: OUTPUT_DIR/step_N/ holds the model as a Hugging Face directory, the optimizer's state by global element offsets, and
// trainer_state.json. A checkpoint is written as step_N.tmp, synced and renamed, and renamed again before it is removed:
// whatever is called step_N is complete, unless it holds the user's files alone (output.h).
//
// All ranks write, and any number of ranks can read: each rank writes its part of the optimizer into a file of its own, and optimizer.json says
// which elements each file holds. So OUTPUT_DIR must be a directory that all ranks see.
#pragma once
#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "../parallel/optimizer_state.h"

struct Comm;

// The file is JSON with one more field, "checksum", the checksum of its content. Reading refuses content that has changed; `fix` ends the message.
void write_checked_json(const std::string &path, nlohmann::json value);
nlohmann::json read_checked_json(const std::string &path, const std::string &fix);

// Returns the end of a message about a damaged checkpoint `dir`, or a directory in it: "\n  fix: ...", which tells to resume from the checkpoint before it.
std::string other_checkpoint(const std::string &dir);

// All ranks call these functions, and an error of one is an error of all.
//
// optimizer-00003-of-00008.safetensors   rank 3's parts one after the other: "master" (the parameters), "m", "v" (its elements, without Muon's), all F32.
//                                        Of ranks that have the same parts the first ones write: where every rank has the whole, rank 0.
// optimizer.json                         {"version": 1, "elements", "files": [{"name", "bytes", "header", "parts": [{"global", "count",
//                                        "master": [...], "m": [...], "v": [...]}]}]}: of the file's header, and of each 2^20 elements
//                                        of a part in each tensor, the XXH3 checksum; and its own
//
// A reader checks the data that it uses, and must read whole blocks of 2^20 elements for that. With another number of ranks a rank reads
// little more than its own parts; with the same number it reads just these.
void save_optimizer(Comm &comm, const std::string &dir, const OptimizerState &state);
void load_optimizer(Comm &comm, const std::string &dir, const OptimizerState &state);
void verify_optimizer(Comm &comm, const std::string &dir, const OptimizerState &state);  // compares the files with it, bit by bit

inline constexpr const char *trial_name = "step_trial";  // a run writes and reads this checkpoint before its first step
std::string checkpoint_path(const std::string &output_dir, size_t step);
std::optional<size_t> step_of(const std::string &name);               // 12 for "step_12", and nothing for names of no checkpoint
std::vector<size_t> checkpoint_steps(const std::string &output_dir);  // rising; of directories with files of a checkpoint
std::string latest_checkpoint(const std::string &output_dir);         // empty if there is none
