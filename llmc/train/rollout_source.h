// The source of an iteration's rollouts: draws prompts, generates n answers to each with the log-probability of every token (generation.h), and
// scores the answers (reward.h).
//
// With --async_steps 1 a copy of the policy, the writer, meanwhile answers the next iteration's prompts, on a thread that never communicates. Ranks
// exchange its answers in the next call of next() or finish_writing().
#pragma once
#include <future>

#include "../data/tokenizer.h"
#include "batch.h"
#include "generation.h"
#include "objective.h"
#include "python_environment.h"

// All ranks make all calls together.
class RolloutSource {
  public:
    explicit RolloutSource(const Run &run);  // distill has no rewards

    std::vector<CoResidentModel> co_residents() const;          // reward models and the writer
    size_t updates(size_t prompts) const;                       // policy updates from the answers to this number of prompts
    void reserve(const Samples &prompts, ModelLimits &limits);  // reserves memory in the policy for answers to these prompts
    void open(const ModelLimits &limits);                       // opens these models, after reserve()
    // Dies if the longest prompt with its answer does not fit into the positions of a model that `flag` names. Later ones must fit, too.
    void expect_positions(const ModelSpec &model, const char *flag);

    // Returns the answers to the next prompts. updates: policy updates so far; left: remaining updates of the run.
    Batch next(Model &policy, DataLoader &prompts, int64_t updates, size_t left);
    // Returns the answers to the prompts of a step, without rewards, and figures for the log.
    std::pair<std::vector<Rollout>, nlohmann::ordered_json> answers(Model &policy, const Step &prompts) const;
    // Measures the mean reward of greedy answers.
    Measured evaluate(Model &policy, const Samples &prompts, std::span<const size_t> samples) const;

    // A checkpoint contains the answers that the writer has begun. It does not contain the writer's weights: the answers are finished first.
    void finish_writing();
    void save(const std::string &dir, int64_t updates, nlohmann::json &state) const;  // on one rank, after finish_writing()
    void load(const std::string &dir, const nlohmann::json &state);                   // before any update

  private:
    // The weighted rewards of answers, and the separate rewards of each judge.
    struct Rewards {
        std::vector<double> rewards;
        std::vector<std::vector<double>> parts;
    };
    // Prompts, and the future of this rank's answers if the writer answers them.
    struct PendingBatch {
        size_t begin;  // number of prompts drawn before
        Questions questions;
        std::future<std::vector<Completion>> completions = {};
    };

    Questions read_questions(const Samples &prompts, std::span<const size_t> samples) const;
    void expect_room(const std::string &of, size_t tokens) const;
    std::vector<Prompt> begin_episodes(const Questions &asked, std::span<const Prompt> own, size_t first, size_t samples) const;
    std::string teacher_of(const Questions &asked, size_t p) const;
    std::vector<Completion> answer(Model &policy, const Questions &asked, size_t first, const GenerationSettings &settings) const;
    Rewards judge(const Questions &asked, std::span<const Completion> answers) const;
    nlohmann::ordered_json means_of_parts(const std::string &prefix, const std::vector<std::vector<double>> &parts) const;
    nlohmann::ordered_json shown(const std::vector<int32_t> &prompt, const Completion &answer) const;
    PendingBatch ask(const Step &drawn) const;
    std::vector<Completion> await(Model *policy, PendingBatch &asked) const;
    void keep(const PendingBatch &asked, std::span<const Completion> answers, std::span<const double> rewards,
              std::vector<Rollout> &rollouts) const;
    Batch collect(Model *policy, DataLoader &prompts, std::optional<PendingBatch> first) const;
    void write_ahead(Model &policy, DataLoader &prompts, int64_t updates);

    const Run &run_;
    const Options &o_;
    std::optional<Tokenizer> tokenizer_;
    GenerationSettings generation_;
    std::vector<std::unique_ptr<Reward>> rewards_;    // the judges of --reward; none with an environment
    std::unique_ptr<PythonEnvironment> environment_;  // null without --environment
    std::vector<Prompt> known_;                       // the prompts that need memory
    size_t longest_ = 0,
           most_positions_ = SIZE_MAX;  // tokens of the longest of them with its answer; of any, by the other models' positions
    GenerationLimits generation_limits_{};
    std::unique_ptr<Model> writer_;          // --async_steps
    DataLoader *prompts_ = nullptr;          // the prompts for the writer
    int64_t writer_at_ = 0;                  // policy updates of the writer's weights
    std::optional<PendingBatch> under_way_;  // the writer's task
    std::optional<Batch> next_;              // the batch that the writer has finished
};
