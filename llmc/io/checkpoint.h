// Checkpoints: OUTPUT_DIR/step_N/ holds the model as a Hugging Face directory, the optimizer's state by global element offsets, and
// trainer_state.json. A checkpoint is written as step_N.tmp, synced and renamed, so whatever is called step_N is complete. The
// file `latest` names the newest, for people and scripts.
//
// All ranks write, and any number of ranks reads: each rank's part of the optimizer is a file of its own, and optimizer.json says which
// elements each file holds. So OUTPUT_DIR must be a directory that all ranks see.
#pragma once
#include <cstddef>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <variant>
#include <vector>

#include "../core/memory.h"

struct Comm;

// Parameters of either dtype, and moments, which may be bf16 alone. In files all are float.
using AnyFloats = std::variant<Floats<float>, Floats<bf16>, bf16 *>;

// What a rank keeps of the optimizer. Elements are counted through all tensors of the model in the order of its parameter table,
// without padding, so that the same number is the same element in every world.
struct OptimizerPart {
    size_t global, count;    // elements [global, global + count)
    AnyFloats master, m, v;  // (count), in `memory`; master: the parameters
};

struct OptimizerState {
    std::vector<OptimizerPart>
        parts;     // of this rank: either all ranks together have each element once, or each rank has them all
    size_t count;  // elements of the model
    Memory *memory;
};

// Writes into a temporary directory, then gives it its name, by rank 0. All ranks call fill(dir), which may call comm and must end in an
// error on all ranks (agree) or on none. On an error nothing remains.
void write_directory(Comm &comm, const std::string &path, const std::function<void(const std::string &)> &fill);

// JSON with the checksum of its content as one more field, "checksum". What is not as it was written is refused; `fix` ends the message.
void write_checked_json(const std::string &path, nlohmann::json value);
nlohmann::json read_checked_json(const std::string &path, const std::string &fix);

// "\n  fix: ..." for what is wrong with the checkpoint `dir`: to resume from the one before it.
std::string other_checkpoint(const std::string &dir);

// Called by all ranks; errors are agreed on.
//
// optimizer-00003-of-00008.safetensors   rank 3's parts one after the other: "master" (the parameters), "m", "v" (its elements), all F32.
//                                        Where every rank has the whole, rank 0 alone writes.
// optimizer.json                         {"version": 1, "elements", "files": [{"name", "bytes", "header", "parts": [{"global", "count",
//                                        "master": [...], "m": [...], "v": [...]}]}]}: of the file's header, and of each 2^20 elements
//                                        of a part in each tensor, the XXH3 checksum; and its own
//
// A reader checks what it uses and must read whole blocks of so many elements for that: a world of another size reads little more than
// its own parts, the same world just these.
void save_optimizer(Comm &comm, const std::string &dir, const OptimizerState &state);
void load_optimizer(Comm &comm, const std::string &dir, const OptimizerState &state);
void verify_optimizer(Comm &comm, const std::string &dir, const OptimizerState &state);  // reads back and compares bit by bit

inline constexpr const char *trial_name = "step_trial";  // the save that is tried before the first step
std::string checkpoint_path(const std::string &output_dir, size_t step);
std::string latest_checkpoint(const std::string &output_dir);  // empty if there is none
void set_latest(const std::string &output_dir, size_t step);

// Of what a run wrote. It loses its name at once, so that a crash leaves no half of it under that.
void remove_directory(const std::string &path);

// Both also remove what a crash left behind.
void prune_checkpoints(const std::string &output_dir, size_t max_num);  // the oldest go
void remove_checkpoints_beyond(const std::string &output_dir,
                               size_t step);  // of a future that never happened; `latest` becomes `step`
