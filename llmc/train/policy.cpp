#include "policy.h"

#include <algorithm>
#include <cmath>

#include "../core/common.h"
#include "../core/json.h"
#include "checkpoint.h"
#include "evaluate.h"
#include "open_data.h"
#include "reference.h"
#include "teacher.h"

using nlohmann::ordered_json;

Policy::Policy(const Run &run) : run_(run), options_(policy_options(run.options, run.task)), next_kl_coef_(run.options.kl_coef) {
    const Options &o = run.options;
    if (o.kl_coef == 0 && !o.ref_model.empty())
        run.say("note: without --kl_coef there is no reference; --ref_model %s is not read", o.ref_model.c_str());
    if (o.rollouts.empty()) source_.emplace(run);
}

// ---- before the first step ----------------------------------------------------------------------------------------------------------

std::vector<CoResidentModel> Policy::co_residents() const {
    std::vector<CoResidentModel> out;
    if (source_ && run_.options.kl_coef > 0 && !reference_is_base(run_))
        out.push_back({"the reference model, resident", reference_spec(run_).config, Mode::evaluate});
    for (const Teacher &teacher : teachers_of(run_.options))
        if (source_ && !teacher_is_base(run_, teacher.model))
            out.push_back({"the teacher, resident", teacher_spec(run_, teacher.model).config, Mode::evaluate});
    if (source_)
        for (const CoResidentModel &model : source_->co_residents()) out.push_back(model);
    if (run_.task == PPO) out.push_back({"the critic, resident and trained", critic_spec(run_).config, Mode::train});
    return out;
}

Drawing Policy::drawing(const Options &o) const {
    return source_ ? Drawing{o.rollout_batch_size, 0, o.num_episodes} : Objective::drawing(o);
}

size_t Policy::steps(size_t samples) const { return source_ ? source_->updates(samples) : 1; }

void Policy::reserve(const Samples &data, ModelLimits &limits) {
    if (source_) source_->reserve(data, limits);
}

// Dies if ids of rollouts have no row in the vocabulary of a model, which may have fewer rows than the policy.
static void expect_known_ids(const ModelSpec &model, const char *flag, const Samples &rollouts) {
    for (size_t i = 0; i < rollouts.documents(); i++)
        for (int32_t id : rollouts.document(i).tokens)
            if (size_t(id) >= model.config.V)
                die("%s: answer %zu has token %d, but %s %s has a vocabulary of %zu\n  fix: leave the answer out, or use another %s",
                    rollouts.name().c_str(), i + 1, id, flag, model.dir.c_str(), model.config.V, flag);
}

Policy::Frozen Policy::open_frozen(bool is_base, const std::function<ModelSpec()> &spec, const char *flag,
                                   const ModelLimits &limits, const Samples &data, const Samples *eval_data) {
    Frozen out;
    if (source_ && is_base) return out;
    out.spec = spec();
    agree(run_.comm, [&] {
        if (source_) return source_->expect_positions(out.spec, flag);
        for (const Samples *rollouts : {&data, eval_data})
            if (rollouts) expect_positions(run_, out.spec, *rollouts), expect_known_ids(out.spec, flag, *rollouts);
    });
    out.model = ::open_frozen(run_, out.spec, limits);
    return out;
}

void Policy::open(const ModelLimits &limits, const Samples &data, size_t, const Samples *eval_data) {
    const Options &o = run_.options;
    if (source_) source_->open(limits);
    const auto opened = [&](bool is_base, const std::function<ModelSpec()> &spec, const char *flag) {
        return open_frozen(is_base, spec, flag, limits, data, eval_data);
    };
    if (o.kl_coef > 0)
        reference_ = opened(
            reference_is_base(run_), [&] { return reference_spec(run_); }, "--ref_model");
    for (const Teacher &teacher : teachers_of(o))
        teachers_.push_back(opened(
            teacher_is_base(run_, teacher.model), [&] { return teacher_spec(run_, teacher.model); }, "--teacher_model"));
    if (run_.task == PPO) {
        const ModelSpec critic = critic_spec(run_);
        agree(run_.comm, [&] {
            if (source_) source_->expect_positions(critic, "--critic_model");
        });
        critic_ = std::make_unique<Critic>(run_, critic, limits);
    }
    if (source_) return;
    const auto prepared = [&](const Samples &rollouts) {
        Batch batch{.rollouts = dynamic_cast<const Rollouts &>(rollouts)};
        if (teachers_.size() < 2 &&
            std::ranges::any_of(batch.rollouts.all(), [](const Rollout &r) { return !r.teacher.empty(); }))
            run_.say("note: without several models in --teacher_model the teachers that %s names have no meaning",
                     rollouts.name().c_str());
        measure(batch, nullptr);
        estimate(batch);
        return batch;
    };
    batch_ = prepared(data);
    if (eval_data) eval_batch_ = prepared(*eval_data);
    reference_.reset(), teachers_.clear();
}

