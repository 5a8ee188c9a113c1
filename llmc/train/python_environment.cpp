#include "python_environment.h"

#include "../core/common.h"

using nlohmann::json;

PythonEnvironment::PythonEnvironment(const Run &run, const Tokenizer &tokenizer)
    : run_(run),
      tokenizer_(tokenizer),
      stop_(tokenizer, run.options.stop),
      worker_(run.options.environment, "data/environment_worker.py", {run.options.environment}, run.options.comm_timeout) {}

void PythonEnvironment::begin(const Questions &asked, std::span<const Prompt> own, size_t first, size_t samples) {
    own_ = {}, samples_ = samples;
    for (const Prompt &prompt : own) {
        const size_t i = prompt.number - first;
        own_.prompts.push_back(asked.prompts[i]), own_.responses.push_back(asked.responses[i]);
        own_.columns.push_back(asked.columns[i]);
    }
}

void PythonEnvironment::act(const Turn &turn) {
    if (error_ || (run_.mesh->tensor && run_.mesh->tensor->rank != 0)) return;
    try {
        ask(turn);
    } catch (...) {
        error_ = std::current_exception();
    }
}

void PythonEnvironment::ask(const Turn &turn) {
    const Options &o = run_.options;
    if (!worker_.has_begun())
        worker_.tell({{"tokenizer", run_.model.tokenizer_dir},
                      {"template", run_.chat.chat_template},
                      {"template_kwargs", o.chat_template_kwargs},
                      {"eos", run_.model.config.eos},
                      {"max_turns", o.max_turns},
                      {"max_observation", o.max_observation}});
    const Completion said{{turn.tokens.begin(), turn.tokens.end()}, turn.ended, turn.stopped};
    json request = {{"episode", turn.episode},
                    {"turn", turn.number},
                    {"answer", text_of(said, tokenizer_, stop_)},
                    {"raw_answer", tokenizer_.decode(said.tokens, false)},
                    {"end", turn.stopped ? "text"
                            : turn.ended ? "token"
                                         : "limit"},
                    {"room", turn.room}};
    if (turn.number == 0) {
        const size_t i = turn.episode / samples_;
        request["prompt"] = tokenizer_.decode(own_.prompts[i]), request["raw_prompt"] = tokenizer_.decode(own_.prompts[i], false);
        request["label"] = tokenizer_.decode(own_.responses[i]), request["columns"] = own_.columns[i];
    }
    worker_.tell(request);
    last_ = std::chrono::steady_clock::now();
}

std::vector<Reply> PythonEnvironment::hear(bool wait) {
    std::vector<Reply> out;
    while (const auto reply = worker_.hear(wait && out.empty() ? 100 : 0)) {
        out.push_back({reply->at("episode"), reply->at("ids"),
                       reply->at("reward").is_null() ? no_reward : reply->at("reward").get<double>(), reply->at("truncated"),
                       reply->value("calls", size_t(0)), reply->value("failures", size_t(0))});
        has_tools_ |= reply->contains("calls");
        for (const int32_t id : out.back().observation)
            if (size_t(id) >= run_.model.config.V)
                die("an observation of %s has the token %d, but the model has a vocabulary of %zu\n  fix: use the model's own tokenizer",
                    run_.options.environment.c_str(), id, run_.model.config.V);
        last_ = std::chrono::steady_clock::now();
    }
    if (seconds_since(last_) > run_.options.comm_timeout)
        die("%s took longer than %g s for a step of an episode\n  fix: raise --comm_timeout, or end the step there by a timeout of its own",
            run_.options.environment.c_str(), run_.options.comm_timeout);
    return out;
}

std::vector<Reply> PythonEnvironment::replies(bool wait) {
    Comm *const tensor = run_.mesh->tensor.get();
    std::vector<Reply> out;
    if (!tensor || tensor->rank == 0) try {
            if (!error_) out = hear(wait);
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
