#include "preference.h"

#include <algorithm>
#include <cmath>

#include "../core/common.h"

static constexpr const char *names[] = {"sigmoid",  "sigmoid_norm", "robust",   "hinge",     "ipo_sum",
                                        "ipo_mean", "apo_zero",     "apo_down", "sppo_hard", "nca_pair",
                                        "bco_pair", "exo_pair",     "discopop", "simpo",     "orpo"};

PairLossType pair_loss_type(const std::string &name) {
    std::string list;
    for (size_t i = 0; i < std::size(names); i++) {
        if (name == names[i]) return PairLossType(i);
        list += names[i] + std::string(", ");
    }
    list += "sft";  // of PreferenceLoss
    if (name == "aot" || name == "aot_unpaired")
        die("--loss_type %s sorts the pairs of a micro-batch, so its value depends on how a step is split\n  fix: one of %s",
            name.c_str(), list.c_str());
    die("there is no --loss_type \"%s\"\n  fix: one of %s", name.c_str(), list.c_str());
}

bool needs_reference(PairLossType type) { return type != PairLossType::simpo && type != PairLossType::orpo; }

void check_pair_loss(PairLossType type, const PairLossOptions &o) {
    const char *name = names[size_t(type)];
    const auto must = [&](bool good, const char *flag, double value, const char *rule) {
        if (!good) die("--%s is %g but must be %s for --loss_type %s\n  fix: another --%s", flag, value, rule, name, flag);
    };
    must(std::isfinite(o.beta) && o.beta > 0, "beta", o.beta, "above 0");
    must(o.label_smoothing >= 0 && o.label_smoothing < 0.5, "label_smoothing", o.label_smoothing, "at least 0 and less than 0.5");
    if (type == PairLossType::exo_pair) must(o.label_smoothing > 0, "label_smoothing", o.label_smoothing, "above 0");
}

namespace {

// A number and its derivatives with respect to c and r, so that a loss is written only once, as its formula.
struct Dual {
    double value, c = 0, r = 0;
    Dual(double value, double c = 0, double r = 0) : value(value), c(c), r(r) {}
    friend Dual operator+(Dual a, Dual b) { return {a.value + b.value, a.c + b.c, a.r + b.r}; }
    friend Dual operator-(Dual a, Dual b) { return {a.value - b.value, a.c - b.c, a.r - b.r}; }
    friend Dual operator*(Dual a, Dual b) {
        return {a.value * b.value, a.c * b.value + a.value * b.c, a.r * b.value + a.value * b.r};
    }
    friend Dual operator-(Dual a) { return 0 - a; }
    Dual map(double f, double slope) const { return {f, slope * c, slope * r}; }  // f(value) and f'(value)
};

double sigmoid(double x) { return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x)); }
double log_sigmoid(double x) { return std::min(x, 0.0) - std::log1p(std::exp(-std::abs(x))); }

Dual s(Dual x) { return x.map(sigmoid(x.value), sigmoid(x.value) * sigmoid(-x.value)); }
Dual log_s(Dual x) { return x.map(log_sigmoid(x.value), sigmoid(-x.value)); }
Dual exp(Dual x) { return x.map(std::exp(x.value), std::exp(x.value)); }
Dual square(Dual x) { return x * x; }
Dual positive(Dual x) { return x.value > 0 ? x : Dual(0); }

// a - log(1 - exp(a)) of a mean log-probability, which is below 0; a mean of exactly 0 is replaced by a number just below.
Dual odds(Dual a) {
    const double x = std::min(a.value, -1e-12);
    return a.map(x - std::log(-std::expm1(x)), -1 / std::expm1(x));
}