// ---- a batch ------------------------------------------------------------------------------------------------------------------------

std::vector<Step> Policy::draw(Model &model, DataLoader &loader, size_t left) {
    if (!source_) return {loader.next()};
    const Options &o = run_.options;
    if (steps_left_ == 0) {
        batch_ = source_->next(model, loader, updates_, left);
        steps_done_ = 0, steps_left_ = 1;  // or more
    }
    kl_coef() = next_kl_coef_;
    if (!batch_.is_measured) measure(batch_, &model);
    estimate(batch_);

    LoaderOptions options;
    options.batch_size = o.train_batch_size, options.row_tokens = o.row_tokens, options.shuffle = o.shuffle;
    options.seed = o.seed + batch_.begin, options.share_prompts = run_.share_prompts;
    DataLoader rollout_loader(batch_.rollouts, options);
    std::vector<Step> out;
    for (size_t i = 0, all = rollout_loader.steps(o.max_epochs); i < all; i++)
        if (Step step = rollout_loader.next(); i >= steps_done_) out.push_back(std::move(step));
    steps_left_ = out.size();
    return out;
}

// Returns log p of each token of these rollouts, by a model or its base; of other rollouts 0.
static Batch::OfTokens logps(const Run &run, const ModelSpec &spec, Model &model, const Rollouts &rollouts,
                             std::span<const size_t> samples, bool base) {
    auto out = target_values(run, spec, model, rollouts, samples, base);
    for (auto &tokens : out)
        for (double &value : tokens) value = -value;
    return out;
}

Batch::OfTokens Policy::logps_by(const Frozen &frozen, const Rollouts &rollouts, std::span<const size_t> samples,
                                 Model *policy) const {
    return frozen.model ? logps(run_, frozen.spec, *frozen.model, rollouts, samples, false)
                        : logps(run_, run_.model, *policy, rollouts, samples, true);
}

// Returns log p of each token of each rollout, by its teacher.
Batch::OfTokens Policy::teacher_logps(const Rollouts &rollouts, Model *policy) const {
    const std::vector<Teacher> known = teachers_of(run_.options);
    if (known.size() == 1) return logps_by(teachers_[0], rollouts, first_samples(rollouts.size()), policy);
    std::vector<std::vector<size_t>> pupils(known.size());
    agree(run_.comm, [&] {
        for (size_t i = 0; i < rollouts.size(); i++) {
            const auto teacher = std::ranges::find(known, rollouts[i].teacher, &Teacher::name);
            if (teacher == known.end())
                die("%s: answer %zu has the teacher \"%s\", which is no name in --teacher_model\n  fix: give each answer the name of its teacher",
                    rollouts.name().c_str(), i + 1, rollouts[i].teacher.c_str());
            pupils[size_t(teacher - known.begin())].push_back(i);
        }
    });
    Batch::OfTokens out(rollouts.size());
    for (size_t k = 0; k < known.size(); k++) {
        if (pupils[k].empty()) continue;
        Batch::OfTokens judged = logps_by(teachers_[k], rollouts, pupils[k], policy);
        for (size_t i : pupils[k]) out[i] = std::move(judged[i]);
    }
    return out;
}

// Computes the log-probabilities and values that the steps need. The policy is null with --rollouts, which give its log-probabilities.
void Policy::measure(Batch &batch, Model *policy) {
    const Rollouts &rollouts = batch.rollouts;
    const std::vector<size_t> all = first_samples(rollouts.size());
    if (!run_.options.is_correction.empty()) {
        batch.old_logps = logps(run_, run_.model, *policy, rollouts, all, false);
        policy->take_sums();  // discards the sums: no step has begun yet
    }
    if (reference_) batch.reference_logps = logps_by(*reference_, rollouts, all, policy);
    if (!teachers_.empty()) batch.teacher_logps = teacher_logps(rollouts, policy);
    if (critic_) batch.values = critic_->values(rollouts);
    batch.is_measured = true;
}

