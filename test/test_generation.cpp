// Generation: answers depend only on weights, prompts and seed, not on the number of concurrent sequences or the size of the cache.
#include "../llmc/train/generation.h"

#include <gtest/gtest.h>

#include <map>
#include <ranges>
#include <set>

#include "../llmc/io/hf.h"
#include "../llmc/ops/sample.h"
#include "models.h"

#include "check.h"
#include "golden.h"

namespace {

const char *const with_attention = "test/golden/qwen3", *const with_states = "test/golden/qwen35";
constexpr uint64_t run_seed = 3;

std::vector<Prompt> some_prompts(size_t count) {
    std::vector<Prompt> prompts;
    for (uint32_t i = 0; i < count; i++) {
        std::vector<int32_t> tokens(1 + 17 * i % 90);  // up to two pages
        for (size_t t = 0; t < tokens.size(); t++) tokens[t] = int32_t((7 * i + 3 * t + t * t) % 96);
        prompts.push_back({tokens, i});
    }
    return prompts;
}

struct Setting {
    const char *model = with_attention;
    size_t sequences = 64, pages = 0;  // 0: enough for all
    size_t samples = 1, max_new_tokens = 30;
    Sampling sampling = {.temperature = 1};
    int threads = 2;
    std::vector<int32_t> eos = {5};
    std::vector<std::string> stop = {};
    Environment *environment = nullptr;
    size_t appended = 0;
    bool exact = false;
};

const Tokenizer &bytes() {  // one token a byte, and four special tokens
    static const Tokenizer tokenizer("data/demo/model/tokenizer.json");
    return tokenizer;
}

template <class Dev = CpuF32> struct Loaded {  // a model
    ModelConfig config;
    SelfComm comm;
    Mesh mesh{comm, 1};
    std::unique_ptr<Decoder<Dev>> model;

    Loaded(const char *directory, const ModelLimits &limits, int threads = 2, bool guards = false, bool exact = false) {
        std::vector<std::string> notes;
        config = read_config(directory, notes);
        Dev dev = make_device<Dev>(threads);
        dev.exact = exact;
        model = make_model(dev, config, limits);
        model->allocate(mesh, guards, false);
        model->load(HfWeights(directory), 1);
    }
};

template <class Dev = CpuF32> std::vector<Completion> run(const std::vector<Prompt> &prompts, const Setting &s) {
    const GenerationSettings settings{.max_new_tokens = s.max_new_tokens,
                                      .sampling = s.sampling,
                                      .seed = run_seed,
                                      .samples = s.samples,
                                      .vocabulary = 96,
                                      .eos = s.eos,
                                      .stop = {bytes(), s.stop},
                                      .logps = true,
                                      .environment = s.environment};
    GenerationLimits room(prompts, settings, s.sequences);
    if (s.pages) room.pages = s.pages;
    room.appended = s.appended;
    ModelLimits limits;
    limits.mode = Mode::generate, limits.row_tokens = limits.positions = row_multiple;
    room.use(limits);
    Loaded<Dev> g(s.model, limits, s.threads, true, s.exact);
    EXPECT_GE(g.config.V, settings.vocabulary);
    const auto out = generate(g.model->generator(), room, prompts, settings);
    g.model->arena().check_guards();
    return out;
}

void expect_same(const std::vector<Completion> &got, const std::vector<Completion> &want) {
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < want.size(); i++) {
        EXPECT_EQ(got[i].tokens, want[i].tokens) << "completion " << i;
        EXPECT_EQ(got[i].ended, want[i].ended) << "completion " << i;
    }
}

// (V) the logits at the last token, from the whole sequence in one row.
std::vector<float> logits_of(const char *model, const std::vector<int32_t> &tokens, bool exact = false) {
    static std::map<std::pair<std::string, bool>, std::unique_ptr<Loaded<>>> loaded;
    ModelLimits limits;
    limits.mode = Mode::generate, limits.row_tokens = limits.positions = 256;
    limits.cache_pages = limits.sequence_pages = 4, limits.sequences = 1;
    std::unique_ptr<Loaded<>> &g = loaded[{model, exact}];
    if (!g) g = std::make_unique<Loaded<>>(model, limits, 2, false, exact);
    const Row row = make_row({tokens});
    const std::vector<int32_t> nowhere(row.T, -1);
    g->model->generator().next_logits(row, {true, nowhere, {}, {}, nowhere});
    return g->model->generator().logits();
}

