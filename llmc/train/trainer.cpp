// The training loop: steps, evaluation, checkpoints, the log, signals, resuming.
#include <signal.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <list>
#include <optional>

#include "../core/common.h"
#include "../core/file.h"
#include "../core/gpu.h"
#include "../core/json.h"
#include "../core/rng.h"
#include "../io/hf.h"
#include "../model/lora.h"
#include "../model/profile.h"
#include "checkpoint.h"
#include "continuation.h"
#include "evaluate.h"
#include "logger.h"
#include "objective.h"
#include "open.h"
#include "output.h"
#include "reporter.h"
#include "schedule.h"
#include "trainer_state.h"

namespace fs = std::filesystem;
using nlohmann::ordered_json;

// The only global of the program: a signal handler has nowhere else to write.
static volatile sig_atomic_t received_signal = 0;
extern "C" void remember_signal(int signal) { received_signal = signal; }

static constexpr size_t max_skips_in_a_row = 5;

namespace {

// The model with the smallest evaluation loss so far. It is saved in best/, with these numbers beside it.
struct Best {
    size_t step = 0;  // 0: there is none
    double loss = 0;
};

class Trainer {
  public:
    explicit Trainer(Run &run);
    int train();

  private:
    size_t steps_of(const Drawing &drawing) const;
    void check_output_dir();
    ModelLimits draw_from_data();
    void start_or_resume();
    void restore_state(const std::string &dir);
    TrainerState state() const;
    void describe_run();
    void describe_split(const Step &batch) const;
    void try_saving();
    void claim_names();
    void save_model(const std::string &dir);
    void save_states(const std::string &dir);
    void write_own_directory(const std::string &name, const std::function<void(const std::string &)> &fill);
    void save_checkpoint();
    ordered_json mfu(const Step &batch, double seconds) const;
    struct Report;
    void add_reports(ordered_json &line, const Report &own, double seconds) const;
    Measured gradients_of(const Step &batch);
    double schedule(size_t frozen) const;
    void update(const Step &batch, const Measured &measured, double norm, double lr);
    void explain(const Step &batch);
    ordered_json optimizer_step(const Step &batch);
    void evaluate_now();
    void show_sample();
    std::string best_path() const { return o_.output_dir + "/best"; }
    void find_best();
    void keep_best(double loss);
    void write_summary();
    void finish();

