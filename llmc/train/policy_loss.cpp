#include "policy_loss.h"

#include <algorithm>
#include <cmath>

#include "../core/common.h"
#include "advantages.h"

PolicySums &PolicySums::operator+=(const PolicySums &o) {
    policy_loss += o.policy_loss, kl_loss += o.kl_loss, tokens += o.tokens, clipped += o.clipped, moved += o.moved, kl += o.kl;
    stale += o.stale, weights += o.weights, cut += o.cut;
    return *this;
}

void check_options(const PolicyLossOptions &o) {
    if (o.kl_coef > 0 && o.kl == KlEstimator::k1)
        die("k1 as a loss has a gradient that says nothing about the reference\n  fix: --kl_estimator k2 or k3, or k1 without --kl_use_loss");
    if (o.type == PolicyLossType::cispo && o.clip_high < 1)
        die("with cispo the upper bound applies to the ratio itself, but %g is below 1\n  fix: --eps_clip 0,5", o.clip_high);
    if (!(o.clip_low >= 0 && o.clip_low <= 1 && o.clip_high >= 0))
        die("ratios cannot be clipped to 1 - %g and 1 + %g\n  fix: --eps_clip 0.2, or a lower and an upper bound: 0.2,0.28",
            o.clip_low, o.clip_high);
    if (o.dual_clip != 0 && !(o.dual_clip > 1)) die("--dual_clip %g must be above 1\n  fix: --dual_clip 3", o.dual_clip);
    if (o.correction == Correction::none) return;
    const std::string correction = name_of(o.correction);
    if (!(0 <= o.correction_low && o.correction_low <= 1 && 1 <= o.correction_high))
        die("--is_correction %s,%g,%g: the range must contain 1, the weight of an answer of the current policy\n  fix: --is_correction %s,0.5,5, say",
            correction.c_str(), o.correction_low, o.correction_high, correction.c_str());
    if (o.type == PolicyLossType::gspo)
        die("--is_correction %s: gspo already takes its ratio to the probability at sampling, which is the correction\n  fix: leave it out",
            correction.c_str());
}

namespace {

struct Term {
    double loss, slope;  // slope: the derivative with respect to log r
    bool clipped;
};

Term clipped_objective(const PolicyLossOptions &o, double ratio, double advantage) {
    const double plain = ratio * advantage, clipped = std::clamp(ratio, 1 - o.clip_low, 1 + o.clip_high) * advantage;
    if (o.dual_clip && advantage < 0 && std::min(plain, clipped) < o.dual_clip * advantage)
        return {-o.dual_clip * advantage, 0, clipped < plain};
    if (clipped < plain) return {-clipped, 0, true};
    return {-plain, -plain, false};
}

double within_20(double log_ratio) { return std::clamp(log_ratio, -20.0, 20.0); }

// What a token's loss is multiplied by.
double token_weight(const PolicyLossOptions &o, const PolicyStep &step, size_t tokens) {
    const bool per_sequence =
        o.aggregation.value_or(o.type == PolicyLossType::gspo ? Aggregation::sequence_mean : Aggregation::token_mean) ==
        Aggregation::sequence_mean;
    if (per_sequence) return 1 / (step.sequences * double(tokens));
    return o.aggregation == Aggregation::constant ? 1 / (step.sequences * step.longest) : 1 / step.tokens;
}

// Returns the weights that a correction gives to an answer's tokens.
std::vector<double> correction_weights(const PolicyLossOptions &o, const PolicyTokens &in, PolicySums &sums) {
    const size_t n = in.logp.size();
    std::vector<double> weights(n, 1);
    if (o.correction == Correction::none) return weights;
    double mean = 0;  // of log w
    for (size_t t = 0; t < n; t++) mean += (in.logp_old[t] - in.logp_sampled[t]) / double(n);
    for (size_t t = 0; t < n; t++) {
        const double log_weight = in.logp_old[t] - in.logp_sampled[t], weight = std::exp(within_20(log_weight)),
                     judged = o.correction == Correction::seq_mask_tis ? std::exp(within_20(mean)) : weight,
                     near = std::clamp(judged, o.correction_low, o.correction_high);
        if (o.correction == Correction::tis) weights[t] = near;
        else weights[t] = judged == near ? weight : 0;
        sums.stale -= log_weight, sums.weights += weights[t], sums.cut += judged != near;
    }
    return weights;
}

}  // namespace

