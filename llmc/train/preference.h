// Preference losses: functions of one pair's log-probabilities, or of its rewards, and their derivatives. The backward pass only needs dL/dc and
// dL/dr of a pair, which become the weights of its answers' tokens.
//
//   c, r    log p(chosen | prompt), log p(rejected | prompt): sums over the answers' tokens; c0, r0 the same of the reference model
//   u, v    c - c0, r - r0           x = beta (u - v)           s(x) = 1 / (1 + exp(-x))
//   n, m    numbers of tokens of the chosen and rejected answer e = label_smoothing
//
//   sigmoid       -(1-e) log s(x) - e log s(-x)                 Rafailov et al., "Direct preference optimization", 2023, arXiv:2305.18290;
//                                                               with e > 0 conservative (cDPO)
//   sigmoid_norm  the same for x = beta (u/n - v/m)             TRL
//   robust        (-(1-e) log s(x) + e log s(-x)) / (1-2e)      Chowdhury et al., "Provably robust DPO", 2024, arXiv:2403.00409
//   hinge         max(0, 1 - x)                                 Zhao et al., "SLiC-HF", 2023, arXiv:2305.10425
//   ipo_sum       (u - v - 1/(2 beta))^2                        Azar et al., "A general theoretical paradigm", 2023, arXiv:2310.12036; as OpenRLHF
//   ipo_mean      (u/n - v/m - 1/(2 beta))^2                    as TRL
//   apo_zero      1 - s(beta u) + s(beta v)                     D'Oosterlinck et al., "Anchored preference optimization", 2024, arXiv:2408.06266
//   apo_down      s(beta u) + 1 - s(x)                          the same
//   sppo_hard     (u - 1/(2 beta))^2 + (v + 1/(2 beta))^2       Wu et al., "Self-play preference optimization", 2024, arXiv:2405.00675
//   nca_pair      -log s(beta u) - (log s(-beta u) + log s(-beta v)) / 2       Chen et al., "Noise contrastive alignment", 2024, arXiv:2402.05369
//   bco_pair      -log s(beta u) - log s(-beta v)               Jung et al., "Binary classifier optimization", 2024, arXiv:2404.04656; no shift
//   exo_pair      s(x) (log s(x) - log(1-e)) + s(-x) (log s(-x) - log e)       Ji et al., "Efficient exact optimization", 2024, arXiv:2402.00856
//   discopop      (1-g) (-log s(x)) + g exp(-x), g = s(x / 0.05)               Lu et al., "Discovering preference optimization algorithms", 2024,
//                                                               arXiv:2406.08414
//   simpo         -log s(beta (c/n - r/m) - gamma)              Meng et al., "SimPO", 2024, arXiv:2405.14734; without a reference
//   orpo          -c/n - beta log s(odds(c/n) - odds(r/m)), odds(a) = a - log(1 - exp(a))      Hong et al., "ORPO", 2024, arXiv:2403.07691;
//                                                               without a reference; beta is the paper's lambda
//
// TRL's types aot and aot_unpaired sort the pairs of a micro-batch, so their value depends on the split of a step. They are not supported.
#pragma once
#include <string>
#include <utility>
#include <vector>

struct PairLossOptions {
    double beta = 0.1, label_smoothing = 0, gamma = 0;  // gamma: simpo's
};

struct PairSums {
    double chosen, rejected, reference_chosen, reference_rejected;  // log-probabilities, nats; 0 without a reference
    double chosen_tokens, rejected_tokens;                          // of the answers, at least 1
};

struct PairLoss {
    double loss, d_chosen, d_rejected;  // dL/dc, dL/dr
};

// One of the losses above: an entry of the table in preference.cpp.
struct PreferenceFormula;
const PreferenceFormula &preference_formula(const std::string &name);  // dies with the list of names
std::string preference_names();  // "sigmoid, sigmoid_norm, ...", also those of single answers
bool needs_reference(const PreferenceFormula &);
bool smooths_labels(const std::string &name);                            // whether label_smoothing changes the loss of this name
void check_options(const PreferenceFormula &, const PairLossOptions &);  // dies if the formula has no value for these options
PairLoss pair_loss(const PreferenceFormula &, const PairLossOptions &options, const PairSums &pair);

// The denominators of a step's losses.
struct StepSize {
    double pairs, chosen_tokens;
};

// The loss of a step: the mean over its pairs of a weighted sum of the losses above, and two losses that only depend on the chosen answers:
//   sft    the mean nll over all chosen tokens of the step, as in TRL                       selected like the other types
//   nll    the mean over the pairs of -c/n, as OpenRLHF's nll_loss_coef (Llama 3.1, 2024, arXiv:2407.21783, section 4.1.4)
class PreferenceLoss {
  public:
    // There is one weight per type, or none, which means 1 each. Dies if a type is unknown or an option is out of range.
    PreferenceLoss(const std::vector<std::string> &types, const std::vector<double> &weights, const PairLossOptions &options,
                   double nll);

    bool needs_reference() const;
    PairLoss operator()(const PairSums &pair, const StepSize &step) const;  // the pair's share of the loss

  private:
    std::vector<std::pair<const PreferenceFormula *, double>> terms_;  // each with its weight
    PairLossOptions options_;
    double sft_ = 0, nll_;
};

// Losses of single answers, each judged desirable or undesirable:
//
//   kto                desirable: 1 - s(beta (u - z))       undesirable: 1 - s(beta (z - u))       Ethayarajh et al., "KTO", 2024, arXiv:2402.01306
//   apo_zero_unpaired  the same with z = 0: apo_zero, whose two terms each depend on one answer    D'Oosterlinck et al., as above
//
// Each loss is multiplied by the weight of its label. u is the answer's log p - log p of the reference. z estimates the policy's KL divergence from the reference, in nats (unpaired.h); the derivative
// treats it as a constant.
bool is_unpaired(const std::string &loss);

struct AnswerLossOptions {
    double beta = 0.1, desirable_weight = 1, undesirable_weight = 1;
};

struct AnswerLoss {
    double loss, d_logp;  // d_logp: dL/du
};
AnswerLoss answer_loss(const AnswerLossOptions &options, double u, double z, bool desirable);  // multiplied by its weight
double divergence(double sum, double pairs);  // z from the sum of u over the mismatched pairs (unpaired.h); NAN stays

// Reward models: -log s(c - r - margin) + center (c + r)^2, where c and r are the rewards of the answers.
//   Ouyang et al., 2022, arXiv:2203.02155; margin: Touvron et al., "Llama 2", 2023, arXiv:2307.09288; center: Eisenstein et al., 2023,
//   arXiv:2312.09244
PairLoss reward_loss(double chosen, double rejected, double margin, double center);
