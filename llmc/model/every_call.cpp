#include "every_call.h"

#include <algorithm>

#include "../ops/attention_decode.h"

std::vector<double> generate_once(Model &model, const std::vector<int32_t> &text, const ModelLimits &limits) {
    const size_t T = limits.row_tokens, n = limits.sequences, pages = limits.sequence_pages;
    const size_t length = std::max(T / n, row_multiple) / row_multiple * row_multiple, sequences = std::min(n, T / length);
    std::vector<std::vector<int32_t>> prompts(sequences);
    CacheStep step{true, {}, {}, {}},
        next{false, {}, std::vector<int32_t>(sequences * pages), std::vector<int32_t>(sequences, int32_t(length) + 1)};
    for (size_t i = 0; i < sequences; i++) {
        const size_t first_slot = i * pages * cache_page;
        for (size_t t = 0; t < length; t++)
            prompts[i].push_back(text[i * length + t]), step.slots.push_back(int32_t(first_slot + t)), step.states.push_back(-1);
        step.states.back() = int32_t(i);
        next.slots.push_back(int32_t(first_slot + length)), next.states.push_back(int32_t(i));
        for (size_t page = 0; page < pages; page++) next.table[i * pages + page] = int32_t(i * pages + page);
    }
    Row row = make_row(prompts);
    step.slots.resize(row.T, -1), step.states.resize(row.T, -1);
    model.generator().next_logits(row, step);
    row.T = sequences, row.tokens.resize(sequences), row.doc_pos.assign(sequences, int32_t(length));
    model.generator().next_logits(row, next);
    const std::vector<float> logits = model.generator().logits();
    return {logits.begin(), logits.end()};
}

// Every token after the first of a document is a target.
static Row row_of(const std::vector<std::vector<int32_t>> &documents, const ModelConfig &config) {
    std::vector<std::vector<uint8_t>> masks;
    for (const auto &d : documents) masks.emplace_back(d.size(), 1);
    const Row row = make_row(documents, masks);
    return config.reward ? at_ends(row) : row;
}

void make_two_steps(Model &model, const std::vector<std::vector<int32_t>> &documents, const ModelConfig &config,
                    size_t micro_steps) {
    const Row row = row_of(documents, config);
    for (int step = 0; step < 2; step++) {
        model.zero_gradients();
        for (size_t i = 1; config.experts.aux_loss_coef > 0 && micro_steps > 1 && i <= micro_steps; i++)
            model.count_routing(row, i == micro_steps);
        for (size_t i = 1; i <= micro_steps; i++) model.accumulate(row, 1, i == micro_steps);
        model.gradient_norm(), model.update(AdamW{});
    }
}

std::map<std::string, std::vector<double>> make_every_call(Model &model, const std::vector<std::vector<int32_t>> &documents,
                                                           const ModelConfig &config, const ModelLimits &limits) {
    std::map<std::string, std::vector<double>> values;
    std::vector<int32_t> text;
    for (const auto &d : documents) text.insert(text.end(), d.begin(), d.end());
    const Row row = row_of(documents, config);
    const bool trains = limits.mode == Mode::train, is_student = limits.teacher.C > 0;
    const bool computes_losses = !is_student && (trains || limits.mode == Mode::evaluate);
    if (trains) model.randomise(1), model.zero_gradients();
    if (computes_losses) values["losses"] = model.evaluate(row);
    if (computes_losses && trains && (config.lora.embedding || config.lora.head))
        values["losses of the base"] = model.evaluate_base(row);
    if (limits.mode == Mode::teach) model.teach(row);
    if (is_student) {
        const TeacherRow teacher = limits.teacher.is_base ? model.teach(row) : TeacherRow{nullptr, nullptr, limits.teacher.C};
        model.compare(row, teacher), model.distil(row, teacher, 1, false), model.distil(row, teacher, 1, true);
    } else if (trains) {
        model.backward(std::vector<float>(row.predictors.size(), 1.0f), 0.1f, false);
        const auto half_of_squares = [](std::span<const size_t>, std::span<const float> nll) {
            return std::vector<float>(nll.begin(), nll.end());
        };
        if (!config.reward) model.accumulate(row, half_of_squares, 0.1f, false);
        model.accumulate(row, 1, true);
    }
    if (trains) {
        values["gradient norm"] = {model.gradient_norm()};
        model.update(
            AdamW{.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .grad_scale = 1, .step = 1});
    }
    if (is_student) model.take_divergence();
    if (computes_losses) model.take_sums();
    if (limits.cache_pages) values["logits"] = generate_once(model, text, limits);
    return values;
}
