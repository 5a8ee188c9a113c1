#include "trainer_state.h"

#include <algorithm>
#include <cmath>

#include "../core/common.h"
#include "checkpoint.h"

using nlohmann::json;

static const char *const file_name = "/trainer_state.json";

// The results of a step depend on these options, so a run cannot be resumed with other values. Other options may differ, which is noted.
// clang-format off
static const char *const fixed_options[] = {
    "train_batch_size", "train_batch_tokens", "seed", "shuffle", "optimizer", "neftune_noise_alpha", "dtype", "max_samples", "eval_fraction", "rope_theta", "rope_scaling", "loss_type", "loss_weights", "beta",
    "lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "lora_modules_to_save", "add_tokens", "use_rslora", "adapter", "load_in", "label_smoothing", "desirable_weight", "undesirable_weight", "simpo_gamma", "nll_loss_coef", "ref_model", "teacher_model", "teacher_load_in", "teacher_coef", "divergence_beta", "on_policy", "margin_loss_enable", "center_rewards_coefficient",
    "temperature", "n", "rollout_batch_size", "overlong_buffer", "stop_properly_coef", "mask_truncated", "dynamic_filtering", "max_new_tokens", "stop", "environment", "max_turns", "max_observation", "reward", "reward_weights", "normalize_reward", "advantage_estimator", "gamma", "gae_lambda", "critic_model", "value_clip", "freezing_steps", "no_std_norm", "reward_clip_range", "kl_coef",
    "kl_target", "kl_use_loss", "kl_estimator", "policy_loss_type", "eps_clip", "dual_clip", "loss_aggregation", "async_steps", "is_correction", "entropy_coef"};
// clang-format on

static json to_json(const TrainerState &s) {
    return {{"step", s.step},
            {"cursor", s.cursor},
            {"iteration", {{"step", s.begun_step}, {"cursor", s.begun_cursor}, {"steps_done", s.steps_done}}},
            {"samples", s.totals.samples},
            {"tokens", s.totals.tokens},
            {"target_tokens", s.totals.targets},
            {"skipped", s.totals.skipped},
            {"skips_in_a_row", s.skips_in_a_row},
            {"worse_in_a_row", s.worse_in_a_row},
            {"restarts", s.totals.restarts},
            {"step_seconds", s.totals.step_seconds},
            {"seconds", s.totals.seconds},
            {"losses",
             {{"seen", s.spikes.seen}, {"spikes", s.spikes.count}, {"mean", s.spikes.mean}, {"variance", s.spikes.variance}}},
            {"steps", s.steps},
            {"task", s.task},
            {"data", s.data},
            {"data_fingerprint", s.data_fingerprint},
            {"options", s.options}};
}

void write_trainer_state(const std::string &dir, const TrainerState &state) {
    write_checked_json(dir + file_name, to_json(state));
}

static constexpr double most = double(uint64_t(1) << 53);  // no run counts further

// Checks that every field of `now` exists, has its type, and a value that a run can reach. The options may differ.
static void check_fields(const json &saved, json now, const std::string &where, const std::string &fix) {
    now["options"] = json::object();
    const json fields = now.flatten();
    for (const auto &[name, value] : fields.items()) {
        const json::json_pointer field(name);
        if (!saved.contains(field) || saved[field].type() != (name == "/options" ? json::value_t::object : value.type()))
            die("%s: \"%s\" is missing or of another kind%s", where.c_str(), name.c_str() + 1, fix.c_str());
        const json &found = saved[field];
        const bool may_be_negative = name == "/losses/mean";
        if (found.is_number() && !(std::abs(found.get<double>()) <= most && (may_be_negative || found.get<double>() >= 0)))
            die("%s: \"%s\" is %s, which no run reaches%s", where.c_str(), name.c_str() + 1, found.dump().c_str(), fix.c_str());
    }
    for (const char *part : {"step", "skips_in_a_row", "skipped"})
        if (const auto &whole = saved[part == std::string("step") ? "steps" : "step"]; saved[part] > whole)
            die("%s: \"%s\" is %s of %s steps%s", where.c_str(), part, saved[part].dump().c_str(), whole.dump().c_str(),
                fix.c_str());
}

TrainerState read_trainer_state(const std::string &dir, const TrainerState &now_state,
                                const std::function<void(const std::string &)> &note) {
    const std::string where = dir + file_name, fix = other_checkpoint(dir);
    json saved = read_checked_json(where, fix);
    const json now = to_json(now_state);
    if (!saved.contains("iteration"))  // written by a version that saved only between iterations
        saved["iteration"] = {{"step", saved["step"]}, {"cursor", saved["cursor"]}, {"steps_done", false}};
    check_fields(saved, now, where, fix);
    const auto refuse = [&](const std::string &what, const json &was, const json &is) {
        const auto text = [](const json &value) { return value.is_string() ? value.get<std::string>() : value.dump(); };
        die("%s was made with %s %s, this run has %s\n  fix: use the same %s, or --overwrite for a new run", dir.c_str(),
            what.c_str(), text(was).c_str(), text(is).c_str(), what.c_str());
    };
    if (saved["task"] != now["task"]) refuse("task", saved["task"], now["task"]);
    if (saved["data_fingerprint"] != now["data_fingerprint"]) refuse("data", saved["data_fingerprint"], now["data_fingerprint"]);
    const json &options = saved["options"];
    for (const auto &[name, value] : now["options"].items()) {
        if (!options.contains(name) || options[name] == value) continue;
        if (std::ranges::find(fixed_options, name) != std::end(fixed_options)) refuse("--" + name, options[name], value);
        if (name != "resume" && name != "overwrite")
            note(format("note: --%s was %s in the checkpoint, is %s now", name.c_str(), options[name].dump().c_str(),
                        value.dump().c_str()));
    }
    const json &losses = saved["losses"];
    TrainerState state = now_state;
    state.step = saved["step"], state.cursor = saved["cursor"];
    const json &iteration = saved["iteration"];
    state.begun_step = iteration["step"], state.begun_cursor = iteration["cursor"], state.steps_done = iteration["steps_done"];
    state.skips_in_a_row = saved["skips_in_a_row"], state.worse_in_a_row = saved["worse_in_a_row"];
    state.totals = {saved["samples"],  saved["tokens"],       saved["target_tokens"], saved["skipped"],
                    saved["restarts"], saved["step_seconds"], saved["seconds"]};
    state.spikes = {losses["seen"], losses["spikes"], losses["mean"], losses["variance"]};
    return state;
}
