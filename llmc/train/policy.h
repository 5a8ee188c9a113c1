// The task grpo: a policy learns from rollouts (rollouts.h). Their advantages are computed once, over all of them, before the first step
// (advantages.h). In each step a forward pass gives the log-probability of each token, from which the host computes the token's share of the loss
// and the derivative that the backward pass starts from (policy_loss.h).
#pragma once
#include <map>

#include "advantages.h"
#include "objective.h"
#include "policy_loss.h"
#include "rollouts.h"

class Policy final : public Objective {
  public:
    explicit Policy(const Run &run);

    void use(const Samples &data, size_t samples, const ModelLimits &limits) override;
    void begin(const Samples &data, const Step &step) override;
    void accumulate(Model &model, const Row &row, bool last) override;
    Measured take(Model &model) override;
    Measured evaluate(Model &model, const Samples &data, std::span<const size_t> samples) override;

  private:
    // What is known of the rollouts of a file before the first step.
    struct Prepared {
        const Rollouts *rollouts;
        std::vector<std::vector<double>> advantages, reference_logps;  // of each rollout's tokens; the reference's may be empty
    };
    // Means over the rollouts of a step.
    struct Answers {
        double reward = 0, reward_std = 0, length = 0, longest = 0, truncated = 0;
    };

    Answers means_of(std::span<const size_t> samples) const;
    void start(const Samples &data, std::span<const size_t> samples);
    std::vector<float> add(const Row &row, std::span<const double> nll);
    Measured measured(Model &model, const std::string &prefix);

    const Run &run_;
    AdvantageOptions advantage_;
    PolicyLossOptions loss_;
    std::map<const Samples *, Prepared> prepared_;
    const Prepared *now_ = nullptr;  // the rollouts of the step or evaluation that goes on
    PolicyStep size_{};
    Answers answers_;
    PolicySums sums_;  // over this rank's rollouts
};
