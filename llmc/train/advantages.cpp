#include "advantages.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "../core/common.h"

namespace {

enum class Baseline { none, mean, mean_of_others, standard_score };

constexpr struct {
    Baseline baseline;
    bool whitened;
} estimators[] = {
    {Baseline::none, true},             // gae
    {Baseline::none, true},             // reinforce
    {Baseline::mean, true},             // reinforce_baseline
    {Baseline::mean_of_others, false},  // rloo
    {Baseline::standard_score, false},  // group_norm
    {Baseline::mean, false},            // dr_grpo
};

struct Group {
    size_t rollouts = 0;
    std::vector<double> rewards;  // of the rollouts that have one
    double mean = 0, deviation = 0;
    bool equal = false;

    void summarise() {
        const double n = double(rewards.size());
        equal = n < 1 || std::ranges::min(rewards) == std::ranges::max(rewards);
        for (double r : rewards) mean += r / n;
        for (double r : rewards) deviation += (r - mean) * (r - mean);
        deviation = std::sqrt(deviation / (n - 1));
    }
    double shaped(Baseline baseline, double reward) const {
        const double n = double(rewards.size());
        if (equal) return 0;
        if (baseline == Baseline::mean) return reward - mean;
        if (baseline == Baseline::mean_of_others) return (reward - mean) * n / (n - 1);
        return (reward - mean) / (deviation + 1e-9);
    }
};

std::vector<double> shaped_rewards(Baseline baseline, std::span<const ScoredRollout> batch) {
    std::vector<double> shaped;
    if (baseline == Baseline::none) {
        for (const ScoredRollout &j : batch) shaped.push_back(j.reward);
        return shaped;
    }
    std::map<int64_t, Group> groups;
    for (const ScoredRollout &j : batch) {
        groups[j.group].rollouts++;
        if (has_reward(j.reward)) groups[j.group].rewards.push_back(j.reward);
    }
    for (auto &[number, group] : groups) {
        if (group.rollouts == 1)
            die("group %lld has only one rollout, and the baseline needs others\n  fix: give at least two answers to each prompt, or use --advantage_estimator reinforce",
                (long long)(number));
        group.summarise();
    }
    for (const ScoredRollout &j : batch) shaped.push_back(groups[j.group].shaped(baseline, j.reward));
    return shaped;
}

void whiten(std::vector<std::vector<double>> &batch, bool divide) {
    double n = 0, mean = 0, variance = 0;
    for (const auto &tokens : batch) n += double(tokens.size());
    for (const auto &tokens : batch)
        for (double a : tokens) mean += a / n;
    for (const auto &tokens : batch)
        for (double a : tokens) variance += (a - mean) * (a - mean) / n;
    const double scale = divide ? 1 / std::sqrt(std::max(variance, 1e-8)) : 1;
    for (auto &tokens : batch)
        for (double &a : tokens) a = (a - mean) * scale;
}

}  // namespace

bool whitens(Estimator e) { return estimators[size_t(e)].whitened; }
bool discounts(Estimator e) { return estimators[size_t(e)].baseline == Baseline::none; }

KlEstimate kl_estimate(KlEstimator estimator, double d) {
    if (estimator == KlEstimator::k1) return {d, 1};
    if (estimator == KlEstimator::k2) return {d * d / 2, d};
    const double power = std::expm1(std::min(-d, 20.0));
    return {power + d, d < -20 ? 1 : -power};
}

double adapted_kl_coef(double coef, double kl, double target, double answers, double horizon) {
    return coef * (1 + std::clamp(kl / target - 1, -0.2, 0.2) * answers / horizon);
}

void check_options(const AdvantageOptions &o) {
    if (!(o.gamma > 0 && o.gamma <= 1)) die("--gamma %g must be above 0 and at most 1\n  fix: --gamma 1", o.gamma);
    if (!(o.gae_lambda >= 0 && o.gae_lambda <= 1))
        die("--gae_lambda %g must be between 0 and 1\n  fix: --gae_lambda 1", o.gae_lambda);
    if (!(o.kl_coef >= 0)) die("--kl_coef %g is negative\n  fix: 0 or more", o.kl_coef);
}

Estimated advantages(const AdvantageOptions &o, std::span<const ScoredRollout> batch) {
    const Baseline baseline = estimators[size_t(o.estimator)].baseline;
    const bool critic = o.estimator == Estimator::gae;
    const double gamma = discounts(o.estimator) ? o.gamma : 1, lambda = critic ? o.gae_lambda : 1;
    const std::vector<double> shaped = shaped_rewards(baseline, batch);
    Estimated out;
    out.clipped.resize(batch.size());
    for (size_t i = 0; i < batch.size(); i++) {
        const ScoredRollout &j = batch[i];
        if (!has_reward(j.reward)) {
            out.advantages.emplace_back(), out.returns.emplace_back(j.logp.size());
            continue;
        }
        std::vector<double> own(j.logp.size()), returns(j.logp.size());
        double reward = std::clamp(shaped[i], o.reward_clip[0], o.reward_clip[1]), later = 0, later_value = 0;
        out.clipped[i] = reward != shaped[i];
        for (const double earlier : j.turn_rewards) reward -= earlier;
        for (size_t t = own.size(); t-- > 0; reward = 0) {
            if (!j.turn_rewards.empty()) reward += j.turn_rewards[t];
            if (o.kl_coef > 0) reward -= o.kl_coef * kl_estimate(o.kl, j.logp[t] - j.reference_logp[t]).value;
            const double value = critic ? j.values[t] : 0;
            later = own[t] = reward + gamma * later_value - value + gamma * lambda * later;
            later_value = value;
            returns[t] = own[t] + value;
        }
        out.advantages.push_back(std::move(own)), out.returns.push_back(std::move(returns));
    }
    if (whitens(o.estimator)) whiten(out.advantages, !o.no_std_norm);
    for (size_t i = 0; i < batch.size(); i++) {
        const ScoredRollout &j = batch[i];
        out.advantages[i].resize(j.logp.size());  // 0 without a reward
        for (size_t t = 0; t < j.teacher_logp.size(); t++)
            out.advantages[i][t] += o.teacher_coef * (j.teacher_logp[t] - j.logp[t]);
    }
    return out;
}