// Computes rewards, advantages and returns of a measured batch, and the coefficient of the divergence for the next batch.
void Policy::estimate(Batch &batch) {
    const Rollouts &rollouts = batch.rollouts;
    std::vector<ScoredRollout> scored;
    std::vector<std::vector<double>> turn_rewards(rollouts.size());
    for (size_t i = 0; i < rollouts.size(); i++) {
        const Rollout &r = rollouts[i];
        batch.rewards.push_back(shaped_reward(options_.shaping, r.reward, r.logp.size(), r.truncated));
        scored.push_back({r.group, batch.rewards.back(), batch.old_logp(i), {}});
        if (!batch.reference_logps.empty()) scored.back().reference_logp = batch.reference_logps[i];
        if (!batch.teacher_logps.empty()) scored.back().teacher_logp = batch.teacher_logps[i];
        if (critic_) scored.back().values = batch.values[i], scored.back().turn_rewards = turn_rewards[i] = earlier_rewards(r);
    }
    agree(run_.comm, [&] {
        if (std::ranges::none_of(batch.rewards, has_reward))
            die("none of the %zu answers of this batch has a reward: each is None, or null in a file\n  fix: use a --reward that judges most answers to these prompts",
                rollouts.size());
        Estimated estimated = advantages(options_.advantage, scored);
        batch.advantages = std::move(estimated.advantages), batch.returns = std::move(estimated.returns);
        batch.clipped = std::move(estimated.clipped);
    });
    const Options &o = run_.options;
    if (o.kl_target[0] > 0)
        next_kl_coef_ = adapted_kl_coef(next_kl_coef_, kl_of(batch), o.kl_target[0], double(rollouts.size()), kl_horizon(o));
}

// Returns the divergence from the reference: the mean over the answers of the mean over their tokens.
double Policy::kl_of(const Batch &batch) const {
    double kl = 0;
    for (size_t i = 0; i < batch.rollouts.size(); i++) {
        const auto &logp = batch.old_logp(i);
        for (size_t t = 0; t < logp.size(); t++)
            kl += kl_estimate(run_.options.kl_estimator, logp[t] - batch.reference_logps[i][t]).value / double(logp.size());
    }
    return kl / double(batch.rollouts.size());
}

// ---- a step -------------------------------------------------------------------------------------------------------------------------

Policy::AnswerMeans Policy::means(const Batch &batch, std::span<const size_t> samples) const {
    AnswerMeans a;
    const double n = double(samples.size());
    double rewarded = 0, squares = 0;
    for (size_t s : samples) {
        const Rollout &r = batch.rollouts[s];
        if (has_reward(batch.rewards[s])) a.reward += batch.rewards[s], rewarded++;
        a.length += double(r.logp.size()) / n, a.truncated += r.truncated / n;
        a.clipped += batch.clipped[s] / n;
        a.longest = std::max(a.longest, double(r.logp.size()));
    }
    a.reward /= rewarded, a.unscored = 1 - rewarded / n;
    for (size_t s : samples)
        if (has_reward(batch.rewards[s])) squares += std::pow(batch.rewards[s] - a.reward, 2);
    a.reward_std = rewarded > 1 ? std::sqrt(squares / (rewarded - 1)) : 0;
    return a;
}

ordered_json Policy::answer_metrics(const std::string &prefix) const {
    ordered_json out = {{prefix + "reward", means_.reward},          {prefix + "reward_std", means_.reward_std},
                        {prefix + "response_length", means_.length}, {prefix + "response_length_max", means_.longest},
                        {prefix + "truncated", means_.truncated},    {prefix + "unscored", means_.unscored}};
    if (!run_.options.reward_clip_range.empty()) out[prefix + "reward_clip_ratio"] = means_.clipped;
    return out;
}

size_t Policy::targets_in(const Batch &batch, std::span<const size_t> samples) const {
    size_t tokens = 0;
    for (size_t s : samples)
        if (!masked(batch.rollouts[s])) tokens += batch.rollouts.sample_targets(s);
    return tokens;
}

