#include "run_log.h"

#include <algorithm>
#include <filesystem>

#include "../core/common.h"
#include "../core/gpu.h"
#include "../model/lora.h"
#include "../model/profile.h"

using nlohmann::ordered_json;

StepMeter::StepMeter(const Mesh &mesh, Model &model) : mesh_(mesh), model_(model), comm_before_(mesh.seconds()) {
    if (Profiler *profiler = model.trace().profiler()) profiler->begin_step();
    model.take_sent();  // drops the bytes sent in an evaluation
}

void StepMeter::begin_update() {
    update_start_ = std::chrono::steady_clock::now();
    comm_before_update_ = mesh_.seconds();
}

void StepMeter::end_update() {
    const double update_comm = mesh_.seconds() - comm_before_update_;
    report_.sent = model_.take_sent();
    report_.comm_seconds = mesh_.seconds() - comm_before_;
    report_.update_seconds = seconds_since(update_start_) - update_comm;
    report_.peak_mem = model_.memory().peak();
}

StepReport StepMeter::report() {
    if (Profiler *profiler = model_.trace().profiler()) profiler->end_step();
    report_.seconds = seconds_since(start_);
    return report_;
}

RunLog::RunLog(const Run &run, const Training &training)
    : run_(run),
      o_(run.options),
      training_(training),
      peak_(gpu_peak(training.model->memory().device(), name_of(run.options.dtype))) {}

void RunLog::open(size_t step, bool within_step) {
    if (!run_.is_main_rank()) return;
    const std::string log = o_.log.empty() ? o_.output_dir + "/log.jsonl" : o_.log;
    const bool same_log = !training_.resume_from.empty() && std::filesystem::exists(log);
    logger_ = std::make_unique<Logger>(log, same_log, step, within_step);
    if (!same_log) describe_run();
    for (const std::string &tracker : o_.report_to) {
        const size_t colon = tracker.find(':');  // before a project
        if (tracker == "tensorboard") reporters_.emplace_back(tracker, log, o_.output_dir + "/tensorboard");
        else if (tracker != "none")
            reporters_.emplace_back(tracker.substr(0, colon), log,
                                    colon == tracker.npos ? "train_llama" : tracker.substr(colon + 1));
    }
}

void RunLog::describe_run() {
    const Plan &plan = training_.model->plan();
    const size_t parameters = parameter_count(run_.model.config), samples = training_.loader->train_samples().size();
    write({{"task", task_name(run_.task)},
           {"options", to_json(o_, run_.task)},
           {"device", training_.model->memory().device()},
           {"threads", o_.threads},
           {"world", run_.comm.size},
           {"dp", run_.model.ranks.dp()},
           {"sp", run_.model.ranks.sp},
           {"tp", run_.model.ranks.tp},
           {"model",
            {{"family", run_.model.config.family},
             {"parameters", parameters},
             {"trained", run_.model.config.lora.rank ? trained_parameters(run_.model.config) : parameters},
             {"dir", run_.model.dir}}},
           {"data",
            {{"path", training_.data->path()},
             {"name", o_.rollouts.empty() ? o_.data : o_.rollouts},
             {"samples", samples},
             {"tokens", training_.data->total_tokens()},
             {"target_tokens", training_.data->total_targets()}}},
           {"steps", training_.steps},
           {"plan_bytes", plan.bytes()},
           {"planned_peak_mem", training_.planned},
           {"offloaded_bytes", plan.store_bytes()},
           {"compiler", __VERSION__}});
    if (run_.model.config.lora.rank)
        say("adapters of rank %zu: %zu parameters are trained", run_.model.config.lora.rank,
            trained_parameters(run_.model.config));
    say("%s: %zu parameters, %s on %zu threads%s; %zu samples, %zu steps; plan %s", task_name(run_.task), parameters,
        name_of(o_.dtype).c_str(), o_.threads, run_.comm.size > 1 ? " a rank" : "", samples, training_.steps,
        human_bytes(plan.bytes()).c_str());
    if (plan.store_bytes())
        say("offloaded: %s to %s%s", human_bytes(plan.store_bytes()).c_str(), training_.model->store_name().c_str(),
            run_.comm.size > 1 ? ", on each rank" : "");
}

void RunLog::say_split(const Step &step) const {
    if (run_.model.ranks.sp == 1 || !run_.is_main_rank()) return;
    const Row row = pad_row(make_row(*step.data, step.rows[0]), run_.model.ranks.sp);
    run_.say("%s", pieces_table(split_row(run_.model.config, run_.model.ranks, o_.dtype == Dtype::bf16 ? 2 : 4, row)).c_str());
}

// ---- a step ---------------------------------------------------------------------------------------------------------------------------