// The sum of the softmax over the ids below this one.
double mass_below(const std::vector<float> &logits, size_t id) {
    double below = 0, all = 0;
    for (size_t v = 0; v < logits.size(); v++)
        all += std::exp(double(logits[v])), below += v < id ? std::exp(double(logits[v])) : 0;
    return below / all;
}

// A preempted sequence is recomputed as a row, in which products are summed in another order than in decoding. Its logits may differ by
// rounding, and a draw within rounding of the boundary between two ids may then select the other id: at most once in a run.
void expect_same_but_for_rounding(const std::vector<Completion> &got, const std::vector<Completion> &want,
                                  const std::vector<Prompt> &prompts, const Setting &s) {
    ASSERT_EQ(got.size(), want.size());
    double rounding = 1e-5;
    if (s.model == with_states) {  // the delta rule sums in chunks there, and token by token here
        float largest = 0;
        for (float logit : logits_of(s.model, prompts[0].tokens)) largest = std::max(largest, std::abs(logit));
        rounding = 4 * 2e-5 * largest;  // of a logit and of the logarithm of the sum, in both (expect_logits_through_the_cache)
    }
    size_t diverged = 0;
    for (size_t i = 0; i < want.size(); i++) {
        const auto &a = got[i].tokens, &b = want[i].tokens;
        const size_t same = size_t(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
        for (size_t k = 0; k < size_t(std::count(want[i].mask.begin(), want[i].mask.begin() + ptrdiff_t(same), 1)); k++)
            EXPECT_NEAR(got[i].logp[k], want[i].logp[k], rounding) << "completion " << i << ", sampled token " << k;
        if (same == a.size() && same == b.size()) {
            EXPECT_EQ(got[i].ended, want[i].ended) << "completion " << i;
            continue;
        }
        diverged++;
        ASSERT_LT(same, std::min(a.size(), b.size())) << "completion " << i;
        ASSERT_EQ(std::abs(a[same] - b[same]), 1) << "completion " << i << ", token " << same;
        auto before = prompts[i / s.samples].tokens;
        before.insert(before.end(), a.begin(), a.begin() + ptrdiff_t(same));
        const double drawn =
            Random{run_seed, Purpose::sampling, uint32_t(prompts[i / s.samples].number * s.samples + i % s.samples)}.uniform(
                same);
        EXPECT_NEAR(drawn, mass_below(logits_of(s.model, before), size_t(std::max(a[same], b[same]))), 1e-6)
            << "completion " << i << ", token " << same;
    }
    EXPECT_LE(diverged, 1u);
}

}  // namespace

// Greedy decoding selects the largest logit of the whole sequence, after the penalty on the ids of prompt and answer.
TEST(Generation, GreedySelectsTheLargestPenalisedLogit) {
    const auto prompts = some_prompts(6);
    std::vector<Completion> plain;
    for (const double penalty : {1.0, 1.5}) {
        const auto out = run(prompts, {.max_new_tokens = 12, .sampling = {.repetition_penalty = penalty}, .eos = {}});
        size_t changed = 0;
        for (size_t i = 0; i < prompts.size(); i++) {
            auto tokens = prompts[i].tokens;
            for (int32_t token : out[i].tokens) {
                auto logits = logits_of(with_attention, tokens);
                for (int32_t v : std::set<int32_t>(tokens.begin(), tokens.end()))
                    logits[size_t(v)] = sampling::penalised(logits[size_t(v)], float(penalty));
                const float largest = *std::max_element(logits.begin(), logits.end());
                EXPECT_NEAR(logits[size_t(token)], largest, 1e-5) << "prompt " << i << ", token " << tokens.size();  // or a tie
                tokens.push_back(token);
            }
            changed += penalty != 1 && out[i].tokens != plain[i].tokens;
        }
        EXPECT_EQ(changed > 0, penalty != 1);
        plain = out;
    }
}

