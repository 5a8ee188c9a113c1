#include "dataloader.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <utility>

#include "../core/common.h"
#include "../core/rng.h"
#include "packing.h"

// ---- packing

static void check_lengths(const Samples &data, std::span<const size_t> samples, size_t row_tokens) {
    const auto shorter = [&](size_t a, size_t b) { return data.sample_length(a) < data.sample_length(b); };
    const auto longest = std::max_element(samples.begin(), samples.end(), shorter);
    if (longest == samples.end() || data.sample_length(*longest) <= row_tokens) return;
    const size_t length = data.sample_length(*longest);
    die("%s: %s %zu has %zu tokens%s, the most of any, but a row holds %zu\n  fix: --row_tokens %zu, or prepare the data again with "
        "--max_len %zu and --truncation",
        data.name().c_str(), data.pairs() ? "pair" : "document", *longest, length, data.pairs() ? " in its two answers" : "",
        row_tokens, length, data.pairs() ? row_tokens / 2 : row_tokens);
}

// Samples that are packed together, because they share a prompt.
struct Bundle {
    std::vector<size_t> samples;
    size_t tokens;
};

static std::vector<Bundle> bundles_of(const Samples &data, std::span<const size_t> samples, size_t row_tokens) {
    std::vector<Bundle> bundles;
    std::map<std::vector<int32_t>, size_t> latest;  // the last bundle of each prompt
    const auto tokens_of = [&](const std::vector<size_t> &row) { return outline(data, row, true).doc_offsets.back(); };
    for (size_t s : samples) {
        const Document first = data.document(data.first(s));
        const std::vector<int32_t> prompt(first.tokens.begin(), first.tokens.begin() + ptrdiff_t(prompt_length(first)));
        const auto found = latest.find(prompt);
        if (found != latest.end()) {
            Bundle &with = bundles[found->second];
            const size_t last = with.samples.back(), more = tokens_of({last, s}) - tokens_of({last});
            if (with.tokens + more <= row_tokens) {
                with.samples.push_back(s), with.tokens += more;
                continue;
            }
        }
        latest[prompt] = bundles.size();
        bundles.push_back({{s}, tokens_of({s})});
    }
    return bundles;
}

std::vector<std::vector<size_t>> pack_samples(const Samples &data, std::span<const size_t> samples, size_t row_tokens,
                                              bool share_prompts) {
    check_lengths(data, samples, row_tokens);
    std::vector<Bundle> bundles;
    if (share_prompts) bundles = bundles_of(data, samples, row_tokens);
    else
        for (size_t s : samples) bundles.push_back({{s}, data.sample_length(s)});
    std::vector<size_t> lengths;
    for (const Bundle &bundle : bundles) lengths.push_back(bundle.tokens);
    std::vector<std::vector<size_t>> rows;
    for (const auto &row : pack_best_fit(lengths, row_tokens)) {
        auto &of_row = rows.emplace_back();
        for (size_t i : row) of_row.insert(of_row.end(), bundles[i].samples.begin(), bundles[i].samples.end());
    }
    return rows;
}

// ---- steps

static std::vector<size_t> shuffled(std::vector<size_t> v, Random random) {  // Fisher and Yates
    for (size_t i = v.size(); i > 1; i--) std::swap(v[i - 1], v[random.below(i - 1, i)]);
    return v;
}

DataLoader::DataLoader(const Samples &data, const LoaderOptions &options) : data_(data), options_(options) {
    if (options.batch_size == 0 && options.batch_tokens == 0)
        die("an optimizer step needs samples\n  fix: --train_batch_size 1 or more");
    if (!(options.eval_fraction >= 0 && options.eval_fraction < 1))
        die("eval_fraction is %g but must be at least 0 and less than 1\n  fix: --eval_fraction 0.05", options.eval_fraction);
    const size_t used = options.max_samples ? std::min(options.max_samples, data.size()) : data.size();
    train_ = first_samples(used);
    check_lengths(data, train_, options.row_tokens);  // at the start, not only when a sample is drawn
    if (options.eval_fraction > 0) {
        const size_t held_out = std::max<size_t>(1, size_t(std::llround(options.eval_fraction * double(used))));
        if (held_out >= used)
            die("%s: eval_fraction %g of %zu samples leaves none to train on\n  fix: lower --eval_fraction, or use --eval_data",
                data.name().c_str(), options.eval_fraction, used);
        const auto drawn = shuffled(train_, Random{options.seed, Purpose::holdout, 0});
        eval_.assign(drawn.begin(), drawn.begin() + ptrdiff_t(held_out));
        train_.assign(drawn.begin() + ptrdiff_t(held_out), drawn.end());
        std::sort(eval_.begin(), eval_.end());
        std::sort(train_.begin(), train_.end());
    }
    order_ = order(0);
}

std::vector<size_t> DataLoader::order(size_t epoch) const {
    return options_.shuffle ? shuffled(train_, Random{options_.seed, Purpose::shuffle, uint32_t(epoch)}) : train_;
}

// Returns the end of the step that begins at index `begin` of the epoch's order.
size_t DataLoader::step_end(std::span<const size_t> order, size_t begin) const {
    if (options_.batch_tokens == 0) return std::min(begin + options_.batch_size, order.size());
    size_t end = begin + 1, tokens = data_.sample_length(order[begin]);
    while (end < order.size() && tokens + data_.sample_length(order[end]) <= options_.batch_tokens)
        tokens += data_.sample_length(order[end++]);
    return end;
}

size_t DataLoader::steps(size_t epochs) const {
    if (options_.batch_tokens == 0) return epochs * ceil_div(train_.size(), options_.batch_size);
    size_t steps = 0;
    for (size_t epoch = 0; epoch < epochs; epoch++) {  // the number of steps depends on the order of samples
        const auto samples = order(epoch);
        for (size_t begin = 0; begin < samples.size(); begin = step_end(samples, begin)) steps++;
    }
    return steps;
}

Step DataLoader::next() {
    Step step{};
    step.data = &data_, step.begin = cursor_;
    step.epoch = cursor_ / train_.size();
    if (step.epoch != order_epoch_) {
        order_ = order(step.epoch);
        order_epoch_ = step.epoch;
    }
    const size_t begin = cursor_ % train_.size(), end = step_end(order_, begin);
    cursor_ += end - begin;

    step.samples.assign(order_.begin() + ptrdiff_t(begin), order_.begin() + ptrdiff_t(end));
    for (size_t s : step.samples) {
        step.tokens += data_.sample_length(s);
        step.target_tokens += data_.sample_targets(s);
    }
    step.rows = pack_samples(data_, step.samples, options_.row_tokens, options_.share_prompts);
    return step;
}
