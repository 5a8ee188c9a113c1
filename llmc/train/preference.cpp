#include "preference.h"

#include <algorithm>
#include <cmath>

#include "../core/common.h"

namespace preference {

// A number with its derivatives with respect to c and r, so each loss is written only as its formula.
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

// Returns a - log(1 - exp(a)) for a mean log-probability, which is below 0; a mean of exactly 0 is replaced by a number just below.
Dual odds(Dual a) {
    const double x = std::min(a.value, -1e-12);
    return a.map(x - std::log(-std::expm1(x)), -1 / std::expm1(x));
}

// The variables of the formulas, named as in preference.h.
struct Terms {
    double beta, e, gamma, n, m;  // n, m: 1 / (tokens of the chosen answer), 1 / (tokens of the rejected answer)
    Dual c, r, u, v, x;
    Terms(const PairLossOptions &o, const PairSums &p)
        : beta(o.beta),
          e(o.label_smoothing),
          gamma(o.gamma),
          n(1 / p.chosen_tokens),
          m(1 / p.rejected_tokens),
          c{p.chosen, 1, 0},
          r{p.rejected, 0, 1},
          u(c - p.reference_chosen),
          v(r - p.reference_rejected),
          x(beta * (u - v)) {}
    double half() const { return 1 / (2 * beta); }
    Dual x_norm() const { return beta * (n * u - m * v); }
};

}  // namespace preference
using namespace preference;

struct PreferenceFormula {
    const char *name;
    bool reference;  // true if it needs a reference model
    Dual (*loss)(const Terms &);
};

// clang-format off
static const PreferenceFormula formulas[] = {
    {"sigmoid",      true,  [](const Terms &t) { return -((1 - t.e) * log_s(t.x) + t.e * log_s(-t.x)); }},
    {"sigmoid_norm", true,  [](const Terms &t) { return -((1 - t.e) * log_s(t.x_norm()) + t.e * log_s(-t.x_norm())); }},
    {"robust",       true,  [](const Terms &t) { return 1 / (1 - 2 * t.e) * (t.e * log_s(-t.x) - (1 - t.e) * log_s(t.x)); }},
    {"hinge",        true,  [](const Terms &t) { return positive(1 - t.x); }},
    {"ipo_sum",      true,  [](const Terms &t) { return square(t.u - t.v - t.half()); }},
    {"ipo_mean",     true,  [](const Terms &t) { return square(t.n * t.u - t.m * t.v - t.half()); }},
    {"apo_zero",     true,  [](const Terms &t) { return 1 - s(t.beta * t.u) + s(t.beta * t.v); }},
    {"apo_down",     true,  [](const Terms &t) { return s(t.beta * t.u) + 1 - s(t.x); }},
    {"sppo_hard",    true,  [](const Terms &t) { return square(t.u - t.half()) + square(t.v + t.half()); }},
    {"nca_pair",     true,  [](const Terms &t) { return -log_s(t.beta * t.u) - 0.5 * (log_s(-t.beta * t.u) + log_s(-t.beta * t.v)); }},
    {"bco_pair",     true,  [](const Terms &t) { return -log_s(t.beta * t.u) - log_s(-t.beta * t.v); }},
    {"exo_pair",     true,  [](const Terms &t) { return s(t.x) * (log_s(t.x) - std::log(1 - t.e)) + s(-t.x) * (log_s(-t.x) - std::log(t.e)); }},
    {"discopop",     true,  [](const Terms &t) { return (1 - s(20 * t.x)) * -log_s(t.x) + s(20 * t.x) * exp(-t.x); }},
    {"simpo",        false, [](const Terms &t) { return -log_s(t.beta * (t.n * t.c - t.m * t.r) - t.gamma); }},
    {"orpo",         false, [](const Terms &t) { return -(t.n * t.c) - t.beta * log_s(odds(t.n * t.c) - odds(t.m * t.r)); }},
};
// clang-format on

std::string preference_names() {
    std::string list;
    for (const PreferenceFormula &f : formulas) list += std::string(f.name) + ", ";
    return list + "sft, kto, apo_zero_unpaired";  // of PreferenceLoss, and of answer_loss
}