// Answers of transformers' own generation with states (golden/make.py).
TEST(Generation, GreedyAnswersOfLinearAttentionAreThoseOfTransformers) {
    for (const std::string name : golden_hybrids) {
        const Golden g(name);
        const std::vector<std::vector<int32_t>> answers = g.expected["answers"];
        std::vector<Prompt> prompts;
        for (const size_t d : g.expected["logits_documents"]) {
            const std::vector<int32_t> &tokens = g.documents[d];
            prompts.push_back({{tokens.begin(), tokens.begin() + ptrdiff_t(answers[0].size())}, uint32_t(d)});
        }
        const auto got = run(prompts, {.model = g.dir.c_str(), .max_new_tokens = answers[0].size(), .sampling = {}, .eos = {}});
        for (size_t i = 0; i < got.size(); i++) EXPECT_EQ(got[i].tokens, answers[i]) << name;
    }
}

TEST(Generation, EndsAtAnEndTokenOrAtTheLimit) {
    size_t ended = 0;
    for (const Completion &c : run(some_prompts(40), {})) {
        EXPECT_LE(c.tokens.size(), 30u);
        EXPECT_EQ(c.ended, c.tokens.back() == 5);
        EXPECT_TRUE(c.ended || c.tokens.size() == 30);
        EXPECT_LE(std::count(c.tokens.begin(), c.tokens.end(), 5), c.ended);
        ended += c.ended;
    }
    EXPECT_GT(ended, 0u);
    EXPECT_LT(ended, 40u);
}

TEST(Generation, DoesNotDependOnConcurrentSequences) {
    const auto prompts = some_prompts(20);
    for (const char *model : {with_attention, with_states}) {
        SCOPED_TRACE(model);
        const auto want = run(prompts, {.model = model});
        for (size_t sequences : {1, 3, 7}) expect_same(run(prompts, {.model = model, .sequences = sequences}), want);
        for (int threads : {1, 3}) expect_same(run(prompts, {.model = model, .threads = threads}), want);
        for (size_t i : {0, 11, 19}) expect_same(run({prompts[i]}, {.model = model}), {want[i]});
    }
}

// With fewer pages sequences are preempted, and their prompts are recomputed.
TEST(Generation, DoesNotDependOnTheCache) {
    const auto prompts = some_prompts(20);
    for (const char *model : {with_attention, with_states})
        for (size_t samples : {1, 4}) {
            SCOPED_TRACE(format("%s, %zu samples", model, samples));
            const auto want = run(prompts, {.model = model, .samples = samples});
            for (size_t pages : {2, 3, 4, 9}) {
                const Setting small{.model = model, .pages = pages, .samples = samples};
                expect_same_but_for_rounding(run(prompts, small), want, prompts, small);
            }
        }
}

// With dev.exact the log-probability of a sampled token has the bits that an evaluation gives it, in rows with several answers, whatever the number of
// sequences and threads, and if sequences lose their pages.
template <class Dev> void expect_exact_generation() {
    const auto prompts = some_prompts(12);
    for (const char *model : {with_attention, "test/golden/mistral", "test/golden/qwen3_moe", "test/golden/gemma3",
                              "test/golden/olmo2", "test/golden/gpt2"}) {
        std::vector<Completion> want;
        for (const auto &[sequences, pages, threads] :
             {std::tuple<size_t, size_t, int>{64, 0, 2}, {1, 0, 1}, {7, 0, 3}, {64, 5, 2}}) {
            SCOPED_TRACE(format("%s, %zu sequences, %zu pages, %d threads", model, sequences, pages, threads));
            const Setting s{.model = model,
                            .sequences = sequences,
                            .pages = pages,
                            .samples = 2,
                            .max_new_tokens = 40,
                            .threads = threads,
                            .exact = true};
            const auto got = run<Dev>(prompts, s);
            if (want.empty()) want = got;
            expect_same(got, want);
            for (size_t i = 0; i < want.size(); i++) EXPECT_EQ(got[i].logp, want[i].logp) << "completion " << i;
        }
        constexpr size_t T = 640;
        ModelLimits limits;
        limits.row_tokens = T, limits.positions = 256;
        Loaded<Dev> trained(model, limits, 2, false, true);
        for (size_t i = 0; i < want.size();) {
            std::vector<std::vector<int32_t>> documents;
            std::vector<std::vector<uint8_t>> answers;
            std::vector<double> sampled;
            for (size_t tokens = 0; i < want.size(); i++) {
                auto document = prompts[i / 2].tokens;
                std::vector<uint8_t> answer(document.size(), 0);
                document.insert(document.end(), want[i].tokens.begin(), want[i].tokens.end());
                if ((tokens += document.size()) > T) break;
                answer.resize(document.size(), 1);
                sampled.insert(sampled.end(), want[i].logp.begin(), want[i].logp.end());
                documents.push_back(std::move(document)), answers.push_back(std::move(answer));
            }
            std::vector<double> whole;
            for (const double nll : trained.model->evaluate(make_row(documents, answers))) whole.push_back(-nll);
            EXPECT_EQ(whole, sampled);
        }
    }
}
TEST(Generation, IsExactInF32) { expect_exact_generation<CpuF32>(); }
TEST(Generation, IsExactInBf16) { expect_exact_generation<CpuBf16>(); }

