#include "rollouts.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <span>

#include "../core/common.h"
#include "../core/file.h"
#include "../core/json.h"

static constexpr const char *mask_names[] = {
    "completion_mask",     // also in TRL and prime-rl
    "env_mask",            // TRL
    "tool_mask",           // TRL
    "loss_mask",           // slime, AReaL
    "loss_masks",          // SkyRL
    "response_mask",       // verl, ROLL
    "response_loss_mask",  // ms-swift
    "action_mask",         // OpenRLHF
    "token_loss_mask",     // NeMo-RL
    "assistant_masks",     // transformers' chat templates
};
static constexpr const char *other_names[] = {"prompt_ids", "completion_ids", "logprobs", "reward",
                                              "group",      "truncated",      "teacher",  "turn_rewards"};

static bool is_among(const auto &names, const std::string &name) { return std::ranges::find(names, name) != std::end(names); }

static void refuse_unknown(const Fields &fields) {
    for (const auto &[name, value] : fields.source().items())
        if (!value.is_null() && !is_among(other_names, name) && !is_among(mask_names, name))
            fields.refuse(name,
                          "is no field of a rollout\n  fix: leave it out, or give it its name in docs/rl.md#collected-answers");
}

// Returns the JSON list of one value for each of n tokens.
static const nlohmann::json &of_tokens(const Fields &fields, const std::string &name, size_t n) {
    const nlohmann::json *list = fields.find(name);
    if (!list || !list->is_array()) fields.refuse(name, "must be a list of numbers");
    if (list->size() != n)
        fields.refuse(
            name,
            format(
                "has %zu numbers, but completion_ids has %zu tokens\n  fix: give one for each token of the completion, and none for the prompt's",
                list->size(), n));
    return *list;
}

static std::vector<int32_t> ids(const Fields &fields, const std::string &name, size_t vocab) {
    std::vector<int32_t> out = fields.ids(name);
    if (out.empty()) fields.refuse(name, "has no token");
    for (int32_t id : out)
        if (id < 0 || size_t(id) >= vocab)
            fields.refuse(name, format("has token %d, but the model has a vocabulary of %zu\n  fix: use rollouts of this model",
                                       id, vocab));
    return out;
}

// Returns the mask of a completion of n tokens; all 1 if the record has none.
static std::vector<uint8_t> mask(const Fields &fields, size_t n) {
    std::vector<uint8_t> out(n, 1);
    const char *first = nullptr;
    for (const char *name : mask_names) {
        if (!fields.has(name)) continue;
        std::vector<uint8_t> own;
        for (const nlohmann::json &value : of_tokens(fields, name, n)) {
            const double number = value.is_boolean() ? value.get<bool>() : value.is_number() ? value.get<double>() : NAN;
            if (number != 0 && number != 1)
                fields.refuse(name, format("has %s for token %zu\n  fix: 1 for a token that the policy sampled, 0 for any other",
                                           shown(value).c_str(), own.size()));
            own.push_back(number == 1);
        }
        if (first && own != out)
            fields.refuse(
                name,
                format(
                    "differs from %s of the same answer\n  fix: leave one of them out; where both masks apply, give their product",
                    first));
        out = own, first = name;
    }
    return out;
}

static constexpr double least_logp = -1e4;  // of a token that was sampled; its ratio of probabilities would overflow far above

static std::vector<double> logprobs(const Fields &fields, std::span<const uint8_t> mask) {
    const nlohmann::json &list = of_tokens(fields, "logprobs", mask.size());
    std::vector<double> out;
    for (size_t t = 0; t < mask.size(); t++) {
        if (!mask[t]) continue;
        const double logp = list[t].is_number() ? list[t].get<double>() : NAN;
        if (!(logp >= least_logp && logp <= 1e-3))
            fields.refuse(
                "logprobs",
                format(
                    "has %s for token %zu, which is not the logarithm of a probability\n  fix: record the natural logarithm of each token's probability when it was sampled",
                    shown(list[t]).c_str(), t));
        out.push_back(logp);
    }
    return out;
}

static double reward_of(const Fields &fields, const char *name, const nlohmann::json &value) {
    if (value.is_null()) return no_reward;
    const double reward = value.is_number() ? value.get<double>() : NAN;
    if (!(std::abs(reward) <= largest_reward))
        fields.refuse(name, format("has %s\n  fix: numbers within +-%g, or null", shown(value).c_str(), largest_reward));
    return reward;
}

// Returns the rewards of the turns; none if the record has none.
static std::vector<double> turn_rewards(const Fields &fields, const Rollout &r) {
    const nlohmann::json *list = fields.find("turn_rewards");
    if (!list || list->is_null()) return {};
    if (!list->is_array() || list->size() != turns_of(r.mask))
        fields.refuse(
            "turn_rewards",
            format(
                "must be a list of %zu numbers, for the answer has as many turns\n  fix: one number, or null, for each run of tokens that the policy sampled",
                turns_of(r.mask)));
    std::vector<double> out;
    for (const nlohmann::json &value : *list) out.push_back(reward_of(fields, "turn_rewards", value));
    const double sum = sum_of_rewards(out);
    if (has_reward(sum) != has_reward(r.reward) || std::abs(sum - r.reward) > 1e-6 * std::max(1.0, std::abs(r.reward)))
        fields.refuse("turn_rewards",
                      format("add up to %g, but the reward is %g\n  fix: the reward is the sum of all turns'", sum, r.reward));
    return out;
}

