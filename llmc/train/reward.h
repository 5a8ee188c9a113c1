// Rewards of answers. Several judges can score the same answers, each with a weight (--reward A,B --reward_weights 1,0.5):
//
//   exact_match           1 if an answer is the record's response token by token, else 0
//   FILE.py               the user's Python function, in a separate process (data/reward_worker.py)
//   http://... https://   a server with OpenRLHF's protocol, which the same process queries
//   DIRECTORY             a reward model, which stays in memory with the policy. The score is read at the last token of prompt and answer. If the model
//                         has another tokenizer, their text is encoded again (data/encode_worker.py)
#pragma once
#include <memory>

#include "../data/tokenizer.h"
#include "generation.h"
#include "run.h"

// The prompts of samples, and the responses and other fields (Samples::columns) of their records.
struct Questions {
    std::vector<std::vector<int32_t>> prompts, responses;
    std::vector<std::string> columns;
};

// All ranks make all calls together.
class Reward {
  public:
    virtual ~Reward() = default;
    virtual std::optional<ModelConfig> resident() const { return {}; }  // configuration of a model that stays in memory
    virtual void open(const ModelLimits & /*of the policy*/) {}
    // Scores the answers to prompt 0, to prompt 1, ..., with the same number for each prompt. Returns a finite number for each answer, or no_reward
    // if it cannot be scored; the same on all ranks.
    virtual std::vector<double> operator()(const Questions &asked, std::span<const Completion> answers) = 0;
};

bool is_model_reward(
    const std::string &name);  // true if the value of --reward is neither exact_match nor a file or server that judges text

// Dies if there is no such reward. `tokenizer` is the policy's, or null; it must outlive the reward.
std::unique_ptr<Reward> find_reward(const Run &run, const std::string &name, const Tokenizer *tokenizer);
