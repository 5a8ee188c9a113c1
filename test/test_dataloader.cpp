// The data loader: the order of samples, steps by samples or by tokens, the held-out share, and rows that keep documents apart.
#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <set>
#include <type_traits>

#include "../llmc/core/rng.h"
#include "../llmc/data/dataloader.h"
#include "../llmc/data/tokens.h"
#include "prepared.h"

constexpr size_t longest = 40;

// Documents of `shortest` to 40 tokens, about half of which are targets. No id is that of padding.
static Prepared random_documents(size_t documents, const char *kind, size_t shortest) {
    Prepared p;
    p.metadata["kind"] = kind;
    const Random random{1, Purpose::test, 7};
    uint64_t draw = 0;
    for (size_t i = 0; i < documents; i++) {
        std::vector<int32_t> ids(shortest + random.below(draw++, longest + 1 - shortest));
        std::vector<uint8_t> mask(ids.size());
        for (size_t t = 0; t < ids.size(); t++) {
            ids[t] = int32_t(1 + random.below(draw++, 99));
            mask[t] = t > 0 && (random.below(draw++, 2) || t < shortest);
        }
        p.add(ids, mask);
    }
    return p;
}

static std::vector<size_t> sorted(std::vector<size_t> v) {
    std::sort(v.begin(), v.end());
    return v;
}

struct Loader : testing::Test {
    static constexpr size_t documents = 103;
    const PreparedFile file{random_documents(documents, "sft", 1)};
    const PreparedData data = file.open();
    LoaderOptions options;

    Loader() { options.batch_size = 10, options.row_tokens = 64; }
    static std::vector<size_t> epoch_samples(DataLoader &loader, size_t epoch) {  // of a loader at the epoch's first step
        std::vector<size_t> samples;
        for (size_t end = (epoch + 1) * loader.train_samples().size(); loader.cursor() < end;) {
            const Step step = loader.next();
            EXPECT_EQ(step.epoch, epoch);
            samples.insert(samples.end(), step.samples.begin(), step.samples.end());
        }
        return samples;
    }
};

TEST_F(Loader, EpochsArePermutations) {
    DataLoader loader(data, options), same(data, options);
    EXPECT_EQ(loader.steps(1), 11u);
    EXPECT_EQ(loader.steps(3), 33u);
    std::vector<size_t> all(documents);
    std::iota(all.begin(), all.end(), size_t(0));
    const auto first = epoch_samples(loader, 0), second = epoch_samples(loader, 1);
    EXPECT_EQ(sorted(first), all);
    EXPECT_EQ(sorted(second), all);
    EXPECT_NE(first, all);
    EXPECT_NE(first, second);
    EXPECT_EQ(epoch_samples(same, 0), first);
    options.seed++;
    DataLoader other(data, options);
    EXPECT_NE(epoch_samples(other, 0), first);
    options.shuffle = false;
    DataLoader unshuffled(data, options);
    for (size_t epoch : {0, 1}) EXPECT_EQ(epoch_samples(unshuffled, epoch), all);
}

// Each of n samples is first in about 1/n of the epochs, and so on: a biased shuffle fails.
TEST_F(Loader, ShuffleIsUniform) {
    options.max_samples = options.batch_size = 5;
    DataLoader loader(data, options);
    const size_t epochs = 5000;
    size_t count[5][5] = {};
    for (size_t e = 0; e < epochs; e++) {
        const Step step = loader.next();
        for (size_t place = 0; place < 5; place++) count[place][step.samples[place]]++;
    }
    const double mean = epochs / 5.0, deviation = std::sqrt(epochs * 0.2 * 0.8);
    for (const auto &place : count)
        for (size_t n : place) EXPECT_LT(std::abs(double(n) - mean), 5 * deviation);  // 25 counts: 5 sigma is 1 in 70000
}

// Steps do not depend on the length of rows. Each row has the documents of its samples, as make_row gives them; the two of a pair are
// neighbours. The last step of an epoch is smaller, and each step counts its own targets.
TEST_F(Loader, RowsHoldTheDocumentsOfTheirStep) {
    for (size_t each : {1, 2}) {  // documents of a sample
        const PreparedFile file(random_documents(each * documents, each == 2 ? "pref" : "sft", each));
        const PreparedData data = file.open();
        std::vector<std::vector<size_t>> samples;
        for (size_t row_tokens : {40 * each, size_t(100), size_t(1000)}) {
            options.row_tokens = row_tokens;
            DataLoader loader(data, options);
            size_t tokens = 0, targets = 0;
            for (size_t s = 0; s < 11; s++) {
                const Step step = loader.next();
                EXPECT_EQ(step.samples.size(), s < 10 ? 10u : 3u);
                if (samples.size() <= s) samples.push_back(step.samples);
                EXPECT_EQ(step.samples, samples[s]);
                std::vector<size_t> in_rows;
                size_t targets_in_rows = 0;
                for (const auto &of_row : step.rows) {
                    std::vector<size_t> numbers;
                    std::vector<std::vector<int32_t>> documents;
                    std::vector<std::vector<uint8_t>> masks;
                    for (size_t sample : of_row)
                        for (size_t d = 0; d < each; d++) {
                            const auto [tokens, mask] = data.document(numbers.emplace_back(each * sample + d));
                            documents.emplace_back(tokens.begin(), tokens.end()), masks.emplace_back(mask.begin(), mask.end());
                        }
                    const Row row = make_row(data, of_row), sketch = outline(data, of_row), want = make_row(documents, masks);
                    for (const auto member : {&Row::tokens, &Row::doc_pos, &Row::doc_begin, &Row::predictors, &Row::targets})
                        EXPECT_EQ(row.*member, want.*member);
                    EXPECT_EQ(row.documents, numbers);
                    EXPECT_EQ(sketch.documents, numbers);
                    EXPECT_EQ(row.doc_offsets, want.doc_offsets);
                    EXPECT_EQ(sketch.doc_offsets, want.doc_offsets);
                    EXPECT_LE(row.doc_offsets.back(), row_tokens);
                    in_rows.insert(in_rows.end(), of_row.begin(), of_row.end());
                    targets_in_rows += row.targets.size();
                }
                EXPECT_EQ(sorted(in_rows), sorted(step.samples));
                EXPECT_EQ(step.target_tokens, targets_in_rows);
                tokens += step.tokens, targets += step.target_tokens;
            }
            EXPECT_EQ(tokens, data.total_tokens());
            EXPECT_EQ(targets, data.total_targets());
            EXPECT_EQ(loader.next().epoch, 1u);
        }
        options.row_tokens = longest;
        if (each == 2)
            expect_error([&] { DataLoader(data, options); },
                         {"pair ", "in its two answers", "a row holds 40", "fix: --row_tokens"});
    }
}

