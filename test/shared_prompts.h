// Rows that share prompts give the values and gradients of rows that do not.
#pragma once
#include <map>

#include "golden.h"
#include "models.h"

// Answers to prompts, of which some have one answer and one is too short to share; before and behind them, documents without a prompt.
class Answers final : public Samples {
  public:
    explicit Answers(bool pairs, size_t repeats = 1) : pairs_(pairs) {
        size_t seed = 1;
        const auto ids = [&](size_t n) {
            std::vector<int32_t> out;
            for (size_t i = 0; i < n; i++) out.push_back(int32_t(3 + (seed = seed * 48271 % 2147483647) % 90));
            return out;
        };
        const auto add = [&](std::vector<int32_t> prompt, size_t answer) {
            std::vector<uint8_t> mask(prompt.size(), 0);
            for (int32_t id : ids(answer))
                prompt.push_back(id), mask.push_back(mask.size() % 5 != 4);  // as if a tool had written some
            all_.push_back({prompt, mask});
        };
        for (size_t i = 0; i < repeats; i++)
            for (const auto &[prompt, answers] : std::map<size_t, std::vector<size_t>>{
                     {1, {5, 6}}, {2, {9, 1}}, {23, {7}}, {30, {11, 4, 19, 8}}, {31, {40, 3}}, {33, {2, 30, 2, 2, 2, 2}}}) {
                const auto begin = ids(prompt);
                for (size_t answer : answers) add(begin, answer);
                if (pairs && answers.size() % 2) add(begin, 12);
            }
        all_.push_back({ids(9), std::vector<uint8_t>(9, 0)});
        all_.push_back({ids(8), {0, 1, 1, 1, 1, 1, 1, 1}});
    }
    size_t documents() const override { return all_.size(); }
    size_t length(size_t i) const override { return all_[i].tokens.size(); }
    size_t targets(size_t i) const override { return size_t(std::ranges::count(all_[i].mask, 1)); }
    Document document(size_t i) const override { return all_[i]; }
    const InputFile &file() const override { die("answers in memory come from no file"); }
    bool pairs() const override { return pairs_; }

  private:
    std::vector<Document> all_;
    bool pairs_;
};

struct Measures {
    std::map<std::pair<size_t, size_t>, double> values;  // by document, and by target or score
    std::vector<float> gradient;
    size_t tokens = 0;
    double aux_loss = 0;
};

// Evaluates the samples, and computes the gradient of a sum of their values in which each one has its own weight.
template <class Dev> Measures measure(Dev dev, const Golden &g, const Samples &data, const TrainedOptions &o) {
    Trained<Dev> t(dev, g, o);
    t.model->zero_gradients();
    Measures out;
    std::vector<Row> rows;
    for (const auto &samples : pack_samples(data, first_samples(data.size()), o.row_tokens, o.share_prompts))
        rows.push_back(make_row(data, samples, o.share_prompts));
    for (size_t i = 0; g.config.experts.aux_loss_coef > 0 && i < rows.size(); i++)
        t.model->count_routing(rows[i], i + 1 == rows.size());
    for (Row &row : rows) {
        if (g.config.reward) row = at_ends(std::move(row));
        out.tokens += row.doc_offsets.back();
        const auto values = t.model->evaluate(row);
        std::vector<float> weights;
        std::map<size_t, size_t> count;
        for (size_t n = 0; n < values.size(); n++) {
            const size_t document = row.documents[size_t(row.target_documents[n])], i = count[document]++;
            out.values[{document, i}] = values[n];
            weights.push_back(0.01f * float((7 * document + 3 * i) % 11));
        }
        t.model->backward(weights, 0.02f, false);
        t.model->arena().check_guards();
    }
    out.gradient = t.gradient();
    out.aux_loss = g.config.experts.number ? t.model->routing().aux_loss() : 0;
    return out;
}

// `allowed`: the roundings of a type, by which sums in another order may differ.
template <class Dev>
void expect_shared_prompts(Dev dev, const std::string &family, bool pairs, double allowed, TrainedOptions o = {}) {
    Golden g(family);
    if (g.config.experts.number) g.config.experts.aux_loss_coef = 0.5;
    if (pairs) make_reward(g.config), g.config.tied = false;
    const Answers data(pairs);
    o.row_tokens = 192, o.guards = true;
    const Measures apart = measure(dev, g, data, o);
    o.share_prompts = true;
    const Measures shared = measure(dev, g, data, o);
    EXPECT_LT(shared.tokens, apart.tokens - 200);
    ASSERT_EQ(shared.values.size(), apart.values.size());
    double largest = 0, scale = 0;
    for (const auto &[at, value] : apart.values)
        largest = std::max(largest, std::abs(shared.values.at(at) - value)), scale = std::max(scale, std::abs(value));
    expect_at_most("shared prompts, values", largest / scale, allowed);
    expect_at_most("shared prompts, auxiliary loss", std::abs(shared.aux_loss - apart.aux_loss), allowed);
    expect_at_most("shared prompts, gradient, L2", relative_distance(shared.gradient, apart.gradient), allowed);
}
