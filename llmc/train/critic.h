// The critic of ppo: a second model in memory, which learns the expected return at each token of an answer, given all tokens before it. It is a
// reward model whose head reads every predictor of a row instead of the end of each document. It has its own optimizer, and is trained on the same
// rows and by the same ranks as the policy. All of its weights are trained, even if the policy has adapters.
#pragma once
#include <memory>
#include <nlohmann/json.hpp>

#include "batch.h"
#include "policy_loss.h"
#include "run.h"

// Returns the model of --critic_model, by default --model with a new head. Dies if its tokenizer differs from the policy's.
ModelSpec critic_spec(const Run &run);

class Critic {
  public:
    // Opens critic_spec(run) for rows within `limits`. All ranks make all calls together.
    Critic(const Run &run, const ModelSpec &spec, const ModelLimits &limits);

    std::vector<std::vector<double>> values(const Samples &rollouts);  // [i] = the values of the tokens of rollout i

    // Begins a step or an evaluation with this number of tokens of a batch. The batch must outlive it.
    void begin(const Batch &batch, double tokens);
    void zero_gradients(uint64_t key) { model_->zero_gradients(key); }
    void evaluate(const Row &row);
    void accumulate(const Row &row, bool last);              // forward, loss and backward
    double gradient_norm();                                  // called after the last row
    void update(AdamW adamw, double rate);                   // rate: the schedule's current share of --critic_learning_rate
    nlohmann::ordered_json take(const std::string &prefix);  // metrics over all rows and ranks since begin()

    // Read and write the directory `critic` in dir: the model, and in a checkpoint also its optimizer.
    void save(const std::string &dir, const std::string &export_dtype);
    void save_optimizer(const std::string &dir);
    void verify_optimizer(const std::string &dir);
    void load_optimizer(const std::string &dir);

  private:
    std::vector<float> add(const Row &row);

    const Run &run_;
    const ModelSpec spec_;
    std::unique_ptr<Model> model_;
    const Batch *batch_ = nullptr;
    double tokens_ = 0, norm_ = 0;
    ValueSums sums_;  // over this rank's rollouts
};
