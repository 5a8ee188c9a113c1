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

// The part of a token's loss that depends on its ratio, with a gradient with respect to the ratio's logarithm, which is the result.
double ratio_loss(const PolicyLossOptions &o, const PolicyToken &token, double logp, double moved, PolicySums &sums) {
    const double log_ratio = within_20(moved), ratio = std::exp(log_ratio);
    Term term{};
    if (o.type == PolicyLossType::cispo) {
        const double factor = std::min(ratio, o.clip_high) * token.advantage;
        term = {-factor * logp, -factor, ratio > o.clip_high};
    } else {
        term = clipped_objective(o, ratio, token.advantage);
        if (log_ratio != moved) term.slope = 0, term.clipped = true;
    }
    sums.policy_loss += token.weight * token.correction * term.loss;
    sums.clipped += term.clipped, sums.moved -= logp - token.logp_old, sums.tokens++;
    sums.stale -= token.stale, sums.weights += o.correction == Correction::none ? 0 : token.correction, sums.cut += token.is_cut;
    return token.weight * token.correction * term.slope;
}

// The part that depends on the reference.
double reference_loss(const PolicyLossOptions &o, const PolicyToken &token, double logp, PolicySums &sums) {
    if (!token.reference_logp) return 0;
    const double d = logp - *token.reference_logp;
    sums.kl += kl_estimate(KlEstimator::k3, d).value;
    if (o.kl_coef == 0) return 0;
    const KlEstimate k = kl_estimate(o.kl, d);
    sums.kl_loss += token.weight * o.kl_coef * k.value;
    return token.weight * o.kl_coef * k.slope;
}

}  // namespace

std::vector<PolicyToken> policy_tokens(const PolicyLossOptions &o, const PolicyTokens &in, const PolicyStep &step) {
    const size_t n = in.logp_old.size();
    const double weight = token_weight(o, step, n);
    double mean = 0;  // of log w
    for (size_t t = 0; t < n && o.correction != Correction::none; t++) mean += (in.logp_old[t] - in.logp_sampled[t]) / double(n);
    std::vector<PolicyToken> tokens(n);
    for (size_t t = 0; t < n; t++) {
        PolicyToken &token = tokens[t];
        token = {.weight = weight, .logp_old = in.logp_old[t], .advantage = in.advantages[t]};
        if (!in.reference_logp.empty()) token.reference_logp = in.reference_logp[t];
        if (o.correction == Correction::none) continue;
        token.stale = in.logp_old[t] - in.logp_sampled[t];
        const double w = std::exp(within_20(token.stale)),
                     judged = o.correction == Correction::seq_mask_tis ? std::exp(within_20(mean)) : w,
                     near = std::clamp(judged, o.correction_low, o.correction_high);
        token.is_cut = judged != near;
        token.correction = o.correction == Correction::tis ? near : token.is_cut ? 0 : w;
    }
    return tokens;
}

double policy_loss(const PolicyLossOptions &o, const PolicyToken &token, double logp, PolicySums &sums) {
    const double slope = ratio_loss(o, token, logp, logp - token.logp_old, sums);
    return slope + reference_loss(o, token, logp, sums);
}

PolicySums policy_loss(const PolicyLossOptions &o, const PolicyTokens &in, const PolicyStep &step, std::span<double> d_logp) {
    const size_t n = in.logp.size();
    const std::vector<PolicyToken> tokens = policy_tokens(o, in, step);
    PolicySums sums;
    if (is_by_token(o)) {
        for (size_t t = 0; t < n; t++) d_logp[t] = policy_loss(o, tokens[t], in.logp[t], sums);
        return sums;
    }
    double moved = 0, slope = 0;  // the logarithm of the answer's ratio, and the derivative with respect to it
    for (size_t t = 0; t < n; t++) moved += (in.logp[t] - in.logp_old[t]) / double(n);
    for (size_t t = 0; t < n; t++) slope += ratio_loss(o, tokens[t], in.logp[t], moved, sums);
    for (size_t t = 0; t < n; t++) d_logp[t] = slope / double(n) + reference_loss(o, tokens[t], in.logp[t], sums);
    return sums;
}

ValueSums &ValueSums::operator+=(const ValueSums &o) {
    value_loss += o.value_loss, tokens += o.tokens, clipped += o.clipped, values += o.values;
    returns += o.returns, returns2 += o.returns2, errors += o.errors, errors2 += o.errors2;
    return *this;
}

double ValueSums::explained_variance() const {
    const double n = tokens, variance = returns2 / n - returns / n * (returns / n);
    if (!(variance > 1e-12 * (returns2 + errors2) / n)) return NAN;  // what rounding leaves of equal numbers, or of zeros
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
