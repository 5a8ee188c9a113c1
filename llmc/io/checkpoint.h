// Checkpoints: OUTPUT_DIR/step_N/ holds the model as a Hugging Face directory, the optimizer's state by global element offsets, and
// trainer_state.json. A checkpoint is written as step_N.tmp, synced and renamed, so whatever is called step_N is complete. The
// file `latest` names the newest, for people and scripts.
#pragma once
#include <cstddef>
#include <functional>
#include <string>

#include "../core/memory.h"

// The optimizer's memory: float, flat, by global element offsets, so that it can be cut anywhere and read back by any number of ranks.
struct OptimizerState {
    float *master, *m, *v;  // (count), in `memory`
    size_t count;
    Memory *memory;
};

// Writes into a temporary directory through `fill(dir)`, then syncs it and gives it its name. On an error nothing remains.
void write_directory(const std::string &path, const std::function<void(const std::string &)> &fill);

void save_optimizer(const std::string &dir, const OptimizerState &state);
void load_optimizer(const std::string &dir, const OptimizerState &state);    // dies when the sizes differ
void verify_optimizer(const std::string &dir, const OptimizerState &state);  // reads back and compares bit by bit

inline constexpr const char *trial_name = "step_trial";  // the save that is tried before the first step
std::string checkpoint_path(const std::string &output_dir, size_t step);
std::string latest_checkpoint(const std::string &output_dir);  // empty if there is none
void set_latest(const std::string &output_dir, size_t step);

// Both also remove what a crash left behind.
void prune_checkpoints(const std::string &output_dir, size_t max_num);  // the oldest go
void remove_checkpoints_beyond(const std::string &output_dir,
                               size_t step);  // of a future that never happened; `latest` becomes `step`
