// The tasks dpo and rm: computes the loss of a step, its derivatives and the log's figures from the values of a pair's documents.
//
// Both tasks use the same algorithm. A row holds whole pairs. The model's forward pass gives one value for each document: the sum of its answer's
// nll, or its reward. From the two values of a pair the host computes its share of the loss and the derivatives with respect to both values, where
// the backward pass starts. No result depends on the division of a step's pairs among rows and ranks.
#pragma once
#include <memory>
#include <optional>

#include "objective.h"
#include "preference.h"
#include "reference.h"

// Sums over pairs. In dpo the reward of an answer is beta (log p - log p of the reference).
struct PairTotals {
    double pairs = 0, loss = 0;  // loss: the sum of the pairs' shares
    double chosen_reward = 0, rejected_reward = 0, squared_rewards = 0;
    double right = 0;  // number of pairs in which the chosen answer has the larger reward
    double chosen_logp = 0, rejected_logp = 0;

    PairTotals &operator+=(const PairTotals &o);
    double reward_mean() const { return (chosen_reward + rejected_reward) / (2 * pairs); }
    double reward_std() const;  // over all answers, unbiased
    void add_to(nlohmann::ordered_json &line, Task task,
                const std::string &prefix) const;  // adds the means of all figures except the loss
};

StepSize step_size(const Samples &data, std::span<const size_t> samples);

class Pairs final : public Objective {
  public:
    explicit Pairs(const Run &run);

    std::vector<CoResidentModel> co_residents() const override;
    void open(const ModelLimits &limits, const Samples &data, size_t pairs, const Samples *eval_data) override;
    void begin(const Step &step, uint64_t) override;
    void accumulate(Model &model, const Row &row, bool last) override;
    Measured take(Model &model) override;
    Measured evaluate(Model &model, const Samples &data, std::span<const size_t> samples) override;
    void describe(ModelConfig &config) const override;
    PairTotals take_totals();  // sums over all ranks since the last call

  private:
    std::vector<double> reference_logps(Model &model, const Row &row) const;
    std::vector<float> add(const Row &row, std::span<const double> values, std::span<const double> reference);
    PairLoss loss_of(size_t pair, const PairSums &p) const;

    const Run &run_;
    std::optional<PreferenceLoss> preference_;  // dpo
    std::unique_ptr<Reference> reference_;
    const Samples *data_ = nullptr;  // the data of the current step or evaluation
    StepSize size_{};
    PairTotals totals_;     // sums over this rank's pairs since the last take_totals()
    PairTotals evaluated_;  // sums of the last evaluation, over all ranks
};
