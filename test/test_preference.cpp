// Preference losses: values by hand and of TRL, derivatives, extremes.
#include "../llmc/train/preference.h"

#include <cmath>
#include <set>
#include <sstream>

#include "../llmc/core/json.h"
#include "check.h"
#include "errors.h"

namespace {

constexpr const char *loss_names[] = {"sigmoid",  "sigmoid_norm", "robust",   "hinge",     "ipo_sum",
                                      "ipo_mean", "apo_zero",     "apo_down", "sppo_hard", "nca_pair",
                                      "bco_pair", "exo_pair",     "discopop", "simpo",     "orpo"};

double value(const std::string &name, const PairSums &p, const PairLossOptions &o) {
    return pair_loss(preference_formula(name), o, p).loss;
}

}  // namespace

// By hand: u = 2, v = -1, so z = 3; beta 0.5.
TEST(Preference, ByHand) {
    const PairSums p{-8, -21, -10, -20, 4, 10};
    const auto s = [](double x) { return 1 / (1 + std::exp(-x)); };
    const auto is = [&](const char *name, double want, double e = 0) {
        EXPECT_NEAR(value(name, p, {.beta = 0.5, .label_smoothing = e, .gamma = 0.3}), want, 1e-13) << name;
    };
    is("sigmoid", -0.9 * std::log(s(1.5)) - 0.1 * std::log(s(-1.5)), 0.1);
    is("sigmoid_norm", -std::log(s(0.5 * (2 / 4. + 1 / 10.))));
    is("robust", (-0.9 * std::log(s(1.5)) + 0.1 * std::log(s(-1.5))) / 0.8, 0.1);
    is("hinge", 0);
    is("ipo_sum", 4), is("ipo_mean", std::pow(0.6 - 1, 2));
    is("apo_zero", 1 - s(1) + s(-0.5)), is("apo_down", s(1) + 1 - s(1.5));
    is("sppo_hard", 1 + 0);
    is("nca_pair", -std::log(s(1)) - (std::log(s(-1)) + std::log(s(0.5))) / 2);
    is("bco_pair", -std::log(s(1)) - std::log(s(0.5)));
    is("exo_pair", s(1.5) * (std::log(s(1.5)) - std::log(0.9)) + s(-1.5) * (std::log(s(-1.5)) - std::log(0.1)), 0.1);
    is("discopop", (1 - s(30)) * -std::log(s(1.5)) + s(30) * std::exp(-1.5));
    is("simpo", -std::log(s(0.5 * (-2 + 2.1) - 0.3)));
    const auto odds = [](double a) { return a - std::log(1 - std::exp(a)); };
    is("orpo", 2 - 0.5 * std::log(s(odds(-2) - odds(-2.1))));
}

// golden/make_trl.py: TRL's mean loss over pairs with the same log probabilities.
TEST(Preference, EqualsTrl) {
    const nlohmann::json trl = read_json("test/golden/trl.json"), logps = trl["logps"], tokens = trl["tokens"];
    const size_t pairs = logps["chosen"].size();
    size_t compared = 0;
    for (const auto &[trl_name, golden] : trl["dpo"].items()) {
        if (trl_name == "sft") continue;  // not a function of a pair
        const std::string name = trl_name == "ipo" ? "ipo_mean" : trl_name;
        const PairLossOptions o{.beta = golden["beta"], .label_smoothing = golden["label_smoothing"]};
        double loss = 0, allowed = 0;
        for (size_t i = 0; i < pairs; i++) {
            const PairSums p{logps["chosen"][i],           logps["rejected"][i],
                             logps["reference_chosen"][i], logps["reference_rejected"][i],
                             tokens["chosen"][i],          tokens["rejected"][i]};
            const PairLoss got = pair_loss(preference_formula(name), o, p);
            loss += got.loss / double(pairs);
            // TRL computes in float. Up to 6 roundings of u, v, their difference and its product with beta count as roundings of u and
            // v. The formula has up to 16 more, in terms of at most 1 + |loss|, and the sum over pairs has 10.
            const double u = p.chosen - p.reference_chosen, v = p.rejected - p.reference_rejected;
            const double inputs = std::abs(got.d_chosen * u) + std::abs(got.d_rejected * v), terms = 1 + std::abs(got.loss);
            allowed += unit_roundoff<float> * (6 * inputs + 26 * terms) / double(pairs);
        }
        const double want = golden["loss"];
        expect_close(name.c_str(), std::vector{loss}, std::vector{want}, allowed);
        EXPECT_LE(allowed, 1e-5 * want) << name;  // a tight comparison
        compared++;
    }
    EXPECT_EQ(compared, 12u);  // all losses that both have
}

