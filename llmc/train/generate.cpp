// Generates text: for the task generate, for the demo's unseen prompts, and as samples during training. The engine is in generation.h.
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "../core/common.h"
#include "../core/rng.h"
#include "../data/tokenizer.h"
#include "continuation.h"
#include "generation.h"
#include "open_data.h"
#include "open_model.h"

using Ids = std::vector<int32_t>;

namespace {

GenerationSettings settings_of(const Run &run, const Tokenizer &tokenizer) {
    const Options &o = run.options;
    return {.max_new_tokens = o.max_new_tokens,
            .sampling = {o.temperature, o.top_k, o.top_p, o.min_p, o.repetition_penalty},
            .seed = o.seed,
            .samples = o.n,
            .vocabulary = std::min(run.model.config.V, tokenizer.size()),
            .eos = run.model.config.eos,
            .stop = {tokenizer, o.stop}};
}

// Names the settings of generation_config.json that would change which tokens are drawn: transformers takes its defaults from there.
void note_own_settings(const Run &run) {
    const Options &o = run.options;
    const std::map<std::string, nlohmann::json> here = {{"temperature", o.temperature},
                                                        {"top_k", o.top_k},
                                                        {"top_p", o.top_p},
                                                        {"min_p", o.min_p},
                                                        {"num_beams", 1},
                                                        {"repetition_penalty", o.repetition_penalty},
                                                        {"no_repeat_ngram_size", 0},
                                                        {"typical_p", 1},
                                                        {"guidance_scale", 1},
                                                        {"penalty_alpha", nullptr},
                                                        {"bad_words_ids", nullptr},
                                                        {"suppress_tokens", nullptr},
                                                        {"begin_suppress_tokens", nullptr},
                                                        {"forced_bos_token_id", nullptr},
                                                        {"forced_eos_token_id", nullptr},
                                                        {"sequence_bias", nullptr},
                                                        {"stop_strings", nullptr},
                                                        {"exponential_decay_length_penalty", nullptr}};
    std::string names;
    for (const auto &[name, value] : run.model.config.generation.items())
        if (const auto own = here.find(name); own != here.end() && !value.is_null() && value != own->second)
            names += (names.empty() ? "" : ", ") + name + " " + value.dump();
    if (!names.empty())
        run.say("note: %s/generation_config.json has %s, which are left to the flags of generate", run.model.dir.c_str(),
                names.c_str());
}

// Opens the file of --prompts, or the prompt of --prompt, rendered like training data.
std::unique_ptr<PreparedData> open_prompts(const Run &run) {
    const Options &o = run.options;
    std::vector<std::string> extra;
    if (o.prompts.empty()) extra.push_back("--prompt=" + o.prompt);  // as one argument, because a prompt may begin with a dash
    if (!run.chat.chat_template.empty()) extra.push_back("--tokenizer_chat_template=" + run.chat.chat_template);
    const std::string prepared = prepared_file(run, GENERATE, "prompts", o.prompts, extra);
    auto data = open_data(run, prepared);
    if (o.prompts.empty() && run.is_main_rank()) std::filesystem::remove(prepared);  // no longer needed
    return data;
}

// Opens the model and continues the prompts.
std::vector<Completion> continue_all(const Run &run, const ModelSpec &spec, const std::vector<Ids> &prompts,
                                     const GenerationSettings &settings) {
    size_t longest = 0, most = spec.config.max_positions, end = spec.config.growing_positions();
    for (const Ids &prompt : prompts) longest = std::max(longest, prompt.size());
    agree(run.comm, [&] {
        if (longest + settings.max_new_tokens > end)  // learned positions are limited, rotary ones are not
            die("a prompt has %zu tokens and --max_new_tokens %zu may follow, but %s of %s is %zu%s\n  fix: lower --max_new_tokens, or shorten the prompt",
                longest, settings.max_new_tokens, spec.config.growing_positions_name(), spec.dir.c_str(), end,
                spec.config.gpt2() ? "" : ", beyond which its rotation changes");
    });
    if (longest + settings.max_new_tokens > most)
        run.say("note: a prompt and its continuation may reach %zu tokens, but max_position_embeddings is %zu",
                longest + settings.max_new_tokens, most);
    const std::vector<Prompt> own = own_prompts(run.comm, spec.ranks.tp, prompts);
    GenerationLimits generation(own, settings, run.options.max_sequences);
    const auto limits = [&] {
        ModelLimits limits = flag_limits(run.options);
        limits.mode = Mode::generate, limits.row_tokens = limits.positions = row_multiple;
        limits.ranks = spec.ranks.of_generation();
        generation.use(limits);
        return limits;
    };
    while (run.comm.max(double(generation.pages > generation.sequence_pages)) > 0 && !fits(run, spec, limits()))
        generation.pages = std::max(generation.sequence_pages, generation.pages / 2);
    const auto model = open_model(run, spec, limits());

    const auto began = std::chrono::steady_clock::now();
    const auto progress =
        told_progress(own.size() * settings.samples, [&](const std::string &line) { run.say("%s", line.c_str()); });
    const auto completions =
        share_completions(run.comm, spec.ranks.tp, generate(model->generator(), generation, own, settings, progress),
                          prompts.size(), settings.samples);
    size_t tokens = 0;
    for (const Completion &c : completions) tokens += c.tokens.size();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    if (!run.options.prompts.empty()) run.say("%zu tokens in %.2f s, %.0f tokens/s", tokens, seconds, double(tokens) / seconds);
    return completions;
}

}  // namespace