TEST(Generation, SamplesOfAPromptDiffer) {
    const auto prompts = some_prompts(5);
    const auto out = run(prompts, {.samples = 4});
    ASSERT_EQ(out.size(), 20u);
    for (size_t i = 0; i < 20; i += 4)
        for (size_t k = 1; k < 4; k++) EXPECT_NE(out[i].tokens, out[i + k].tokens);
    const auto greedy = run(prompts, {.samples = 3, .sampling = {}});
    for (size_t i = 0; i < 15; i += 3) EXPECT_EQ(greedy[i].tokens, greedy[i + 2].tokens);
}

// The answers equal those of a run without stop strings, cut at the first occurrence of one: tokens do not depend on later ones.
TEST(Generation, EndsAtAStopString) {
    const auto prompts = some_prompts(30);
    const auto whole = run(prompts, {.max_new_tokens = 40});
    std::map<std::string, size_t> pairs;  // of characters; many answers contain the most frequent pair
    for (const Completion &c : whole)
        for (const std::string text = bytes().decode(c.answer());
             size_t i : std::views::iota(size_t(1), std::max<size_t>(1, text.size())))
            pairs[text.substr(i - 1, 2)]++;
    const auto more = [](const auto &a, const auto &b) { return a.second < b.second; };
    const std::vector<std::string> stop = {std::max_element(pairs.begin(), pairs.end(), more)->first, "not there",
                                           std::string(1, 'q')};
    size_t stopped = 0;
    for (const auto &[sequences, pages] : {std::pair<size_t, size_t>{64, 0}, {3, 0}, {64, 3}}) {
        const auto got = run(prompts, {.sequences = sequences, .pages = pages, .max_new_tokens = 40, .stop = stop});
        for (size_t i = 0; i < got.size(); i++) {
            const std::string text = bytes().decode(whole[i].answer());
            const size_t at = std::min(text.find(stop[0]), text.find(stop[2]));
            EXPECT_EQ(got[i].stopped, at != text.npos) << text;
            EXPECT_EQ(got[i].ended, got[i].stopped || whole[i].ended);
            EXPECT_EQ(text_of(got[i], bytes(), {bytes(), stop}), text.substr(0, at));
            const size_t end = at == text.npos ? text.size() : at + (text.find(stop[0]) == at ? 2 : 1);
            EXPECT_EQ(bytes().decode(got[i].answer()).size(), end);
            stopped += got[i].stopped;
        }
    }
    EXPECT_GT(stopped, 10u);
    EXPECT_LT(stopped, 80u);
}

TEST(StopStrings, AreFoundAtTheEndOfTheTokens) {
    const std::vector<std::string> texts = {"ab", "\n\n"};
    const StopStrings stop(bytes(), texts);
    const auto ids = [](const std::string &text) {  // by trial
        std::vector<int32_t> out;
        for (char c : text)
            for (int32_t id = 0; id < 256; id++)
                if (bytes().decode(std::vector<int32_t>{id}) == std::string(1, c)) out.push_back(id);
        return out;
    };
    for (const char *text : {"ab", "xab", "abab", "a\n\n"}) EXPECT_TRUE(stop.end(ids(text))) << text;
    for (const char *text : {"", "a", "ba", "a b", "\n"}) EXPECT_FALSE(stop.end(ids(text))) << text;
    auto with_special = ids("xa");
    for (int i = 0; i < 5; i++) with_special.push_back(258);  // special tokens are no text
    EXPECT_FALSE(stop.end(with_special));
    with_special.push_back(ids("b")[0]);
    EXPECT_TRUE(stop.end(with_special));
    EXPECT_EQ(stop.before("x\nab\n\n"), "x\n");
    EXPECT_EQ(stop.before("x"), "x");
    EXPECT_FALSE(StopStrings().end(ids("ab")));
}

