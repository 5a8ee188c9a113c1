#include "rollout_source.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <numeric>

#include "../core/common.h"
#include "../core/json.h"
#include "../core/signals.h"
#include "open_model.h"

using nlohmann::ordered_json;

RolloutSource::RolloutSource(const Run &run) : run_(run), o_(run.options) {
    generation_ = {.max_new_tokens = o_.max_new_tokens,
                   .sampling = {.temperature = o_.temperature},
                   .seed = o_.seed,
                   .samples = o_.n,
                   .vocabulary = run.model.config.V,
                   .eos = run.model.config.eos,
                   .logps = true};
    const std::string tokenizer = run.model.tokenizer_dir + "/tokenizer.json";
    if (std::filesystem::exists(tokenizer)) tokenizer_.emplace(tokenizer);
    if (!tokenizer_ && !o_.stop.empty())
        die("--stop reads text, but %s has no tokenizer.json\n  fix: use a model directory with its tokenizer",
            run.model.dir.c_str());
    if (tokenizer_)
        generation_.vocabulary = std::min(run.model.config.V, tokenizer_->size()), generation_.stop = {*tokenizer_, o_.stop};
    if (!o_.environment.empty()) {
        if (!tokenizer_)
            die("--environment %s reads text, but %s has no tokenizer.json\n  fix: use a model directory with its tokenizer",
                o_.environment.c_str(), run.model.dir.c_str());
        if (!std::filesystem::exists(o_.environment))
            die("--environment %s: no such file\n  fix: a Python file with a class Environment (docs/rl.md#episodes)",
                o_.environment.c_str());
        environment_ = std::make_unique<PythonEnvironment>(run, *tokenizer_);
        generation_.environment = environment_.get();
    }
    for (const std::string &name : run.task &RL && !environment_ ? o_.reward : Names())
        rewards_.push_back(find_reward(run, name, tokenizer_ ? &*tokenizer_ : nullptr));
}

std::vector<CoResidentModel> RolloutSource::co_residents() const {
    std::vector<CoResidentModel> out;
    for (const auto &reward : rewards_)
        if (const auto model = reward->resident()) out.push_back({"a reward model, resident", *model, Mode::evaluate});
    if (o_.async_steps)
        out.push_back({"a copy of the policy, resident, which samples the next answers", run_.model.config, Mode::generate});
    return out;
}

size_t RolloutSource::updates(size_t prompts) const { return o_.max_epochs * ceil_div(prompts * o_.n, o_.train_batch_size); }

// Returns the response, the right answer, without the tokens that end a turn.
Questions RolloutSource::read_questions(const Samples &prompts, std::span<const size_t> samples) const {
    Questions out;
    const auto is_end = [&](int32_t id) { return std::ranges::find(generation_.eos, id) != generation_.eos.end(); };
    for (size_t s : samples) {
        const auto [ids, mask] = prompts.document(s);
        const auto first = std::ranges::find(mask, 1) - mask.begin();
        auto last = std::find(mask.begin() + first, mask.end(), 0) - mask.begin();
        while (last > first && is_end(ids[size_t(last) - 1])) last--;
        out.prompts.emplace_back(ids.begin(), ids.begin() + first);
        out.responses.emplace_back(ids.begin() + first, ids.begin() + last);
        out.columns.push_back(prompts.columns(s));
    }
    return out;
}

// Returns the name of the teacher of prompt p; empty without several teachers.
std::string RolloutSource::teacher_of(const Questions &asked, size_t p) const {
    const std::vector<Teacher> teachers = teachers_of(o_);
    if (teachers.size() < 2) return "";
    const nlohmann::json name = nlohmann::json::parse(asked.columns[p]).value("teacher", nlohmann::json());
    if (std::ranges::none_of(teachers, [&](const Teacher &known) { return name == known.name; }))
        die("prompt %zu has the teacher %s, which is no name in --teacher_model\n  fix: a field teacher in each record, with one of these names",
            p + 1, ::shown(name).c_str());
    return name;
}

