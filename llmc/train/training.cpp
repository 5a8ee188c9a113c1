#include "training.h"

#include <filesystem>

#include "../core/common.h"
#include "../core/file.h"
#include "checkpoint.h"
#include "open_data.h"
#include "open_model.h"

namespace fs = std::filesystem;

// Returns the checkpoint that --resume names; empty: none.
static std::string find_checkpoint(const Options &o) {
    if (o.resume == "never") return "";
    const std::string dir = o.resume == "auto" ? latest_checkpoint(o.output_dir) : o.resume;
    if (fs::exists(dir + "/optimizer.json") && !fs::exists(dir + "/trainer_state.json"))
        die("%s: has no trainer_state.json, so it is not a complete checkpoint%s", dir.c_str(), other_checkpoint(dir).c_str());
    if (!dir.empty() && !fs::exists(dir + "/trainer_state.json"))
        die("--resume %s: no such checkpoint\n  fix: auto, never, or a step_N directory", dir.c_str());
    return dir;
}

// The directory is locked before anything in it is looked at: a run that ends may still be saving its last checkpoint there.
static void open_output(const Run &run, Training &t) {
    const Options &o = run.options;
    const std::string &dir = o.output_dir;
    t.output = std::make_unique<OutputDirectory>(dir);
    for (const auto &[flag, path] : inputs_of(run)) t.output->refuse_input(flag, path);
    t.resume_from = find_checkpoint(o);
    std::error_code error;
    const bool goes_on =
        o.resume == "auto" || (!t.resume_from.empty() && fs::equivalent(fs::path(t.resume_from) / "..", dir, error));
    if (!goes_on && !o.overwrite && t.output->holds_run())
        die("%s already holds a run or a model\n  fix: use --resume auto to continue it, --overwrite to replace it, or another --output_dir",
            dir.c_str());
    if (o.resume == "auto" && t.resume_from.empty() && !o.overwrite && t.output->holds_model())
        die("--resume auto: %s holds a finished model and no checkpoint\n  fix: --overwrite to train again, or another --output_dir",
            dir.c_str());
}

static void open_files(Run &run, Training &t) {
    const Options &o = run.options;
    Options eval = o;
    eval.dataset_probs.clear(), eval.stopping_strategy.clear();  // they belong to the training data
    const auto prepared = [&](const char *flag, const std::string &path, const Options &options) {
        return o.rollouts.empty() ? prepared_file(run, run.task, flag, path, prepare_flags(options, run.task)) : path;
    };
    const std::string path = run.task == DEMO ? program_file("data/demo/train.safetensors")
                                              : prepared("data", o.rollouts.empty() ? o.data : o.rollouts, o);
    const std::string eval_path = o.eval_data.empty() ? "" : prepared("eval_data", o.eval_data, eval);
    t.data = open_samples(run, path);
    if (!eval_path.empty()) t.eval_data = open_samples(run, eval_path);
}

// The number of optimizer steps.
static size_t steps_of(const Training &t, const Drawing &drawing) {
    if (drawing.batch_tokens) return t.loader->steps(drawing.epochs);
    const size_t samples = t.loader->train_samples().size(), rest = samples % drawing.batch_size;
    return drawing.epochs *
           (samples / drawing.batch_size * t.objective->steps(drawing.batch_size) + (rest ? t.objective->steps(rest) : 0));
}

// Returns the limits that the model must have room for.
static ModelLimits open_loader(Run &run, Training &t) {
    const Options &o = run.options;
    run.chat = t.data->chat_format();
    add_eos(run.model.config, run.chat.end_of_turn);
    t.data_fingerprint = t.data->fingerprint();
    const Drawing drawing = t.objective->drawing(o);
    LoaderOptions options;
    options.batch_size = drawing.batch_size, options.batch_tokens = drawing.batch_tokens, options.row_tokens = o.row_tokens;
    options.max_samples = o.max_samples, options.eval_fraction = o.eval_fraction, options.seed = o.seed,
    options.shuffle = o.shuffle, options.share_prompts = run.share_prompts;
    t.loader = std::make_unique<DataLoader>(*t.data, options);
    t.steps = o.max_steps ? o.max_steps : steps_of(t, drawing);

    ModelLimits limits = limits_for(run, Mode::train, *t.data);
    if (t.eval_data) {
        const ModelLimits other = limits_for(run, Mode::train, *t.eval_data);
        limits.row_tokens = std::max(limits.row_tokens, other.row_tokens);
        limits.positions = std::max(limits.positions, other.positions);
    }
    return limits;
}

Training open_training(Run &run) {
    Training t;
    agree(run.comm, [&] {
        t.objective = make_objective(run);
        if (run.is_main_rank()) open_output(run, t);
    });
    t.resume_from = run.comm.gather(t.resume_from)[0];
    open_files(run, t);
    ModelLimits limits;
    agree(run.comm, [&] { limits = open_loader(run, t); });
    if (run.options.sample_every) t.continuation.emplace(run), t.continuation->use(limits);
    agree(run.comm, [&] {
        t.objective->reserve(*t.data, limits);
        if (t.eval_data) t.objective->reserve(*t.eval_data, limits);
    });
    t.objective->open(limits, *t.data, t.loader->used(), t.eval_data.get());
    const size_t process = run.device.make_memory()->process();  // measured before any rank allocates
    t.model = open_model(run, run.model, limits, run.options.profile);
    t.planned = process + run.in_process * t.model->plan().bytes();
    return t;
}
