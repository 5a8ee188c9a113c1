// The task eval.
#include <chrono>
#include <cmath>
#include <iostream>
#include <nlohmann/json.hpp>

#include "../core/common.h"
#include "../core/file.h"
#include "../core/json.h"
#include "../data/prepare.h"
#include "../train/evaluate.h"
#include "../train/logger.h"
#include "../train/open_data.h"
#include "../train/open_model.h"
#include "../train/pairs.h"
#include "tasks.h"

// For --scores: writes the value of each document, one JSON object per line.
static void write_scores(const Run &run, const Samples &data, std::span<const size_t> samples,
                         const std::vector<double> &values) {
    std::string lines;
    for (size_t s : samples)
        for (size_t i = data.first(s); i < data.first(s + 1); i++) {
            nlohmann::ordered_json line = {{"document", i}};
            if (run.model.config.reward) line["score"] = values[i];
            else line["logp"] = -values[i], line["tokens"] = data.targets(i);
            lines += line.dump() + "\n";
        }
    write_file(run.options.scores, lines);
}

// Prints the share of pairs that a reward model ranks correctly, and the margins.
static void report_rewards(const Run &run, const Samples &data, std::span<const size_t> samples,
                           const std::vector<double> &values) {
    PairTotals totals;
    for (size_t s : samples) {
        const double c = values[data.first(s)], r = values[data.first(s) + 1];
        totals += {1, reward_loss(c, r, 0, 0).loss / double(samples.size()), c, r, c * c + r * r, double(c > r)};
    }
    nlohmann::ordered_json line = {{"eval_loss", totals.loss}};
    totals.add_to(line, RM, "eval_");
    printf("loss %.6f  accuracy %.4f  margin %.4f  reward %.4f +- %.4f  over %zu pairs\n", totals.loss,
           totals.right / totals.pairs, line["eval_margin"].get<double>(), totals.reward_mean(), totals.reward_std(),
           samples.size());
    if (!run.options.log.empty()) Logger(run.options.log, true, Logger::other_run).write(line);
}

static void report_loss(const Run &run, const LossSums &sums, size_t documents, size_t tokens, double seconds) {
    const double n = sums.targets, loss = sums.nll / n;
    printf(
        "loss %.6f  perplexity %.4f  entropy %.4f  accuracy %.4f  over %.0f target tokens of %zu tokens in %zu documents, %.0f tok/s\n",
        loss, std::exp(loss), sums.entropy / n, sums.correct / n, n, tokens, documents, double(tokens) / seconds);
    if (!run.options.log.empty())
        Logger(run.options.log, true, Logger::other_run)
            .write({{"eval_loss", loss},
                    {"eval_perplexity", std::exp(loss)},
                    {"eval_entropy", sums.entropy / n},
                    {"eval_mean_token_accuracy", sums.correct / n},
                    {"eval_target_tokens", size_t(n)},
                    {"eval_tokens", tokens}});
}

// Returns the sequences {"ids": [[id, ...], ...]} of a request, for a model with this token limit.
static Sequences sequences_of(const std::string &line, size_t most, size_t vocabulary) {
    std::vector<std::vector<int32_t>> all;
    const nlohmann::json request = parse_json(line, "the request");
    if (!request.is_object() || !request.contains("ids"))
        die("the request has no \"ids\"\n  fix: {\"ids\": [[1, 2, 3]]}, a list of token ids for each sequence");
    for (const nlohmann::json &ids : request["ids"]) {
        const std::string where = format("sequence %zu of the request", all.size());
        const nlohmann::json record = {{"ids", ids}};
        all.push_back(Fields(record, where).ids("ids"));
        if (all.back().empty() || all.back().size() > most)
            die("%s has %zu tokens, but it may have 1 to %zu\n  fix: shorten the sequence, or raise --max_len up to the model's positions",
                where.c_str(), all.back().size(), most);
        for (int32_t id : all.back())
            if (id < 0 || size_t(id) >= vocabulary)
                die("%s has token %d, but the model a vocabulary of %zu\n  fix: give ids of the model's own tokenizer",
                    where.c_str(), id, vocabulary);
    }
    return Sequences(std::move(all));
}

// For --data -: answers each request, a line of standard input, with the scores of its sequences, {"scores": [number, ...]}, or with {"error":
// text}.
static int answer_requests(Run &run) {
    const Options &o = run.options;
    if (!run.model.config.reward || run.comm.size > 1)
        die("--data - reads sequences to score, which needs a reward model and one rank\n  fix: --data FILE");
    ModelLimits limits = flag_limits(o);
    limits.mode = Mode::evaluate;
    limits.row_tokens = round_up(o.row_tokens, row_multiple);
    limits.positions = std::min(limits.row_tokens, run.model.config.max_positions);
    const auto model = open_model(run, run.model, limits);
    for (std::string line; std::getline(std::cin, line);) {
        nlohmann::json answer;
        try {
            const Sequences sequences = sequences_of(line, std::min(o.row_tokens, limits.positions), run.model.config.V);
            answer["scores"] = document_values(run, run.model, *model, sequences, first_samples(sequences.size()));
        } catch (const Error &error) {
            answer["error"] = error.what();
        }
        printf("%s\n", answer.dump().c_str());
        fflush(stdout);
    }
    return 0;
}

int evaluate(Run &run) {
    const Options &o = run.options;
    if (o.data == "-") return answer_requests(run);
    const Task like = run.model.config.reward ? RM
                      : token_shards(o.data)  ? PRETRAIN
                                              : SFT;  // raw data is prepared as for this task
    const std::string path = prepared_file(run, like, "data", o.data, prepare_flags(o, like));
    const auto data = open_data(run, path);
    ModelLimits limits;
    agree(run.comm, [&] {
        limits = limits_for(run, Mode::evaluate, *data);
        if (run.model.config.reward && !data->pairs() && o.scores.empty())
            die("%s is a reward model, and %s holds no pairs to rank\n  fix: --scores FILE, for the score of each document",
                o.model.c_str(), o.data.c_str());
    });
    const auto model = open_model(run, run.model, limits);
    const std::vector<size_t> samples = first_samples(o.max_samples ? std::min(o.max_samples, data->size()) : data->size());

    const auto start = std::chrono::steady_clock::now();
    const auto values = document_values(run, run.model, *model, *data, samples);
    const LossSums sums = over_ranks(run.comm, model->take_sums());
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    agree(run.comm, [&] {
        if (!run.model.config.reward && sums.targets == 0)
            die("no token of the first %zu documents of %s is a target\n  fix: raise --max_samples", samples.size(),
                o.data.c_str());
        for (double value : values)
            if (!std::isfinite(value))
                die("the loss of %s on %s is not finite\n  fix: look for NaN in the weights", o.model.c_str(), o.data.c_str());
        if (run.is_main_rank() && !o.scores.empty()) write_scores(run, *data, samples, values);
    });
    if (!run.is_main_rank()) return 0;
    size_t tokens = 0;
    for (size_t s : samples) tokens += data->sample_length(s);
    if (!run.model.config.reward) report_loss(run, sums, data->first(samples.size()), tokens, seconds);
    else if (data->pairs()) report_rewards(run, *data, samples, values);
    return 0;
}