// Dies if an answer to a prompt of this many tokens may be too long.
void RolloutSource::expect_room(const std::string &of, size_t tokens) const {
    if (const size_t end = run_.model.config.growing_positions(); tokens + o_.max_new_tokens > end)
        die("a prompt of %s has %zu tokens and --max_new_tokens %zu may follow, but %s of the model is %zu, beyond which it %s\n  fix: lower --max_new_tokens, or shorten the prompts",
            of.c_str(), tokens, o_.max_new_tokens, run_.model.config.growing_positions_name(), end,
            run_.model.config.gpt2() ? "has no positions" : "is rotated otherwise");
    if (tokens + o_.max_new_tokens > o_.row_tokens)
        die("a prompt of %s has %zu tokens and --max_new_tokens %zu may follow, but a row holds %zu\n  fix: use --row_tokens %zu, or lower --max_new_tokens",
            of.c_str(), tokens, o_.max_new_tokens, o_.row_tokens, tokens + o_.max_new_tokens);
    if (tokens + o_.max_new_tokens > most_positions_)
        die("a prompt of %s has %zu tokens and --max_new_tokens %zu may follow, but another model of the run has %zu positions\n  fix: lower --max_new_tokens, or shorten the prompts",
            of.c_str(), tokens, o_.max_new_tokens, most_positions_);
}

void RolloutSource::reserve(const Samples &prompts, ModelLimits &limits) {
    generation_.eos = run_.model.config.eos;  // includes the end of turn of the prompts' template
    const Questions asked = read_questions(prompts, first_samples(prompts.size()));
    const bool compares = !rewards_.empty() && std::ranges::find(o_.reward, "exact_match") != o_.reward.end();
    for (size_t i = 0; i < asked.prompts.size(); i++) {
        const auto &prompt = asked.prompts[i];
        if (compares && asked.responses[i].empty())
            die("prompt %zu of %s has no right answer, which --reward exact_match compares with\n  fix: name the prompt and the answer by --input_key and --output_key, or use another --reward",
                i + 1, prompts.name().c_str());
        expect_room(prompts.name(), prompt.size());
        teacher_of(asked, i);  // dies if there is none
        known_.push_back({prompt, 0});
        longest_ = std::max(longest_, prompt.size() + o_.max_new_tokens);
    }
    if (environment_)
        generation_.prompt_growth =
            std::min(o_.max_observation, std::min(o_.row_tokens, run_.model.config.growing_positions()) - longest_);
    generation_limits_ = GenerationLimits(known_, generation_, o_.max_sequences);
    if (environment_) generation_limits_.use_environment(run_.model.config);
    const bool evaluates = !o_.eval_data.empty() || o_.eval_fraction > 0;
    if (!o_.async_steps || evaluates) generation_limits_.use(limits, run_.model.ranks.sp);  // the policy generates the answers
    limits.row_tokens = std::max(limits.row_tokens, round_up(o_.row_tokens, row_multiple));
    limits.positions = std::max(limits.positions, generation_limits_.longest);
}

void RolloutSource::expect_positions(const ModelSpec &model, const char *flag) {
    most_positions_ = std::min(most_positions_, model.config.max_positions);
    if (longest_ > most_positions_)
        die("an answer may end at token %zu, but %s of %s %s is %zu\n  fix: lower --max_new_tokens, or use another %s", longest_,
            model.config.positions_name(), flag, model.dir.c_str(), model.config.max_positions, flag);
}

void RolloutSource::open(const ModelLimits &limits) {
    for (const auto &reward : rewards_) reward->open(limits);
    if (!o_.async_steps) return;
    ModelLimits writer = flag_limits(o_);
    writer.mode = Mode::generate, writer.concurrent = true;
    writer.row_tokens = writer.positions = row_multiple;
    generation_limits_.use(writer);
    writer_ = open_model(run_, run_.model, writer);
}

// ---- answers ------------------------------------------------------------------------------------------------------------------------

// Returns the prompt of each of this rank's episodes. Without an environment there are none.
std::vector<Prompt> RolloutSource::begin_episodes(const Questions &asked, std::span<const Prompt> own, size_t first,
                                                  size_t samples) const {
    if (!environment_) return {};
    std::vector<Prompt> out = environment_->begin(asked, own, first, samples);
    agree(run_.comm, [&] {
        stop_if_asked();
        environment_->check();
        for (const Prompt &prompt : out) expect_room("the reset of " + o_.environment, prompt.tokens.size());
    });
    return out;
}

