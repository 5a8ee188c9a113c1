#include "policy.h"

#include <cmath>

#include "../core/common.h"
#include "../data/packing.h"
#include "evaluate.h"
#include "reference.h"

using nlohmann::ordered_json;

Policy::Policy(const Run &run) : run_(run) {
    const Options &o = run.options;
    if (!(o.temperature > 0))
        die("--temperature %g: what was sampled greedily has no probability to learn from\n  fix: the temperature at which the rollouts were sampled, 1 by default",
            o.temperature);
    advantage_ = {o.advantage_estimator,         o.gamma,       o.no_std_norm, o.reward_clip_range,
                  o.kl_use_loss ? 0 : o.kl_coef, o.kl_estimator};
    check_options(advantage_);
    loss_ = {o.policy_loss_type, o.loss_aggregation, o.eps_clip, o.eps_clip, o.dual_clip, o.kl_use_loss ? o.kl_coef : 0,
             o.kl_estimator};
    if (!o.eps_clip_low_high.empty()) {
        if (o.eps_clip_low_high.size() != 2)
            die("--eps_clip_low_high has %zu numbers\n  fix: two, such as 0.2,0.28", o.eps_clip_low_high.size());
        loss_.clip_low = o.eps_clip_low_high[0], loss_.clip_high = o.eps_clip_low_high[1];
    }
    check_options(loss_);
    if (o.kl_coef == 0 && !o.ref_model.empty())
        run.say("note: without --kl_coef there is no reference; --ref_model %s is not read", o.ref_model.c_str());
}

void Policy::use(const Samples &data, size_t, const ModelLimits &limits) {
    Prepared &p = prepared_[&data];
    p.rollouts = &dynamic_cast<const Rollouts &>(data);
    if (run_.options.kl_coef > 0) p.reference_logps = reference_target_logps(run_, limits, data);
    std::vector<Judged> batch;
    for (size_t i = 0; i < data.documents(); i++) {
        const Rollout &r = (*p.rollouts)[i];
        batch.push_back({r.group, r.reward, r.logp, {}});
        if (!p.reference_logps.empty()) batch.back().reference_logp = p.reference_logps[i];
    }
    agree(run_.comm, [&] { p.advantages = advantages(advantage_, batch); });
}

Policy::Answers Policy::means_of(std::span<const size_t> samples) const {
    Answers a;
    const double n = double(samples.size());
    for (size_t s : samples) {
        const Rollout &r = (*now_->rollouts)[s];
        a.reward += r.reward / n, a.length += double(r.completion.size()) / n, a.truncated += r.truncated / n;
        a.longest = std::max(a.longest, double(r.completion.size()));
    }
    for (size_t s : samples) a.reward_std += std::pow((*now_->rollouts)[s].reward - a.reward, 2);
    a.reward_std = n > 1 ? std::sqrt(a.reward_std / (n - 1)) : 0;
    return a;
}

void Policy::start(const Samples &data, std::span<const size_t> samples) {
    now_ = &prepared_.at(&data);
    answers_ = means_of(samples);
    size_ = {0, double(samples.size()), double(run_.options.max_new_tokens)};
    for (size_t s : samples) size_.tokens += double(data.sample_targets(s));
}

void Policy::begin(const Samples &data, const Step &step) { start(data, step.samples); }

// Adds a row's rollouts to the sums, and returns the derivatives of the loss with respect to the nll of each token.
std::vector<float> Policy::add(const Row &row, std::span<const double> nll) {
    std::vector<double> logp(nll.size()), d_logp(nll.size());
    for (size_t n = 0; n < nll.size(); n++) logp[n] = -nll[n];
    PolicySums sums;
    size_t first = 0;
    for (size_t i : row.documents) {
        const Rollout &r = (*now_->rollouts)[i];
        const size_t count = nll.empty() ? 0 : r.completion.size();
        PolicyTokens tokens{std::span(logp).subspan(first, count), r.logp, {}, now_->advantages[i]};
        if (!now_->reference_logps.empty()) tokens.reference_logp = now_->reference_logps[i];
        sums += policy_loss(loss_, tokens, size_, std::span(d_logp).subspan(first, count));
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
}

Measured Policy::measured(Model &model, const std::string &prefix) {
    const LossSums tokens = over_ranks(run_.comm, model.take_sums());
    const PolicySums sums = over_ranks(run_.comm, std::exchange(sums_, {}));
    const double n = sums.tokens, entropy = tokens.entropy / tokens.targets;
    Measured out;
    out.loss = sums.policy_loss + sums.kl_loss - run_.options.entropy_coef * entropy;
    out.metrics = {{prefix + "policy_loss", sums.policy_loss},
                   {prefix + "reward", answers_.reward},
                   {prefix + "reward_std", answers_.reward_std},
                   {prefix + "kl", sums.kl / n},
                   {prefix + "ppo_kl", sums.moved / n},
                   {prefix + "clip_ratio", sums.clipped / n},
                   {prefix + "entropy", entropy},
                   {prefix + "response_length", answers_.length},
                   {prefix + "response_length_max", answers_.longest},
                   {prefix + "truncated", answers_.truncated}};
    if (!now_->reference_logps.empty()) out.metrics[prefix + "kl_loss"] = sums.kl_loss;
    else out.metrics.erase(prefix + "kl");
    out.text = format("eval loss %.4f  reward %.4f", out.loss, answers_.reward);
    return out;
}

Measured Policy::take(Model &model) { return measured(model, ""); }

Measured Policy::evaluate(Model &model, const Samples &data, std::span<const size_t> samples) {
    start(data, samples);
    for (const auto &own : own_rows(run_.config, run_.ranks, data, pack_samples(data, samples, run_.options.row_tokens)))
        if (!own.empty()) {
            const Row row = make_row(data, own);
            add(row, model.evaluate(row));
        }
    return measured(model, "eval_");
}