const PreferenceFormula &preference_formula(const std::string &name) {
    for (const PreferenceFormula &f : formulas)
        if (name == f.name) return f;
    const std::string fix = "fix: use one of " + preference_names();
    if (name == "aot" || name == "aot_unpaired")
        die("--loss_type %s sorts the pairs of a micro-batch, so its value depends on the split of a step\n  %s", name.c_str(),
            fix.c_str());
    die("there is no --loss_type \"%s\"\n  %s", name.c_str(), fix.c_str());
}

bool needs_reference(const PreferenceFormula &f) { return f.reference; }

static constexpr PairSums any_pair{-1, -2, -1, -1, 1, 1};

bool smooths_labels(const std::string &name) {
    const auto loss = [&](const PreferenceFormula &f, double smoothing) {
        return pair_loss(f, {.label_smoothing = smoothing}, any_pair).loss;
    };
    return std::ranges::any_of(formulas,
                               [&](const PreferenceFormula &f) { return name == f.name && loss(f, 0.1) != loss(f, 0.2); });
}

void check_options(const PreferenceFormula &f, const PairLossOptions &o) {
    const auto must = [&](bool good, const char *flag, double value, const char *rule) {
        if (!good) die("--%s is %g but must be %s for --loss_type %s\n  fix: change --%s", flag, value, rule, f.name, flag);
    };
    must(std::isfinite(o.beta) && o.beta > 0, "beta", o.beta, "above 0");
    must(o.label_smoothing >= 0 && o.label_smoothing < 0.5, "label_smoothing", o.label_smoothing, "at least 0 and less than 0.5");
    must(std::isfinite(f.loss({o, any_pair}).value), "label_smoothing", o.label_smoothing,
         "above 0");  // exo_pair takes its logarithm
}

PairLoss pair_loss(const PreferenceFormula &f, const PairLossOptions &options, const PairSums &pair) {
    const Dual loss = f.loss({options, pair});
    return {loss.value, loss.c, loss.r};
}

PreferenceLoss::PreferenceLoss(const std::vector<std::string> &types, const std::vector<double> &weights,
                               const PairLossOptions &options, double nll)
    : options_(options), nll_(nll) {
    if (!weights.empty() && weights.size() != types.size())
        die("--loss_weights has %zu numbers for the %zu losses of --loss_type\n  fix: give one for each, or leave it out for 1 each",
            weights.size(), types.size());
    for (size_t i = 0; i < types.size(); i++) {
        const double weight = weights.empty() ? 1 : weights[i];
        if (types[i] == "sft") {
            sft_ += weight;
            continue;
        }
        terms_.emplace_back(&preference_formula(types[i]), weight);
        check_options(*terms_.back().first, options);
    }
    if (terms_.empty() && sft_ == 0 && nll == 0) die("--loss_type is empty\n  fix: sigmoid, say");
}

bool PreferenceLoss::needs_reference() const {
    return std::any_of(terms_.begin(), terms_.end(), [](const auto &term) { return term.first->reference; });
}

PairLoss PreferenceLoss::operator()(const PairSums &pair, const StepSize &step) const {
    const double of_chosen = sft_ / step.chosen_tokens + nll_ / (pair.chosen_tokens * step.pairs);
    PairLoss sum{-pair.chosen * of_chosen, -of_chosen, 0};
    for (const auto &[formula, weight] : terms_) {
        const PairLoss term = pair_loss(*formula, options_, pair);
        const double share = weight / step.pairs;
        sum.loss += share * term.loss, sum.d_chosen += share * term.d_chosen, sum.d_rejected += share * term.d_rejected;
    }
    return sum;
}

bool is_unpaired(const std::string &loss) { return loss == "kto" || loss == "apo_zero_unpaired"; }

AnswerLoss answer_loss(const AnswerLossOptions &o, double u, double z, bool desirable) {
    const double sign = desirable ? 1 : -1, weight = desirable ? o.desirable_weight : o.undesirable_weight;
    const Dual loss = weight * (1 - s(sign * o.beta * (Dual(u, 1) - z)));
    return {loss.value, loss.c};
}

double divergence(double sum, double pairs) { return std::max(sum / pairs, 0.0); }

PairLoss reward_loss(double chosen, double rejected, double margin, double center) {
    const Dual c{chosen, 1, 0}, r{rejected, 0, 1};
    const Dual loss = -log_s(c - r - margin) + center * square(c + r);
    return {loss.value, loss.c, loss.r};
}
