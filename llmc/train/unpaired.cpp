#include "unpaired.h"

#include <algorithm>
#include <cmath>

#include "../core/common.h"
#include "evaluate.h"
#include "open_model.h"

using nlohmann::ordered_json;

Mismatched::Mismatched(const Samples &data, std::span<const size_t> samples, size_t most) : data_(data) {
    Document before = data.document(samples.back());
    for (size_t s : samples) {
        Document own = data.document(s), pair = own;
        pair.tokens.resize(prompt_length(own)), pair.mask.resize(prompt_length(own));
        const auto first = ptrdiff_t(prompt_length(before));
        pair.tokens.insert(pair.tokens.end(), before.tokens.begin() + first, before.tokens.end());
        pair.mask.insert(pair.mask.end(), before.mask.begin() + first, before.mask.end());
        if (pair.tokens.size() > most) pair.tokens.resize(most), pair.mask.resize(most);
        all_.push_back(std::move(pair));
        before = std::move(own);
    }
}

UnpairedTotals &UnpairedTotals::operator+=(const UnpairedTotals &o) {
    loss += o.loss;
    for (auto of : {&UnpairedTotals::desirable, &UnpairedTotals::undesirable})
        (this->*of).answers += (o.*of).answers, (this->*of).reward += (o.*of).reward, (this->*of).logp += (o.*of).logp;
    return *this;
}

Unpaired::Unpaired(const Run &run) : run_(run) {
    const Options &o = run.options;
    const std::string &loss = *std::ranges::find_if(o.loss_type, is_unpaired);
    if (o.loss_type.size() > 1)
        die("--loss_type %s learns from single answers, and cannot be added to other losses\n  fix: --loss_type %s alone",
            loss.c_str(), loss.c_str());
    if (!(std::isfinite(o.beta) && o.beta > 0))
        die("--beta is %g but must be above 0 for --loss_type %s\n  fix: change --beta", o.beta, loss.c_str());
    if (estimates_kl(o) && o.train_batch_size == 1)
        die("--train_batch_size 1: the mismatched pairs of --loss_type kto are of different samples of a step\n  fix: --train_batch_size 2 or more, or --loss_type apo_zero_unpaired");
}

// ---- before the first step ----------------------------------------------------------------------------------------------------------

// A mismatched pair is as long as a sample may be, even if no sample is: --max_len cuts it, as it has cut the samples.
void Unpaired::reserve(const Samples &data, ModelLimits &limits) {
    if (!estimates_kl(run_.options)) return;
    const size_t most = std::min({run_.options.max_len, run_.options.row_tokens, run_.model.config.max_positions,
                                  reference_spec(run_).config.max_positions});
    size_t longest = 0, prompt = 0, answer = 0;
    for (size_t i = 0; i < data.documents(); i++) {
        const size_t length = data.length(i), before = prompt_length(data.document(i));
        longest = std::max(longest, length), prompt = std::max(prompt, before), answer = std::max(answer, length - before);
    }
    longest_ = std::max({longest_, longest, std::min(prompt + answer, most)});
    limits.positions = std::max(limits.positions, longest_);
    limits.row_tokens = std::max(limits.row_tokens, round_up(longest_, row_multiple));
}

// Notes labels of one kind, and weights that leave one kind the larger part of the loss: the paper recommends a ratio of 1 to 4/3 (equation 8).
static void note_balance(const Run &run, const Samples &data, size_t samples) {
    double desirable = 0;
    for (size_t s = 0; s < samples; s++) desirable += data.desirable(s);
    const double undesirable = double(samples) - desirable;
    if (desirable == 0 || undesirable == 0)
        return run.say("note: all %zu answers of %s are %s, so nothing is learned of the others", samples, data.name().c_str(),
                       undesirable == 0 ? "desirable" : "undesirable");
    const Options &o = run.options;
    const double ratio = o.desirable_weight * desirable / (o.undesirable_weight * undesirable);
    if (!(ratio >= 0.99 && ratio <= 4 / 3. + 0.01))
        run.say(
            "note: the weights of %.0f desirable and %.0f undesirable answers have the ratio %.3g; 1 to 1.33 is usual: --desirable_weight %.3g or --undesirable_weight %.3g",
            desirable, undesirable, ratio, o.undesirable_weight * undesirable / desirable,
            o.desirable_weight * desirable / undesirable);
}

void Unpaired::open(const ModelLimits &limits, const Samples &data, size_t samples, const Samples *eval_data) {
    note_balance(run_, data, samples);
    reference_ = std::make_unique<Reference>(run_, limits);
    reference_->use(data, samples);
    if (eval_data) reference_->use(*eval_data, eval_data->size());
}