int generate(Run &run) {
    const Options &o = run.options;
    note_own_settings(run);
    const auto data = open_prompts(run);
    std::vector<Ids> prompts;
    for (size_t i = 0; i < data->documents(); i++) prompts.push_back(data->document(i).tokens);
    add_eos(run.model.config, data->chat_format().end_of_turn);
    const Tokenizer tokenizer(run.model.tokenizer_dir + "/tokenizer.json");
    const GenerationSettings settings = settings_of(run, tokenizer);
    const auto completions = continue_all(run, run.model, prompts, settings);
    if (!run.is_main_rank()) return 0;
    for (size_t i = 0; i < completions.size(); i++) {
        const std::string completion = text_of(completions[i], tokenizer, settings.stop);
        if (o.prompts.empty()) {
            printf("%s\n", completion.c_str());
            continue;
        }
        nlohmann::ordered_json line = {{"prompt", tokenizer.decode(prompts[i / o.n])}};
        if (o.n > 1) line["sample"] = i % o.n;
        line["completion"] = completion;
        line["tokens"] = completions[i].answer().size();
        line["finish_reason"] = completions[i].ended ? "stop" : "length";
        printf("%s\n", line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
    }
    return 0;
}

// Returns the share of samples whose answer greedy decoding reproduces token by token; for a pair either answer counts. The targets of a document are
// its answer, and the tokens before them its prompt. The first few answers are printed.
double exact_match(const Run &run, const std::string &model_dir, const Samples &data, size_t show) {
    std::vector<Ids> prompts, answers;  // one per sample; one per document
    size_t longest = 1;
    for (size_t i = 0; i < data.documents(); i++) {
        const auto [ids, mask] = data.document(i);
        const size_t answer = size_t(std::find(mask.begin(), mask.end(), 1) - mask.begin());
        size_t end = ids.size();
        while (end > answer && (!mask[end - 1] || std::find(run.model.config.eos.begin(), run.model.config.eos.end(),
                                                            ids[end - 1]) != run.model.config.eos.end()))
            end--;
        if (i == data.first(prompts.size())) prompts.emplace_back(ids.begin(), ids.begin() + ptrdiff_t(answer));
        answers.emplace_back(ids.begin() + ptrdiff_t(answer), ids.begin() + ptrdiff_t(end));
        longest = std::max(longest, ids.size() - answer + 1);
    }
    ModelSpec saved = run.model;
    saved.dir = model_dir;
    const Tokenizer tokenizer(model_dir + "/tokenizer.json");
    GenerationSettings settings = settings_of(run, tokenizer);
    settings.max_new_tokens = longest, settings.sampling = {}, settings.samples = 1;
    const auto completions = continue_all(run, saved, prompts, settings);
    size_t right = 0;
    for (size_t s = 0; s < prompts.size(); s++) {
        const auto first = answers.begin() + ptrdiff_t(data.first(s)), last = answers.begin() + ptrdiff_t(data.first(s + 1));
        const auto said = completions[s].answer();
        const bool found = std::find(first, last, Ids(said.begin(), said.end())) != last;
        right += found;
        if (s < show)
            run.say("  %-40s -> %-16s %s", tokenizer.decode(prompts[s]).c_str(), tokenizer.decode(said).c_str(),
                    found ? "right" : ("wrong, " + tokenizer.decode(*first)).c_str());
    }
    return double(right) / double(prompts.size());
}

// ---- during training ------------------------------------------------------------------------------------------------------------------

Continuation::Continuation(const Run &run) : run_(run) {
    const Options &o = run.options;
    const ModelConfig &c = run.model.config;
    const std::string model = run.model.dir.empty() ? "a --preset" : run.model.dir;
    agree(run.comm, [&] {
        if (run.model.tokenizer_hash.empty())
            die("--sample_every prints text, but %s has no tokenizer.json\n  fix: --model DIR with a tokenizer, or leave --sample_every out",
                model.c_str());
        if (o.prompt.empty() && c.bos < 0 && c.eos.empty())
            die("config.json of %s has neither bos_token_id nor eos_token_id to begin a text with\n  fix: --prompt TEXT",
                model.c_str());
        tokenizer_.emplace(run.model.tokenizer_dir + "/tokenizer.json");
    });
    const Ids prompt = !o.prompt.empty() ? open_prompts(run)->document(0).tokens : Ids{c.bos >= 0 ? c.bos : c.eos[0]};
    prompt_ = {{prompt, 0}};
    generation_limits_ = GenerationLimits(prompt_, settings(0), 1);
    agree(run.comm, [&] {
        const size_t most = std::min(c.max_positions, c.growing_positions());
        if (prompt.size() + o.max_new_tokens > most)
            die("the prompt has %zu tokens and --max_new_tokens %zu may follow, but %s has %zu positions\n  fix: lower --max_new_tokens%s",
                prompt.size(), o.max_new_tokens, model.c_str(), most, o.prompt.empty() ? "" : ", or shorten --prompt");
    });
}

GenerationSettings Continuation::settings(size_t step) const {
    GenerationSettings s = settings_of(run_, *tokenizer_);
    s.seed = Random{run_.options.seed, Purpose::sampling, 0}.bits(step);
    return s;
}

void Continuation::use(ModelLimits &limits) const { generation_limits_.use(limits, run_.model.ranks.sp); }

std::string Continuation::text(Model &model, size_t step) const {
    model.gather_parameters();
    std::vector<Completion> own;
    if (run_.comm.rank < int(run_.model.ranks.tp)) own = generate(model.generator(), generation_limits_, prompt_, settings(step));
    model.generator().finish();
    return text_of(share_completions(run_.comm, run_.model.ranks.tp, own, 1, 1)[0], *tokenizer_, settings(step).stop);
}
