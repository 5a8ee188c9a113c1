// The tasks grpo and ppo: a policy learns from answers of its own and their rewards; with ppo, beside a critic (critic.h). An iteration:
//
//   draw()       prompts are drawn, the engine (generation.h) answers each n times and keeps the log-probability of every token, and answers
//                get rewards: they are rollouts (rollouts.h). With --rollouts they are read from a file instead, once. With --async_steps 1 a copy of the
//                policy answers the prompts of the next iteration meanwhile, on a thread that sends no messages: what ranks share of its answers, they
//                share in the next draw() or save_state()
//   prepare()    the reference and the critic, if there are any, evaluate the rollouts; rewards become advantages (advantages.h), over all ranks
//   begin(), accumulate(), take()    one or several optimizer steps: a forward pass gives the log-probability of each token now, from which the host
//                computes the token's share of the loss and the derivative that the backward pass starts from (policy_loss.h); then the
//                critic does the same with its own loss, and update() updates it
#pragma once
#include <future>
#include <map>

#include "../data/tokenizer.h"
#include "advantages.h"
#include "critic.h"
#include "generation.h"
#include "objective.h"
#include "policy_loss.h"
#include "reward.h"
#include "rollouts.h"
#include "shaping.h"

class Policy final : public Objective {
  public:
    explicit Policy(const Run &run);

    std::vector<CoResidentModel> co_residents() const override;
    Drawing drawing(const Options &o) const override;
    size_t steps(size_t samples) const override;
    void reserve(const Samples &data, ModelLimits &limits) override;
    void use(const Samples &data, size_t samples, const ModelLimits &limits) override;
    std::vector<Step> draw(Model &model, DataLoader &loader, size_t left) override;
    size_t targets(const Step &step) const override { return targets_of(*step.data, step.samples); }
    Measured skip(const Step &step) override;
    void begin(const Step &step, uint64_t key) override;
    void accumulate(Model &model, const Row &row, bool last) override;
    Measured take(Model &model) override;
    void update(const AdamW &adamw, double rate) override;
    size_t frozen_steps() const override { return size_t(std::max<int64_t>(0, run_.options.freezing_steps)); }
    Measured evaluate(Model &model, const Samples &data, std::span<const size_t> samples) override;
    void save(const std::string &dir, const std::string &export_dtype) override;
    void save_state(const std::string &dir) override;
    void verify_state(const std::string &dir) override;
    void load_state(const std::string &dir) override;

  private:
    // Rollouts, and what is known of them before the first step.
    struct Prepared {
        const Rollouts *rollouts;
        std::vector<double> rewards;                                   // shaped
        std::vector<std::vector<double>> advantages, reference_logps;  // of each rollout's tokens; the reference's may be empty
        std::vector<std::vector<double>> old_logps;                    // by the policy now; empty without --is_correction
        Critic::Targets critic;                                        // ppo

        const std::vector<double> &old_logp(size_t i) const { return old_logps.empty() ? (*rollouts)[i].logp : old_logps[i]; }
    };
    // Means over the rollouts of a step.
    struct Answers {
        double reward = 0, reward_std = 0, length = 0, longest = 0, truncated = 0;
    };
    // What answers are worth: their weighted rewards, and those of each of --reward.
    struct Rewards {
        std::vector<double> rewards;
        std::vector<std::vector<double>> parts;
    };

    // Prompts, and this rank's answers, if the model beside writes them.
    struct PendingBatch {
        size_t begin;  // prompts that were drawn before
        Questions questions;
        std::future<std::vector<Completion>> own = {};
    };
    // Rollouts for an iteration. written_at: the number of steps before the weights that wrote them.
    struct Batch {
        std::vector<Rollout> rollouts;
        size_t begin;
        int64_t written_at;
        nlohmann::ordered_json news;  // for the log line of its first step
    };

    Questions questions(const Samples &data, std::span<const size_t> samples) const;
    std::vector<Completion> answer(Model &model, const Questions &asked, size_t first, const GenerationSettings &settings) const;
    Rewards rewards_of(const Questions &asked, std::span<const Completion> answers) const;
    PendingBatch ask(const Step &drawn) const;
    std::vector<Completion> answers_to(Model *model, PendingBatch &asked) const;
    void keep(const PendingBatch &asked, std::span<const Completion> answers, std::span<const double> rewards,
              std::vector<Rollout> &rollouts) const;
    Batch collect(Model *model, DataLoader &loader, std::optional<PendingBatch> first) const;
    nlohmann::ordered_json means_of_parts(const std::string &prefix, const std::vector<std::vector<double>> &parts) const;
    void write_ahead(Model &model, DataLoader &loader);
    void finish_writing();
    std::unique_ptr<Model> open_writer() const;
    void prepare(const Rollouts &rollouts, Model *policy, Model *reference, bool base);
    double adapted_kl_coef_after(const Prepared &p) const;
    Answers means_of(std::span<const size_t> samples) const;
    size_t targets_of(const Samples &data, std::span<const size_t> samples) const;  // without those of masked answers
    nlohmann::ordered_json metrics_of_answers(const std::string &prefix) const;
    bool masked(const Rollout &r) const { return run_.options.mask_truncated && r.truncated; }  // it teaches the policy nothing
    void start(const Samples &data, std::span<const size_t> samples);
    std::vector<float> add(const Row &row, std::span<const double> nll);
    Measured measured(Model &model, const std::string &prefix);

    const Run &run_;
    const bool samples_;  // answers are sampled, not read
    ShapingOptions shaping_;
    AdvantageOptions advantage_;
    PolicyLossOptions loss_;
    double next_kl_coef_ = 0;  // of the next batch of answers
    std::optional<Tokenizer> tokenizer_;
    std::vector<std::unique_ptr<Reward>> rewards_;  // of --reward
    bool opened_ = false;                           // they have their models
    GenerationSettings generation_{};
    std::vector<Prompt> known_;  // those that there must be room for
    GenerationLimits room_{};
    std::optional<Run> reference_run_;
    std::unique_ptr<Model> reference_;
    std::unique_ptr<Critic> critic_;         // null unless ppo
    std::unique_ptr<Model> writer_;          // --async_steps: has the weights of the policy when it began to write
    DataLoader *loader_ = nullptr;           // of the prompts that it answers
    std::optional<PendingBatch> under_way_;  // what it answers
    std::optional<Batch> next_;              // or what it has answered
    int64_t steps_ = 0;                      // of this run of the program
    int64_t writer_at_ = 0, written_at_ = 0,
            staleness_ = 0;               // steps before its weights, and before those that wrote this iteration's answers
    std::unique_ptr<Rollouts> rollouts_;  // of this iteration
    std::map<const Samples *, Prepared> prepared_;
    const Prepared *now_ = nullptr;  // the rollouts of the step or evaluation that goes on
    PolicyStep size_{};
    Answers answers_;
    PolicySums sums_;                                                        // over this rank's rollouts
    nlohmann::ordered_json pending_log_ = nlohmann::ordered_json::object();  // Batch
};
