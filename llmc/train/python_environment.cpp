#include "python_environment.h"

#include "../core/common.h"
#include "../core/signals.h"

using nlohmann::json;

PythonEnvironment::PythonEnvironment(const Run &run, const Tokenizer &tokenizer)
    : run_(run),
      tokenizer_(tokenizer),
      stop_(tokenizer, run.options.stop),
      worker_(run.options.environment, "data/environment_worker.py", {run.options.environment}, run.options.comm_timeout) {}

std::vector<Prompt> PythonEnvironment::begin(const Questions &asked, std::span<const Prompt> own, size_t first, size_t samples) {
    std::vector<Prompt> out;
    for (const Prompt &prompt : own)
        for (size_t s = 0; s < samples; s++) out.push_back({prompt.tokens, uint32_t(prompt.number * samples + s)});
    Comm *const tensor = run_.mesh->tensor.get();
    if (!tensor || tensor->rank == 0) try {
            reset(asked, first, samples, out);
        } catch (...) {
            error_ = std::current_exception();
        }
    if (!tensor) return out;
    json prompts = json::array();
    for (const Prompt &prompt : out) prompts.push_back(prompt.tokens);
    prompts = json::parse(tensor->gather(prompts.dump())[0]);
    for (size_t i = 0; i < out.size(); i++) out[i].tokens = prompts[i].get<std::vector<int32_t>>();
    return out;
}

void PythonEnvironment::reset(const Questions &asked, size_t first, size_t samples, std::vector<Prompt> &episodes) {
    const Options &o = run_.options;
    const Activity activity("before these episodes");
    if (!worker_.has_begun())
        worker_.tell({{"tokenizer", run_.model.tokenizer_dir},
                      {"template", run_.chat.chat_template},
                      {"template_kwargs", o.chat_template_kwargs},
                      {"eos", run_.model.config.eos},
                      {"max_turns", o.max_turns},
                      {"max_observation", o.max_observation}});
    for (size_t i = 0; i < episodes.size(); i++) {
        const size_t p = episodes[i].number / samples - first;
        const std::vector<int32_t> &ids = asked.prompts[p];
        tell({{"episode", i},
              {"prompt_ids", ids},
              {"prompt", tokenizer_.decode(ids)},
              {"raw_prompt", tokenizer_.decode(ids, false)},
              {"label", tokenizer_.decode(asked.responses[p])},
              {"columns", asked.columns[p]}});
    }
    for (size_t left = episodes.size(); left > 0 && !asked_to_stop();)
        if (const auto reply = next(true)) episodes[reply->at("episode")].tokens = known(reply->at("prompt_ids")), left--;
}

void PythonEnvironment::act(const Turn &turn) {
    if (error_ || (run_.mesh->tensor && run_.mesh->tensor->rank != 0)) return;
    const Completion said{{turn.tokens.begin(), turn.tokens.end()}, turn.ended, turn.stopped};
    try {
        tell({{"episode", turn.episode},
              {"turn", turn.number},
              {"answer", text_of(said, tokenizer_, stop_)},
              {"raw_answer", tokenizer_.decode(said.tokens, false)},
              {"end", turn.stopped ? "text"
                      : turn.ended ? "token"
                                   : "limit"},
              {"room", turn.room}});
    } catch (...) {
        error_ = std::current_exception();
    }
}

void PythonEnvironment::tell(const json &request) {
    worker_.tell(request);
    last_ = std::chrono::steady_clock::now();
}

// Returns the next reply, or none after a moment. Dies if the process is late.
std::optional<json> PythonEnvironment::next(bool wait) {
    const auto reply = worker_.hear(wait ? 100 : 0);
    if (reply) last_ = std::chrono::steady_clock::now();
    else if (seconds_since(last_) > run_.options.comm_timeout)
        die("%s took longer than %g s for a step of an episode\n  fix: raise --comm_timeout, or end the step there by a timeout of its own",
            run_.options.environment.c_str(), run_.options.comm_timeout);
    return reply;
}

std::vector<int32_t> PythonEnvironment::known(const json &ids) const {
    const size_t V = run_.model.config.V;
    for (const size_t id : ids)
        if (id >= V)
            die("an observation of %s has the token %zu, but the model has a vocabulary of %zu\n  fix: use the model's own tokenizer",
                run_.options.environment.c_str(), id, V);
    return ids;
}

std::vector<Reply> PythonEnvironment::replies(bool wait) {
    Comm *const tensor = run_.mesh->tensor.get();
    std::vector<Reply> out;
    if (!tensor || tensor->rank == 0) try {
            while (const auto reply = error_ ? std::nullopt : next(wait && out.empty())) {
                out.push_back({reply->at("episode"), known(reply->at("ids")),
                               reply->at("reward").is_null() ? no_reward : reply->at("reward").get<double>(),
                               reply->at("truncated"), reply->value("calls", size_t(0)), reply->value("failures", size_t(0))});
                has_tools_ |= reply->contains("calls");
            }
        } catch (...) {
            error_ = std::current_exception();
        }
    if (!tensor) return out;
    json own = json::array();
    for (const Reply &r : out)
        own.push_back(
            {r.episode, r.observation, has_reward(r.reward) ? json(r.reward) : json(), r.truncated, r.calls, r.failures});
    out.clear();
    for (const json &r : json::parse(tensor->gather(own.dump())[0]))
        out.push_back({r[0], r[1], r[2].is_null() ? no_reward : r[2].get<double>(), r[3], r[4], r[5]});
    return out;
}

void PythonEnvironment::check() const {
    if (error_) std::rethrow_exception(error_);
}
