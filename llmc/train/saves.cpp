#include "saves.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "../core/common.h"
#include "../core/json.h"
#include "../core/signals.h"
#include "../io/hf.h"
#include "checkpoint.h"

namespace fs = std::filesystem;

Saves::Saves(const Run &run, Training &training)
    : run_(run),
      o_(run.options),
      training_(training),
      output_(training.output.get()),
      every_(run.options.save_steps.of(training.steps)) {
    const Auto<Dtype> exported = o_.export_dtype ? o_.export_dtype : run.model.config.lora.rank ? Dtype::f32 : o_.dtype;
    export_dtype_ = exported == Dtype::bf16 ? "BF16" : "F32";
}

TrainerState Saves::resume(const TrainerState &state) {
    const std::string &from = training_.resume_from;
    TrainerState saved;
    agree(run_.comm,
          [&] { saved = read_trainer_state(from, state, [&](const std::string &line) { run_.say("%s", line.c_str()); }); });
    load_optimizer(run_.comm, from, training_.model->optimizer_state(tensor_ranks_of(run_.comm, from)));
    training_.model->optimizer_state_loaded();
    training_.objective->load_state(from);
    if (from == checkpoint_path(o_.output_dir, saved.step)) saved_ = saved.step;
    run_.say("resumed from %s at step %zu", from.c_str(), saved.step);
    return saved;
}

void Saves::begin(size_t step) {
    agree(run_.comm, [&] { output_ ? output_->remove_leftovers() : void(); });
    try_saving();
    agree(run_.comm, [&] {
        if (!output_) return;
        claim_names(step);
        output_->remove_checkpoints_beyond(step);
        find_best(step);
        if (every_) output_->prune_checkpoints(o_.max_num);  // a crash may have prevented this after the last save
    });
    best_ = run_.comm.gather(best_)[0];
}

void Saves::save_model(const std::string &dir) {
    training_.model->save(dir, export_dtype_);
    agree(run_.comm, [&] {
        if (!run_.is_main_rank()) return;
        ModelSpec saved = run_.model;
        training_.objective->describe(saved.config);
        write_companions(saved, run_.chat, dir, export_dtype_);
    });
    training_.objective->save(dir, export_dtype_);
}

void Saves::save_states(const std::string &dir) {
    save_optimizer(run_.comm, dir, training_.model->optimizer_state());
    training_.objective->save_state(dir);
}

// Writes a directory of the run in the output directory.
void Saves::write_directory(const std::string &name, const std::function<void(const std::string &)> &fill) {
    agree(run_.comm, [&] { output_ ? output_->claim({name + "/"}) : void(); });
    ::write_directory(run_.comm, o_.output_dir + "/" + name, fill);
}

void Saves::try_saving() {
    write_directory(trial_name, [&](const std::string &dir) {
        save_model(dir);
        agree(run_.comm, [&] {
            const HfWeights weights(dir, run_.model.config.lora.rank ? adapter_files : model_files);
            for (const Tensor &t : training_.model->tensors())
                if (!weights.find(t.name)) die("%s was written without %s", dir.c_str(), t.name.c_str());
        });
        if (!every_) return;
        save_states(dir);
        verify_optimizer(run_.comm, dir, training_.model->optimizer_state());
        training_.objective->verify_state(dir);
    });
}

// Lists the run's files other than checkpoints.
void Saves::claim_names(size_t step) {
    std::vector<std::string> names = output_->model_in(trial_name);
    names.insert(names.end(), {"latest", std::string(model_name) + "/"});
    if (o_.log.empty()) names.push_back("log.jsonl");
    if (training_.evaluates()) names.push_back("best/");
    if (o_.save_rollouts) names.push_back("rollouts/");
    if (std::ranges::count(o_.report_to, "tensorboard")) names.push_back("tensorboard/");
    output_->remove(std::string(trial_name) + "/");
    output_->expect_free(names);
    output_->expect_free(output_->checkpoints_beyond(step, training_.steps));
    if (o_.overwrite) output_->clear();
    output_->claim(names);
}

void Saves::save_checkpoint(TrainerState state, RunLog &log) {
    const Activity activity("when its checkpoint is written", Activity::is_finished);
    write_directory(format("step_%zu", state.step), [&](const std::string &dir) {
        save_model(dir);
        save_states(dir);
        agree(run_.comm, [&] {
            if (!run_.is_main_rank()) return;
            state.cursor = training_.loader->cursor();  // the objective may have drawn more samples for its state
            log.sync();                                 // no checkpoint outlives the lines of the steps that led to it
            write_trainer_state(dir, state);
        });
    });
    agree(run_.comm, [&] {
        if (!output_) return;
        output_->set_latest(state.step);
        output_->prune_checkpoints(o_.max_num);
    });
    saved_ = state.step;
}

// ---- the best model -------------------------------------------------------------------------------------------------------------------

std::string Saves::best_path() const { return o_.output_dir + "/best"; }

// Reads best/ when the run begins. Deletes it if it belongs to another run, or to steps after the resumed one.
void Saves::find_best(size_t step) {
    const std::string file = best_path() + "/evaluation.json";
    if (!training_.resume_from.empty() && fs::exists(file)) {
        const auto saved = read_checked_json(file, "\n  fix: move that directory away; the best of what follows will be kept");
        if (saved.value("step", size_t(0)) <= step) best_ = {saved.value("step", size_t(0)), saved.value("eval_loss", 0.0)};
    }
    if (best_.step == 0) output_->remove("best/");
}

bool Saves::keep_best(size_t step, double loss) {
    if (!std::isfinite(loss) || (best_.step && loss >= best_.loss)) return false;
    best_ = {step, loss};
    const Activity activity("when this best model is written", Activity::is_finished);
    write_directory("best", [&](const std::string &dir) {
        save_model(dir);
        agree(run_.comm, [&] {
            if (run_.is_main_rank()) write_checked_json(dir + "/evaluation.json", {{"step", step}, {"eval_loss", loss}});
        });
    });
    return true;
}

void Saves::finish() {
    const Activity activity("when its model is written", Activity::is_finished);
    write_directory(model_name, [&](const std::string &dir) { save_model(dir); });
    agree(run_.comm, [&] { output_ ? output_->publish_model() : void(); });
}