PolicySums policy_loss(const PolicyLossOptions &o, const PolicyTokens &in, const PolicyStep &step, std::span<double> d_logp) {
    const size_t n = in.logp.size();
    const double weight = token_weight(o, step, n);
    PolicySums sums;
    const std::vector<double> corrections = correction_weights(o, in, sums);
    double mean_moved = 0;  // of log p - log p_old
    for (size_t t = 0; t < n; t++) mean_moved += (in.logp[t] - in.logp_old[t]) / double(n);

    double of_sequence = 0;  // gspo: the derivative with respect to the logarithm of the answer's ratio
    for (size_t t = 0; t < n; t++) {
        const double moved = in.logp[t] - in.logp_old[t], advantage = in.advantages[t],
                     log_ratio = within_20(o.type == PolicyLossType::gspo ? mean_moved : moved), ratio = std::exp(log_ratio);
        Term term{};
        if (o.type == PolicyLossType::cispo) {
            const double factor = std::min(ratio, o.clip_high) * advantage;
            term = {-factor * in.logp[t], -factor, ratio > o.clip_high};
        } else {
            term = clipped_objective(o, ratio, advantage);
            if (log_ratio != (o.type == PolicyLossType::gspo ? mean_moved : moved)) term.slope = 0, term.clipped = true;
        }
        sums.policy_loss += weight * corrections[t] * term.loss;
        if (o.type == PolicyLossType::gspo) of_sequence += weight * term.slope;
        else d_logp[t] = weight * corrections[t] * term.slope;
        sums.clipped += term.clipped, sums.moved -= moved, sums.tokens++;
    }
    for (size_t t = 0; t < n; t++) {
        if (o.type == PolicyLossType::gspo) d_logp[t] = of_sequence / double(n);
        if (in.reference_logp.empty()) continue;
        const double d = in.logp[t] - in.reference_logp[t];
        sums.kl += kl_estimate(KlEstimator::k3, d).value;
        if (o.kl_coef == 0) continue;
        const KlEstimate k = kl_estimate(o.kl, d);
        sums.kl_loss += weight * o.kl_coef * k.value;
        d_logp[t] += weight * o.kl_coef * k.slope;
    }
    return sums;
}

ValueSums &ValueSums::operator+=(const ValueSums &o) {
    value_loss += o.value_loss, tokens += o.tokens, clipped += o.clipped, values += o.values;
    returns += o.returns, returns2 += o.returns2, errors += o.errors, errors2 += o.errors2;
    return *this;
}

double ValueSums::explained_variance() const {
    const double n = tokens, variance = returns2 / n - returns / n * (returns / n);
    if (!(variance > 1e-12 * returns2 / n)) return NAN;  // what rounding leaves of equal numbers
    return 1 - (errors2 / n - errors / n * (errors / n)) / variance;
}

ValueSums value_loss(double clip, const ValueTokens &in, double step_tokens, std::span<double> d_values) {
    ValueSums sums;
    for (size_t t = 0; t < in.values.size(); t++) {
        const double value = in.values[t], old = in.values_old[t], target = in.returns[t], error = value - target;
        const double near = clip > 0 ? old + std::clamp(value - old, -clip, clip) : value;
        const bool clipped = std::abs(near - target) > std::abs(error);
        d_values[t] = clipped ? 0 : error / step_tokens;
        sums += {0.5 * std::pow(clipped ? near - target : error, 2) / step_tokens,
                 1,
                 double(clipped),
                 value,
                 target,
                 target * target,
                 -error,
                 error * error};
    }
    return sums;
}
