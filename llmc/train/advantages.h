// Advantages: the improvement of an answer, or of one of its tokens, over the policy's average.
//
//   R_i   reward of rollout i, one of n of its group (the same prompt)      mean, s   over the group; s is the unbiased deviation
//   q_t   -kl_coef k(log p_t - log p_ref,t), if the KL divergence is part of the reward; k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d
//   G_t   the return: sum over u >= t of gamma^(u-t) q_u, to whose last q the shaped reward is added
//
//   V_t   the critic's value of the text before token t (gae); 0 after the last token
//   A_t   q_t + gamma V_(t+1) - V_t + gamma gae_lambda A_(t+1), an exponential average of the advantage estimates from 1, 2, ... tokens
//
// With gae the reward of a turn is added to the q of its last token, and the last turn has the rest of the shaped reward.
//
//   estimator            shaped reward                       advantage            source
//   gae                  R_i                                 A, whitened          Schulman et al., "High-dimensional continuous control using
//                                                                                 generalized advantage estimation", 2016, arXiv:1506.02438
//   reinforce            R_i                                 G, whitened          Hu et al., "REINFORCE++", 2025, arXiv:2501.03262
//   reinforce_baseline   R_i - mean                          G, whitened          the same with a baseline
//   rloo                 R_i - mean of the others            G                    Ahmadian et al., "Back to basics", 2024, arXiv:2402.14740
//   group_norm           (R_i - mean) / (s + 1e-9)           G                    Shao et al., "DeepSeekMath" (GRPO), 2024, arXiv:2402.03300
//   dr_grpo              R_i - mean                          G                    Liu et al., "Understanding R1-Zero-like training", 2025,
//                                                                                 arXiv:2503.20783
//
// A reward of NaN means that no judge scored the rollout. It is excluded from its group and from the whitened tokens, and its advantages are 0.
//
// The shaped reward is clipped to reward_clip, if that is given, before it is added to a q. Whitening subtracts the mean over all tokens of the batch and divides by
// their deviation (biased; with no_std_norm only the mean is subtracted). Estimators with groups have gamma 1; if all rewards of a group are equal,
// their shaped rewards are exactly 0.
//
// A teacher adds teacher_coef (log p_teacher,t - log p_t) to the advantage of each token, after whitening, and also without a reward: a sample of the
// negative slope of KL(policy, teacher), which a critic does not learn (Lu, "On-policy distillation", Thinking Machines, 2025; slime).
//
// All sums are over the whole batch, in double, in the order of the rollouts.
#pragma once
#include <array>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "choices.h"
#include "rollouts.h"

struct AdvantageOptions {
    Estimator estimator = Estimator::group_norm;
    double gamma = 1, gae_lambda = 1;
    bool no_std_norm = false;
    std::array<double, 2> reward_clip = {-INFINITY, INFINITY};
    double kl_coef = 0;  // weight of the KL divergence in the reward
    KlEstimator kl = KlEstimator::k1;
    double teacher_coef = 1;
};

struct ScoredRollout {
    int64_t group;
    double reward;                                 // NaN: none
    std::span<const double> logp, reference_logp;  // log p of the answer's tokens; the reference's may be empty if kl_coef is 0
    std::span<const double> values = {};           // the critic's, of each token; only for gae
    std::span<const double> teacher_logp = {};     // empty without a teacher
    std::span<const double> turn_rewards =
        {};  // of each token, the reward of the turn before the last that it ends, else 0; only for gae
};

// Results for each token of each rollout.
struct Estimated {
    std::vector<std::vector<double>> advantages;
    std::vector<std::vector<double>> returns;  // G; for gae A + V before whitening, which are the critic's targets
    std::vector<bool> clipped;                 // (rollouts) true: reward_clip has changed the shaped reward
};

bool whitens(Estimator);
bool discounts(Estimator);                     // true if gamma has an effect
void check_options(const AdvantageOptions &);  // dies if a number is out of range

// Dies if the baseline needs other rollouts and a group has only one.
Estimated advantages(const AdvantageOptions &options, std::span<const ScoredRollout> batch);

// A one-sample estimate of the KL divergence of the policy from the reference, d = log p - log p_ref, and its derivative with respect to d. Below
// d = -20 the exponential is constant, so that it does not overflow.
struct KlEstimate {
    double value, slope;
};
KlEstimate kl_estimate(KlEstimator, double d);  // Schulman, "Approximating KL divergence", 2020

// Returns the coefficient of the divergence after a batch of `answers` answers with the divergence `kl`:
//   coef (1 + clip(kl / target - 1, -0.2, 0.2) answers / horizon)        Ziegler et al., 2019, arXiv:1909.08593, section 2.2
double adapted_kl_coef(double coef, double kl, double target, double answers, double horizon);
