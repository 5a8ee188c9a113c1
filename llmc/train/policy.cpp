#include "policy.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <numeric>

#include "../core/common.h"
#include "../core/json.h"
#include "../data/packing.h"
#include "checkpoint.h"
#include "evaluate.h"
#include "open.h"
#include "reference.h"

using nlohmann::ordered_json;

Policy::Policy(const Run &run) : run_(run), samples_(run.options.rollouts.empty()) {
    const Options &o = run.options;
    if (!(o.temperature > 0))
        die("--temperature %g: what was sampled greedily has no probability to learn from\n  fix: the temperature at which the rollouts were sampled, 1 by default",
            o.temperature);
    advantage_ = {o.advantage_estimator,         o.gamma,       o.gae_lambda, o.no_std_norm, o.reward_clip_range,
                  o.kl_use_loss ? 0 : o.kl_coef, o.kl_estimator};
    check_options(advantage_);
    next_kl_coef_ = o.kl_coef;
    if (o.kl_target > 0 && o.kl_coef == 0)
        die("--kl_target %g adapts a coefficient that begins with --kl_coef 0\n  fix: --kl_coef 0.01, say", o.kl_target);
    if (o.kl_target > 0 && double(o.rollout_batch_size * o.n) >= 5 * o.kl_horizon)
        die("--kl_horizon %g is a fifth or less of the %zu answers of a batch, after which the coefficient could be negative\n  fix: --kl_horizon 10000, say",
            o.kl_horizon, o.rollout_batch_size * o.n);
    if ((run.task == PPO) != (o.advantage_estimator == "gae"))
        die("--advantage_estimator %s is not for %s\n  fix: the task ppo for gae, which has a critic; grpo for the others, which have none",
            o.advantage_estimator.c_str(), task_name(run.task));
    loss_ = {o.policy_loss_type, o.loss_aggregation, o.eps_clip, o.eps_clip, o.dual_clip, o.kl_use_loss ? o.kl_coef : 0,
             o.kl_estimator};
    if (!o.eps_clip_low_high.empty()) {
        if (o.eps_clip_low_high.size() != 2)
            die("--eps_clip_low_high has %zu numbers\n  fix: two, such as 0.2,0.28", o.eps_clip_low_high.size());
        loss_.clip_low = o.eps_clip_low_high[0], loss_.clip_high = o.eps_clip_low_high[1];
    }
    loss_.correction = o.is_correction, loss_.correction_low = o.is_correction_range[0];
    loss_.correction_high = o.is_correction_range[1];
    check_options(loss_);
    shaping_ = {o.max_new_tokens, o.overlong_buffer_len, o.overlong_penalty_factor, o.stop_properly_coef};
    check_options(shaping_);
    if (o.mask_truncated && o.entropy_coef != 0)
        die("--entropy_coef %g rewards the entropy of all answers, and --mask_truncated leaves some out\n  fix: one of the two",
            o.entropy_coef);
    if (o.kl_coef == 0 && !o.ref_model.empty())
        run.say("note: without --kl_coef there is no reference; --ref_model %s is not read", o.ref_model.c_str());
    generation_ = {.max_new_tokens = o.max_new_tokens,
                   .sampling = {.temperature = o.temperature},
                   .seed = o.seed,
                   .samples = o.n,
                   .vocabulary = run.config.V,
                   .eos = run.config.eos,
                   .logps = true};
    const std::string tokenizer = run.model_dir + "/tokenizer.json";
    if (std::filesystem::exists(tokenizer)) tokenizer_.emplace(tokenizer);
    if (!tokenizer_ && !o.stop.empty())
        die("--stop reads text, but %s has no tokenizer.json\n  fix: a model with its tokenizer", run.model_dir.c_str());
    if (tokenizer_) generation_.vocabulary = std::min(run.config.V, tokenizer_->size()), generation_.stop = {*tokenizer_, o.stop};
    for (const std::string &name : samples_ ? o.reward : Names())
        rewards_.push_back(find_reward(run, name, tokenizer_ ? &*tokenizer_ : nullptr));
}

// ---- before a step ------------------------------------------------------------------------------------------------------------------

