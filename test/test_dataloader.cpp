// Steps are defined by their samples: the order, the held-out share, resuming, and rows that never mix documents.
#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <set>

#include "../llmc/core/rng.h"
#include "../llmc/data/dataloader.h"
#include "../llmc/data/tokens.h"
#include "prepared.h"

constexpr size_t longest = 40;

// Documents of 1 to 40 tokens in which about half of the tokens are targets. All ids differ from the padding's.
static Prepared random_documents(size_t documents) {
    Prepared p;
    const Random random{1, Purpose::test, 7};
    uint64_t draw = 0;
    for (size_t i = 0; i < documents; i++) {
        std::vector<int32_t> ids(1 + random.below(draw++, longest));
        std::vector<uint8_t> mask(ids.size());
        for (size_t t = 0; t < ids.size(); t++) {
            ids[t] = int32_t(1 + random.below(draw++, 99));
            mask[t] = t > 0 && random.below(draw++, 2);
        }
        p.add(ids, mask);
    }
    return p;
}

struct Loader : testing::Test {
    static constexpr size_t documents = 103;
    const PreparedFile file{random_documents(documents)};
    const PreparedData data = file.open();
    LoaderOptions options;

    Loader() { options.batch_size = 10, options.row_tokens = 64; }
    std::vector<Row> rows_of(const Step &step) {
        std::vector<Row> rows;
        for (const auto &samples : step.rows) rows.push_back(make_row(data, samples));
        return rows;
    }
    std::vector<size_t> epoch_samples(DataLoader &loader, size_t epoch) {  // the loader is at its first step
        std::vector<size_t> samples;
        for (size_t end = (epoch + 1) * loader.train_samples().size(); loader.cursor() < end;) {
            const Step step = loader.next();
            EXPECT_EQ(step.epoch, epoch);
            samples.insert(samples.end(), step.samples.begin(), step.samples.end());
        }
        return samples;
    }
};

static void expect_same(const Step &a, const Step &b) {
    EXPECT_EQ(a.epoch, b.epoch);
    EXPECT_EQ(a.samples, b.samples);
    EXPECT_EQ(a.tokens, b.tokens);
    EXPECT_EQ(a.target_tokens, b.target_tokens);
    EXPECT_EQ(a.rows, b.rows);
}

static std::vector<size_t> sorted(std::vector<size_t> v) {
    std::sort(v.begin(), v.end());
    return v;
}

TEST_F(Loader, EpochsArePermutations) {
    DataLoader loader(data, options);
    EXPECT_EQ(loader.steps(1), 11u);
    EXPECT_EQ(loader.steps(3), 33u);
    std::vector<size_t> all(documents);
    std::iota(all.begin(), all.end(), size_t(0));
    const auto first = epoch_samples(loader, 0), second = epoch_samples(loader, 1);
    EXPECT_EQ(sorted(first), all);
    EXPECT_EQ(sorted(second), all);
    EXPECT_NE(first, all);
    EXPECT_NE(first, second);

    DataLoader same(data, options);
    EXPECT_EQ(epoch_samples(same, 0), first);
    options.seed++;
    DataLoader other(data, options);
    EXPECT_NE(epoch_samples(other, 0), first);
    options.shuffle = false;
    DataLoader unshuffled(data, options);
    EXPECT_EQ(epoch_samples(unshuffled, 0), all);
    EXPECT_EQ(epoch_samples(unshuffled, 1), all);
}

