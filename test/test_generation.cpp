// The generation engine: what it says depends on weights, prompts and seed alone, not on how many sequences run together, nor on the cache.
#define LLMC_NO_MAIN
#include "../llmc/train/generation.h"

#include <gtest/gtest.h>

#include "../llmc/io/hf.h"
#include "check.h"
#include "models.h"

namespace {

const char *const directory = "test/golden/qwen3";

std::vector<Prompt> some_prompts(size_t count) {
    std::vector<Prompt> prompts;
    for (uint32_t i = 0; i < count; i++) {
        std::vector<int32_t> tokens(1 + 17 * i % 90);  // some are longer than a page
        for (size_t t = 0; t < tokens.size(); t++) tokens[t] = int32_t((7 * i + 3 * t + t * t) % 96);
        prompts.push_back({tokens, i});
    }
    return prompts;
}

struct Setting {
    size_t sequences = 64, pages = 0;  // 0: as many as all need
    size_t samples = 1, max_new_tokens = 30;
    Sampling sampling = {.temperature = 1};
    int threads = 2;
    std::vector<int32_t> eos = {5};
};

std::vector<Completion> run(const std::vector<Prompt> &prompts, const Setting &s) {
    std::vector<std::string> notes;
    const ModelConfig config = read_config(directory, notes);
    const GenerationSettings settings{.max_new_tokens = s.max_new_tokens,
                                      .sampling = s.sampling,
                                      .seed = 3,
                                      .samples = s.samples,
                                      .vocabulary = config.V,
                                      .eos = s.eos};
    GenerationRoom room(prompts, settings, config.V, s.sequences);
    if (s.pages) room.pages = s.pages;
    ModelLimits limits;
    limits.mode = Mode::generate, limits.row_tokens = row_multiple, limits.positions = row_multiple;
    room.use(limits);
    const auto model = make_model(make_device<CpuF32>(s.threads), config, limits);
    SelfComm comm;
    Mesh mesh(comm, 1);
    model->allocate(mesh, true, false);
    model->load(HfWeights(directory), 1);
    const auto out = generate(*model, room, prompts, settings);
    model->arena().check_guards();
    return out;
}

void expect_same(const std::vector<Completion> &got, const std::vector<Completion> &want) {
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < want.size(); i++) {
        EXPECT_EQ(got[i].tokens, want[i].tokens) << "completion " << i;
        EXPECT_EQ(got[i].ended, want[i].ended) << "completion " << i;
    }
}

// The logits of a sequence's last token, computed with the whole sequence in one row.
std::vector<float> logits_of(const std::vector<int32_t> &tokens) {
    std::vector<std::string> notes;
    const ModelConfig config = read_config(directory, notes);
    ModelLimits limits;
    limits.mode = Mode::generate, limits.row_tokens = limits.positions = 256;
    limits.cache_pages = limits.sequence_pages = 4, limits.sequences = 1;
    const auto model = make_model(make_device<CpuF32>(), config, limits);
    SelfComm comm;
    Mesh mesh(comm, 1);
    model->allocate(mesh, false, false);
    model->load(HfWeights(directory), 1);
    const Row row = make_row({tokens});
    const float *logits = model->next_logits(row, {true, std::vector<int32_t>(row.T, -1), {}, {}});
    return {logits, logits + config.V};
}

}  // namespace

TEST(Generation, GreedyTakesTheLikeliestOfTheWholeSequence) {
    const auto prompts = some_prompts(6);
    const auto out = run(prompts, {.max_new_tokens = 12, .sampling = {}});
    for (size_t i = 0; i < prompts.size(); i++) {
        auto tokens = prompts[i].tokens;
        for (int32_t token : out[i].tokens) {
            const auto logits = logits_of(tokens);
            const float most = *std::max_element(logits.begin(), logits.end());
            EXPECT_NEAR(logits[size_t(token)], most, 1e-5) << "prompt " << i << ", token " << tokens.size();  // or as likely
            tokens.push_back(token);
        }
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

TEST(Generation, DoesNotDependOnWhatRunsTogether) {
    const auto prompts = some_prompts(20);
    const auto want = run(prompts, {});
    for (size_t sequences : {1, 3, 7}) expect_same(run(prompts, {.sequences = sequences}), want);
    for (int threads : {1, 3}) expect_same(run(prompts, {.threads = threads}), want);
    for (size_t i : {0, 11, 19}) expect_same(run({prompts[i]}, {}), {want[i]});
}

// With fewer pages sequences are preempted, and prompts are computed again.
TEST(Generation, DoesNotDependOnTheCache) {
    const auto prompts = some_prompts(20);
    for (size_t samples : {1, 4}) {
        const auto want = run(prompts, {.samples = samples});
        for (size_t pages : {2, 3, 4, 9}) expect_same(run(prompts, {.pages = pages, .samples = samples}), want);
    }
}

TEST(Generation, SamplesOfAPromptDiffer) {
    const auto prompts = some_prompts(5);
    const auto out = run(prompts, {.samples = 4});
    ASSERT_EQ(out.size(), 20u);
    for (size_t i = 0; i < 20; i += 4)
        for (size_t k = 1; k < 4; k++) EXPECT_NE(out[i].tokens, out[i + k].tokens);
    const auto greedy = run(prompts, {.samples = 3, .sampling = {}});
    for (size_t i = 0; i < 15; i += 3) EXPECT_EQ(greedy[i].tokens, greedy[i + 2].tokens);
}