// `first` is the number of the first prompt, the key of its random numbers.
std::vector<Completion> RolloutSource::answer(Model &policy, const Questions &asked, size_t first,
                                              const GenerationSettings &settings) const {
    policy.gather_parameters();
    std::vector<Prompt> own = own_prompts(run_.comm, run_.model.ranks.tp, asked.prompts, uint32_t(first));
    std::vector<Prompt> begun = begin_episodes(asked, own, first, settings.samples);
    GenerationSettings how = settings;
    for (size_t i = 0; i < begun.size(); i++)  // episodes share their prompt where they have the same
        if (begun[i].tokens != begun[i - i % settings.samples].tokens) how.samples = 1;
    for (size_t p = 0; p < own.size() && !begun.empty(); p++) own[p].tokens = begun[p * settings.samples].tokens;
    const std::span<const Prompt> prompts = how.samples == settings.samples ? own : begun;
    const auto progress =
        told_progress(own.size() * settings.samples, [&](const std::string &line) { run_.say("%s", line.c_str()); });
    auto completions = generate(policy.generator(), generation_limits_, prompts, how, progress);
    for (size_t i = 0; i < begun.size(); i++) completions[i].prompt = std::move(begun[i].tokens);
    policy.generator().finish();
    agree(run_.comm, [&] {
        stop_if_asked();
        if (environment_) environment_->check();
    });
    return share_completions(run_.comm, run_.model.ranks.tp, completions, asked.prompts.size(), settings.samples);
}

RolloutSource::PendingBatch RolloutSource::ask(const Step &drawn) const {
    PendingBatch out{drawn.begin, read_questions(*drawn.data, drawn.samples)};
    if (!writer_) return out;
    const auto write = [this, own = own_prompts(run_.comm, run_.model.ranks.tp, out.questions.prompts, uint32_t(drawn.begin))] {
        const Activity activity("", Activity::is_finished);  // only the weights that began the answers can finish them
        writer_->memory().use_on_this_thread();
        return generate(writer_->generator(), generation_limits_, own, generation_);
    };
    out.completions = std::async(std::launch::async, write);
    return out;
}

// Returns the answers to all prompts. The policy is null if the writer has answered them.
std::vector<Completion> RolloutSource::await(Model *policy, PendingBatch &asked) const {
    if (policy) return answer(*policy, asked.questions, asked.begin, generation_);
    std::vector<Completion> own;
    agree(run_.comm, [&] { own = asked.completions.get(); });
    return share_completions(run_.comm, run_.model.ranks.tp, own, asked.questions.prompts.size(), generation_.samples);
}

// ---- rewards ------------------------------------------------------------------------------------------------------------------------

// Returns the mean reward of the answers with a reward; no_reward if there are none.
static double mean_of(std::span<const double> rewards) {
    double sum = 0, n = 0;
    for (double r : rewards)
        if (has_reward(r)) sum += r, n++;
    return sum / n;
}

RolloutSource::Rewards RolloutSource::judge(const Questions &asked, std::span<const Completion> answers) const {
    const Numbers &weights = o_.reward_weights;
    Rewards out{std::vector<double>(answers.size(), no_reward), {}};
    if (environment_) {
        std::ranges::transform(answers, out.rewards.begin(), [](const Completion &a) { return sum_of_rewards(a.turn_rewards); });
        agree(run_.comm, [&] {
            for (const double reward : out.rewards)
                if (std::abs(reward) > largest_reward)
                    die("an episode of %s has the reward %g, but it must be within +-%g\n  fix: scale the rewards",
                        o_.environment.c_str(), reward, largest_reward);
        });
    }
    for (const auto &reward : rewards_) {
        const std::string &name = o_.reward[out.parts.size()];
        const double weight = weights.empty() ? 1 : weights[out.parts.size()];
        out.parts.push_back((*reward)(asked, answers));
        agree(run_.comm, [&] {
            for (size_t i = 0; i < answers.size(); i++) {
                const double part = out.parts.back()[i];
                if (!has_reward(part)) continue;
                double &sum = out.rewards[i];
                sum = (has_reward(sum) ? sum : 0) + weight * part;
                if (!(std::abs(sum) <= largest_reward))
                    die("the reward of answer %zu is %g after %s has added %g * %g, but must be within +-%g\n  fix: scale the rewards, or lower --reward_weights",
                        i, sum, name.c_str(), weight, part, largest_reward);
            }
        });
    }
    return out;
}

// Names of the separate rewards in the log, if there are several.
ordered_json RolloutSource::means_of_parts(const std::string &prefix, const std::vector<std::vector<double>> &parts) const {
    ordered_json out = ordered_json::object();
    for (size_t r = 0; parts.size() > 1 && r < parts.size(); r++) out[prefix + o_.reward[r]] = mean_of(parts[r]);
    return out;
}

