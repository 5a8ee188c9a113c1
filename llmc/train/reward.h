// What says how good an answer is. Several may judge the same answers, each with a weight (--reward A,B --reward_weights 1,0.5):
//
//   exact_match           1 if an answer is the record's response token by token, else 0
//   FILE.py               a Python function of the user's, in a process of its own (data/reward_worker.py)
//   http://... https://   a server that speaks OpenRLHF's protocol, which the same process asks
//   DIRECTORY             a reward model, which stays in memory with the policy. The score is read at the last token of prompt and answer. If the model
//                         has another tokenizer, their text is encoded anew (data/encode_worker.py)
#pragma once
#include <memory>

#include "../data/tokenizer.h"
#include "generation.h"
#include "run.h"

// The prompts of samples, and the responses that their records have.
struct Questions {
    std::vector<std::vector<int32_t>> prompts, responses;
};

// All ranks make all calls together.
class Reward {
  public:
    virtual ~Reward() = default;
    virtual std::optional<ModelConfig> resident() const { return {}; }  // of a model that stays in memory
    virtual void open(const ModelLimits & /*of the policy*/) {}
    // Of answers to prompt 0, to prompt 1, ..., equally many to each. Returns a finite number for each of them, or no_reward if it cannot say,
    // the same on all ranks.
    virtual std::vector<double> operator()(const Questions &asked, std::span<const Completion> answers) = 0;
};

bool is_model_reward(const std::string &name);  // of --reward: neither exact_match nor a file or server that judges text

// Dies if there is no such reward. `tokenizer` is the policy's, null if it has none, and outlives the reward.
std::unique_ptr<Reward> find_reward(const Run &run, const std::string &name, const Tokenizer *tokenizer);
