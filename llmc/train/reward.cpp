#include "reward.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <set>

#include "../core/common.h"
#include "evaluate.h"
#include "open_config.h"
#include "open_model.h"
#include "rollouts.h"
#include "worker.h"

namespace fs = std::filesystem;
using nlohmann::json;

static bool is_server(const std::string &name) { return name.starts_with("http://") || name.starts_with("https://"); }

bool is_model_reward(const std::string &name) { return name != "exact_match" && !name.ends_with(".py") && !is_server(name); }

namespace {

// If a stop string ended the answer, the text before it is compared.
class ExactMatch final : public Reward {
  public:
    ExactMatch(const Run &run, const Tokenizer *tokenizer) : tokenizer_(tokenizer) {
        if (tokenizer) stop_ = {*tokenizer, run.options.stop};
    }

    std::vector<double> operator()(const Questions &asked, std::span<const Completion> answers) override {
        const size_t n = answers.size() / asked.prompts.size();
        std::vector<double> out;
        for (size_t i = 0; i < answers.size(); i++)
            if (const auto &response = asked.responses[i / n]; answers[i].stopped)
                out.push_back(text_of(answers[i], *tokenizer_, stop_) == tokenizer_->decode(response));
            else out.push_back(std::ranges::equal(answers[i].answer(), response));
        return out;
    }

  private:
    const Tokenizer *tokenizer_;  // not null if there are stop strings
    StopStrings stop_;
};

// A function or a server. Each rank scores its share of the answers.
class OfTexts final : public Reward {
  public:
    OfTexts(const Run &run, const std::string &name, const Tokenizer &tokenizer)
        : comm_(run.comm),
          name_(name),
          tokenizer_(tokenizer),
          stop_(tokenizer, run.options.stop),
          worker_(name, "data/reward_worker.py", {name}, run.options.comm_timeout) {}

    std::vector<double> operator()(const Questions &asked, std::span<const Completion> answers) override {
        const size_t n = answers.size() / asked.prompts.size();
        std::vector<double> out(answers.size());
        std::vector<size_t> own;
        for (size_t i = 0; i < out.size(); i++)
            if (i / n % size_t(comm_.size) == size_t(comm_.rank)) own.push_back(i);
        agree(comm_, [&] {
            if (own.empty()) return;
            json request;
            for (size_t i : own) {
                const auto &prompt = asked.prompts[i / n];
                request["prompts"].push_back(tokenizer_.decode(prompt));
                request["answers"].push_back(text_of(answers[i], tokenizer_, stop_));
                request["labels"].push_back(tokenizer_.decode(asked.responses[i / n]));
                request["completion_ids"].push_back(answers[i].tokens);
                request["columns"].push_back(asked.columns[i / n]);
                request["raw_prompts"].push_back(tokenizer_.decode(prompt, false));
                request["raw_answers"].push_back(tokenizer_.decode(answers[i].tokens, false));
            }
            const json rewards = worker_.ask(request, "rewards", own.size());
            for (size_t i = 0; i < own.size(); i++) {
                if (rewards[i].is_null()) {
                    out[own[i]] = no_reward;
                    continue;
                }
                if (!rewards[i].is_number() || !std::isfinite(rewards[i].get<double>()))
                    die("%s returned %s for answer %zu\n  fix: return a finite number", name_.c_str(), rewards[i].dump().c_str(),
                        i);
                out[own[i]] = rewards[i];
            }
        });
        share(comm_, out);
        return out;
    }

  private:
    Comm &comm_;
    const std::string name_;
    const Tokenizer &tokenizer_;
    const StopStrings stop_;
    Worker worker_;
};

class ByModel final : public Reward {
  public:
    ByModel(const Run &run, const std::string &dir, const Tokenizer *tokenizer)
        : run_(run), spec_(open_config(run, dir)), tokenizer_(tokenizer) {
        const ModelConfig &c = spec_.config;
        if (!c.reward) die("--reward %s is not a reward model\n  fix: use a model that the task rm has trained", dir.c_str());
        if (run_.options.normalize_reward && !(c.source.contains("mean") && c.source.contains("std")))
            die("--normalize_reward: config.json of %s has no \"mean\" and \"std\"\n  fix: train it with an evaluation, which finds them, or leave the flag out",
                dir.c_str());
        if (run_.options.normalize_reward) mean_ = c.source["mean"], std_ = c.source["std"];
        if (spec_.tokenizer_hash != run.model.tokenizer_hash) {
            if (!tokenizer || spec_.tokenizer_hash.empty())
                die("%s and %s do not have the same tokenizer, and one of them has no tokenizer.json\n  fix: use models with their tokenizers",
                    dir.c_str(), run.model.dir.c_str());
            encoder_ = std::make_unique<Worker>(dir, "data/encode_worker.py", std::vector{dir}, run.options.comm_timeout);
            known_ = added_tokens(spec_.dir + "/tokenizer.json");
        } else if (c.V < run.model.config.V) {
            die("--reward %s has a vocabulary of %zu tokens, %s of %zu\n  fix: use a reward model that was trained from the same model",
                dir.c_str(), c.V, run.model.dir.c_str(), run.model.config.V);
        }
        spec_.ranks = ranks_of(run, c, run.model.ranks.world, run.model.ranks.sp);  // it may have other numbers of heads
    }