std::vector<CoResidentModel> Policy::co_residents() const {
    std::vector<CoResidentModel> out;
    if (samples_ && run_.options.kl_coef > 0 && !reference_is_base(run_))
        out.push_back({"the reference model, beside it", reference_run(run_).config, Mode::evaluate});
    for (const auto &reward : rewards_)
        if (const auto model = reward->resident()) out.push_back({"a reward model, beside it", *model, Mode::evaluate});
    if (run_.task == PPO) out.push_back({"the critic, beside it, which is trained, too", critic_run(run_).config, Mode::train});
    if (run_.options.async_steps)
        out.push_back({"a copy of the policy, beside it, which writes the next answers", run_.config, Mode::generate});
    return out;
}

Drawing Policy::drawing(const Options &o) const {
    return samples_ ? Drawing{o.rollout_batch_size, 0, o.num_episodes} : Objective::drawing(o);
}

size_t Policy::steps(size_t samples) const {
    const Options &o = run_.options;
    return samples_ ? o.max_epochs * ceil_div(samples * o.n, o.train_batch_size) : 1;
}

Questions Policy::questions(const Samples &data, std::span<const size_t> samples) const {
    Questions out;
    const auto is_end = [&](int32_t id) { return std::ranges::find(generation_.eos, id) != generation_.eos.end(); };
    for (size_t s : samples) {
        const auto [ids, mask] = data.document(s);
        const auto first = std::ranges::find(mask, 1) - mask.begin();
        auto last = std::find(mask.begin() + first, mask.end(), 0) - mask.begin();
        while (last > first && is_end(ids[size_t(last) - 1])) last--;
        out.prompts.emplace_back(ids.begin(), ids.begin() + first);
        out.responses.emplace_back(ids.begin() + first, ids.begin() + last);
    }
    return out;
}

static std::vector<size_t> all_samples(const Samples &data) {
    std::vector<size_t> samples(data.size());
    std::iota(samples.begin(), samples.end(), size_t(0));
    return samples;
}

void Policy::reserve(const Samples &data, ModelLimits &limits) {
    if (!samples_) return;
    generation_.eos = run_.config.eos;  // with the end of turn of the prompts' template
    const Options &o = run_.options;
    const Questions asked = questions(data, all_samples(data));
    const bool compares = std::ranges::find(o.reward, "exact_match") != o.reward.end();
    for (size_t i = 0; i < asked.prompts.size(); i++) {
        const auto &prompt = asked.prompts[i];
        if (compares && asked.responses[i].empty())
            die("prompt %zu of %s has no right answer, which --reward exact_match compares with\n  fix: --input_key and --output_key, which name the prompt and the answer, or another --reward",
                i + 1, data.name().c_str());
        if (prompt.size() + o.max_new_tokens > o.row_tokens)
            die("a prompt of %s has %zu tokens and --max_new_tokens %zu may follow, but a row holds %zu\n  fix: --row_tokens %zu, or a smaller --max_new_tokens",
                data.name().c_str(), prompt.size(), o.max_new_tokens, o.row_tokens, prompt.size() + o.max_new_tokens);
        known_.push_back({prompt, 0});
    }
    room_ = GenerationLimits(known_, generation_, o.max_sequences);
    const bool evaluates = !o.eval_data.empty() || o.eval_fraction > 0;
    if (!o.async_steps || evaluates) room_.use(limits);  // the policy answers itself
    limits.row_tokens = std::max(limits.row_tokens, round_up(o.row_tokens, row_multiple));
    limits.positions = std::max(limits.positions, room_.longest);
}

std::unique_ptr<Model> Policy::open_writer() const {
    ModelLimits limits;
    limits.mode = Mode::generate, limits.concurrent = true;
    limits.row_tokens = limits.positions = row_multiple;
    room_.use(limits);
    Run run = run_;
    run.options.profile = false;
    return open_model(run, limits);
}

void Policy::use(const Samples &data, size_t, const ModelLimits &limits) {
    if (!opened_)
        for (const auto &reward : rewards_) reward->open(limits);
    opened_ = true;
    if (run_.options.kl_coef > 0 && !reference_ && !(samples_ && reference_is_base(run_))) {
        reference_run_.emplace(reference_run(run_));
        agree(run_.comm, [&] { expect_positions(*reference_run_, data); });
        reference_ = open_reference(*reference_run_, limits);
    }
    if (samples_ && run_.options.async_steps && !writer_) writer_ = open_writer();
    if (run_.task == PPO && !critic_) critic_ = std::make_unique<Critic>(run_, limits, room_.longest);
    if (samples_) return;
    prepare(dynamic_cast<const Rollouts &>(data), nullptr, reference_.get(), false);
    reference_.reset();  // it has done its work
}

