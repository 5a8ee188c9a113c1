// The tasks dpo and rm: computes the loss of a step, its derivatives and the log's figures from the values of a pair's documents.
//
// Both are one algorithm. A row holds whole pairs. The model's forward pass gives one value for each document: the sum of its answer's nll,
// or its reward. From the two values of a pair the host computes its share of the loss and the derivatives of the loss with respect to both,
// from which the backward pass starts. No result depends on how the pairs of a step are dealt to rows and ranks.
#pragma once
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>

#include "preference.h"
#include "reference.h"
#include "run.h"

// Sums over pairs. The reward of an answer is, in dpo, beta (log p - log p of the reference).
struct PairTotals {
    double pairs = 0, loss = 0;  // loss: the sum of the pairs' shares
    double chosen_reward = 0, rejected_reward = 0, squared_rewards = 0;
    double right = 0;  // pairs whose chosen answer has the larger reward
    double chosen_logp = 0, rejected_logp = 0;

    PairTotals &operator+=(const PairTotals &o);
    double reward_mean() const { return (chosen_reward + rejected_reward) / (2 * pairs); }
    double reward_std() const;                                                              // over all answers, unbiased
    void add_to(nlohmann::ordered_json &line, Task task, const std::string &prefix) const;  // adds means of all but the loss
};

StepSize step_size(const PreparedData &data, std::span<const size_t> samples);

class PairTask {
  public:
    explicit PairTask(const Run &run);  // dies if the options contradict each other

    std::optional<ModelConfig> resident_reference()
        const;  // of the reference model, if it stays in memory beside the trained one

    // Announces the first `pairs` of data that the methods below will get. It must be called before the trained model takes its memory. If the
    // loss needs a reference model, this one gets rows as long as `limits` says.
    void use(const PreparedData &data, size_t pairs, const ModelLimits &limits);

    // Runs forward, loss and backward of one row of a step. The row has no tokens if this ring has none in this micro-step.
    void accumulate(Model &model, const PreparedData &data, const Row &row, const StepSize &step, bool last);
    // Runs forward and loss of all rows.
    void evaluate(Model &model, const PreparedData &data, std::span<const size_t> samples);
    PairTotals take_totals();  // sums over all ranks, which call it together, since the last call

  private:
    std::vector<float> add(const PreparedData &data, const Row &row, std::span<const double> values, const StepSize &step);
    PairLoss loss_of(const PreparedData &data, size_t pair, const PairSums &p, const StepSize &step) const;

    const Run &run_;
    std::optional<PreferenceLoss> preference_;  // dpo
    std::unique_ptr<Reference> reference_;
    PairTotals totals_;
};
