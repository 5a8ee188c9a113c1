#include "rollouts.h"

#include <algorithm>
#include <cmath>
#include <fstream>

#include "../core/common.h"
#include "../core/file.h"
#include "../core/json.h"

static std::vector<double> numbers(const Fields &fields, const std::string &name) {
    const nlohmann::json *list = fields.find(name);
    if (!list || !list->is_array()) fields.refuse(name, "must be a list of numbers");
    std::vector<double> out;
    for (const auto &value : *list) {
        if (!value.is_number()) fields.refuse(name, "must be a list of numbers");
        out.push_back(value.get<double>());
    }
    return out;
}

static std::vector<int32_t> ids(const Fields &fields, const std::string &name, size_t vocab) {
    std::vector<int32_t> out = fields.ids(name);
    if (out.empty()) fields.refuse(name, "has no token");
    for (int32_t id : out)
        if (id < 0 || size_t(id) >= vocab)
            fields.refuse(name, format("has token %d, but the model has a vocabulary of %zu", id, vocab));
    return out;
}

static constexpr const char *known_fields[] = {"prompt_ids", "completion_ids", "logprobs", "reward", "group", "truncated"};

static void refuse_unknown(const Fields &fields) {
    for (const auto &[name, value] : fields.source().items())
        if (!value.is_null() && std::ranges::find(known_fields, name) == std::end(known_fields))
            fields.refuse(name, "is no field of a rollout");
}

static Rollout read_rollout(const Fields &fields, size_t vocab) {
    refuse_unknown(fields);
    const double reward = fields.is_null("reward") ? no_reward : fields.number("reward");
    Rollout r{ids(fields, "prompt_ids", vocab), ids(fields, "completion_ids", vocab), numbers(fields, "logprobs"), reward,
              int64_t(fields.size("group")),    fields.boolean("truncated", false)};
    if (r.logp.size() != r.completion.size())
        fields.refuse("logprobs",
                      format("has %zu numbers, but completion_ids has %zu tokens", r.logp.size(), r.completion.size()));
    for (double logp : r.logp)
        if (!std::isfinite(logp) || logp > 1e-3)
            fields.refuse("logprobs", format("has %g, which is not the logarithm of a probability", logp));
    return r;
}

Rollouts::Rollouts(const std::string &path, size_t vocab) : own_file_(std::make_shared<InputFile>(path)), file_(own_file_.get()) {
    std::vector<Rollout> all;
    std::ifstream in(path);
    std::string line;
    for (size_t number = 1; std::getline(in, line); number++) {
        if (line.find_first_not_of(" \t\r") == line.npos) continue;
        const std::string where = format("%s, line %zu", path.c_str(), number);
        try {
            const nlohmann::json record = parse_json(line, where);
            all.push_back(read_rollout(Fields(record, where), vocab));
        } catch (const Error &error) {
            const std::string what = error.what();
            die("%s\n  fix: use rollouts of this model, with the fields that docs/rl.md lists",
                what.substr(0, what.find("\n  fix: ")).c_str());
        }
    }
    if (all.empty()) die("%s holds no rollouts\n  fix: write one JSON object per line (docs/rl.md)", path.c_str());
    all_ = std::make_shared<std::vector<Rollout>>(std::move(all));
}

void write_rollouts(const std::string &path, const std::vector<Rollout> &rollouts) {
    OutputFile out(path);
    for (const Rollout &r : rollouts) {
        const nlohmann::ordered_json record = {{"prompt_ids", r.prompt}, {"completion_ids", r.completion},
                                               {"logprobs", r.logp},     {"reward", r.reward},
                                               {"group", r.group},       {"truncated", r.truncated}};
        const std::string line = record.dump() + "\n";
        out.write(line.data(), line.size());
    }
    out.commit();
}

Document Rollouts::document(size_t i) const {
    const Rollout &r = (*this)[i];
    Document document{r.prompt, std::vector<uint8_t>(r.prompt.size(), 0)};
    document.tokens.insert(document.tokens.end(), r.completion.begin(), r.completion.end());
    document.mask.resize(document.tokens.size(), 1);
    return document;
}