    Run &run_;
    const Options &o_;
    std::unique_ptr<Samples> data_, eval_data_;
    std::unique_ptr<DataLoader> loader_;
    std::unique_ptr<Objective> objective_;
    std::optional<Continuation> continuation_;  // --sample_every
    std::unique_ptr<Model> model_;
    double peak_ = 0;                 // FLOP/s of the device; 0: not known
    size_t planned_ = 0;              // bytes of memory that the process should hold at its peak
    std::unique_ptr<Logger> logger_;  // only on the rank that prints
    std::list<Reporter> reporters_;   // of its log
    std::string export_dtype_, resume_from_;
    std::optional<OutputDirectory> output_;  // on the main rank
    std::string data_fingerprint_;           // hash of the file that is open; its name may meanwhile belong to another file
    size_t save_every_ = 0, eval_every_ = 0, log_every_ = 1;  // steps; 0: never, and after each epoch
    size_t steps_ = 0, step_ = 0, skips_in_a_row_ = 0;
    size_t frozen_ = 0;          // updates that leave the model as it is
    size_t worse_in_a_row_ = 0;  // evaluations since the best
    Totals totals_;
    LossSpikes spikes_;
    Best best_;
    const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
};

Trainer::Trainer(Run &run) : run_(run), o_(run.options) {
    agree(run.comm, [&] {
        objective_ = make_objective(run);
        frozen_ = objective_->frozen_steps();
        if (run.is_main_rank()) check_output_dir();
    });
    resume_from_ = run.comm.gather(resume_from_)[0];
    Options eval = o_;
    eval.dataset_probs.clear();  // they belong to the training data
    const auto prepared = [&](const char *flag, const std::string &path, const Options &o) {
        return o_.rollouts.empty() ? prepared_file(run, run.task, flag, path, prepare_flags(o, run.task)) : path;
    };
    const std::string path = run.task == DEMO ? program_file("data/demo/train.safetensors")
                                              : prepared("data", o_.rollouts.empty() ? o_.data : o_.rollouts, o_);
    const std::string eval_path = o_.eval_data.empty() ? "" : prepared("eval_data", o_.eval_data, eval);
    ModelLimits limits;
    data_ = open_samples(run, path);
    if (!eval_path.empty()) eval_data_ = open_samples(run, eval_path);
    agree(run.comm, [&] { limits = draw_from_data(); });
    if (o_.sample_every) continuation_.emplace(run), continuation_->use(limits);
    agree(run.comm, [&] {
        objective_->reserve(*data_, limits);
        if (eval_data_) objective_->reserve(*eval_data_, limits);
    });
    objective_->use(*data_, loader_->used(), limits);
    if (eval_data_) objective_->use(*eval_data_, eval_data_->size(), limits);
    const size_t process = run.make_model(run.config, {})->memory().process();  // measured before any rank allocates
    model_ = open_model(run, limits);
    planned_ = process + run.in_process * model_->plan().bytes();
    peak_ = gpu_peak(model_->memory().device(), o_.dtype);
    const std::string exported = o_.export_dtype != "auto" ? o_.export_dtype : run.config.lora.rank ? "f32" : o_.dtype;
    export_dtype_ = exported == "bf16" ? "BF16" : "F32";
}

// Returns the limits that the model must have room for.
ModelLimits Trainer::draw_from_data() {
    run_.chat = data_->chat_format();
    add_eos(run_.config, run_.chat.end_of_turn);
    data_fingerprint_ = data_->fingerprint();
    LoaderOptions options;
    const Drawing drawing = objective_->drawing(o_);
    options.batch_size = drawing.batch_size, options.batch_tokens = drawing.batch_tokens, options.row_tokens = o_.row_tokens;
    options.max_samples = o_.max_samples, options.eval_fraction = o_.eval_fraction, options.seed = o_.seed,
    options.shuffle = o_.shuffle;
    loader_ = std::make_unique<DataLoader>(*data_, options);
    steps_ = o_.max_steps ? o_.max_steps : steps_of(drawing);
    save_every_ = o_.save_steps.of(steps_), eval_every_ = o_.eval_steps.of(steps_), log_every_ = o_.logging_steps.of(steps_);

    ModelLimits limits = limits_for(run_, Mode::train, *data_);
    if (eval_data_) {
        const ModelLimits other = limits_for(run_, Mode::train, *eval_data_);
        limits.row_tokens = std::max(limits.row_tokens, other.row_tokens);
        limits.positions = std::max(limits.positions, other.positions);
    }
    return limits;
}

// The number of optimizer steps.
size_t Trainer::steps_of(const Drawing &drawing) const {
    if (drawing.batch_tokens) return loader_->steps(drawing.epochs);
    const size_t samples = loader_->train_samples().size(), rest = samples % drawing.batch_size;
    return drawing.epochs *
           (samples / drawing.batch_size * objective_->steps(drawing.batch_size) + (rest ? objective_->steps(rest) : 0));
}

// The directory is locked before anything in it is looked at: a run that ends may still be saving its last checkpoint there.
void Trainer::check_output_dir() {
    const std::string &dir = o_.output_dir;
    output_.emplace(dir);
    for (const auto &[flag, path] : inputs_of(run_)) output_->refuse_input(flag, path);
    if (o_.resume != "never") {
        resume_from_ = o_.resume == "auto" ? latest_checkpoint(dir) : o_.resume;
        if (fs::exists(resume_from_ + "/optimizer.json") && !fs::exists(resume_from_ + "/trainer_state.json"))
            die("%s: has no trainer_state.json, so it is no whole checkpoint%s", resume_from_.c_str(),
                other_checkpoint(resume_from_).c_str());
        if (!resume_from_.empty() && !fs::exists(resume_from_ + "/trainer_state.json"))
            die("--resume %s: no such checkpoint\n  fix: auto, never, or a step_N directory", resume_from_.c_str());
    }
    std::error_code error;
    const bool goes_on =
        o_.resume == "auto" || (!resume_from_.empty() && fs::equivalent(fs::path(resume_from_) / "..", dir, error));
    if (!goes_on && !o_.overwrite && output_->holds_run())
        die("%s already holds a run or a model\n  fix: --resume auto to go on, --overwrite to replace it, or another --output_dir",
            dir.c_str());
}

// ---- state ----------------------------------------------------------------------------------------------------------------------------

static double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

TrainerState Trainer::state() const {
    Totals totals = totals_;
    totals.seconds += seconds_since(began_);
    return {.step = step_,
            .cursor = loader_->cursor(),
            .steps = steps_,
            .skips_in_a_row = skips_in_a_row_,
            .worse_in_a_row = worse_in_a_row_,
            .totals = totals,
            .spikes = spikes_,
            .task = task_name(run_.task),
            .data = data_->path(),
            .data_fingerprint = data_fingerprint_,
            .options = to_json(o_, run_.task)};
}

void Trainer::restore_state(const std::string &dir) {
    const TrainerState saved = read_trainer_state(dir, state(), [&](const std::string &line) { run_.say("%s", line.c_str()); });
    step_ = saved.step;
    loader_->seek(saved.cursor);
    totals_ = saved.totals;
    totals_.restarts++;
    skips_in_a_row_ = saved.skips_in_a_row;
    worse_in_a_row_ = saved.worse_in_a_row;
    spikes_ = saved.spikes;
}

void Trainer::start_or_resume() {
    if (!resume_from_.empty()) {
        agree(run_.comm, [&] { restore_state(resume_from_); });
        load_optimizer(run_.comm, resume_from_, model_->optimizer_state());
        model_->optimizer_state_loaded();
        objective_->load_state(resume_from_);
        run_.say("resumed from %s at step %zu", resume_from_.c_str(), step_);
    }
    agree(run_.comm, [&] { output_ ? output_->remove_leftovers() : void(); });
    try_saving();
    agree(run_.comm, [&] {
        if (!run_.is_main_rank()) return;
        output_->remove_checkpoints_beyond(step_);
        find_best();
        if (save_every_) output_->prune_checkpoints(o_.max_num);  // a crash may have prevented this after the last save
        const std::string log = o_.log.empty() ? o_.output_dir + "/log.jsonl" : o_.log;
        const bool same_log = !resume_from_.empty() && fs::exists(log);
        logger_ = std::make_unique<Logger>(log, same_log, step_);
        if (!same_log) describe_run();
        for (const std::string &where : o_.report_to)
            if (where != "none")
                reporters_.emplace_back(where, log, where == "tensorboard" ? o_.output_dir + "/tensorboard" : o_.report_project);
    });
    best_ = run_.comm.gather(best_)[0];
}

void Trainer::describe_run() {
    const Plan &plan = model_->plan();
    const size_t parameters = parameter_count(run_.config);
    logger_->write({{"task", task_name(run_.task)},
                    {"options", to_json(o_, run_.task)},
                    {"device", model_->memory().device()},
                    {"threads", o_.threads},
                    {"world", run_.comm.size},
                    {"dp", run_.ranks.dp()},
                    {"sp", run_.ranks.sp},
                    {"model",
                     {{"family", run_.config.family},
                      {"parameters", parameters},
                      {"trained", run_.config.lora.rank ? trained_parameters(run_.config) : parameters},
                      {"dir", run_.model_dir}}},
                    {"data",
                     {{"path", data_->path()},
                      {"samples", loader_->train_samples().size()},
                      {"tokens", data_->total_tokens()},
                      {"target_tokens", data_->total_targets()}}},
                    {"steps", steps_},
                    {"plan_bytes", plan.bytes()},
                    {"planned_peak_mem", planned_},
                    {"offloaded_bytes", plan.store_bytes()},
                    {"compiler", __VERSION__}});
    if (run_.config.lora.rank)
        logger_->say("adapters of rank %zu: %zu parameters are trained", run_.config.lora.rank, trained_parameters(run_.config));
    logger_->say("%s: %zu parameters, %s on %zu threads%s; %zu samples, %zu steps; plan %s", task_name(run_.task), parameters,
                 o_.dtype.c_str(), o_.threads, run_.comm.size > 1 ? " a rank" : "", loader_->train_samples().size(), steps_,
                 human_bytes(plan.bytes()).c_str());
    if (plan.store_bytes())
        logger_->say("offloaded: %s to %s%s", human_bytes(plan.store_bytes()).c_str(), model_->store_name().c_str(),
                     run_.comm.size > 1 ? ", on each rank" : "");
}

// Prints how the ranks of a ring share the first row of a step.
void Trainer::describe_split(const Step &batch) const {
    if (run_.ranks.sp == 1 || !run_.is_main_rank()) return;
    const Row row = pad_row(make_row(*batch.data, batch.rows[0]), run_.ranks.sp);
    run_.say("%s", pieces_table(split_row(run_.config, run_.ranks, o_.dtype == "bf16" ? 2 : 4, row)).c_str());
}

// ---- saving ---------------------------------------------------------------------------------------------------------------------------

void Trainer::save_model(const std::string &dir) {
    model_->save(dir, export_dtype_);
    agree(run_.comm, [&] {
        if (!run_.is_main_rank()) return;
        ModelConfig config = run_.config;
        objective_->describe(config);
        write_companions(run_, config, dir, export_dtype_);
    });
    objective_->save(dir, export_dtype_);
}

// Writes a directory of the run in the output directory.
void Trainer::write_own_directory(const std::string &name, const std::function<void(const std::string &)> &fill) {
    agree(run_.comm, [&] { output_ ? output_->claim({name + "/"}) : void(); });
    write_directory(run_.comm, o_.output_dir + "/" + name, fill);
}

void Trainer::save_states(const std::string &dir) {
    save_optimizer(run_.comm, dir, model_->optimizer_state());
    objective_->save_state(dir);
}

// Writes everything that the run will save before its first step, and reads it back, so that a long run does not fail at its first save.
void Trainer::try_saving() {
    write_own_directory(trial_name, [&](const std::string &dir) {
        save_model(dir);
        agree(run_.comm, [&] {
            const HfWeights weights(dir, run_.config.lora.rank ? adapter_files : model_files);
            for (const Tensor &t : model_->tensors())
                if (!weights.find(t.name)) die("%s was written without %s", dir.c_str(), t.name.c_str());
        });
        if (!save_every_) return;
        save_states(dir);
        verify_optimizer(run_.comm, dir, model_->optimizer_state());
        objective_->verify_state(dir);
    });
    agree(run_.comm, [&] { output_ ? claim_names() : void(); });
}

// Lists what the run will write, beside its checkpoints. Only then does --overwrite remove the earlier run.
void Trainer::claim_names() {
    std::vector<std::string> names = output_->model_in(trial_name);
    names.insert(names.end(), {"latest", std::string(model_name) + "/"});
    if (o_.log.empty()) names.push_back("log.jsonl");
    if (eval_data_ || !loader_->eval_samples().empty()) names.push_back("best/");
    if (o_.save_rollouts) names.push_back("rollouts/");
    if (std::ranges::count(o_.report_to, "tensorboard")) names.push_back("tensorboard/");
    output_->remove(std::string(trial_name) + "/");
    output_->expect_free(names);
    output_->expect_free(output_->checkpoints_beyond(step_, steps_));
    if (o_.overwrite) output_->clear();
    output_->claim(names);
}

void Trainer::save_checkpoint() {
    write_own_directory(format("step_%zu", step_), [&](const std::string &dir) {
        save_model(dir);
        save_states(dir);
        agree(run_.comm, [&] {
            if (!run_.is_main_rank()) return;
            logger_->sync();  // no checkpoint outlives the lines of the steps that led to it
            write_trainer_state(dir, state());
        });
    });
    agree(run_.comm, [&] {
        if (!run_.is_main_rank()) return;
        output_->set_latest(step_);
        output_->prune_checkpoints(o_.max_num);
    });
}

// Reads best/ when the run begins. Deletes it if it belongs to another run, or to later steps than the one that is resumed.
void Trainer::find_best() {
    const std::string file = best_path() + "/evaluation.json";
    if (!resume_from_.empty() && fs::exists(file)) {
        const auto saved = read_checked_json(file, "\n  fix: move that directory away; the best of what follows will be kept");
        if (saved.value("step", size_t(0)) <= step_) best_ = {saved.value("step", size_t(0)), saved.value("eval_loss", 0.0)};
    }
    if (best_.step == 0) output_->remove("best/");
}

void Trainer::keep_best(double loss) {
    worse_in_a_row_++;
    if (!std::isfinite(loss) || (best_.step && loss >= best_.loss)) return;
    worse_in_a_row_ = 0;
    best_ = {step_, loss};
    write_own_directory("best", [&](const std::string &dir) {
        save_model(dir);
        agree(run_.comm, [&] {
            if (run_.is_main_rank()) write_checked_json(dir + "/evaluation.json", {{"step", step_}, {"eval_loss", loss}});
        });
    });
}

// ---- steps ----------------------------------------------------------------------------------------------------------------------------

// Model FLOPs utilisation: the share of the device's peak that went into the model's own arithmetic. It is null if
// no peak is known, or if the step had no target and computed nothing.
ordered_json Trainer::mfu(const Step &batch, double seconds) const {
    if (peak_ == 0 || batch.target_tokens == 0) return nullptr;
    double flops = 0;
    for (const auto &samples : batch.rows) flops += model_->model_flops(outline(*batch.data, samples));
    return flops / (seconds * peak_ * run_.comm.size);
}

// A rank's figures of a step. Seconds are measured by the host's clock; on a GPU the time of queued work counts where the host waits for it.
struct Trainer::Report {
    Payload sent;
    double comm_seconds, update_seconds;
    size_t peak_mem;
};

// Combines the figures of all ranks. Bytes are summed. Times are those of the slowest rank, which waits least for the others.
void Trainer::add_reports(ordered_json &line, const Report &own, double seconds) const {
    const auto all = run_.comm.gather(own);
    Payload sent;
    Report slowest = all[0];
    size_t most = 0, least = SIZE_MAX;
    for (const Report &r : all) {
        sent.kv += r.sent.kv, sent.dkv += r.sent.dkv, sent.grads += r.sent.grads, sent.params += r.sent.params;
        if (r.comm_seconds < slowest.comm_seconds) slowest = r;
        most = std::max(most, r.peak_mem), least = std::min(least, r.peak_mem);
    }
    line["peak_mem"] = most;
    if (run_.comm.size == 1) return;
    line["peak_mem_min"] = least;
    line["compute_s"] = seconds - slowest.comm_seconds - slowest.update_seconds;
    line["comm_s"] = slowest.comm_seconds;
    line["optimizer_s"] = slowest.update_seconds;
    line["sent_kv"] = sent.kv, line["sent_dkv"] = sent.dkv, line["sent_grads"] = sent.grads, line["sent_params"] = sent.params;
}

// Computes loss and gradients of a step.
Measured Trainer::gradients_of(const Step &batch) {
    if (batch.target_tokens == 0) return objective_->skip(batch);  // there is nothing to learn, and the loss would be 0 / 0
    const uint64_t key = Random{o_.seed, Purpose::gradients, 0}.bits(step_);
    model_->zero_gradients(key);
    model_->randomise(Random{o_.seed, Purpose::dropout, 0}.bits(step_));
    objective_->begin(batch, key);
    const auto own = own_rows(run_.config, run_.ranks, *batch.data, batch.rows);
    for (size_t i = 0; i < own.size(); i++) objective_->accumulate(*model_, make_row(*batch.data, own[i]), i + 1 == own.size());
    model_->randomise({});
    Measured step = objective_->take(*model_);
    model_->arena().check_guards();
    return step;
}

// Returns the learning rate of a model that the first `frozen` updates leave as it is, as a share of its peak.
double Trainer::schedule(size_t frozen) const {
    if (step_ - totals_.skipped < frozen) return 0;
    const size_t all = steps_ - std::min(frozen, steps_);
    const size_t warmup = o_.lr_warmup_steps >= 0 ? o_.lr_warmup_steps.of(all) : warmup_steps(o_.lr_warmup_ratio, all);
    return learning_rate_at({o_.lr_scheduler, 1, warmup, o_.min_lr_ratio, all, o_.lr_decay_ratio}, step_ - frozen);
}

void Trainer::update(const Step &batch, const Measured &measured, double norm, double lr) {
    const bool finite = std::isfinite(norm + measured.norm_beside) && (std::isfinite(measured.loss) || batch.target_tokens == 0);
    if (finite && batch.target_tokens) {
        AdamW adamw{};
        adamw.lr = lr, adamw.beta1 = o_.adam_betas[0], adamw.beta2 = o_.adam_betas[1], adamw.eps = o_.adam_eps;
        adamw.weight_decay = o_.weight_decay;
        adamw.grad_scale = o_.max_norm > 0 && norm > o_.max_norm ? o_.max_norm / norm : 1;
        adamw.step = step_ - totals_.skipped + 1;
        adamw.seed = o_.seed;
        objective_->update(adamw, schedule(0));
        if (adamw.step > frozen_) adamw.step -= frozen_, model_->update(adamw);
        skips_in_a_row_ = 0;
        return;
    }
    if (!finite && o_.debug) explain(batch);
    totals_.skipped++;
    if (logger_)
        logger_->say("step %zu skipped: %s", step_ + 1,
                     finite ? "no token of its samples is learned from" : "its loss or gradient is not finite");
    if (finite || ++skips_in_a_row_ < max_skips_in_a_row) return;
    const std::string tensor = model_->nonfinite_gradient();
    agree(run_.comm, [&] {
        die("%zu steps in a row had a loss or gradient that is not finite; first in %s\n  fix: a smaller --learning_rate; --debug names the op where it begins",
            skips_in_a_row_, tensor.empty() ? "the loss" : tensor.c_str());
    });
}

// Computes the step once more, examines the output of each op, and ends the run with the first value that is not finite.
void Trainer::explain(const Step &batch) {
    model_->trace().detect_anomaly();
    gradients_of(batch);
    model_->gradient_norm();  // waits for the sums over ranks
    const Anomaly own = model_->trace().anomaly();
    const auto ops = run_.comm.gather(own.ops);
    const auto what = run_.comm.gather(own.what);
    const std::string tensor = model_->nonfinite_gradient();
    const size_t rank = size_t(std::min_element(ops.begin(), ops.end()) - ops.begin());
    const std::string of_rank = run_.comm.size > 1 ? format("rank %zu, ", rank) : "";
    const std::string first = ops[rank] < SIZE_MAX ? of_rank + what[rank]
                              : !tensor.empty() ? "the gradient of " + tensor + ", while what passes through the layers is finite"
                                                : "the loss, while its gradient is finite";
    agree(run_.comm, [&] {
        die("step %zu has a value that is not finite; first in %s\n  fix: a smaller --learning_rate, --dtype f32, or look at the samples of this step",
            step_ + 1, first.c_str());
    });
}

ordered_json Trainer::optimizer_step(const Step &batch) {
    const auto now = [] { return std::chrono::steady_clock::now(); };
    const auto start = now();
    const double comm_before = run_.mesh->seconds();
    Profiler *profiler = model_->trace().profiler();
    if (profiler) profiler->begin_step();
    model_->take_sent();  // drops the bytes sent in an evaluation
    const double lr = o_.learning_rate * schedule(frozen_);
    const Measured step = gradients_of(batch);
    const double norm = batch.target_tokens ? model_->gradient_norm() : 0;
    const auto update_start = now();
    const double comm_before_update = run_.mesh->seconds();
    update(batch, step, norm, lr);
    const double update_comm = run_.mesh->seconds() - comm_before_update;
    const Report report{model_->take_sent(), run_.mesh->seconds() - comm_before, seconds_since(update_start) - update_comm,
                        model_->memory().peak()};
    step_++;
    totals_.samples += batch.samples.size(), totals_.tokens += batch.tokens, totals_.targets += batch.target_tokens;
    if (profiler) profiler->end_step();
    const double seconds = seconds_since(start);
    totals_.step_seconds += seconds;
    const double usual = spikes_.mean;
    if (std::isfinite(step.loss) && spikes_.add(step.loss) && logger_)
        logger_->say("step %zu: a loss spike, %.4f where the mean was %.4f", step_, step.loss, usual);
    const double progress = double(loader_->cursor()) / double(loader_->train_samples().size());
    ordered_json line = {{"step", step_},
                         {"epoch", progress},
                         {"loss", step.loss},
                         {"grad_norm", norm},
                         {"lr", lr},
                         {"samples", totals_.samples},
                         {"tokens", totals_.tokens},
                         {"target_tokens", totals_.targets},
                         {"tok_s", double(batch.tokens) / seconds},
                         {"step_s", seconds},
                         {"mfu", mfu(batch, seconds)},
                         {"peak_mem", report.peak_mem},
                         {"skipped", totals_.skipped}};
    line.update(step.metrics);
    add_reports(line, report, seconds);
    return line;
}

void Trainer::evaluate_now() {
    const Samples &data = eval_data_ ? *eval_data_ : *data_;
    std::vector<size_t> samples = loader_->eval_samples();
    if (eval_data_) {
        samples.resize(eval_data_->size());
        for (size_t i = 0; i < samples.size(); i++) samples[i] = i;
    }
    if (samples.empty()) return;
    const Measured found = objective_->evaluate(*model_, data, samples);
    if (logger_) {
        ordered_json line = {{"step", step_}, {"eval_loss", found.loss}};
        line.update(found.metrics);
        if (!found.metrics.empty()) logger_->write(line);
        logger_->say("step %zu: %s", step_, found.text.c_str());
    }
    keep_best(found.loss);
}

// Prints a sample of the model's text. It does not affect the training.
void Trainer::show_sample() {
    const std::string text = continuation_->text(*model_, step_);
    if (!logger_) return;
    logger_->write({{"step", step_}, {"sample", text}});
    logger_->say("step %zu, a sample:\n%s\n", step_, text.c_str());
}

int Trainer::train() {
    signal(SIGXFSZ, SIG_IGN);  // a file beyond the user's limit is an error of write(), with a message
    start_or_resume();
    struct sigaction action = {};
    action.sa_handler = remember_signal;
    action.sa_flags = SA_RESTART;
    for (int number : {SIGINT, SIGTERM, SIGUSR1}) sigaction(number, &action, nullptr);
    if (struct sigaction before; sigaction(SIGHUP, nullptr, &before) == 0 && before.sa_handler != SIG_IGN)  // as nohup sets it
        sigaction(SIGHUP, &action, nullptr);

    size_t drawn = loader_->cursor();  // samples, when the last step was made
    for (const size_t first = step_; step_ < steps_;) {
        const size_t before = step_;
        auto batches = objective_->draw(*model_, *loader_, steps_ - step_);
        for (size_t i = 0; i < batches.size() && step_ < steps_; i++) {
            batches[i].target_tokens = objective_->targets(batches[i]);
            if (step_ == first) describe_split(batches[i]);
            const ordered_json line = optimizer_step(batches[i]);
            if (logger_ && (step_ % log_every_ == 0 || step_ == steps_)) logger_->write(line), logger_->show_step(line, steps_);
        }
        const auto passed = [&](size_t every) { return step_ / every > before / every; };  // a multiple of it
        const size_t epoch = loader_->train_samples().size(), earlier = std::exchange(drawn, loader_->cursor());
        const bool epoch_ends = drawn / epoch > earlier / epoch;
        if (step_ == steps_ || (eval_every_ ? passed(eval_every_) : epoch_ends)) evaluate_now();
        if (continuation_ && (step_ == steps_ || passed(o_.sample_every))) show_sample();
        const int stop = int(run_.comm.max(received_signal));
        if (stop || (save_every_ && passed(save_every_))) save_checkpoint();
        if (stop) {
            if (logger_)
                logger_->say("stopped by signal %s after step %zu; saved %s\n  go on: the same command with --resume auto",
                             strsignal(stop), step_, checkpoint_path(o_.output_dir, step_).c_str());
            return 128 + stop;
        }
        if (o_.early_stopping_patience && worse_in_a_row_ >= o_.early_stopping_patience && step_ < steps_) {
            if (logger_)
                logger_->say("stopped after step %zu: %zu evaluations in a row were no better than that of step %zu", step_,
                             worse_in_a_row_, best_.step);
            break;
        }
    }
    finish();
    return 0;
}

// The log's last line.
void Trainer::write_summary() {
    const double seconds = totals_.seconds + seconds_since(began_);
    ordered_json summary = {{"steps", step_},
                            {"samples", totals_.samples},
                            {"tokens", totals_.tokens},
                            {"target_tokens", totals_.targets},
                            {"hours", seconds / 3600},
                            {"tok_s", double(totals_.tokens) / totals_.step_seconds},
                            {"peak_mem", model_->memory().peak()},
                            {"skipped", totals_.skipped},
                            {"loss_spikes", spikes_.count},
                            {"restarts", totals_.restarts}};
    if (best_.step) summary["best_step"] = best_.step, summary["best_eval_loss"] = best_.loss;
    logger_->write({{"summary", summary}});
    logger_->sync();
}

void Trainer::finish() {
    write_own_directory(model_name, [&](const std::string &dir) { save_model(dir); });
    agree(run_.comm, [&] { output_ ? output_->publish_model() : void(); });
    if (!logger_) return;
    if (const Profiler *profiler = model_->trace().profiler()) logger_->say("%s", profiler->table().c_str());
    write_summary();
    for (Reporter &reporter : reporters_)
        if (!reporter.finish()) logger_->say("note: the log was not handed on; scripts/report.py does it from the file");
    if (best_.step) logger_->say("best evaluation: loss %.4f at step %zu, in %s", best_.loss, best_.step, best_path().c_str());
    logger_->say("saved %s; %zu steps, %zu samples, %zu tokens, %zu steps skipped, %zu loss spikes; peak memory %s, planned %s",
                 o_.output_dir.c_str(), step_, totals_.samples, totals_.tokens, totals_.skipped, spikes_.count,
                 human_bytes(model_->memory().peak()).c_str(), human_bytes(planned_).c_str());
}

}  // namespace

int train(Run &run) {
    const int code = Trainer(run).train();
    if (run.task != DEMO || code != 0) return code;
    const auto unseen = open_data(run, program_file("data/demo/test.safetensors"));
    const double share = exact_match(run, run.options.output_dir, *unseen, 5);
    run.say("exact match: %.1f %% of %zu unseen prompts", 100 * share, unseen->size());
    return 0;
}