// Of each token of each rollout, by a model or its base.
static std::vector<std::vector<double>> logps(const Run &run, Model &model, const Rollouts &rollouts, bool base) {
    auto out = target_values(run, model, rollouts, all_samples(rollouts), base);
    for (auto &tokens : out)
        for (double &value : tokens) value = -value;
    return out;
}

// The reference is a model, or its base, or null. The policy is null if its log-probabilities are those of the rollouts.
void Policy::prepare(const Rollouts &rollouts, Model *policy, Model *reference, bool base) {
    Prepared &p = prepared_[&rollouts] = {};
    p.rollouts = &rollouts;
    if (policy) {
        p.old_logps = logps(run_, *policy, rollouts, false);
        policy->take_sums();  // drops them: no step begins yet
    }
    if (reference) p.reference_logps = logps(base ? run_ : *reference_run_, *reference, rollouts, base);
    if (critic_) p.critic.values = critic_->values(rollouts);
    std::vector<ScoredRollout> batch;
    for (size_t i = 0; i < rollouts.size(); i++) {
        const Rollout &r = rollouts[i];
        p.rewards.push_back(shaped_reward(shaping_, r.reward, r.completion.size(), r.truncated));
        batch.push_back({r.group, p.rewards.back(), p.old_logp(i), {}});
        if (reference) batch.back().reference_logp = p.reference_logps[i];
        if (critic_) batch.back().values = p.critic.values[i];
    }
    agree(run_.comm, [&] {
        Estimated estimated = advantages(advantage_, batch);
        p.advantages = std::move(estimated.advantages), p.critic.returns = std::move(estimated.returns);
    });
    if (run_.options.kl_target > 0) next_kl_coef_ = adapted_kl_coef_after(p);
}

// The divergence of a batch is the mean over its answers of the mean over their tokens.
double Policy::adapted_kl_coef_after(const Prepared &p) const {
    const Options &o = run_.options;
    double kl = 0;
    for (size_t i = 0; i < p.rollouts->size(); i++) {
        const auto &logp = p.old_logp(i);
        for (size_t t = 0; t < logp.size(); t++)
            kl += kl_estimate(o.kl_estimator, logp[t] - p.reference_logps[i][t]).value / double(logp.size());
    }
    const double answers = double(p.rollouts->size());
    return adapted_kl_coef(next_kl_coef_, kl / answers, o.kl_target, answers, o.kl_horizon);
}

// ---- answers ------------------------------------------------------------------------------------------------------------------------

// `first` is the number of the first prompt: the key of its random numbers.
std::vector<Completion> Policy::answer(Model &model, const Questions &asked, size_t first,
                                       const GenerationSettings &settings) const {
    model.gather_parameters();
    const std::vector<Prompt> own = own_prompts(run_.comm, asked.prompts, uint32_t(first));
    const auto completions = generate(model.generator(), room_, own, settings);
    model.generator().finish();
    return share_completions(run_.comm, completions, asked.prompts.size(), settings.samples);
}

static double mean_of(std::span<const double> values) {
    return std::accumulate(values.begin(), values.end(), 0.0) / double(values.size());
}

Policy::Rewards Policy::rewards_of(const Questions &asked, std::span<const Completion> answers) const {
    const Numbers &weights = run_.options.reward_weights;
    Rewards out{std::vector<double>(answers.size()), {}};
    for (const auto &reward : rewards_) {
        const double weight = weights.empty() ? 1 : weights[out.parts.size()];
        out.parts.push_back((*reward)(asked, answers));
        for (size_t i = 0; i < answers.size(); i++) out.rewards[i] += weight * out.parts.back()[i];
    }
    return out;
}

// For the log, where several rewards make one.
ordered_json Policy::means_of_parts(const std::string &prefix, const std::vector<std::vector<double>> &parts) const {
    ordered_json out = ordered_json::object();
    for (size_t r = 0; parts.size() > 1 && r < parts.size(); r++) out[prefix + run_.options.reward[r]] = mean_of(parts[r]);
    return out;
}

Policy::PendingBatch Policy::ask(const Step &drawn) const {
    PendingBatch out{drawn.begin, questions(*drawn.data, drawn.samples)};
    if (!writer_) return out;
    out.own = std::async(std::launch::async, [this, own = own_prompts(run_.comm, out.questions.prompts, uint32_t(drawn.begin))] {
        writer_->memory().use_on_this_thread();
        return generate(writer_->generator(), room_, own, generation_);
    });
    return out;
}