TEST(Preference, DerivativesAreThoseOfTheLoss) {
    const PairLossOptions o{.beta = 0.3, .label_smoothing = 0.1, .gamma = 0.5};
    for (const char *name : loss_names)
        for (const PairSums &p :
             {PairSums{-12, -15, -13, -14.5, 5, 7}, PairSums{-20, -9, -15, -11, 12, 3}, PairSums{-7, -40, -9, -30, 4, 4}}) {
            const PairLoss got = pair_loss(preference_formula(name), o, p);
            const double h = 1e-5;
            for (const auto &[member, derivative] :
                 {std::pair(&PairSums::chosen, got.d_chosen), {&PairSums::rejected, got.d_rejected}}) {
                PairSums up = p, down = p;
                up.*member += h, down.*member -= h;
                // Central differences are off by h^2/6 of the third derivative, at most about 1e3 (the gate of discopop), and by roundings / h.
                const double want = (value(name, up, o) - value(name, down, o)) / (2 * h);
                EXPECT_NEAR(derivative, want, 1e-6 * std::max(1.0, std::abs(want))) << name;
            }
        }
}

// A step of two pairs: the loss terms of each pair, and the derivatives of their sum.
TEST(Preference, SeveralLossesWithWeights) {
    const PreferenceLoss loss({"sigmoid", "sft", "hinge"}, {1, 0.2, 3}, {.beta = 0.1}, 0.7);
    const PairSums pairs[] = {{-12, -15, -13, -14.5, 5, 7}, {-20, -9, -15, -11, 12, 3}};
    const StepSize step{2, 17};
    double want = 0.2 * (12 + 20) / 17 + 0.7 * (12. / 5 + 20. / 12) / 2, got = 0;
    for (const PairSums &p : pairs) {
        const PairLoss sigmoid = pair_loss(preference_formula("sigmoid"), {.beta = 0.1}, p),
                       hinge = pair_loss(preference_formula("hinge"), {.beta = 0.1}, p);
        const PairLoss share = loss(p, step);
        want += (sigmoid.loss + 3 * hinge.loss) / 2;
        got += share.loss;
        EXPECT_NEAR(share.d_chosen, (sigmoid.d_chosen + 3 * hinge.d_chosen) / 2 - 0.2 / 17 - 0.7 / (p.chosen_tokens * 2), 1e-15);
        EXPECT_NEAR(share.d_rejected, (sigmoid.d_rejected + 3 * hinge.d_rejected) / 2, 1e-15);
    }
    EXPECT_NEAR(got, want, 1e-14);
    EXPECT_TRUE(loss.needs_reference());
    EXPECT_FALSE(PreferenceLoss({"simpo", "sft"}, {}, {}, 0).needs_reference());
    expect_error([] { PreferenceLoss({"sigmoid", "sft"}, {1}, {}, 0); }, {"--loss_weights has 1", "2 losses"});
    expect_error([] { PreferenceLoss({}, {}, {}, 0); }, {"--loss_type is empty"});
}