static Rollout read_rollout(const Fields &fields, size_t vocab) {
    refuse_unknown(fields);
    Rollout r{};
    r.prompt = ids(fields, "prompt_ids", vocab), r.completion = ids(fields, "completion_ids", vocab);
    r.mask = mask(fields, r.completion.size());
    r.logp = logprobs(fields, r.mask);
    r.reward = fields.is_null("reward") ? no_reward : fields.number("reward");
    if (std::abs(r.reward) > largest_reward)
        fields.refuse("reward", format("is %g, but must be within +-%g\n  fix: scale the rewards", r.reward, largest_reward));
    r.group = int64_t(fields.size("group"));
    r.truncated = fields.boolean("truncated", false);
    r.teacher = fields.text("teacher", "");
    r.turn_rewards = turn_rewards(fields, r);
    return r;
}

Rollouts::Rollouts(const std::string &path, size_t vocab) : own_file_(std::make_shared<InputFile>(path)), file_(own_file_.get()) {
    std::vector<Rollout> all;
    std::map<int64_t, std::pair<size_t, size_t>> groups;  // of each group the first answer's index and line
    std::ifstream in(path);
    std::string line;
    for (size_t number = 1; std::getline(in, line); number++) {
        if (line.find_first_not_of(" \t\r") == line.npos) continue;
        const std::string where = format("%s, line %zu", path.c_str(), number);
        const nlohmann::json record = parse_json(line, where);
        all.push_back(read_rollout(Fields(record, where), vocab));
        const Rollout &r = all.back();
        const auto &[first, first_line] = groups.try_emplace(r.group, all.size() - 1, number).first->second;
        if (r.prompt != all[first].prompt &&
            r.turn_rewards.empty())  // an environment may append a text of its own to each episode's
            die("%s: its prompt_ids differ from line %zu's, but both answers have the group %lld\n  fix: give the answers to each prompt a group of their own",
                where.c_str(), first_line, (long long)r.group);
    }
    if (all.empty()) die("%s holds no rollouts\n  fix: write one JSON object per line (docs/rl.md)", path.c_str());
    all_ = std::make_shared<std::vector<Rollout>>(std::move(all));
}

void write_rollouts(const std::string &path, const std::vector<Rollout> &rollouts) {
    OutputFile out(path);
    for (const Rollout &r : rollouts) {
        std::vector<double> logp;  // 0 for the tokens that were not sampled
        for (size_t t = 0, sampled = 0; t < r.mask.size(); t++) logp.push_back(r.mask[t] ? r.logp[sampled++] : 0);
        nlohmann::ordered_json record = {{"prompt_ids", r.prompt},    {"completion_ids", r.completion},
                                         {"completion_mask", r.mask}, {"logprobs", logp},
                                         {"reward", r.reward},        {"group", r.group},
                                         {"truncated", r.truncated}};
        if (!r.turn_rewards.empty()) record["turn_rewards"] = r.turn_rewards;
        if (!r.teacher.empty()) record["teacher"] = r.teacher;
        const std::string line = record.dump() + "\n";
        out.write(line.data(), line.size());
    }
    out.commit();
}

double sum_of_rewards(std::span<const double> rewards) {
    double sum = no_reward;
    for (const double reward : rewards)
        if (has_reward(reward)) sum = (has_reward(sum) ? sum : 0) + reward;
    return sum;
}

size_t turns_of(std::span<const uint8_t> mask) {
    size_t turns = 0;
    for (size_t t = 0; t < mask.size(); t++) turns += mask[t] && (t == 0 || !mask[t - 1]);
    return turns;
}

std::vector<double> earlier_rewards(const Rollout &r) {
    std::vector<double> out;
    size_t turn = 0;
    for (size_t t = 0; t < r.mask.size(); t++) {
        if (!r.mask[t]) continue;
        const bool ends = t + 1 < r.mask.size() && !r.mask[t + 1];
        out.push_back(ends && turn + 1 < r.turn_rewards.size() && has_reward(r.turn_rewards[turn]) ? r.turn_rewards[turn] : 0);
        turn += ends;
    }
    return out;
}

Document Rollouts::document(size_t i) const {
    const Rollout &r = (*this)[i];
    Document document{r.prompt, std::vector<uint8_t>(r.prompt.size(), 0)};
    document.tokens.insert(document.tokens.end(), r.completion.begin(), r.completion.end());
    document.mask.insert(document.mask.end(), r.mask.begin(), r.mask.end());
    return document;
}