// The model is null if the one beside answers.
std::vector<Completion> Policy::answers_to(Model *model, PendingBatch &asked) const {
    if (model) return answer(*model, asked.questions, asked.begin, generation_);
    std::vector<Completion> own;
    agree(run_.comm, [&] { own = asked.own.get(); });
    return share_completions(run_.comm, own, asked.questions.prompts.size(), generation_.samples);
}

// Keeps the answers to all prompts, or to those whose answers have a mean reward within the range.
void Policy::keep(const PendingBatch &asked, std::span<const Completion> answers, std::span<const double> rewards,
                  std::vector<Rollout> &rollouts) const {
    const Options &o = run_.options;
    const auto [low, high] = o.dynamic_filtering_range;
    const auto &prompts = asked.questions.prompts;
    for (size_t p = 0; p < prompts.size(); p++) {
        const double mean = mean_of(rewards.subspan(p * o.n, o.n));
        if (o.dynamic_filtering && !(low < mean && mean < high)) continue;
        for (size_t i = p * o.n; i < (p + 1) * o.n; i++)
            rollouts.push_back(
                {prompts[p], answers[i].tokens, answers[i].logp, rewards[i], int64_t(asked.begin + p), !answers[i].ended});
    }
}

// Collects answers, and judges them, until there are enough: with dynamic filtering several draws may be needed. The model is null if the one beside
// answers, which may have begun with the `first`.
Policy::Batch Policy::collect(Model *model, DataLoader &loader, std::optional<PendingBatch> first) const {
    const Options &o = run_.options;
    Batch batch{};
    size_t prompts = 0;
    double tokens = 0, seconds = 0;
    std::vector<std::vector<double>> parts;  // each of --reward, of all answers
    constexpr size_t most = 10;
    for (size_t times = 0; times == 0 || (o.dynamic_filtering && batch.rollouts.size() < o.rollout_batch_size * o.n); times++) {
        if (times == most)
            die("--dynamic_filtering has kept %zu of %zu prompts, and a step needs --rollout_batch_size %zu: the answers to the others have a mean reward of %g or less, or of %g or more\n"
                "  fix: prompts that are neither too easy nor too hard, more answers to each (--n), another reward, or no filtering",
                batch.rollouts.size() / o.n, prompts, o.rollout_batch_size, o.dynamic_filtering_range[0],
                o.dynamic_filtering_range[1]);
        const auto began = std::chrono::steady_clock::now();
        PendingBatch asked = first ? *std::exchange(first, std::nullopt) : ask(loader.next());
        const auto answers = answers_to(model, asked);
        const Rewards worth = rewards_of(asked.questions, answers);
        keep(asked, answers, worth.rewards, batch.rollouts);
        parts.resize(worth.parts.size());
        for (size_t r = 0; r < parts.size(); r++) parts[r].insert(parts[r].end(), worth.parts[r].begin(), worth.parts[r].end());
        for (const Completion &a : answers) tokens += double(a.tokens.size());
        seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
        prompts += asked.questions.prompts.size(), batch.begin = asked.begin;
    }
    batch.news = {{"generation_s", seconds}, {"generation_tok_s", tokens / seconds}};
    batch.news.update(means_of_parts("reward/", parts));
    if (o.dynamic_filtering) batch.news["filtered"] = 1 - double(batch.rollouts.size() / o.n) / double(prompts);
    if (o.save_rollouts)
        agree(run_.comm, [&] {
            if (run_.comm.rank > 0) return;
            std::filesystem::create_directories(o.output_dir + "/rollouts");
            write_rollouts(format("%s/rollouts/%08zu.jsonl", o.output_dir.c_str(), batch.begin), batch.rollouts);
        });
    return batch;
}

// Begins to answer the next prompts beside the training.
void Policy::write_ahead(Model &model, DataLoader &loader) {
    model.copy_parameters_to(*writer_);
    loader_ = &loader, writer_at_ = steps_;
    under_way_ = ask(loader.next());
}

// Waits for the answers that are under way, if there are any.
void Policy::finish_writing() {
    if (!under_way_) return;
    next_ = collect(nullptr, *loader_, std::exchange(under_way_, std::nullopt));
    next_->written_at = writer_at_;
}