TEST_F(Loader, StepsByTokens) {
    options.batch_tokens = 100;
    DataLoader loader(data, options);
    const size_t steps = loader.steps(2);
    Step previous = loader.next();
    size_t taken = 1;
    for (; loader.cursor() < 2 * documents; taken++) {
        const Step step = loader.next();
        EXPECT_LE(step.tokens, 100u);
        EXPECT_TRUE(step.epoch != previous.epoch || previous.tokens + data.length(step.samples[0]) > 100) << "not full";
        previous = step;
    }
    EXPECT_EQ(taken, steps);
    options.batch_tokens = 1;
    EXPECT_EQ(DataLoader(data, options).steps(1), documents);  // at least one sample
}

TEST_F(Loader, EvaluationSamplesAreHeldOut) {
    options.eval_fraction = 0.1;
    DataLoader loader(data, options);
    const auto &train = loader.train_samples(), &eval = loader.eval_samples();
    EXPECT_EQ(eval.size(), 10u);
    EXPECT_TRUE(std::is_sorted(eval.begin(), eval.end()));
    std::set<size_t> both(train.begin(), train.end());
    both.insert(eval.begin(), eval.end());
    EXPECT_EQ(both.size(), documents);
    EXPECT_NE(eval.back(), 9u);  // random samples, not the first ones
    for (size_t epoch : {0, 1}) EXPECT_EQ(sorted(epoch_samples(loader, epoch)), train);
    EXPECT_EQ(DataLoader(data, options).eval_samples(), eval);
    options.eval_fraction = 0.0001;
    EXPECT_EQ(DataLoader(data, options).eval_samples().size(), 1u);
    options.max_samples = 20, options.eval_fraction = 0.25;
    const DataLoader first_twenty(data, options);
    EXPECT_EQ(first_twenty.eval_samples().size(), 5u);
    EXPECT_LT(std::max(first_twenty.eval_samples().back(), first_twenty.train_samples().back()), 20u);
}

TEST_F(Loader, Refusals) {
    const auto refused = [&](const LoaderOptions &wrong, const std::vector<std::string> &parts) {
        expect_error([&] { DataLoader(data, wrong); }, parts);
    };
    size_t number = 0;  // of the longest document
    for (size_t i = 0; i < documents; i++)
        if (data.length(i) > data.length(number)) number = i;
    LoaderOptions wrong = options;
    wrong.row_tokens = longest - 1;
    refused(wrong, {file.path, format("document %zu ", number), "40 tokens", "fix: --row_tokens 40", "--max_len 39"});
    expect_error([&] { pack_samples(data, std::vector<size_t>{number}, 20); }, {file.path, "--row_tokens 40"});
    wrong = options, wrong.batch_size = 0;
    refused(wrong, {"fix: --train_batch_size"});
    wrong = options, wrong.eval_fraction = 1;
    refused(wrong, {"eval_fraction is 1"});
    wrong.eval_fraction = -0.5;
    refused(wrong, {"eval_fraction is -0.5"});
    wrong.eval_fraction = 0.5, wrong.max_samples = 1;
    refused(wrong, {"leaves none to train on"});
}

TEST(Row, FromDocumentsInMemory) {
    const Row row = make_row({{4, 5, 6}, {7, 8}}, {{1, 0, 1}, {1, 1}});  // a first token is no target: nothing precedes it
    EXPECT_EQ(row.T, 64u);
    EXPECT_EQ(row.documents, (std::vector<size_t>{0, 1}));
    EXPECT_EQ(row.doc_offsets, (std::vector<size_t>{0, 3, 5}));
    EXPECT_EQ(row.predictors, (std::vector<int32_t>{1, 3}));
    EXPECT_EQ(row.targets, (std::vector<int32_t>{6, 8}));
    EXPECT_EQ(row.doc_pos[4], 1);
    EXPECT_EQ(row.doc_begin[4], 3);
    EXPECT_EQ(row.doc_begin[63], 5);  // padding is a document
    EXPECT_EQ(row.doc_pos[63], 58);
    EXPECT_EQ(row.tokens[63], 0);

    const Row prompt = make_row({std::vector<int32_t>(64, 9)});  // a full row has no padding
    EXPECT_EQ(prompt.tokens, std::vector<int32_t>(64, 9));
    EXPECT_TRUE(prompt.predictors.empty());

    const Row ends = at_ends(make_row({{1, 2, 3}, {4}, {5, 6}}));  // as a reward model reads it
    EXPECT_EQ(ends.predictors, (std::vector<int32_t>{2, 3, 5}));
    EXPECT_EQ(ends.target_documents, (std::vector<int32_t>{0, 1, 2}));
    EXPECT_EQ(ends.targets.size(), 3u);
}