// ---- steps ---------------------------------------------------------------------------------------------------------------------------

// Returns z, the same on all ranks.
double Unpaired::mismatched_divergence(Model &model, const Samples &data, std::span<const size_t> samples) {
    if (!estimates_kl(run_.options)) return 0;
    const Mismatched pairs(data, samples, longest_);
    std::vector<double> sum = {0};
    for_own_rows(run_, run_.model, pairs,
                 pack_samples(pairs, first_samples(pairs.size()), run_.options.row_tokens, run_.share_prompts),
                 [&](const Row &row, size_t, size_t) {
                     const auto reference = reference_->logps(model, pairs, row);
                     const auto nll = evaluate_documents(run_.model.config, model, row);
                     for (size_t i = 0; run_.mesh->is_first_of_row() && i < nll.size(); i++) sum[0] += -nll[i] - reference[i];
                 });
    model.take_sums();  // they are not those of the samples
    return divergence(run_.comm.sum(sum)[0], double(pairs.size()));
}

std::vector<Step> Unpaired::draw(Model &model, DataLoader &loader, size_t) {
    Step step = loader.next();
    const auto start = std::chrono::steady_clock::now();
    z_ = mismatched_divergence(model, *step.data, step.samples);
    kl_seconds_ = seconds_since(start);
    return {std::move(step)};
}

// Adds a row's answers to the totals, and returns the derivatives of the loss with respect to the nll of the answers.
std::vector<float> Unpaired::add(const Row &row, std::span<const double> nll, std::span<const double> reference) {
    const Options &o = run_.options;
    UnpairedTotals totals;
    std::vector<float> derivatives;
    for (size_t i = 0; i < nll.size(); i++) {
        const bool desirable = data_->desirable(row.documents[i]);
        const double logp = -nll[i], u = logp - reference[i];
        const AnswerLoss loss = answer_loss({o.beta, o.desirable_weight, o.undesirable_weight}, u, z_, desirable);
        derivatives.push_back(float(-loss.d_logp / answers_));
        totals.loss += loss.loss / answers_;
        AnswerTotals &own = desirable ? totals.desirable : totals.undesirable;
        own.answers++, own.reward += o.beta * u, own.logp += logp;
    }
    if (run_.mesh->is_first_of_row()) totals_ += totals;  // the ranks of a row have the same totals
    return derivatives;
}

void Unpaired::begin(const Step &step, uint64_t) { data_ = step.data, answers_ = double(step.samples.size()); }

void Unpaired::accumulate(Model &model, const Row &row, bool last) {
    const auto reference = reference_->logps(model, *data_, row);
    const auto d_nll = add(row, evaluate_documents(run_.model.config, model, row), reference);
    backward_documents(run_.model.config, model, row, d_nll, last);
}

// The names of the metrics begin with `prefix`. Those of a label without answers are left out.
Measured Unpaired::take(Model &model, const std::string &prefix) {
    const LossSums sums = over_ranks(run_.comm, model.take_sums());
    const UnpairedTotals totals = over_ranks(run_.comm, std::exchange(totals_, {}));
    Measured out;
    out.loss = totals.loss;
    out.metrics = token_metrics(sums, prefix);
    for (const auto &[name, of] : {std::pair("chosen", totals.desirable), {"rejected", totals.undesirable}}) {
        if (of.answers == 0) continue;
        out.metrics[prefix + "rewards/" + name] = of.reward / of.answers;
        out.metrics[prefix + "logps/" + name] = of.logp / of.answers;
    }
    out.text = format("eval loss %.4f", totals.loss);
    if (const double margin = totals.margin(); !std::isnan(margin)) {
        out.metrics[prefix + "rewards/margins"] = margin;
        out.text += format("  margin %.4f", margin);
    }
    if (!estimates_kl(run_.options)) return out;
    out.metrics[prefix + "kl"] = z_;
    out.text += format("  kl %.4f", z_);
    return out;
}

Measured Unpaired::take(Model &model) {
    Measured step = take(model, "");
    if (estimates_kl(run_.options)) step.metrics["kl_s"] = kl_seconds_;
    return step;
}

Measured Unpaired::evaluate(Model &model, const Samples &data, std::span<const size_t> samples) {
    data_ = &data, answers_ = double(samples.size()), z_ = mismatched_divergence(model, data, samples);
    for_own_rows(run_, run_.model, data, pack_samples(data, samples, run_.options.row_tokens, run_.share_prompts),
                 [&](const Row &row, size_t, size_t) {
                     const auto reference = reference_->logps(model, data, row);
                     add(row, evaluate_documents(run_.model.config, model, row), reference);
                 });
    return take(model, "eval_");
}