// Model FLOPs utilisation: the share of the device's peak that went into the model's own arithmetic. It is null if no peak is known, or if the
// step had no target and computed nothing.
ordered_json RunLog::mfu(const Step &step, double seconds) const {
    if (peak_ == 0 || step.target_tokens == 0) return nullptr;
    double flops = 0;
    for (const auto &samples : step.rows) flops += training_.model->model_flops(outline(*step.data, samples, run_.share_prompts));
    return flops / (seconds * peak_ * run_.comm.size);
}

// Combines the reports of all ranks. Bytes are summed. Times are taken from the slowest rank, which waits least for the others.
void RunLog::add_reports(ordered_json &line, const StepReport &own) const {
    const auto all = run_.comm.gather(own);
    Payload sent;
    StepReport slowest = all[0];
    size_t most = 0, least = SIZE_MAX;
    for (const StepReport &r : all) {
        sent += r.sent;
        if (r.comm_seconds < slowest.comm_seconds) slowest = r;
        most = std::max(most, r.peak_mem), least = std::min(least, r.peak_mem);
    }
    line["peak_mem"] = most;
    if (run_.comm.size == 1) return;
    line["peak_mem_min"] = least;
    line["compute_s"] = own.seconds - slowest.comm_seconds - slowest.update_seconds;
    line["comm_s"] = slowest.comm_seconds;
    line["optimizer_s"] = slowest.update_seconds;
    line["sent_kv"] = sent.kv, line["sent_dkv"] = sent.dkv, line["sent_grads"] = sent.grads, line["sent_params"] = sent.params;
    if (run_.model.ranks.expert_parallel > 1) line["sent_experts"] = sent.experts;
    if (run_.model.ranks.tp > 1) line["sent_tensor"] = sent.tensor;
}

ordered_json RunLog::step_line(const TrainerState &state, const Step &step, const Measured &measured, double norm, double lr,
                               const StepReport &report) const {
    ordered_json line = {{"step", state.step},
                         {"epoch", double(state.cursor) / double(training_.loader->train_samples().size())},
                         {"loss", measured.loss},
                         {"grad_norm", norm},
                         {"lr", lr},
                         {"samples", state.totals.samples},
                         {"tokens", state.totals.tokens},
                         {"target_tokens", state.totals.targets},
                         {"tok_s", double(step.tokens) / report.seconds},
                         {"step_s", report.seconds},
                         {"mfu", mfu(step, report.seconds)},
                         {"peak_mem", report.peak_mem},
                         {"skipped", state.totals.skipped}};
    line.update(measured.metrics);
    add_reports(line, report);
    return line;
}

// ---- writing --------------------------------------------------------------------------------------------------------------------------

void RunLog::write(const ordered_json &line) {
    if (logger_) logger_->write(line);
}

void RunLog::show_step(const ordered_json &line) {
    if (logger_) logger_->show_step(line, training_.steps);
}

void RunLog::say(const char *text, ...) {
    if (!logger_) return;
    va_list args;
    va_start(args, text);
    logger_->say("%s", vformat(text, args).c_str());
    va_end(args);
}

void RunLog::sync() {
    if (logger_) logger_->sync();
}

void RunLog::finish(const TrainerState &state, const Best &best, const std::string &best_path) {
    if (!logger_) return;
    Model &model = *training_.model;
    const Totals &totals = state.totals;
    if (const Profiler *profiler = model.trace().profiler()) say("%s", profiler->table().c_str());
    ordered_json summary = {{"steps", state.step},
                            {"samples", totals.samples},
                            {"tokens", totals.tokens},
                            {"target_tokens", totals.targets},
                            {"hours", totals.seconds / 3600},
                            {"tok_s", double(totals.tokens) / totals.step_seconds},
                            {"peak_mem", model.memory().peak()},
                            {"skipped", totals.skipped},
                            {"loss_spikes", state.spikes.count},
                            {"restarts", totals.restarts}};
    if (best.step) summary["best_step"] = best.step, summary["best_eval_loss"] = best.loss;
    write({{"summary", summary}});
    sync();
    for (Reporter &reporter : reporters_)
        if (!reporter.finish()) say("note: the log was not handed on; the task report does it from the file");
    if (best.step) say("best evaluation: loss %.4f at step %zu, in %s", best.loss, best.step, best_path.c_str());
    say("saved %s; %zu steps, %zu samples, %zu tokens, %zu steps skipped, %zu loss spikes; peak memory %s, planned %s",
        o_.output_dir.c_str(), state.step, totals.samples, totals.tokens, totals.skipped, state.spikes.count,
        human_bytes(model.memory().peak()).c_str(), human_bytes(training_.planned).c_str());
    if (const std::string &name = run_.chat.read_as; !name.empty())
        say("note: AutoTokenizer of transformers reads the tokenizer of %s as a %s, which makes other ids of some texts than those of tokenizer.json, on which it was trained: load it with PreTrainedTokenizerFast",
            o_.output_dir.c_str(), name.c_str());
}
