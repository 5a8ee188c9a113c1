// The tasks grpo and ppo: a policy learns from its own answers and their rewards; with ppo, together with a critic (critic.h). An iteration:
//
//   draw()       samples a batch of rollouts (rollout_source.h) and prepares it: reference, teacher and critic, if there are any, evaluate it, and
//                rewards become advantages (advantages.h), over all ranks. With --rollouts a file has the only batch, and open() prepares it. If a
//                signal stops the run within a batch, the checkpoint has the batch, and draw() returns its other steps in the resumed run
//   begin(), accumulate(), take()    run one or several optimizer steps: the forward pass gives the current log-probability of each token. From it
//                the host computes the token's share of the loss and its derivative, where the backward pass starts (policy_loss.h): within the head,
//                or for gspo, whose ratio is that of the whole answer, after a forward pass of its own. The critic starts from a pass of its own, with
//                its own loss, and update() updates it
#pragma once
#include "critic.h"
#include "policy_options.h"
#include "rollout_source.h"

class Policy final : public Objective {
  public:
    explicit Policy(const Run &run);

    std::vector<CoResidentModel> co_residents() const override;
    Drawing drawing(const Options &o) const override;
    size_t steps(size_t samples) const override;
    void reserve(const Samples &data, ModelLimits &limits) override;
    void open(const ModelLimits &limits, const Samples &data, size_t samples, const Samples *eval_data) override;
    std::vector<Step> draw(Model &model, DataLoader &loader, size_t left) override;
    bool keeps_drawn() const override { return steps_left_ > 0; }
    size_t targets(const Step &step) const override { return targets_in(batch_, step.samples); }
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
    // Means over the rollouts of a step.
    struct AnswerMeans {
        double reward = 0, reward_std = 0, length = 0, longest = 0, truncated = 0, unscored = 0, clipped = 0;
        double teacher_kl = 0;  // the mean of log p_old - log p_teacher over the step's tokens
    };

    // A model that gives the tokens of answers log-probabilities.
    struct Frozen {
        ModelSpec spec;
        std::unique_ptr<Model> model;  // null: the policy without its adapters
    };

    Frozen open_frozen(bool is_base, const std::function<ModelSpec()> &spec, const char *flag, const ModelLimits &limits,
                       const Samples &data, const Samples *eval_data);
    Batch::OfTokens teacher_logps(const Rollouts &rollouts, Model *policy) const;
    Batch::OfTokens logps_by(const Frozen &frozen, const Rollouts &rollouts, std::span<const size_t> samples,
                             Model *policy) const;
    void measure(Batch &batch, Model *policy);
    void estimate(Batch &batch);
    double &kl_coef() { return run_.options.kl_use_loss ? options_.loss.kl_coef : options_.advantage.kl_coef; }  // of batch_
    void count_step();
    double kl_of(const Batch &batch) const;
    void begin_on(const Batch &batch, std::span<const size_t> samples);
    PolicyTokens tokens_of(const Batch &batch, size_t i) const;
    std::vector<float> add(const Batch &batch, const Row &row, std::span<const double> nll);
    TokenLoss token_loss(const Row &row);
    Measured take_sums(Model &model, const Batch &batch, const std::string &prefix);
    AnswerMeans means(const Batch &batch, std::span<const size_t> samples) const;
    nlohmann::ordered_json answer_metrics(const std::string &prefix) const;
    size_t targets_in(const Batch &batch, std::span<const size_t> samples) const;               // excludes masked answers
    bool masked(const Rollout &r) const { return run_.options.mask_truncated && r.truncated; }  // true: excluded from the loss

    const Run &run_;
    PolicyOptions options_;
    double next_kl_coef_;                  // for the next batch
    std::optional<RolloutSource> source_;  // none with --rollouts
    std::optional<Frozen> reference_;      // none if it is not or no longer needed
    std::vector<Frozen> teachers_;         // of --teacher_model; none likewise
    std::unique_ptr<Critic> critic_;       // null unless ppo
    Batch batch_;                          // the batch being trained on
    size_t steps_done_ = 0;                // on a drawn batch_
    size_t steps_left_ = 0;                // 0 also without a drawn batch
    std::optional<Batch> eval_batch_;      // --rollouts with --eval_data
    int64_t updates_ = 0;                  // in this run of the program
    PolicyStep size_{};                    // of the current step or evaluation, like the following members:
    AnswerMeans means_;
    PolicySums sums_;  // over this rank's rollouts
};
