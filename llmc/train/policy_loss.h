// Policy losses: functions of the log-probabilities of one answer's tokens, and their derivatives, which become the tokens' weights in the backward
// pass. Advantages are constants.
//
//   r_t    exp(log p_t - log p_old,t): the ratio of the token's current probability to the one at sampling; its logarithm is clamped to +-20
//   A_t    the token's advantage             [a, b]   1 - clip_low to 1 + clip_high
//
//   ppo     -min(r A, clip(r, a, b) A); with dual_clip c > 1 and A < 0, at most -c A
//                                                   Schulman et al., 2017, arXiv:1707.06347; Ye et al. (dual clip), 2019, arXiv:1912.09729;
//                                                   clip_high above clip_low: Yu et al., "DAPO", 2025, arXiv:2503.14476
//   gspo    the same, with the geometric mean of the answer's ratios instead of r_t       Zheng et al., 2025, arXiv:2507.18071
//   cispo   -min(r, clip_high) A log p, where the factor before log p is a constant       MiniMax-M1, 2025, arXiv:2506.13585
//
// The loss of a step is one of
//   token_mean      the sum over all tokens, divided by their number N
//   sequence_mean   the mean over all answers of the mean over their tokens
//   constant        the sum over all tokens, divided by the number of answers times the longest allowed answer (Dr. GRPO)
// where the loss of a token includes kl_coef times k2 or k3 (advantages.h) of log p - log p_ref.
//
// Answers may have been sampled by older weights than those of the first step on them. Then p_old belongs to the latter, so the ratio bounds only the
// change that the steps make (Hilton et al., "Batch size-invariance for policy optimization", 2021, arXiv:2110.00641), and a constant weight on a
// token's term corrects for the older weights. With w_t = exp(log p_old,t - log p_smp,t), where p_smp belongs to the weights that sampled, the
// constant is
//   tis             w_t clamped to [c, d]                                Yao et al., "Your efficient RL framework secretly brings you off-policy RL
//                                                                        training", 2025; Espeholt et al. (IMPALA), 2018, arXiv:1802.01561
//   icepop          w_t, but 0 outside [c, d]                            Ling Team, 2025, arXiv:2510.18855
//   seq-mask-tis    w_t, but 0 if the geometric mean over the answer is outside [c, d]                  as in OpenRLHF
// The denominators of the loss do not change.
//
// A critic learns the returns G (advantages.h). V is its current value of a token, and V_old its value when the token was sampled. The loss is
//   value           half the mean over all tokens of max((V - G)^2, (V_old + clip(V - V_old, -c, c) - G)^2), or of (V - G)^2 if c is 0
//                                                   Schulman et al., 2017, as in the code of its experiments
#pragma once
#include <optional>
#include <span>
#include <vector>

#include "choices.h"

struct PolicyLossOptions {
    PolicyLossType type = PolicyLossType::ppo;
    Auto<Aggregation> aggregation = {};                     // auto: sequence_mean for gspo, else token_mean
    double clip_low = 0.2, clip_high = 0.2, dual_clip = 0;  // dual_clip 0: none
    double kl_coef = 0;
    KlEstimator kl = KlEstimator::k3;
    Correction correction = Correction::none;
    double correction_low = 0.5, correction_high = 5;
};

void check_options(const PolicyLossOptions &);  // dies if a number is out of range, or two values contradict each other

// Arrays over the tokens of an answer, (tokens) each.
struct PolicyTokens {
    std::span<const double> logp, logp_old, reference_logp, advantages;  // the reference's may be empty
    std::span<const double> logp_sampled = {};                           // under the weights that sampled, for a correction
};

// The denominators of a step's losses.
struct PolicyStep {
    double tokens, sequences, longest;
};

// An answer's contribution to the loss, and sums over its tokens.
struct PolicySums {
    double policy_loss = 0, kl_loss = 0;  // shares of the step's loss
    // clipped: number of tokens whose clipped objective is the smaller one, or whose log ratio is clamped
    double tokens = 0, clipped = 0;
    double moved = 0, kl = 0;  // sums of log p_old - log p; of k3 for the reference, 0 without one
    // Sums of log p_smp - log p_old and of the correction's weights, and the number of tokens whose weight was clamped or set to 0.
    double stale = 0, weights = 0, cut = 0;

    PolicySums &operator+=(const PolicySums &o);
};

// True if a token's share of the loss is a function of its own log-probability, and false for gspo.
inline bool is_by_token(const PolicyLossOptions &o) { return o.type != PolicyLossType::gspo; }

// A token of an answer with all that its share of the loss depends on, besides log p.
struct PolicyToken {
    double weight = 0;  // in the step's loss; 0: left out
    double logp_old = 0, advantage = 0;
    std::optional<double> reference_logp = {};
    double stale = 0, correction = 1;
    bool is_cut = false;  // by the correction
};

// The tokens of an answer; in.logp is not read.
std::vector<PolicyToken> policy_tokens(const PolicyLossOptions &options, const PolicyTokens &in, const PolicyStep &step);

// Adds a token's share of a loss by token to the sums, and returns its derivative with respect to log p.
double policy_loss(const PolicyLossOptions &options, const PolicyToken &token, double logp, PolicySums &sums);

// d_logp (tokens) = the derivatives of the answer's share of the loss.
PolicySums policy_loss(const PolicyLossOptions &options, const PolicyTokens &answer, const PolicyStep &step,
                       std::span<double> d_logp);

// Arrays over the tokens of an answer, (tokens) each.
struct ValueTokens {
    std::span<const double> values, values_old, returns;
};

struct ValueSums {
    double value_loss = 0;           // share of the step's loss
    double tokens = 0, clipped = 0;  // clipped: number of tokens whose value has moved too far to learn more
    double values = 0;               // sums over the tokens: of V, G, G^2, G - V, (G - V)^2
    double returns = 0, returns2 = 0, errors = 0, errors2 = 0;

    ValueSums &operator+=(const ValueSums &o);
    double explained_variance() const;  // 1 - var(G - V) / var(G); NAN if all returns are equal
};

// d_values (tokens) = the derivatives. step_tokens: N; clip: c.
ValueSums value_loss(double clip, const ValueTokens &answer, double step_tokens, std::span<double> d_values);
