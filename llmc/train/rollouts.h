// Rollouts: answers sampled by a policy, with the data needed to learn from them. They are the samples of a reinforcement learning step; each is a
// document whose targets are the sampled tokens of its answer. Other tokens of an answer, such as a tool's output between two turns, are only read.
//
// A file has one JSON object per line:
//   prompt_ids, completion_ids   token ids; a completion has at least one
//   completion_mask              optional: for each token of the completion 1 if the policy sampled it, else 0. Other libraries' names for it are
//                                also read (mask_names in rollouts.cpp)
//   logprobs                     log p of each token of the completion, in nats, by the policy that sampled it at the run's temperature; any number
//                                where the mask is 0
//   reward                       a number, or null if no judge scored the answer
//   group                        an integer; the same for all answers to a prompt. Only episodes, with turn_rewards, may have other prompts than the rest
//                                of their group: an environment may have appended to each
//   truncated                    optional: whether the length limit cut the completion off
//   turn_rewards                 optional: the rewards of the completion's turns, numbers or null, which add up to its reward. A turn is a run of tokens
//                                that the policy sampled
//   teacher                      optional: the name of the teacher that judges the completion
// A record with another field is refused.
#pragma once
#include <cmath>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "../data/samples.h"

constexpr double no_reward = NAN;
inline bool has_reward(double reward) { return !std::isnan(reward); }
double sum_of_rewards(std::span<const double> rewards);  // of those that are given; no_reward without any
constexpr double largest_reward =
    1e30;  // the squares of rewards of this magnitude, their sums, and their products with a gradient are finite

struct Rollout {
    std::vector<int32_t> prompt, completion;
    std::vector<uint8_t> mask;  // (completion) 1: sampled by the policy
    std::vector<double> logp;   // of the sampled tokens; all arrays over the tokens of an answer have this length
    double reward;              // or no_reward
    int64_t group;
    bool truncated;
    std::string teacher;                    // a name in --teacher_model; empty: the run has no teacher, or one
    std::vector<double> turn_rewards = {};  // of an episode, each a number or no_reward; empty: the reward is the last turn's
};

size_t turns_of(std::span<const uint8_t> mask);  // runs of sampled tokens
// Returns for each sampled token the reward of the turn that it ends, if that is not the last one, else 0.
std::vector<double> earlier_rewards(const Rollout &r);

// Writes a file for the first constructor of Rollouts. After a crash the file is complete or does not exist.
void write_rollouts(const std::string &path, const std::vector<Rollout> &rollouts);

// Copies share the rollouts, which are immutable.
class Rollouts final : public Samples {
  public:
    Rollouts() = default;  // no rollouts
    // Reads a file. Dies at the first line that a model of `vocab` tokens cannot learn from.
    Rollouts(const std::string &path, size_t vocab);
    // Takes rollouts sampled for the prompts of a file, which must outlive this object.
    Rollouts(std::vector<Rollout> all, const InputFile &prompts)
        : file_(&prompts), all_(std::make_shared<std::vector<Rollout>>(std::move(all))) {}

    size_t documents() const override { return all_->size(); }
    size_t length(size_t i) const override { return (*all_)[i].prompt.size() + (*all_)[i].completion.size(); }
    size_t targets(size_t i) const override { return (*all_)[i].logp.size(); }
    Document document(size_t i) const override;
    const InputFile &file() const override { return *file_; }
    const Rollout &operator[](size_t i) const { return (*all_)[i]; }
    const std::vector<Rollout> &all() const { return *all_; }

  private:
    std::shared_ptr<const InputFile> own_file_;
    const InputFile *file_ = nullptr;
    std::shared_ptr<const std::vector<Rollout>> all_ = std::make_shared<std::vector<Rollout>>();
};
