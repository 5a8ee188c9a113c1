// The tasks dpo and rm: from what a model says of the documents of pairs to the loss of a step, its derivatives, and what the log tells.
//
// Both are one algorithm. A row holds whole pairs. The model's forward pass gives one value for each document: the sum of its answer's nll,
// or its reward. From those of a pair follow, here on the host, its share of the loss and the loss's derivatives by the two values, which
// the backward pass starts from. Nothing depends on how the pairs of a step are dealt to rows and ranks.
#pragma once
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>

#include "preference.h"
#include "reference.h"
#include "run.h"

// Sums over pairs. The reward of an answer is, in dpo, beta (log p - log p of the reference).
struct PairTotals {
    double pairs = 0, loss = 0;  // loss: sum of the pairs' shares
    double chosen_reward = 0, rejected_reward = 0, squared_rewards = 0;
    double right = 0;  // pairs whose chosen answer has the larger reward
    double chosen_logp = 0, rejected_logp = 0;

    PairTotals &operator+=(const PairTotals &o);
    double reward_mean() const { return (chosen_reward + rejected_reward) / (2 * pairs); }
    double reward_std() const;                                                              // of all answers, unbiased
    void add_to(nlohmann::ordered_json &line, Task task, const std::string &prefix) const;  // all but the loss, as means
};

StepSize step_size(const PreparedData &data, std::span<const size_t> samples);

class PairTask {
  public:
    explicit PairTask(const Run &run);  // dies where its options make no sense

    std::optional<ModelConfig> resident_reference() const;  // of a model that stays in memory beside the trained one, if one does

    // Data that the methods below will be given: its first `pairs`. Call it before the trained model takes its memory; the reference, where
    // the loss needs one, gets rows as long as `limits` says.
    void use(const PreparedData &data, size_t pairs, const ModelLimits &limits);

    // Forward, loss and backward of one row of a step; without tokens if this ring has none.
    void accumulate(Model &model, const PreparedData &data, const Row &row, const StepSize &step, bool last);
    // Forward and loss of all rows.
    void evaluate(Model &model, const PreparedData &data, std::span<const size_t> samples);
    PairTotals take_totals();  // of all ranks since the last call, which make it together

  private:
    std::vector<float> add(const PreparedData &data, const Row &row, std::span<const double> values, const StepSize &step);
    PairLoss loss_of(const PreparedData &data, size_t pair, const PairSums &p, const StepSize &step) const;

    const Run &run_;
    std::optional<PreferenceLoss> preference_;  // dpo
    std::unique_ptr<Reference> reference_;
    PairTotals totals_;
};