std::vector<Step> Policy::draw(Model &model, DataLoader &loader, size_t left) {
    if (!samples_) return {loader.next()};
    const Options &o = run_.options;
    if (writer_ && !under_way_ && !next_) write_ahead(model, loader);
    finish_writing();
    Batch batch;
    if (next_) batch = *std::exchange(next_, std::nullopt);
    else batch = collect(&model, loader, {}), batch.written_at = steps_;
    if (writer_ && steps(batch.rollouts.size() / o.n) < left) write_ahead(model, loader);
    written_at_ = batch.written_at, pending_log_ = std::move(batch.news);
    prepared_.erase(rollouts_.get());
    rollouts_ = std::make_unique<Rollouts>(std::move(batch.rollouts), loader.data().file());
    (o.kl_use_loss ? loss_.kl_coef : advantage_.kl_coef) = next_kl_coef_;
    const bool base = run_.options.kl_coef > 0 && reference_is_base(run_);
    prepare(*rollouts_, o.is_correction.empty() ? nullptr : &model, base ? &model : reference_.get(), base);

    LoaderOptions options;
    options.batch_size = o.train_batch_size, options.row_tokens = o.row_tokens, options.shuffle = o.shuffle;
    options.seed = o.seed + batch.begin;
    DataLoader rollout_loader(*rollouts_, options);
    std::vector<Step> out;
    for (size_t i = rollout_loader.steps(o.max_epochs); i-- > 0;) out.push_back(rollout_loader.next());
    return out;
}

// ---- a step -------------------------------------------------------------------------------------------------------------------------

Policy::Answers Policy::means_of(std::span<const size_t> samples) const {
    Answers a;
    const double n = double(samples.size());
    for (size_t s : samples) {
        const Rollout &r = (*now_->rollouts)[s];
        a.reward += now_->rewards[s] / n, a.length += double(r.completion.size()) / n, a.truncated += r.truncated / n;
        a.longest = std::max(a.longest, double(r.completion.size()));
    }
    for (size_t s : samples) a.reward_std += std::pow(now_->rewards[s] - a.reward, 2);
    a.reward_std = n > 1 ? std::sqrt(a.reward_std / (n - 1)) : 0;
    return a;
}

size_t Policy::targets_of(const Samples &data, std::span<const size_t> samples) const {
    const Rollouts &rollouts = *prepared_.at(&data).rollouts;
    size_t tokens = 0;
    for (size_t s : samples)
        if (!masked(rollouts[s])) tokens += data.sample_targets(s);
    return tokens;
}

ordered_json Policy::metrics_of_answers(const std::string &prefix) const {
    return {{prefix + "reward", answers_.reward},
            {prefix + "reward_std", answers_.reward_std},
            {prefix + "response_length", answers_.length},
            {prefix + "response_length_max", answers_.longest},
            {prefix + "truncated", answers_.truncated}};
}

void Policy::start(const Samples &data, std::span<const size_t> samples) {
    now_ = &prepared_.at(&data);
    answers_ = means_of(samples);
    size_ = {double(targets_of(data, samples)), double(samples.size()), double(run_.options.max_new_tokens)};
    double tokens = 0;
    for (size_t s : samples) tokens += double(data.sample_targets(s));
    if (critic_) critic_->begin(now_->critic, tokens);
}

Measured Policy::skip(const Step &step) {
    start(*step.data, step.samples);
    Measured out{NAN, metrics_of_answers("")};
    out.metrics.update(std::exchange(pending_log_, ordered_json::object()));
    return out;
}

void Policy::begin(const Step &step, uint64_t key) {
    start(*step.data, step.samples);
    staleness_ = steps_++ - written_at_;
    if (critic_) critic_->zero_gradients(key);
}

// Adds a row's rollouts to the sums, and returns the derivatives of the loss with respect to the nll of each token.
std::vector<float> Policy::add(const Row &row, std::span<const double> nll) {
    std::vector<double> logp(nll.size()), d_logp(nll.size());
    for (size_t n = 0; n < nll.size(); n++) logp[n] = -nll[n];
    PolicySums sums;
    size_t first = 0;
    for (size_t i : row.documents) {
        const Rollout &r = (*now_->rollouts)[i];
        const size_t count = nll.empty() ? 0 : r.completion.size();
        PolicyTokens tokens{std::span(logp).subspan(first, count), now_->old_logp(i), {}, now_->advantages[i], r.logp};
        if (!now_->reference_logps.empty()) tokens.reference_logp = now_->reference_logps[i];
        if (!masked(r)) sums += policy_loss(loss_, tokens, size_, std::span(d_logp).subspan(first, count));
        first += count;
    }
    if (run_.mesh->sp_rank == 0) sums_ += sums;  // the ranks of a ring have the same
    std::vector<float> weights(nll.size());
    for (size_t n = 0; n < nll.size(); n++) weights[n] = float(-d_logp[n]);
    return weights;
}