// ---- episodes ---------------------------------------------------------------------------------------------------------------------------

namespace {

// Observes a text that depends on the turn, and ends an episode after some turns. Replies come late and in another order, which `order` selects.
class Scripted final : public Environment {
  public:
    Scripted(size_t order, size_t longest) : order_(order), longest_(longest) {}

    void act(const Turn &turn) override {
        Reply reply{turn.episode, {}, double(turn.episode) + 0.25 * double(turn.number), false};
        uint32_t sum = uint32_t(turn.episode);
        for (int32_t id : turn.tokens) sum = sum * 31 + uint32_t(id);
        const size_t length = 1 + sum % longest_;
        const bool goes_on = turn.ended && turn.number < 1 + turn.episode % 4;
        reply.truncated = goes_on && length >= turn.room;
        if (goes_on && !reply.truncated)
            for (size_t t = 0; t < length; t++) reply.observation.push_back(int32_t((sum + 3 * t + t * t) % 96));
        replies_.push_back(reply);
    }
    std::vector<Reply> replies(bool wait) override {
        calls_++;
        if (!wait && calls_ % (1 + order_) != 0) return {};
        if (order_ % 2) std::ranges::reverse(replies_);
        const size_t n = order_ == 0 ? replies_.size() : std::min<size_t>(replies_.size(), order_);
        std::vector<Reply> out(replies_.begin(), replies_.begin() + ptrdiff_t(n));
        replies_.erase(replies_.begin(), replies_.begin() + ptrdiff_t(n));
        return out;
    }

  private:
    const size_t order_, longest_;
    size_t calls_ = 0;
    std::vector<Reply> replies_;
};

// log softmax of the logits after the tokens before position t of a sequence, at its token.
double whole_logp(const char *model, const std::vector<int32_t> &tokens, size_t t, bool exact) {
    const auto logits = logits_of(model, {tokens.begin(), tokens.begin() + ptrdiff_t(t)}, exact);
    const double most = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (float l : logits) sum += std::exp(double(l) - most);
    return double(logits[size_t(tokens[t])]) - most - std::log(sum);
}

}  // namespace

// The log-probability of each sampled token is that of the whole sequence in one row, however many tokens are appended at a time, over the borders of pages,
// and when episodes lose their pages. With the same logits they differ by a sum of floats alone.
TEST(Episodes, HaveTheLogProbabilitiesOfTheWholePass) {
    const auto prompts = some_prompts(8);
    for (const char *model : {with_attention, with_states, "test/golden/mistral", "test/golden/qwen3_moe"})
        for (const auto &[appended, pages] : {std::pair<size_t, size_t>{0, 0}, {1, 0}, {70, 0}, {256, 0}, {40, 4}}) {
            if (model == with_states && appended > 0) continue;
            SCOPED_TRACE(format("%s, %zu appended, %zu pages", model, appended, pages));
            Scripted environment(1, 80);
            const bool exact = model != with_states;
            const Setting s{.model = model,
                            .pages = pages,
                            .samples = 2,
                            .max_new_tokens = 150,
                            .eos = {5, 9, 14, 21, 30, 44},
                            .environment = &environment,
                            .appended = appended,
                            .exact = exact};
            size_t observed = 0;
            const auto out = run(prompts, s);
            for (size_t i = 0; i < out.size(); i++) {
                std::vector<int32_t> tokens = prompts[i / 2].tokens;
                const size_t first = tokens.size();
                tokens.insert(tokens.end(), out[i].tokens.begin(), out[i].tokens.end());
                ASSERT_EQ(out[i].mask.size(), out[i].tokens.size());
                ASSERT_EQ(out[i].logp.size(), size_t(std::ranges::count(out[i].mask, 1)));
                for (size_t t = 0, sampled = 0; t < out[i].tokens.size(); t++)
                    if (out[i].mask[t])
                        EXPECT_NEAR(out[i].logp[sampled++], whole_logp(model, tokens, first + t, exact), exact ? 2e-6 : 1e-4)
                            << "episode " << i << ", token " << t;
                    else observed++;
            }
            EXPECT_GT(observed, 300u);
        }
}