    std::optional<ModelConfig> resident() const override { return spec_.config; }

    void open(const ModelLimits &of_policy) override {
        ModelLimits limits = co_resident_limits(of_policy, spec_.config, Mode::evaluate);
        limits.positions = std::min(limits.row_tokens, spec_.config.max_positions);
        limits_ = limits;
        model_ = open_model(run_, spec_, limits);
    }

    std::vector<double> operator()(const Questions &asked, std::span<const Completion> answers) override {
        const size_t n = answers.size() / asked.prompts.size();
        std::vector<std::vector<int32_t>> all;
        for (size_t i = 0; i < answers.size(); i++) {
            all.push_back(asked.prompts[i / n]);
            all.back().insert(all.back().end(), answers[i].tokens.begin(), answers[i].tokens.end());
        }
        agree(run_.comm, [&] {
            if (encoder_) all = encoded_anew(all);
            const size_t most = std::min(run_.options.row_tokens, limits_.positions);
            for (const auto &tokens : all)
                if (tokens.size() > most)
                    die("a prompt with its answer has %zu tokens for the reward model %s, whose rows and positions end at %zu\n  fix: raise --row_tokens, or lower --max_new_tokens",
                        tokens.size(), spec_.dir.c_str(), most);
        });
        // Equal texts are scored once: their scores in two rows could differ in the last bit, which group_norm would scale to a deviation of 1.
        std::map<std::vector<int32_t>, size_t> numbers;
        std::vector<std::vector<int32_t>> different;
        for (const auto &tokens : all)
            if (numbers.emplace(tokens, different.size()).second) different.push_back(tokens);
        const Sequences sequences(std::move(different));
        const auto scores = document_values(run_, spec_, *model_, sequences, first_samples(sequences.size()));
        std::vector<double> out;
        agree(run_.comm, [&] {
            for (const auto &tokens : all) {
                const double score = scores[numbers[tokens]], reward = (score - mean_) / std_;
                if (!std::isfinite(reward))
                    die("the score %g of %s, with the mean %g and the deviation %g of its config.json, is not a finite reward\n  fix: look for NaN in its weights, or leave --normalize_reward out",
                        score, spec_.dir.c_str(), mean_, std_);
                out.push_back(reward);
            }
        });
        return out;
    }

  private:
    // Every rank encodes all answers, so no rank waits for another.
    std::vector<std::vector<int32_t>> encoded_anew(const std::vector<std::vector<int32_t>> &all) {
        json texts = json::array();
        std::string unknown;
        for (const auto &tokens : all) {
            texts.push_back(tokenizer_->decode(tokens, false));
            for (const int32_t &id : tokens)
                if (tokenizer_->is_special(id))
                    if (const std::string text = tokenizer_->decode({&id, 1}, false); known_.insert(text).second)
                        unknown += " " + text;
        }
        if (!unknown.empty())
            run_.say(
                "note: the tokenizer of %s has no%s, which the reward model therefore reads as plain text (docs/rl.md#rewards)",
                spec_.dir.c_str(), unknown.c_str());
        return encoder_->ask({{"texts", texts}}, "ids", all.size());
    }

    const Run &run_;
    ModelSpec spec_;
    const Tokenizer *tokenizer_;
    double mean_ = 0, std_ = 1;
    std::unique_ptr<Worker> encoder_;  // null if the model uses the policy's tokens
    std::set<std::string> known_;      // its added tokens, and the policy's that a note has named
    ModelLimits limits_;
    std::unique_ptr<Model> model_;
};

}  // namespace

std::unique_ptr<Reward> find_reward(const Run &run, const std::string &name, const Tokenizer *tokenizer) {
    if (name == "exact_match") return std::make_unique<ExactMatch>(run, tokenizer);
    if (is_model_reward(name)) {
        if (!fs::exists(name + "/config.json"))
            die("--reward %s is not known\n  fix: exact_match, a Python file, the http:// address of a server, the directory of a reward model (docs/rl.md), or --rollouts FILE with rewards",
                name.c_str());
        return std::make_unique<ByModel>(run, name, tokenizer);
    }
    if (!tokenizer)
        die("--reward %s reads text, but %s has no tokenizer.json\n  fix: use a model directory with its tokenizer", name.c_str(),
            run.model.dir.c_str());
    if (!is_server(name) && !fs::exists(name))
        die("--reward %s: no such file\n  fix: exact_match, or a Python file", name.c_str());
    return std::make_unique<OfTexts>(run, name, *tokenizer);
}