TEST(Preference, LossesOfSingleAnswers) {
    const auto s = [](double x) { return 1 / (1 + std::exp(-x)); };
    const AnswerLossOptions o{.beta = 0.3, .desirable_weight = 1.5, .undesirable_weight = 0.4};
    for (double u : {-40.0, -3.0, 0.0, 2.0, 25.0})
        for (double z : {0.0, 1.5, 30.0})
            for (bool desirable : {true, false}) {
                const double want = desirable ? 1.5 * (1 - s(0.3 * (u - z))) : 0.4 * (1 - s(0.3 * (z - u))), h = 1e-5;
                const AnswerLoss got = answer_loss(o, u, z, desirable);
                EXPECT_NEAR(got.loss, want, 1e-15);
                const auto loss = [&](double at) { return answer_loss(o, at, z, desirable).loss; };
                EXPECT_NEAR(got.d_logp, (loss(u + h) - loss(u - h)) / (2 * h), 1e-10);  // roundings of 1e-16 over h
                EXPECT_EQ(got.d_logp <= 0, desirable);
            }
    // apo_zero_unpaired of the two answers of a pair adds up to apo_zero.
    const double apo = answer_loss({.beta = 0.5}, 2, 0, true).loss + answer_loss({.beta = 0.5}, -1, 0, false).loss;
    EXPECT_NEAR(apo, value("apo_zero", {-8, -21, -10, -20, 4, 10}, {.beta = 0.5}), 1e-15);
    for (double u : {-1e4, 1e4})
        EXPECT_TRUE(std::isfinite(answer_loss({}, u, 0, true).loss + answer_loss({}, u, 0, true).d_logp));
    EXPECT_EQ(divergence(6, 4), 1.5);
    EXPECT_EQ(divergence(-6, 4), 0);
    EXPECT_TRUE(std::isnan(divergence(NAN, 4)));  // the step is then skipped
}

TEST(Preference, RewardLoss) {
    const auto s = [](double x) { return 1 / (1 + std::exp(-x)); };
    const struct {
        double chosen, rejected, margin, center, loss, d_chosen, d_rejected;
    } rows[] = {{2, 0.5, 0, 0, -std::log(s(1.5)), -s(-1.5), s(-1.5)},
                {2, 0.5, 1, 0, -std::log(s(0.5)), -s(-0.5), s(-0.5)},
                {2, 0.5, 0, 0.01, -std::log(s(1.5)) + 0.01 * 6.25, -s(-1.5) + 0.05, s(-1.5) + 0.05},
                {-1000, 0, 0, 0, 1000, -1, 1},
                {1000, 0, 0, 0, 0, 0, 0}};
    for (const auto &r : rows) {
        const PairLoss got = reward_loss(r.chosen, r.rejected, r.margin, r.center);
        EXPECT_NEAR(got.loss, r.loss, 1e-12);
        EXPECT_NEAR(got.d_chosen, r.d_chosen, 1e-15);
        EXPECT_NEAR(got.d_rejected, r.d_rejected, 1e-15);
    }
}

TEST(Preference, ExtremesStayFinite) {
    for (const char *name : loss_names)
        for (double gap : {-1000.0, 1000.0}) {  // beta z = +-100
            const PairSums p{-1100 + gap, -1100, -1100, -1100, 10, 10};
            const PairLoss got = pair_loss(preference_formula(name), {.beta = 0.1, .label_smoothing = 0.1}, p);
            EXPECT_TRUE(std::isfinite(got.loss) && std::isfinite(got.d_chosen) && std::isfinite(got.d_rejected))
                << name << " " << gap;
        }
    const PairLoss certain = pair_loss(preference_formula("orpo"), {}, {0, -5, 0, 0, 3, 3});
    EXPECT_TRUE(std::isfinite(certain.loss) && std::isfinite(certain.d_chosen));
}

TEST(Preference, LossesThatSmoothLabelsAreKnown) {
    const std::set<std::string> smooth = {"sigmoid", "sigmoid_norm", "robust", "exo_pair"};
    std::istringstream names(preference_names());
    for (std::string name; std::getline(names >> std::ws, name, ',');)
        EXPECT_EQ(smooths_labels(name), smooth.contains(name)) << name;
}

TEST(Preference, WrongInputs) {
    expect_error([] { preference_formula("dpo"); }, {"no --loss_type \"dpo\"", "fix: use one of sigmoid, sigmoid_norm", "orpo"});
    expect_error([] { preference_formula("aot"); }, {"--loss_type aot", "depends on the split of a step", "fix:"});
    expect_error([] { check_options(preference_formula("hinge"), {.beta = 0}); }, {"--beta is 0 but must be above 0", "fix:"});
    expect_error([] { check_options(preference_formula("exo_pair"), {}); }, {"--label_smoothing is 0", "above 0", "exo_pair"});
    expect_error([] { check_options(preference_formula("robust"), {.label_smoothing = 0.5}); }, {"less than 0.5"});
    EXPECT_FALSE(needs_reference(preference_formula("simpo")));
    EXPECT_TRUE(needs_reference(preference_formula("sigmoid")));
}