// Keeps the answers to all prompts, or only to prompts whose mean reward is within the range.
void RolloutSource::keep(const PendingBatch &asked, std::span<const Completion> answers, std::span<const double> rewards,
                         std::vector<Rollout> &rollouts) const {
    const auto &prompts = asked.questions.prompts;
    for (size_t p = 0; p < prompts.size(); p++) {
        const double mean = mean_of(rewards.subspan(p * o_.n, o_.n));
        if (const Numbers &bounds = o_.dynamic_filtering; !bounds.empty() && !(bounds[0] < mean && mean < bounds[1])) continue;
        for (size_t i = p * o_.n; i < (p + 1) * o_.n; i++)
            rollouts.push_back({answers[i].prompt.empty() ? prompts[p] : answers[i].prompt, answers[i].tokens, answers[i].mask,
                                answers[i].logp, rewards[i], int64_t(asked.begin + p), !answers[i].ended,
                                teacher_of(asked.questions, p), answers[i].turn_rewards});
    }
}

std::pair<std::vector<Rollout>, ordered_json> RolloutSource::answers(Model &policy, const Step &prompts) const {
    const auto began = std::chrono::steady_clock::now();
    PendingBatch asked = ask(prompts);
    const auto completions = await(&policy, asked);
    std::vector<Rollout> rollouts;
    keep(asked, completions, std::vector<double>(completions.size(), no_reward), rollouts);
    double tokens = 0, truncated = 0;
    for (const Completion &c : completions) tokens += double(c.tokens.size()), truncated += !c.ended;
    const double n = double(completions.size()), seconds = seconds_since(began);
    ordered_json log = {{"response_length", tokens / n},
                        {"truncated", truncated / n},
                        {"generation_s", seconds},
                        {"generation_tok_s", tokens / seconds}};
    if (tokenizer_) log["answer"] = shown(asked.questions.prompts[0], completions[0]);
    return {std::move(rollouts), log};
}

Measured RolloutSource::evaluate(Model &policy, const Samples &prompts, std::span<const size_t> samples) const {
    GenerationSettings greedy = generation_;
    greedy.sampling.temperature = 0, greedy.samples = 1, greedy.logps = false;
    const Questions asked = read_questions(prompts, samples);
    const auto answers = answer(policy, asked, 0, greedy);
    const Rewards judged = judge(asked, answers);
    const double mean = mean_of(judged.rewards);
    if (!has_reward(mean)) return {NAN, ordered_json::object(), "nothing to evaluate, no answer has a reward"};
    ordered_json metrics = {{"eval_reward", mean}};
    metrics.update(means_of_parts("eval_reward/", judged.parts));
    return {-mean, metrics, format("eval reward %.4f of %zu greedy answers", mean, answers.size())};
}

// ---- batches ------------------------------------------------------------------------------------------------------------------------

// Returns JSON of a text that may end within a character.
static ordered_json text_json(const std::string &text) {
    return ordered_json::parse(ordered_json(text).dump(-1, ' ', false, ordered_json::error_handler_t::replace));
}

// Returns an answer for the log.
ordered_json RolloutSource::shown(const std::vector<int32_t> &prompt, const Completion &answer) const {
    const std::string text = environment_ ? tokenizer_->decode(answer.answer(), false)  // the marks separate the turns
                                          : text_of(answer, *tokenizer_, generation_.stop);
    return {{"prompt", text_json(tokenizer_->decode(answer.prompt.empty() ? prompt : answer.prompt))}, {"text", text_json(text)}};
}