TEST(Episodes, DoNotDependOnTheOrderOfReplies) {
    const auto prompts = some_prompts(8);
    for (const char *model : {with_attention, with_states}) {
        const size_t appended = model == with_states ? 0 : 256;
        std::vector<Completion> want;
        for (const auto &[order, sequences, pages] :
             {std::tuple<size_t, size_t, size_t>{0, 64, 0}, {1, 64, 0}, {2, 3, 0}, {3, 5, 0}, {3, 5, 4}}) {
            SCOPED_TRACE(format("%s, order %zu, %zu sequences, %zu pages", model, order, sequences, pages));
            Scripted environment(order, 40);
            const Setting s{.model = model,
                            .sequences = sequences,
                            .pages = pages,
                            .samples = 2,
                            .max_new_tokens = 90,
                            .eos = {5, 9, 14, 21},
                            .environment = &environment,
                            .appended = appended};
            const auto got = run(prompts, s);
            if (want.empty()) want = got;
            expect_same_but_for_rounding(got, want, prompts, s);
            for (size_t i = 0; i < got.size(); i++)
                if (got[i].tokens == want[i].tokens) {
                    EXPECT_EQ(got[i].mask, want[i].mask);
                    EXPECT_EQ(got[i].turn_rewards, want[i].turn_rewards);
                }
        }
    }
}

// One turn without observations is an answer without an environment.
TEST(Episodes, OfOneTurnAreAnswers) {
    class Silent final : public Environment {
        std::vector<Reply> replies_;
        void act(const Turn &turn) override { replies_.push_back({turn.episode, {}, 0.5, false}); }
        std::vector<Reply> replies(bool) override { return std::exchange(replies_, {}); }
    } silent;
    const auto prompts = some_prompts(20);
    for (const char *model : {with_attention, with_states})
        for (const size_t sequences : {3, 64}) {
            const auto want = run(prompts, {.model = model, .sequences = sequences, .samples = 2});
            const auto got = run(prompts, {.model = model, .sequences = sequences, .samples = 2, .environment = &silent});
            expect_same(got, want);
            for (size_t i = 0; i < got.size(); i++) {
                EXPECT_EQ(got[i].logp, want[i].logp);
                EXPECT_EQ(got[i].mask, std::vector<uint8_t>(got[i].tokens.size(), 1));
                EXPECT_EQ(got[i].turn_rewards, std::vector<double>{0.5});
            }
        }
}

// Observations are no turns: their tokens neither end an episode nor complete a stop string, and the limit counts them.
TEST(Episodes, OnlySampledTokensEndATurn) {
    class Loud final : public Environment {
      public:
        size_t most_room = 0;
        std::vector<size_t> turns, sampled;

      private:
        std::vector<Reply> replies_;
        void act(const Turn &turn) override {
            most_room = std::max(most_room, turn.room);
            turns.resize(std::max(turns.size(), turn.episode + 1)), sampled.resize(turns.size());
            EXPECT_EQ(turn.number, turns[turn.episode]++);
            sampled[turn.episode] += turn.tokens.size();
            const bool fits = turn.room > 7;
            Reply reply{turn.episode, {}, 1, turn.ended && !fits, 2, 1};
            if (turn.ended && fits) reply.observation = {5, 9, 14, 21, 5, 113 % 96, 5};
            replies_.push_back(reply);
        }
        std::vector<Reply> replies(bool) override { return std::exchange(replies_, {}); }
    } loud;
    const auto prompts = some_prompts(10);
    const Setting s{.max_new_tokens = 60, .eos = {5, 9, 14, 21}, .environment = &loud, .appended = 3};
    const auto out = run(prompts, s);
    EXPECT_LT(loud.most_room, 60u);
    size_t episodes = 0;
    for (size_t i = 0; i < out.size(); i++) {
        EXPECT_LE(out[i].tokens.size(), 60u);
        EXPECT_FALSE(out[i].ended);  // only the limit ends them
        EXPECT_EQ(out[i].turn_rewards, std::vector<double>(loud.turns[i], 1));
        EXPECT_EQ(out[i].calls, 2 * loud.turns[i]);
        EXPECT_EQ(out[i].failures, loud.turns[i]);
        EXPECT_EQ(size_t(std::ranges::count(out[i].mask, 0)), 7 * (loud.turns[i] - 1));
        EXPECT_EQ(size_t(std::ranges::count(out[i].mask, 1)), loud.sampled[i]);
        episodes += loud.turns[i] > 2;
    }
    EXPECT_GT(episodes, 3u);
}