// Each of n samples comes first in about 1/n of the epochs: a shuffle that leaves something in place would show.
TEST_F(Loader, ShuffleIsUniform) {
    options.max_samples = 5;
    options.batch_size = 5;
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

// Rows of any length hold the same steps, each document as it is. The last step of an epoch is smaller, and each counts its own targets.
TEST_F(Loader, RowsHoldTheDocumentsOfTheirStep) {
    std::vector<std::vector<size_t>> samples;
    for (size_t row_tokens : {40, 64, 1000}) {
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
            for (const Row &row : rows_of(step)) {
                std::vector<std::vector<int32_t>> documents;
                std::vector<std::vector<uint8_t>> masks;
                for (size_t sample : row.documents) {
                    const auto [tokens, mask] = data.document(sample);
                    documents.emplace_back(tokens.begin(), tokens.end()), masks.emplace_back(mask.begin(), mask.end());
                }
                const Row want = make_row(documents, masks);
                for (const auto member : {&Row::tokens, &Row::doc_pos, &Row::doc_begin, &Row::predictors, &Row::targets})
                    EXPECT_EQ(row.*member, want.*member);
                EXPECT_EQ(row.doc_offsets, want.doc_offsets);
                EXPECT_LE(row.doc_offsets.back(), row_tokens);
                in_rows.insert(in_rows.end(), row.documents.begin(), row.documents.end());
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
        EXPECT_TRUE(step.epoch != previous.epoch || previous.tokens + data.length(step.samples[0]) > 100);  // was full
        previous = step;
    }
    EXPECT_EQ(taken, steps);
    options.batch_tokens = 1;
    EXPECT_EQ(DataLoader(data, options).steps(1), documents);  // never fewer than one sample
}

TEST_F(Loader, ResumesAtTheCursor) {
    for (size_t batch_tokens : {0, 150}) {
        options.batch_tokens = batch_tokens;
        DataLoader whole(data, options);
        std::vector<size_t> cursors;
        std::vector<Step> steps;
        for (size_t s = 0; s < 40; s++) {
            cursors.push_back(whole.cursor());
            steps.push_back(whole.next());
        }
        for (size_t s = 0; s < steps.size(); s += 7) {
            DataLoader resumed(data, options);
            resumed.seek(cursors[s]);
            for (size_t i = s; i < steps.size(); i++) expect_same(resumed.next(), steps[i]);
        }
        whole.seek(0);
        expect_same(whole.next(), steps[0]);
    }
}

TEST_F(Loader, HoldsOutAShare) {
    options.eval_fraction = 0.1;
    DataLoader loader(data, options);
    const auto &train = loader.train_samples(), &eval = loader.eval_samples();
    EXPECT_EQ(eval.size(), 10u);
    EXPECT_EQ(train.size(), documents - 10);
    EXPECT_TRUE(std::is_sorted(eval.begin(), eval.end()));
    EXPECT_TRUE(std::is_sorted(train.begin(), train.end()));
    std::set<size_t> both(train.begin(), train.end());
    both.insert(eval.begin(), eval.end());
    EXPECT_EQ(both.size(), documents);
    EXPECT_NE(eval.back(), 9u);  // drawn, not the first ones
    for (size_t e = 0; e < 2; e++) EXPECT_EQ(sorted(epoch_samples(loader, e)), train);
    EXPECT_EQ(DataLoader(data, options).eval_samples(), eval);

    options.eval_fraction = 0.0001;
    EXPECT_EQ(DataLoader(data, options).eval_samples().size(), 1u);
    options.max_samples = 20;
    options.eval_fraction = 0.25;
    DataLoader first_twenty(data, options);
    EXPECT_EQ(first_twenty.eval_samples().size(), 5u);
    EXPECT_LT(std::max(first_twenty.eval_samples().back(), first_twenty.train_samples().back()), 20u);
}

TEST_F(Loader, Refusals) {
    const auto refusal = [&] { return error_of([&] { DataLoader(data, options); }); };
    options.row_tokens = longest - 1;
    size_t longest_document = 0;
    for (size_t i = 0; i < documents; i++)
        if (data.length(i) > data.length(longest_document)) longest_document = i;
    ASSERT_EQ(data.length(longest_document), longest);
    expect_contains(refusal(),
                    {file.path, format("document %zu ", longest_document), "40 tokens", "fix: --row_tokens 40", "--max_len 39"});
    expect_error([&] { pack_samples(data, std::vector<size_t>{longest_document}, 20); }, {file.path, "--row_tokens 40"});
    options.row_tokens = 64;
    options.batch_size = 0;
    expect_contains(refusal(), {"fix: --train_batch_size"});
    options.batch_size = 1;
    options.eval_fraction = 1;
    expect_contains(refusal(), {"eval_fraction is 1"});
    options.eval_fraction = -0.5;
    expect_contains(refusal(), {"eval_fraction is -0.5"});
    options.eval_fraction = 0.5;
    options.max_samples = 1;
    expect_contains(refusal(), {"leaves none to train on"});
}

TEST(Row, FromDocumentsInMemory) {
    const Row row = make_row({{4, 5, 6}, {7, 8}}, {{1, 0, 1}, {1, 1}});  // a mask on a first token: nothing there to predict it
    EXPECT_EQ(row.T, 64u);
    EXPECT_EQ(row.documents, (std::vector<size_t>{0, 1}));
    EXPECT_EQ(row.doc_offsets, (std::vector<size_t>{0, 3, 5}));
    EXPECT_EQ(row.predictors, (std::vector<int32_t>{1, 3}));
    EXPECT_EQ(row.targets, (std::vector<int32_t>{6, 8}));
    EXPECT_EQ(row.doc_pos[4], 1);
    EXPECT_EQ(row.doc_begin[4], 3);
    EXPECT_EQ(row.doc_begin[63], 5);
    EXPECT_EQ(row.doc_pos[63], 58);
    EXPECT_EQ(row.tokens[63], 0);

    const Row prompt = make_row({std::vector<int32_t>(64, 9)});
    EXPECT_EQ(prompt.T, 64u);  // full: no padding
    EXPECT_EQ(prompt.tokens, std::vector<int32_t>(64, 9));
    EXPECT_TRUE(prompt.predictors.empty());
}

// A pair is one sample: its documents are in one row, the chosen one first, and a row holds the pairs whose summed lengths fit.
TEST(Pairs, StayInOneRow) {
    Prepared p;
    p.metadata["kind"] = "pref";
    const Random random{2, Purpose::test, 7};
    for (uint64_t i = 0; i < 60; i++) {
        std::vector<int32_t> ids(2 + random.below(i, longest - 1), 1);
        std::vector<uint8_t> mask(ids.size());
        mask[1] = mask.back() = 1;
        p.add(ids, mask);
    }
    const PreparedFile file(p);
    const PreparedData data = file.open();
    LoaderOptions options;
    options.batch_size = 7, options.row_tokens = 2 * longest;
    DataLoader loader(data, options);
    EXPECT_EQ(loader.steps(1), 5u);
    for (size_t s = 0; s < 5; s++) {
        const Step step = loader.next();
        std::vector<size_t> in_rows;
        size_t tokens = 0, targets = 0;
        for (const auto &samples : step.rows) {
            const Row row = make_row(data, samples), sketch = outline(data, samples);
            EXPECT_LE(row.doc_offsets.back(), options.row_tokens);
            EXPECT_EQ(row.doc_offsets, sketch.doc_offsets);
            EXPECT_EQ(row.documents, sketch.documents);
            ASSERT_EQ(row.documents.size(), 2 * samples.size());
            for (size_t i = 0; i < samples.size(); i++) {
                EXPECT_EQ(row.documents[2 * i], 2 * samples[i]);
                EXPECT_EQ(row.documents[2 * i + 1], 2 * samples[i] + 1);
            }
            in_rows.insert(in_rows.end(), samples.begin(), samples.end());
            tokens += row.doc_offsets.back(), targets += row.predictors.size();
        }
        EXPECT_EQ(sorted(in_rows), sorted(step.samples));
        EXPECT_EQ(tokens, step.tokens);
        EXPECT_EQ(targets, step.target_tokens);
    }
    options.row_tokens = longest;
    expect_error([&] { DataLoader(data, options); }, {"pair ", "in its two answers", "a row holds 40", "fix: --row_tokens"});
}

TEST(Pairs, ARewardModelReadsTheEnds) {
    const Row row = at_ends(make_row({{1, 2, 3}, {4}, {5, 6}}));
    EXPECT_EQ(row.predictors, (std::vector<int32_t>{2, 3, 5}));
    EXPECT_EQ(row.target_documents, (std::vector<int32_t>{0, 1, 2}));
    EXPECT_EQ(row.targets.size(), 3u);
}