// Begins a step, or an evaluation, on some rollouts of a batch.
void Policy::begin_on(const Batch &batch, std::span<const size_t> samples) {
    means_ = means(batch, samples);
    size_ = {double(targets_in(batch, samples)), double(samples.size()), double(run_.options.max_new_tokens)};
    double tokens = 0;
    for (size_t s : samples) {
        tokens += double(batch.rollouts.sample_targets(s));
        for (size_t t = 0; !batch.teacher_logps.empty() && !masked(batch.rollouts[s]) && t < batch.teacher_logps[s].size(); t++)
            means_.teacher_kl += (batch.old_logp(s)[t] - batch.teacher_logps[s][t]) / size_.tokens;
    }
    if (critic_) critic_->begin(batch, tokens);
}

void Policy::count_step() {
    if (steps_left_) steps_done_++, steps_left_--;
}

Measured Policy::skip(const Step &step) {
    begin_on(batch_, step.samples);
    count_step();
    Measured out{NAN, answer_metrics("")};
    out.metrics.update(std::exchange(batch_.log, ordered_json::object()));
    return out;
}

void Policy::begin(const Step &step, uint64_t key) {
    begin_on(batch_, step.samples);
    if (critic_) critic_->zero_gradients(key);
}

// Rollout i's tokens, without their current log-probabilities.
PolicyTokens Policy::tokens_of(const Batch &batch, size_t i) const {
    PolicyTokens tokens{{}, batch.old_logp(i), {}, batch.advantages[i], batch.rollouts[i].logp};
    if (!batch.reference_logps.empty()) tokens.reference_logp = batch.reference_logps[i];
    return tokens;
}

// Adds a row's rollouts to the sums, and returns the derivatives of the loss with respect to the nll of each token.
std::vector<float> Policy::add(const Batch &batch, const Row &row, std::span<const double> nll) {
    std::vector<double> logp(nll.size()), d_logp(nll.size());
    for (size_t n = 0; n < nll.size(); n++) logp[n] = -nll[n];
    PolicySums sums;
    size_t first = 0;
    for (size_t i : row.documents) {
        const Rollout &r = batch.rollouts[i];
        const size_t count = nll.empty() ? 0 : r.logp.size();
        PolicyTokens tokens = tokens_of(batch, i);
        tokens.logp = std::span(logp).subspan(first, count);
        if (!masked(r)) sums += policy_loss(options_.loss, tokens, size_, std::span(d_logp).subspan(first, count));
        first += count;
    }
    if (run_.mesh->is_first_of_row()) sums_ += sums;  // the ranks of a row have the same
    std::vector<float> weights(nll.size());
    for (size_t n = 0; n < nll.size(); n++) weights[n] = float(-d_logp[n]);
    return weights;
}

// The same for a loss by token, some tokens at a time.
TokenLoss Policy::token_loss(const Row &row) {
    std::vector<PolicyToken> tokens;  // of the row's predictors
    for (size_t i : row.documents) {
        const auto answer = policy_tokens(options_.loss, tokens_of(batch_, i), size_);
        if (masked(batch_.rollouts[i])) tokens.resize(tokens.size() + answer.size());
        else tokens.insert(tokens.end(), answer.begin(), answer.end());
    }
    return [this, tokens = std::move(tokens)](std::span<const size_t> numbers, std::span<const float> nll) {
        std::vector<float> weights(nll.size());
        PolicySums elsewhere;  // the ranks of a tensor group have the same tokens
        PolicySums &sums = run_.mesh->tp_rank == 0 ? sums_ : elsewhere;
        for (size_t n = 0; n < nll.size(); n++)
            if (const PolicyToken &token = tokens[numbers[n]]; token.weight > 0)
                weights[n] = float(-policy_loss(options_.loss, token, -double(nll[n]), sums));
        return weights;
    };
}

void Policy::accumulate(Model &model, const Row &row, bool last) {
    const float entropy_weight = float(-run_.options.entropy_coef / size_.tokens);
    if (is_by_token(options_.loss)) model.accumulate(row, token_loss(row), entropy_weight, last);
    else model.backward(add(batch_, row, model.evaluate(row)), entropy_weight, last);
    if (critic_) critic_->accumulate(row, last);
}

void Policy::update(const AdamW &adamw, double rate) {
    if (critic_) critic_->update(adamw, rate);
}

