#include "pairs.h"

#include <cmath>

#include "../core/common.h"
#include "../data/packing.h"
#include "evaluate.h"

using nlohmann::ordered_json;

PairTotals &PairTotals::operator+=(const PairTotals &o) {
    pairs += o.pairs, loss += o.loss, chosen_reward += o.chosen_reward, rejected_reward += o.rejected_reward;
    squared_rewards += o.squared_rewards, right += o.right, chosen_logp += o.chosen_logp, rejected_logp += o.rejected_logp;
    return *this;
}

double PairTotals::reward_std() const {
    const double n = 2 * pairs, mean = reward_mean();
    return std::sqrt(std::max(0.0, (squared_rewards - n * mean * mean) / (n - 1)));
}

void PairTotals::add_to(ordered_json &line, Task task, const std::string &prefix) const {
    line[prefix + "rewards/chosen"] = chosen_reward / pairs;
    line[prefix + "rewards/rejected"] = rejected_reward / pairs;
    line[prefix + (task == RM ? "accuracy" : "rewards/accuracies")] = right / pairs;
    line[prefix + (task == RM ? "margin" : "rewards/margins")] = (chosen_reward - rejected_reward) / pairs;
    if (task == RM) return;
    line[prefix + "logps/chosen"] = chosen_logp / pairs;
    line[prefix + "logps/rejected"] = rejected_logp / pairs;
}

StepSize step_size(const Samples &data, std::span<const size_t> samples) {
    StepSize size{double(samples.size()), 0};
    for (size_t s : samples) size.chosen_tokens += double(data.targets(data.first(s)));
    return size;
}

Pairs::Pairs(const Run &run) : run_(run) {
    const Options &o = run.options;
    if (run.task == RM) return;
    preference_.emplace(o.loss_type, o.loss_weights, PairLossOptions{o.beta, o.label_smoothing, o.simpo_gamma}, o.nll_loss_coef);
    if (!preference_->needs_reference() && !o.ref_model.empty())
        run.say("note: this loss needs no reference; --ref_model %s is not read", o.ref_model.c_str());
}

std::vector<CoResidentModel> Pairs::co_residents() const {
    if (!preference_ || !preference_->needs_reference()) return {};
    return Reference::co_residents(run_);
}

void Pairs::open(const ModelLimits &limits, const Samples &data, size_t pairs, const Samples *eval_data) {
    const auto expect_margins = [&](const Samples &samples) {
        if (!samples.has_margins())
            die("--margin_loss_enable needs margins, but the pairs of %s have none\n  fix: leave it out, or prepare records with a field \"margin\"",
                samples.name().c_str());
    };
    if (run_.task == RM && run_.options.margin_loss_enable)
        agree(run_.comm, [&] {
            expect_margins(data);
            if (eval_data) expect_margins(*eval_data);
        });
    if (!preference_ || !preference_->needs_reference()) return;
    reference_ = std::make_unique<Reference>(run_, limits);
    reference_->use(data, pairs);
    if (eval_data) reference_->use(*eval_data, eval_data->size());
}

// Computes the loss from the rewards of a reward model, or from the log-probabilities of a language model.
PairLoss Pairs::loss_of(size_t pair, const PairSums &p) const {
    if (preference_) return (*preference_)(p, size_);
    const Options &o = run_.options;
    PairLoss loss =
        reward_loss(p.chosen, p.rejected, o.margin_loss_enable ? data_->margin(pair) : 0, o.center_rewards_coefficient);
    return {loss.loss / size_.pairs, loss.d_chosen / size_.pairs, loss.d_rejected / size_.pairs};
}

// Returns the reference's log p of a row's documents, or zeros without a reference. It is called before the model evaluates the row.
std::vector<double> Pairs::reference_logps(Model &model, const Row &row) const {
    return reference_ ? reference_->logps(model, *data_, row) : std::vector<double>(row.documents.size());
}

// Adds a row's pairs to the totals, and returns the derivatives of the loss with respect to the documents' values.
std::vector<float> Pairs::add(const Row &row, std::span<const double> values, std::span<const double> reference) {
    const Samples &data = *data_;
    const double sign = run_.task == RM ? 1 : -1;  // a language model's values are nll
    const double scale = run_.task == RM ? 1 : run_.options.beta;
    PairTotals totals;
    std::vector<float> weights(values.size());
    for (size_t i = 0; i < values.size(); i += 2) {
        const size_t chosen = row.documents[i], rejected = row.documents[i + 1];
        const PairSums p{sign * values[i], sign * values[i + 1],         reference[i],
                         reference[i + 1], double(data.targets(chosen)), double(data.targets(rejected))};
        const PairLoss loss = loss_of(chosen / 2, p);
        weights[i] = float(sign * loss.d_chosen);
        weights[i + 1] = float(sign * loss.d_rejected);
        const double u = scale * (p.chosen - p.reference_chosen), v = scale * (p.rejected - p.reference_rejected);
        totals += {1, loss.loss, u, v, u * u + v * v, double(u > v), p.chosen, p.rejected};
    }
    if (run_.mesh->is_first_of_row()) totals_ += totals;  // the ranks of a row have the same totals
    return weights;
}

void Pairs::begin(const Step &step, uint64_t) { data_ = step.data, size_ = step_size(*step.data, step.samples); }

void Pairs::accumulate(Model &model, const Row &row, bool last) {
    const auto reference = reference_logps(model, row);
    const auto d_values = add(row, evaluate_documents(run_.model.config, model, row), reference);
    backward_documents(run_.model.config, model, row, d_values, last);
}

PairTotals Pairs::take_totals() { return over_ranks(run_.comm, std::exchange(totals_, {})); }

Measured Pairs::take(Model &model) {
    Measured step;
    const LossSums sums = over_ranks(run_.comm, model.take_sums());
    const PairTotals totals = take_totals();
    step.loss = totals.loss;
    if (!run_.model.config.reward) step.metrics = token_metrics(sums, "");
    totals.add_to(step.metrics, run_.task, "");
    return step;
}

Measured Pairs::evaluate(Model &model, const Samples &data, std::span<const size_t> samples) {
    data_ = &data, size_ = step_size(data, samples);
    for_own_rows(run_, run_.model, data, pack_samples(data, samples, run_.options.row_tokens, run_.share_prompts),
                 [&](const Row &row, size_t, size_t) {
                     const auto reference = reference_logps(model, row);
                     add(row, evaluate_documents(run_.model.config, model, row), reference);
                 });
    const LossSums sums = over_ranks(run_.comm, model.take_sums());
    const PairTotals totals = evaluated_ = take_totals();
    Measured out;
    out.loss = totals.loss;
    if (!run_.model.config.reward) out.metrics = token_metrics(sums, "eval_");
    totals.add_to(out.metrics, run_.task, "eval_");
    out.text = format("eval loss %.4f  accuracy %.4f  margin %.4f", totals.loss, totals.right / totals.pairs,
                      (totals.chosen_reward - totals.rejected_reward) / totals.pairs);
    return out;
}

// Users of a reward model can normalise its rewards with their mean and deviation.
void Pairs::describe(ModelConfig &config) const {
    if (!config.reward || evaluated_.pairs == 0) return;
    config.source["mean"] = evaluated_.reward_mean();
    config.source["std"] = std::max(evaluated_.reward_std(), 1e-8);
}