// Draws prompts, has them answered and judges the answers, until there are enough: with dynamic filtering several draws may be needed. The policy is
// null if the writer answers, which may have begun with the `first`.
Batch RolloutSource::collect(Model *policy, DataLoader &prompts, std::optional<PendingBatch> first) const {
    Batch batch;
    std::vector<Rollout> rollouts;
    size_t asked_prompts = 0;
    double tokens = 0, turns = 0, calls = 0, failures = 0, asked_answers = 0, seconds = 0;
    ordered_json first_answer;
    std::vector<std::vector<double>> parts;  // each of --reward, of all answers
    constexpr size_t most = 10;
    for (size_t times = 0; times == 0 || (!o_.dynamic_filtering.empty() && rollouts.size() < o_.rollout_batch_size * o_.n);
         times++) {
        if (times == most)
            die("--dynamic_filtering has kept %zu of %zu prompts, and a step needs --rollout_batch_size %zu: the answers to the others have a mean reward of %g or less, or of %g or more\n"
                "  fix: use prompts that are neither too easy nor too hard, more answers to each (--n), another reward, or no filtering",
                rollouts.size() / o_.n, asked_prompts, o_.rollout_batch_size, o_.dynamic_filtering[0], o_.dynamic_filtering[1]);
        const auto began = std::chrono::steady_clock::now();
        PendingBatch asked = first ? *std::exchange(first, std::nullopt) : ask(prompts.next());
        const auto answers = await(policy, asked);
        const Rewards judged = judge(asked.questions, answers);
        if (times == 0 && tokenizer_) {
            const double reward = judged.rewards[0];
            first_answer = shown(asked.questions.prompts[0], answers[0]);
            first_answer["reward"] = has_reward(reward) ? ordered_json(reward) : nullptr;
        }
        keep(asked, answers, judged.rewards, rollouts);
        parts.resize(judged.parts.size());
        for (size_t r = 0; r < parts.size(); r++) parts[r].insert(parts[r].end(), judged.parts[r].begin(), judged.parts[r].end());
        for (const Completion &a : answers) {
            tokens += double(a.logp.size()), turns += double(turns_of(a.mask));
            calls += double(a.calls), failures += double(a.failures);
        }
        asked_answers += answers.size();
        seconds += seconds_since(began);
        asked_prompts += asked.questions.prompts.size(), batch.begin = asked.begin;
    }
    batch.log = {{"generation_s", seconds}, {"generation_tok_s", tokens / seconds}};
    if (environment_) batch.log["turns"] = turns / asked_answers;
    if (environment_ && environment_->has_tools())
        batch.log["tool_calls"] = calls / asked_answers, batch.log["tool_failures"] = calls > 0 ? failures / calls : 0;
    if (tokenizer_) batch.log["answer"] = first_answer;
    batch.log.update(means_of_parts("reward/", parts));
    if (!o_.dynamic_filtering.empty()) batch.log["filtered"] = 1 - double(rollouts.size() / o_.n) / double(asked_prompts);
    if (o_.save_rollouts)
        agree(run_.comm, [&] {
            if (!run_.is_main_rank()) return;
            std::filesystem::create_directories(o_.output_dir + "/rollouts");
            write_rollouts(format("%s/rollouts/%08zu.jsonl", o_.output_dir.c_str(), batch.begin), rollouts);
        });
    batch.rollouts = Rollouts(std::move(rollouts), prompts.data().file());
    return batch;
}

// The writer begins to answer the next prompts, with the weights that the policy has now.
void RolloutSource::write_ahead(Model &policy, DataLoader &prompts, int64_t updates) {
    policy.copy_parameters_to(*writer_);
    prompts_ = &prompts, writer_at_ = updates;
    under_way_ = ask(prompts.next());
}

// Waits for the writer, if it is at work.
void RolloutSource::finish_writing() {
    if (!under_way_) return;
    const Activity activity("when the answers under way are finished", Activity::is_finished);
    next_ = collect(nullptr, *prompts_, std::exchange(under_way_, std::nullopt));
    next_->written_at = writer_at_;
}

Batch RolloutSource::next(Model &policy, DataLoader &prompts, int64_t updates, size_t left) {
    if (writer_ && !under_way_ && !next_) write_ahead(policy, prompts, updates);
    finish_writing();
    Batch batch;
    if (next_) batch = *std::exchange(next_, std::nullopt);
    else batch = collect(&policy, prompts, {}), batch.written_at = updates;
    if (writer_ && this->updates(batch.rollouts.size() / o_.n) < left) write_ahead(policy, prompts, updates);
    return batch;
}

// ---- files --------------------------------------------------------------------------------------------------------------------------

void RolloutSource::save(const std::string &dir, int64_t updates, nlohmann::json &state) const {
    if (next_) state["next_answers"] = save_batch(*next_, dir, "next_answers", updates);
}

void RolloutSource::load(const std::string &dir, const nlohmann::json &state) {
    if (state.contains("next_answers")) next_ = load_batch(state["next_answers"], dir, "next_answers", run_.model.config.V);
}