// Returns loss and metrics of the step or evaluation, and clears their sums.
Measured Policy::take_sums(Model &model, const Batch &batch, const std::string &prefix) {
    const LossSums tokens = over_ranks(run_.comm, model.take_sums());
    const PolicySums sums = over_ranks(run_.comm, std::exchange(sums_, {}));
    const double n = sums.tokens, entropy = tokens.entropy / tokens.targets;
    Measured out;
    out.loss = sums.policy_loss + sums.kl_loss - run_.options.entropy_coef * entropy;
    out.metrics = {{prefix + "policy_loss", sums.policy_loss},
                   {prefix + "kl", sums.kl / n},
                   {prefix + "ppo_kl", sums.moved / n},
                   {prefix + "clip_ratio", sums.clipped / n},
                   {prefix + "entropy", entropy}};
    out.metrics.update(answer_metrics(prefix));
    if (options_.loss.correction != Correction::none)
        out.metrics.update({{prefix + "sampler_kl", sums.stale / n},
                            {prefix + "is_weight", sums.weights / n},
                            {prefix + "is_cut", sums.cut / n}});
    if (run_.options.kl_target[0] > 0)
        out.metrics[prefix + "kl_coef"] = std::max(options_.loss.kl_coef, options_.advantage.kl_coef);
    if (!batch.reference_logps.empty()) out.metrics[prefix + "kl_loss"] = sums.kl_loss;
    else out.metrics.erase(prefix + "kl");
    if (!batch.teacher_logps.empty()) out.metrics[prefix + "teacher_kl"] = means_.teacher_kl;
    if (critic_) out.metrics.update(critic_->take(prefix));
    out.text = format("eval loss %.4f  reward %.4f", out.loss, means_.reward);
    return out;
}

Measured Policy::take(Model &model) {
    Measured step = take_sums(model, batch_, "");
    step.metrics.update(std::exchange(batch_.log, ordered_json::object()));
    if (source_) step.metrics["staleness"] = updates_ - batch_.written_at;
    updates_++;
    count_step();
    if (critic_) step.metrics["critic_grad_norm"] = step.norm_beside = critic_->gradient_norm();
    return step;
}

// The mean reward of greedy answers; of given rollouts, the loss.
Measured Policy::evaluate(Model &model, const Samples &data, std::span<const size_t> samples) {
    if (source_) return source_->evaluate(model, data, samples);
    const Batch &batch = eval_batch_ ? *eval_batch_ : batch_;
    if (targets_in(batch, samples) == 0)
        return {NAN, ordered_json::object(), "nothing to evaluate, every answer was cut off, and --mask_truncated leaves it out"};
    begin_on(batch, samples);
    for_own_rows(run_, run_.model, data, pack_samples(data, samples, run_.options.row_tokens, run_.share_prompts),
                 [&](const Row &row, size_t, size_t) {
                     add(batch, row, model.evaluate(row));
                     if (critic_) critic_->evaluate(row);
                 });
    return take_sums(model, batch, "eval_");
}

// ---- files --------------------------------------------------------------------------------------------------------------------------

void Policy::save(const std::string &dir, const std::string &export_dtype) {
    if (critic_) critic_->save(dir, export_dtype);
}

static std::string state_file(const std::string &dir) { return dir + "/policy_state.json"; }

void Policy::save_state(const std::string &dir) {
    if (critic_) critic_->save_optimizer(dir);
    if (source_) source_->finish_writing();
    agree(run_.comm, [&] {
        if (!run_.is_main_rank()) return;
        nlohmann::json state = {{"next_kl_coef", keeps_drawn() ? kl_coef() : next_kl_coef_}};
        if (keeps_drawn()) {
            state["answers"] = save_batch(batch_, dir, "answers", updates_);
            state["answers"]["steps_done"] = steps_done_;
        }
        if (source_) source_->save(dir, updates_, state);
        write_checked_json(state_file(dir), state);
    });
}

void Policy::verify_state(const std::string &dir) {
    if (critic_) critic_->verify_optimizer(dir);
}

void Policy::load_state(const std::string &dir) {
    if (critic_) critic_->load_optimizer(dir);
    agree(run_.comm, [&] {
        const nlohmann::json state = read_checked_json(state_file(dir), other_checkpoint(dir));
        next_kl_coef_ = Fields(state, state_file(dir)).number("next_kl_coef");
        if (source_) source_->load(dir, state);
        if (!state.contains("answers")) return;
        batch_ = load_batch(state["answers"], dir, "answers", run_.model.config.V);
        steps_done_ = state["answers"]["steps_done"], steps_left_ = 1;
    });
}