Dual formula(PairLossType type, const PairLossOptions &o, const PairSums &p) {
    const Dual c{p.chosen, 1, 0}, r{p.rejected, 0, 1};
    const double beta = o.beta, e = o.label_smoothing, n = 1 / p.chosen_tokens, m = 1 / p.rejected_tokens;
    const Dual u = c - p.reference_chosen, v = r - p.reference_rejected, x = beta * (u - v), x_norm = beta * (n * u - m * v);
    const double half = 1 / (2 * beta);
    switch (type) {
        case PairLossType::sigmoid: return -((1 - e) * log_s(x) + e * log_s(-x));
        case PairLossType::sigmoid_norm: return -((1 - e) * log_s(x_norm) + e * log_s(-x_norm));
        case PairLossType::robust: return 1 / (1 - 2 * e) * (e * log_s(-x) - (1 - e) * log_s(x));
        case PairLossType::hinge: return positive(1 - x);
        case PairLossType::ipo_sum: return square(u - v - half);
        case PairLossType::ipo_mean: return square(n * u - m * v - half);
        case PairLossType::apo_zero: return 1 - s(beta * u) + s(beta * v);
        case PairLossType::apo_down: return s(beta * u) + 1 - s(x);
        case PairLossType::sppo_hard: return square(u - half) + square(v + half);
        case PairLossType::nca_pair: return -log_s(beta * u) - 0.5 * (log_s(-beta * u) + log_s(-beta * v));
        case PairLossType::bco_pair: return -log_s(beta * u) - log_s(-beta * v);
        case PairLossType::exo_pair: return s(x) * (log_s(x) - std::log(1 - e)) + s(-x) * (log_s(-x) - std::log(e));
        case PairLossType::discopop: return (1 - s(20 * x)) * -log_s(x) + s(20 * x) * exp(-x);
        case PairLossType::simpo: return -log_s(beta * (n * c - m * r) - o.gamma);
        case PairLossType::orpo: return -(n * c) - beta * log_s(odds(n * c) - odds(m * r));
    }
    die("no such loss: %d", int(type));
}

}  // namespace

PairLoss pair_loss(PairLossType type, const PairLossOptions &options, const PairSums &pair) {
    const Dual loss = formula(type, options, pair);
    return {loss.value, loss.c, loss.r};
}

PreferenceLoss::PreferenceLoss(const std::vector<std::string> &types, const std::vector<double> &weights,
                               const PairLossOptions &options, double nll)
    : options_(options), nll_(nll) {
    if (!weights.empty() && weights.size() != types.size())
        die("--loss_weights has %zu numbers for the %zu losses of --loss_type\n  fix: one for each, or none for 1 each",
            weights.size(), types.size());
    for (size_t i = 0; i < types.size(); i++) {
        const double weight = weights.empty() ? 1 : weights[i];
        if (types[i] == "sft") {
            sft_ += weight;
            continue;
        }
        terms_.emplace_back(pair_loss_type(types[i]), weight);
        check_pair_loss(terms_.back().first, options);
    }
    if (terms_.empty() && sft_ == 0 && nll == 0) die("--loss_type is empty\n  fix: sigmoid, say");
}

bool PreferenceLoss::needs_reference() const {
    return std::any_of(terms_.begin(), terms_.end(), [](const auto &term) { return ::needs_reference(term.first); });
}

PairLoss PreferenceLoss::operator()(const PairSums &pair, const StepSize &step) const {
    const double of_chosen = sft_ / step.chosen_tokens + nll_ / (pair.chosen_tokens * step.pairs);
    PairLoss sum{-pair.chosen * of_chosen, -of_chosen, 0};
    for (const auto &[type, weight] : terms_) {
        const PairLoss term = pair_loss(type, options_, pair);
        const double share = weight / step.pairs;
        sum.loss += share * term.loss, sum.d_chosen += share * term.d_chosen, sum.d_rejected += share * term.d_rejected;
    }
    return sum;
}

PairLoss reward_loss(double chosen, double rejected, double margin, double center) {
    const Dual c{chosen, 1, 0}, r{rejected, 0, 1};
    const Dual loss = -log_s(c - r - margin) + center * square(c + r);
    return {loss.value, loss.c, loss.r};
}
