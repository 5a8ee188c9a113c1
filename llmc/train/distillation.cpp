#include "distillation.h"

#include <cmath>

#include "../core/common.h"
#include "../core/rng.h"
#include "evaluate.h"
#include "open_data.h"
#include "open_model.h"
#include "teacher.h"

using nlohmann::ordered_json;

TeacherShape teacher_shape(const Run &run) {
    const bool is_base = teacher_is_base(run, run.options.teacher_model[0]);
    const ModelConfig &own = run.model.config, teacher = is_base ? own : teacher_spec(run, run.options.teacher_model[0]).config;
    return {teacher.C, std::min(teacher.V, own.V), float(run.options.divergence_beta), is_base};
}

std::vector<CoResidentModel> Distillation::co_residents() const {
    if (teacher_is_base(run_, run_.options.teacher_model[0])) return {};
    return {{"the teacher, resident", teacher_spec(run_, run_.options.teacher_model[0]).config, Mode::teach}};
}

// ---- before the first step ----------------------------------------------------------------------------------------------------------

Distillation::Distillation(const Run &run) : run_(run) {
    const Options &o = run.options;
    const LoraConfig &lora = run.model.config.lora;
    const bool prefetched = o.zero_stage == 3 || std::ranges::count(o.offload, "weights");
    if (teacher_is_base(run, run.options.teacher_model[0]) && prefetched && (lora.head || lora.embedding))
        die("--teacher_model is the model without its adapters, whose head --lora_modules_to_save replaces, and %s keeps only one of both\n  fix: leave one of them out",
            o.zero_stage == 3 ? "--zero_stage 3" : "--offload weights");
    if (o.on_policy > 0) source_.emplace(run);
}

void Distillation::reserve(const Samples &data, ModelLimits &limits) {
    if (source_) source_->reserve(data, limits);
}

void Distillation::open(const ModelLimits &limits, const Samples &data, size_t, const Samples *eval_data) {
    if (teacher_is_base(run_, run_.options.teacher_model[0])) return;
    const ModelSpec teacher = teacher_spec(run_, run_.options.teacher_model[0]);
    agree(run_.comm, [&] {
        if (run_.options.on_policy < 1) {
            expect_positions(run_, teacher, data);
            if (eval_data) expect_positions(run_, teacher, *eval_data);
        }
        if (source_) source_->expect_positions(teacher, "--teacher_model");
    });
    ModelLimits of_teacher = co_resident_limits(limits, teacher.config, Mode::teach);
    of_teacher.split_as = std::make_shared<ModelConfig>(run_.model.config);
    teacher_ = open_model(run_, teacher, of_teacher);
}

// ---- steps --------------------------------------------------------------------------------------------------------------------------

bool Distillation::is_on_policy(const Step &step) const {
    return Random{run_.options.seed, Purpose::gradients, 1}.uniform(step.begin) <
           run_.options.on_policy;  // stream 0: keys of steps
}

// Returns the step with the student's answers to its prompts.
Step Distillation::answered(Model &model, const Step &prompts) {
    const Options &o = run_.options;
    auto [rollouts, log] = source_->answers(model, prompts);
    news_ = std::move(log);
    if (o.mask_truncated) std::erase_if(rollouts, [](const Rollout &r) { return r.truncated; });
    answers_ = Rollouts(std::move(rollouts), prompts.data->file());
    Step step = prompts;
    step.data = &answers_, step.samples = first_samples(answers_.size());
    step.rows = pack_samples(answers_, step.samples, o.row_tokens);
    step.tokens = answers_.total_tokens(), step.target_tokens = answers_.total_targets();
    return step;
}

std::vector<Step> Distillation::draw(Model &model, DataLoader &loader, size_t) {
    const Step step = loader.next();
    news_ = ordered_json::object();
    const bool own = source_ && is_on_policy(step);
    if (run_.options.on_policy > 0 && run_.options.on_policy < 1) news_["on_policy"] = int(own);
    if (!own) return {step};
    const ordered_json choice = news_;
    Step out = answered(model, step);
    news_.update(choice);
    return {out};
}

TeacherRow Distillation::taught(Model &student, const Row &row) { return (teacher_ ? *teacher_ : student).teach(row); }

void Distillation::accumulate(Model &model, const Row &row, bool last) {
    const TeacherRow teacher = taught(model, row);
    model.distil(row, teacher, weight_, last);
}

Measured Distillation::take(Model &model, const std::string &prefix) {
    const DivergenceSums sums = over_ranks(run_.comm, model.take_divergence());
    const double n = sums.student.targets;
    Measured out{sums.divergence / n, token_metrics(sums.student, prefix)};
    out.metrics.update({{prefix + "teacher_entropy", sums.teacher.entropy / n},
                        {prefix + "logp", -sums.student.nll / n},
                        {prefix + "teacher_logp", -sums.teacher.nll / n},
                        {prefix + "agreement", sums.agreement / n}});
    for (const auto &[name, value] : news_.items()) out.metrics[prefix + name] = value;
    out.text = format("eval loss %.4f  agreement %.4f", out.loss, sums.agreement / n);
    return out;
}

Measured Distillation::take(Model &model) { return take(model, ""); }

// The divergence at the student's own answers or, if some steps learn from given ones, at those.
Measured Distillation::evaluate(Model &model, const Samples &data, std::span<const size_t> samples) {
    Step step{&data, 0, 0, {samples.begin(), samples.end()}, {}, 0, 0};
    step.rows = pack_samples(data, samples, run_.options.row_tokens);
    news_ = ordered_json::object();
    if (run_.options.on_policy == 1) step = answered(model, step);
    for_own_rows(run_, run_.model, *step.data, step.rows,
                 [&](const Row &row, size_t, size_t) { model.compare(row, taught(model, row)); });
    Measured out = take(model, "eval_");
    if (std::isnan(out.loss))
        return {NAN, ordered_json::object(), "nothing to evaluate, no token of the evaluation samples is a target"};
    return out;
}