void Policy::accumulate(Model &model, const Row &row, bool last) {
    const auto weights = add(row, model.evaluate(row));
    model.backward(weights, float(-run_.options.entropy_coef / size_.tokens), last);
    if (critic_) critic_->accumulate(row, last);
}

void Policy::update(const AdamW &adamw, double rate) {
    if (critic_) critic_->update(adamw, rate);
}

Measured Policy::measured(Model &model, const std::string &prefix) {
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
    out.metrics.update(metrics_of_answers(prefix));
    if (!loss_.correction.empty())
        out.metrics.update({{prefix + "sampler_kl", sums.stale / n},
                            {prefix + "is_weight", sums.weights / n},
                            {prefix + "is_cut", sums.cut / n}});
    if (run_.options.kl_target > 0) out.metrics[prefix + "kl_coef"] = std::max(loss_.kl_coef, advantage_.kl_coef);
    if (!now_->reference_logps.empty()) out.metrics[prefix + "kl_loss"] = sums.kl_loss;
    else out.metrics.erase(prefix + "kl");
    if (critic_) out.metrics.update(critic_->take(prefix));
    out.metrics.update(std::exchange(pending_log_, ordered_json::object()));
    out.text = format("eval loss %.4f  reward %.4f", out.loss, answers_.reward);
    return out;
}

Measured Policy::take(Model &model) {
    Measured step = measured(model, "");
    if (samples_) step.metrics["staleness"] = staleness_;
    if (critic_) step.metrics["critic_grad_norm"] = step.norm_beside = critic_->gradient_norm();
    return step;
}

// The mean reward of greedy answers; of given rollouts, the loss.
Measured Policy::evaluate(Model &model, const Samples &data, std::span<const size_t> samples) {
    if (samples_) {
        GenerationSettings greedy = generation_;
        greedy.sampling.temperature = 0, greedy.samples = 1, greedy.logps = false;
        const Questions asked = questions(data, samples);
        const auto answers = answer(model, asked, 0, greedy);
        const Rewards worth = rewards_of(asked, answers);
        const double mean = mean_of(worth.rewards);
        ordered_json metrics = {{"eval_reward", mean}};
        metrics.update(means_of_parts("eval_reward/", worth.parts));
        return {-mean, metrics, format("eval reward %.4f of %zu greedy answers", mean, answers.size())};
    }
    if (targets_of(data, samples) == 0)
        return {NAN, ordered_json::object(), "nothing to evaluate, every answer was cut off, and --mask_truncated leaves it out"};
    start(data, samples);
    for (const auto &own : own_rows(run_.config, run_.ranks, data, pack_samples(data, samples, run_.options.row_tokens))) {
        const Row row = make_row(data, own);
        add(row, model.evaluate(row));
        if (critic_) critic_->evaluate(row);
    }
    return measured(model, "eval_");
}

// ---- files --------------------------------------------------------------------------------------------------------------------------

void Policy::save(const std::string &dir, const std::string &export_dtype) {
    if (critic_) critic_->save(dir, export_dtype);
}

static std::string state_file(const std::string &dir) { return dir + "/policy_state.json"; }
static std::string answers_file(const std::string &dir) { return dir + "/next_answers.jsonl"; }

// Of the weights that write ahead, nothing is kept: their answers are finished instead.
void Policy::save_state(const std::string &dir) {
    if (critic_) critic_->save_optimizer(dir);
    finish_writing();
    agree(run_.comm, [&] {
        if (!run_.is_main_rank()) return;
        nlohmann::json state = {{"next_kl_coef", next_kl_coef_}};
        if (next_) {
            write_rollouts(answers_file(dir), next_->rollouts);
            state["next_answers"] = {{"file", fingerprint(InputFile(answers_file(dir)))},
                                     {"begin", next_->begin},
                                     {"age", steps_ - next_->written_at},
                                     {"news", next_->news}};
        }
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
        if (!state.contains("next_answers")) return;
        const nlohmann::json &next = state["next_answers"];
        const std::string file = answers_file(dir);
        if (!std::filesystem::exists(file) || next["file"] != fingerprint(InputFile(file)))
            die("%s is damaged%s", file.c_str(), other_checkpoint(dir).c_str());
        next_ = {Rollouts(file, run_.config.V).all(), next["begin"], steps_ - next["age"].get<int64_t>(), next["news"]};
    });
}
