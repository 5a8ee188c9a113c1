// The training loop: steps and updates, evaluation, signals. training.h opens its inputs, saves.h its outputs, and run_log.h writes its log.
#include <signal.h>

#include <cmath>
#include <cstring>
#include <optional>

#include "../core/common.h"
#include "../core/file.h"
#include "../core/rng.h"
#include "../core/signals.h"
#include "checkpoint.h"
#include "evaluate.h"
#include "open_data.h"
#include "run_log.h"
#include "saves.h"
#include "schedule.h"

using nlohmann::ordered_json;

static constexpr size_t max_skips_in_a_row = 5;

namespace {

class Trainer {
  public:
    explicit Trainer(Run &run);
    int train();

  private:
    void start_or_resume();
    TrainerState state_now() const;
    Measured compute_gradients(const Step &step);
    double schedule(size_t frozen) const;
    void update(const Step &step, const Measured &measured, double norm, double lr);
    void skip_step(const Step &step, bool finite);
    void explain_anomaly(const Step &step);
    void optimizer_step(const Step &step);
    void iterate();
    void take_steps();
    void evaluate();
    void show_sample();
    int leave(int signal);

    const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
    Run &run_;
    const Options &o_;
    Training training_;
    Model &model_;
    Objective &objective_;
    DataLoader &loader_;
    Saves saves_;
    RunLog log_;
    TrainerState state_;
    std::optional<CaughtSignals> signals_;
    size_t first_ = 0;                     // the step with which this run of the program begins
    const size_t eval_every_, log_every_;  // steps; eval_every_ 0: after each epoch
    const size_t frozen_;                  // updates that leave the model as it is
};

Trainer::Trainer(Run &run)
    : run_(run),
      o_(run.options),
      training_(open_training(run)),
      model_(*training_.model),
      objective_(*training_.objective),
      loader_(*training_.loader),
      saves_(run, training_),
      log_(run, training_),
      state_{.step = 0,
             .cursor = 0,
             .begun_step = 0,
             .begun_cursor = 0,
             .steps_done = false,
             .steps = training_.steps,
             .skips_in_a_row = 0,
             .worse_in_a_row = 0,
             .totals = {},
             .spikes = {},
             .task = task_name(run.task),
             .data = training_.data->path(),
             .data_fingerprint = training_.data_fingerprint,
             .options = to_json(run.options, run.task)},
      eval_every_(run.options.eval_steps.of(training_.steps)),
      log_every_(run.options.logging_steps.of(training_.steps)),
      frozen_(objective_.frozen_steps()) {}

void Trainer::start_or_resume() {
    if (!training_.resume_from.empty()) {
        state_ = saves_.resume(state_);
        loader_.seek(state_.cursor);
        first_ = state_.step;
        state_.totals.restarts++;
    }
    saves_.begin(state_.step);
    signals_.emplace(run_.is_main_rank());
    agree(run_.comm, [&] { log_.open(state_.step, state_.steps_done); });
}

// Returns the state with the time that the run has taken until now.
TrainerState Trainer::state_now() const {
    TrainerState state = state_;
    state.totals.seconds += seconds_since(began_);
    return state;
}

// ---- steps ----------------------------------------------------------------------------------------------------------------------------

// Computes loss and gradients of a step.
Measured Trainer::compute_gradients(const Step &step) {
    if (step.target_tokens == 0) return objective_.skip(step);  // there is nothing to learn, and the loss would be 0 / 0
    const uint64_t key = Random{o_.seed, Purpose::gradients, 0}.bits(state_.step);
    model_.zero_gradients(key);
    model_.randomise(Random{o_.seed, Purpose::dropout, 0}.bits(state_.step));
    objective_.begin(step, key);
    const ExpertConfig &experts = run_.model.config.experts;
    if (experts.aux_loss_coef > 0)
        for_own_rows(run_, run_.model, *step.data, step.rows, [&](const Row &row, size_t i, size_t count) {
            if (count > 1) model_.count_routing(row, i + 1 == count);
        });
    for_own_rows(run_, run_.model, *step.data, step.rows,
                 [&](const Row &row, size_t i, size_t count) { objective_.accumulate(model_, row, i + 1 == count); });
    model_.randomise({});
    Measured measured = objective_.take(model_);
    if (experts.number) {
        Routing routing = model_.routing();
        routing.sums = run_.comm.sum(routing.sums);
        routing.add_to(measured.metrics);
        measured.loss += experts.aux_loss_coef * routing.aux_loss();
    }
    model_.arena().check_guards();
    return measured;
}

// Returns the learning rate of a model that the first `frozen` updates leave as it is, as a share of its peak.
double Trainer::schedule(size_t frozen) const {
    if (state_.step - state_.totals.skipped < frozen) return 0;
    const size_t all = state_.steps - std::min(frozen, state_.steps);
    const size_t warmup = o_.lr_warmup.of(all);
    return learning_rate_at({o_.lr_scheduler, 1, warmup, o_.min_lr_ratio, all, o_.lr_decay_ratio}, state_.step - frozen);
}

void Trainer::update(const Step &step, const Measured &measured, double norm, double lr) {
    const bool finite = std::isfinite(norm + measured.norm_beside) && (std::isfinite(measured.loss) || step.target_tokens == 0);
    if (!finite || step.target_tokens == 0) return skip_step(step, finite);
    AdamW adamw{};
    adamw.lr = lr, adamw.beta1 = o_.adam_betas[0], adamw.beta2 = o_.adam_betas[1], adamw.eps = o_.adam_eps;
    adamw.weight_decay = o_.weight_decay;
    adamw.grad_scale = o_.max_norm > 0 && norm > o_.max_norm ? o_.max_norm / norm : 1;
    adamw.step = state_.step - state_.totals.skipped + 1;
    adamw.seed = o_.seed;
    objective_.update(adamw, schedule(0));
    if (adamw.step > frozen_) adamw.step -= frozen_, model_.update(adamw);
    state_.skips_in_a_row = 0;
}

// Leaves the model as it is. Dies if too many steps in a row were not finite.
void Trainer::skip_step(const Step &step, bool finite) {
    if (!finite && o_.debug) explain_anomaly(step);
    state_.totals.skipped++;
    log_.say("step %zu skipped: %s", state_.step + 1,
             finite ? "no token of its samples is learned from" : "its loss or gradient is not finite");
    if (finite || ++state_.skips_in_a_row < max_skips_in_a_row) return;
    const std::string tensor = model_.nonfinite_gradient();
    agree(run_.comm, [&] {
        die("%zu steps in a row had a loss or gradient that is not finite; first in %s\n  fix: lower --learning_rate; --debug names the op where it begins",
            state_.skips_in_a_row, tensor.empty() ? "the loss" : tensor.c_str());
    });
}

// Computes the step once more, examines the output of each op, and ends the run with the first value that is not finite.
void Trainer::explain_anomaly(const Step &step) {
    model_.trace().detect_anomaly();
    compute_gradients(step);
    model_.gradient_norm();  // waits for the sums over ranks
    const Anomaly own = model_.trace().anomaly();
    const auto ops = run_.comm.gather(own.ops);
    const auto what = run_.comm.gather(own.what);
    const std::string tensor = model_.nonfinite_gradient();
    const size_t rank = size_t(std::min_element(ops.begin(), ops.end()) - ops.begin());
    const std::string prefix = run_.comm.size > 1 ? format("rank %zu, ", rank) : "";
    const std::string first = ops[rank] < SIZE_MAX ? prefix + what[rank]
                              : !tensor.empty() ? "the gradient of " + tensor + ", while what passes through the layers is finite"
                                                : "the loss, while its gradient is finite";
    agree(run_.comm, [&] {
        die("step %zu has a value that is not finite; first in %s\n  fix: lower --learning_rate, use --dtype f32, or look at the samples of this step",
            state_.step + 1, first.c_str());
    });
}

void Trainer::optimizer_step(const Step &step) {
    StepMeter meter(*run_.mesh, model_);
    const double lr = o_.learning_rate * schedule(frozen_);
    const Measured measured = compute_gradients(step);
    const double norm = step.target_tokens ? model_.gradient_norm() : 0;
    meter.begin_update();
    update(step, measured, norm, lr);
    meter.end_update();
    const StepReport report = meter.report();

    Totals &totals = state_.totals;
    state_.step++;
    state_.cursor = loader_.cursor();
    totals.samples += step.samples.size(), totals.tokens += step.tokens, totals.targets += step.target_tokens;
    totals.step_seconds += report.seconds;
    const double usual = state_.spikes.mean;
    if (std::isfinite(measured.loss) && state_.spikes.add(measured.loss))
        log_.say("step %zu: a loss spike, %.4f where the mean was %.4f", state_.step, measured.loss, usual);
    const ordered_json line = log_.step_line(state_, step, measured, norm, lr, report);
    if (state_.step % log_every_ == 0 || state_.step == state_.steps) log_.write(line), log_.show_step(line);
}

// ---- between steps --------------------------------------------------------------------------------------------------------------------

void Trainer::evaluate() {
    if (!training_.evaluates()) return;
    const Samples &data = training_.eval_data ? *training_.eval_data : *training_.data;
    const Measured found =
        objective_.evaluate(model_, data, training_.eval_data ? first_samples(data.size()) : loader_.eval_samples());
    ordered_json line = {{"step", state_.step}, {"eval_loss", found.loss}};
    line.update(found.metrics);
    if (!found.metrics.empty()) log_.write(line);
    log_.say("step %zu: %s", state_.step, found.text.c_str());
    state_.worse_in_a_row++;
    if (saves_.keep_best(state_.step, found.loss)) state_.worse_in_a_row = 0;
}

// Prints a sample of the model's text. It does not affect the training.
void Trainer::show_sample() {
    const Activity activity("after this sample of text", Activity::is_finished);
    const std::string text = training_.continuation->text(model_, state_.step);
    log_.write({{"step", state_.step}, {"sample", text}});
    log_.say("step %zu, a sample:\n%s\n", state_.step, text.c_str());
}

// Draws from the data, and makes the steps that result.
void Trainer::take_steps() {
    const size_t cursor = loader_.cursor();
    try {
        std::vector<Step> steps = objective_.draw(model_, loader_, state_.steps - state_.step);
        for (size_t i = 0; i < steps.size() && state_.step < state_.steps; i++) {
            steps[i].target_tokens = objective_.targets(steps[i]);
            if (state_.step == first_) log_.say_split(steps[i]);
            optimizer_step(steps[i]);
        }
    } catch (const Stopped &) {
        if (!objective_.keeps_drawn()) loader_.seek(cursor);  // a resumed run draws again
        throw;
    }
    state_.steps_done = true;
}

void Trainer::iterate() {
    while (state_.step < state_.steps || state_.steps_done) {
        if (!state_.steps_done) take_steps();
        const auto passed = [&](size_t every) { return state_.step / every > state_.begun_step / every; };  // a multiple of it
        const size_t epoch = loader_.train_samples().size();
        const bool epoch_ends = loader_.cursor() / epoch > state_.begun_cursor / epoch, ends = state_.step == state_.steps;
        if (ends || (eval_every_ ? passed(eval_every_) : epoch_ends)) evaluate();
        if (training_.continuation && (ends || passed(o_.sample_every))) show_sample();
        const bool saves = saves_.every() && passed(saves_.every());
        state_.begun_step = state_.step, state_.begun_cursor = loader_.cursor(), state_.steps_done = false;
        if (saves) saves_.save_checkpoint(state_now(), log_);
        if (o_.early_stopping_patience && state_.worse_in_a_row >= o_.early_stopping_patience && !ends) {
            log_.say("stopped after step %zu: %zu evaluations in a row were no better than that of step %zu", state_.step,
                     state_.worse_in_a_row, saves_.best().step);
            return;
        }
        if (!ends) agree(run_.comm, stop_if_asked);  // at the end a checkpoint would take as long as the model itself
    }
}

// Saves a checkpoint, unless the last one has all that is done. A resumed run makes the step that the signal has interrupted.
int Trainer::leave(int signal) {
    const bool is_new = state_.step > 0 && saves_.saved() != state_.step;
    if (is_new || objective_.keeps_drawn() || state_.steps_done) saves_.save_checkpoint(state_now(), log_);
    const std::string saved =
        saves_.saved() ? "saved " + checkpoint_path(o_.output_dir, state_.step) : "there is nothing to save";
    log_.say("stopped by signal %s after step %zu; %s\n  to continue: the same command with --resume auto", strsignal(signal),
             state_.step, saved.c_str());
    return 128 + signal;
}

int Trainer::train() {
    signal(SIGXFSZ, SIG_IGN);  // a file beyond the user's limit is an error of write(), with a message
    start_or_resume();
    if (o_.lr_scheduler != Scheduler::constant && o_.lr_warmup.of(state_.steps) >= state_.steps)
        log_.say("note: the whole run belongs to the warm-up, whose first step has the rate 0%s: --lr_warmup 0 leaves it out",
                 state_.steps == 1 ? " and changes no weight" : "");
    try {
        iterate();
    } catch (const Stopped &stopped) {
        return leave(stopped.signal);
    }
    saves_.finish();
    log_.finish(state_now(), saves_.best(), saves_.best_path());
    return 0;
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
