// Advantages and policy losses, compared with values of the papers' formulas in float64 and with finite differences.
#include "../llmc/train/policy_loss.h"

#include <cmath>
#include <functional>
#include <map>

#include "../llmc/train/advantages.h"
#include "../llmc/train/shaping.h"
#include "check.h"
#include "errors.h"

using Numbers = std::vector<double>;
using Answers = std::vector<Numbers>;

// Two prompts with three answers each, 12 tokens: rewards and log probabilities.
const Numbers rewards = {1, 0, 0.25, 0, 0, 1};
const Answers logp_old = {{-0.7, -1.2}, {-0.5, -2.0, -1.6}, {-0.9}, {-1.1, -0.4}, {-0.8}, {-1.5, -0.6, -0.3}};
const Answers logp = {{-0.4, -1.3}, {-0.8, -1.6, -0.4}, {-0.85}, {-1.15, -0.15}, {-0.95}, {-1.28, -0.95, -0.3}};
const Answers logp_ref = {{-0.9, -1.0}, {-0.4, -1.9, -1.0}, {-1.0}, {-1.3, -0.5}, {-0.6}, {-1.4, -0.9, -0.3}};
const Answers logp_smp = {{-0.72, -1.17}, {-0.52, -1.95, -3.3}, {-0.88}, {-1.1, -0.42}, {0.0}, {-1.52, -0.57, -0.31}};

// The critic's values at the time of sampling, and now.
const Answers values_old = {{0.6, 0.8}, {0.3, 0.2, 0.1}, {0.2}, {0.1, 0.0}, {0.3}, {0.4, 0.7, 0.9}};
const Answers values = {{0.5, 1.1}, {0.35, -0.1, 0.15}, {0.5}, {0.1, 0.1}, {0.05}, {0.45, 1.0, 0.8}};

const Numbers one = {-1}, three = {-1, -1, -1};  // log probabilities of answers of one token and of three

static std::vector<ScoredRollout> batch() {
    std::vector<ScoredRollout> out;
    for (size_t i = 0; i < rewards.size(); i++)
        out.push_back({int64_t(i / 3), rewards[i], logp_old[i], logp_ref[i], values_old[i]});
    return out;
}

// One answer of each reward to one prompt; all answers have these log probabilities.
static std::vector<ScoredRollout> group(const Numbers &rewards, const Numbers &logp) {
    std::vector<ScoredRollout> out;
    for (double reward : rewards) out.push_back({0, reward, logp, {}});
    return out;
}

static AdvantageOptions estimator(const std::string &name, double kl_coef = 0, bool no_std_norm = false) {
    AdvantageOptions o;
    o.estimator = *find_choice<Estimator>(name), o.kl_coef = kl_coef, o.no_std_norm = no_std_norm;
    return o;
}

static void expect_answers(const char *what, const Answers &got, const Answers &want, double tolerance = 6e-7) {
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < want.size(); i++) {
        ASSERT_EQ(got[i].size(), want[i].size());
        for (size_t t = 0; t < want[i].size(); t++)
            EXPECT_NEAR(got[i][t], want[i][t], tolerance) << what << ", token " << t << " of answer " << i;
    }
}

// The same advantage for each token of an answer.
static Answers for_tokens(const Numbers &of_answers) {
    Answers out;
    for (size_t i = 0; i < of_answers.size(); i++) out.emplace_back(logp_old[i].size(), of_answers[i]);
    return out;
}

TEST(Advantages, EqualKnownValues) {
    const struct {
        const char *name;
        double kl_coef;
        Answers want;
        double tolerance = 6e-7;
        bool no_std_norm = false;
    } rows[] = {
        {"rloo", 0, for_tokens({0.875, -0.625, -0.25, -0.5, -0.5, 1.0}), 1e-15},
        {"dr_grpo", 0, for_tokens({7.0 / 12, -5.0 / 12, -1.0 / 6, -1.0 / 3, -1.0 / 3, 2.0 / 3})},
        {"group_norm", 0, for_tokens({1.120897, -0.800641, -0.320256, -0.577350, -0.577350, 1.154701})},
        {"reinforce", 0, for_tokens({1.171700, -0.911322, -0.390567, -0.911322, -0.911322, 1.171700})},
        {"reinforce", 0, for_tokens({0.5625, -0.4375, -0.1875, -0.4375, -0.4375, 0.5625}), 1e-15, true},
        {"reinforce_baseline", 0, for_tokens({1.068923, -0.983409, -0.470326, -0.812381, -0.812381, 1.239950})},
        {"group_norm",
         0.1,
         {{1.120897, 1.140897},
          {-0.720641, -0.730641, -0.740641},
          {-0.330256},
          {-0.607350, -0.587350},
          {-0.557350},
          {1.134701, 1.124701, 1.154701}}},
        {"reinforce_baseline",
         0.1,
         {{1.082793, 1.125395},
          {-0.876885, -0.898186, -0.919487},
          {-0.536071},
          {-0.933687, -0.891086},
          {-0.827183},
          {1.217699, 1.196398, 1.260300}}},
    };
    for (const auto &[name, kl_coef, want, tolerance, no_std_norm] : rows)
        expect_answers(name, advantages(estimator(name, kl_coef, no_std_norm), batch()).advantages, want, tolerance);
}

TEST(Advantages, ByHand) {
    AdvantageOptions o = estimator("reinforce", 0, true);
    o.gamma = 0.5;
    expect_answers("discounted", advantages(o, group({4}, three)).advantages, {{1 - 7.0 / 3, 2 - 7.0 / 3, 4 - 7.0 / 3}}, 1e-15);
    o.estimator = Estimator::dr_grpo;
    expect_answers("groups are not", advantages(o, group({4, 0}, three)).advantages, {{2, 2, 2}, {-2, -2, -2}}, 1e-15);
    o = estimator("dr_grpo"), o.reward_clip = {-1, 2};
    const Estimated clipped = advantages(o, group({100, 90, 95.5}, one));
    expect_answers("clipped after the baseline", clipped.advantages, {{2}, {-1}, {1.0 / 3}}, 1e-13);
    EXPECT_EQ(clipped.clipped, (std::vector<bool>{true, true, false}));
}

TEST(Advantages, EqualRewardsOfAGroupGiveZero) {
    for (const char *name : {"reinforce_baseline", "rloo", "group_norm", "dr_grpo"})
        for (double reward = 0.01; reward < 1; reward += 0.01)
            for (size_t n = 3; n <= 16; n++)
                for (const auto &a : advantages(estimator(name), group(Numbers(n, reward), one)).advantages) EXPECT_EQ(a[0], 0.0);
}

TEST(Advantages, AnswersWithoutARewardAreLeftOut) {
    const Numbers two = {-1, -2};
    for (const std::string name : {"reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo"}) {
        Answers got = advantages(estimator(name), group({1, no_reward, 4, 6}, two)).advantages;
        EXPECT_EQ(got[1], Numbers(2)) << name;
        got.erase(got.begin() + 1);
        EXPECT_EQ(got, advantages(estimator(name), group({1, 4, 6}, two)).advantages) << name;
        if (name == "reinforce") continue;
        EXPECT_EQ(advantages(estimator(name), group({5, no_reward}, two)).advantages, Answers(2, Numbers(2))) << name;
    }
}

// 0.3 (log p_teacher - log p) is added to each token's advantage: after whitening, to no return, and also without a reward.
TEST(Advantages, OfATeacherByHand) {
    const Numbers teacher = {-1.4, -1, 1}, added = {0.3 * -0.4, 0, 0.3 * 2};
    for (const std::string name : {"reinforce", "dr_grpo"}) {
        AdvantageOptions o = estimator(name);
        o.teacher_coef = 0.3;
        auto rollouts = group({4, no_reward, 1}, three);
        const Estimated alone = advantages(o, rollouts);
        for (size_t i : {0, 1}) rollouts[i].teacher_logp = teacher;
        const Estimated taught = advantages(o, rollouts);
        Answers want = alone.advantages;
        for (size_t i : {0, 1})
            for (size_t t = 0; t < 3; t++) want[i][t] += added[t];
        expect_answers(name.c_str(), taught.advantages, want, 1e-15);
        EXPECT_EQ(taught.returns, alone.returns);
        EXPECT_EQ(alone.advantages[1], Numbers(3));
    }
}

// The policy samples one of two tokens; token a has probability p and reward 1. The expected gradient with respect to the logit of a.
TEST(Advantages, ExpectedGradients) {
    const auto expected = [](const char *name, size_t n, double p) {
        double sum = 0;
        for (size_t outcome = 0; outcome < size_t(1) << n; outcome++) {
            Numbers rewards(n);
            double probability = 1;
            for (size_t i = 0; i < n; i++) rewards[i] = double(outcome >> i & 1), probability *= rewards[i] ? p : 1 - p;
            const auto got = advantages(estimator(name), group(rewards, one)).advantages;
            for (size_t i = 0; i < n; i++) sum += probability * got[i][0] * (rewards[i] - p) / double(n);
        }
        return sum;
    };
    for (size_t n : {2, 4, 8}) {
        EXPECT_NEAR(expected("rloo", n, 0.3), 0.21, 1e-12);  // unbiased: p (1 - p)
        EXPECT_NEAR(expected("dr_grpo", n, 0.3), double(n - 1) / double(n) * 0.21, 1e-12);
    }
    EXPECT_NEAR(expected("group_norm", 2, 0.3), 0.14849242, 1e-8);
    EXPECT_NEAR(expected("group_norm", 4, 0.3), 0.29727516, 1e-8);
    EXPECT_NEAR(expected("group_norm", 8, 0.3), 0.38555117, 1e-8);
    EXPECT_NEAR(expected("group_norm", 8, 0.05), 0.10988357, 1e-8);
}

TEST(Advantages, GroupOfOneAnswerIsRefused) {
    const std::vector<ScoredRollout> batch = {{4, 1, one, {}}, {5, 1, one, {}}, {5, 0, one, {}}};
    expect_error([&] { advantages(estimator("group_norm"), batch); }, {"group 4", "one rollout", "reinforce"});
    EXPECT_EQ(advantages(estimator("reinforce"), batch).advantages.size(), 3u);
}

static AdvantageOptions gae(bool no_std_norm = false) {
    AdvantageOptions o = estimator("gae", 0.1, no_std_norm);
    o.kl = KlEstimator::k1, o.gae_lambda = 0.95;
    return o;
}

TEST(Advantages, OfACritic) {
    const Answers raw = {{0.389, 0.22}, {-0.2116, -0.128, -0.04}, {0.04}, {-0.1295, -0.01}, {-0.28}, {0.56175, 0.265, 0.1}};
    const Answers returns = {{0.989, 1.02}, {0.0884, 0.072, 0.06}, {0.24}, {-0.0295, -0.01}, {0.02}, {0.96175, 0.965, 1.0}};
    const Estimated got = advantages(gae(), batch());
    expect_answers("returns", got.returns, returns, 1e-12);
    expect_answers("whitened", got.advantages,
                   {{1.337995, 0.640691},
                    {-1.140116, -0.795177, -0.432084},
                    {-0.102000},
                    {-0.801366, -0.308303},
                    {-1.422338},
                    {2.050771, 0.826364, 0.145564}});
    Answers centred = raw;
    for (Numbers &tokens : centred)
        for (double &a : tokens) a -= 0.77665 / 12;  // the mean of raw
    expect_answers("centred", advantages(gae(true), batch()).advantages, centred, 1e-12);

    const Numbers v = {0.5, 0.25, 1};
    AdvantageOptions o = estimator("gae", 0, true);
    o.gamma = 0.5, o.gae_lambda = 0.5;
    // delta = 0.5 V_(t+1) - V_t, and 2 - V at the last token; A = delta + A_(t+1) / 4
    expect_answers("discounted returns", advantages(o, std::vector<ScoredRollout>{{0, 2, three, {}, v}}).returns,
                   {{0.5 - 0.375 + 0.5 / 4, 0.25 + 0.5, 2}}, 1e-15);
    // A turn that the first token ends has 3 of the reward, and the last one the rest, -1.
    const Numbers turns = {3, 0, 0};
    expect_answers("returns of turns", advantages(o, std::vector<ScoredRollout>{{0, 2, three, {}, v, {}, turns}}).returns,
                   {{0.5 + 3.125 - 0.5 - 0.25 / 4, 0.25 + 0.5 - 0.25 - 2. / 4, -1}}, 1e-15);
}

TEST(Advantages, RewardsOfTurns) {
    EXPECT_EQ(sum_of_rewards(std::vector<double>{3, no_reward, 5}), 8);
    EXPECT_FALSE(has_reward(sum_of_rewards(std::vector<double>{no_reward})));
    const Rollout r{{1}, {1, 2, 3, 4, 5, 6, 7}, {1, 1, 0, 1, 0, 0, 1}, {-1, -1, -1, -1}, 8, 0, false, "", {3, 5, no_reward}};
    EXPECT_EQ(turns_of(r.mask), 3u);
    EXPECT_EQ(earlier_rewards(r), (std::vector<double>{0, 3, 5, 0}));
    Rollout summed = r;
    summed.turn_rewards = {};
    EXPECT_EQ(earlier_rewards(summed), std::vector<double>(4));
}

TEST(Advantages, DivergencesAreNotClipped) {
    EXPECT_EQ(kl_estimate(KlEstimator::k1, -30).value, -30);
    EXPECT_EQ(kl_estimate(KlEstimator::k2, -30).value, 450);
    EXPECT_NEAR(kl_estimate(KlEstimator::k3, -3).value, std::exp(3) - 4, 1e-12);
    EXPECT_NEAR(kl_estimate(KlEstimator::k3, -3).slope, 1 - std::exp(3), 1e-12);
    EXPECT_NEAR(kl_estimate(KlEstimator::k3, -1000).value, std::exp(20) - 1001, 1e-3);
}

TEST(Advantages, CoefficientOfTheDivergenceAdapts) {
    EXPECT_NEAR(adapted_kl_coef(0.01, 9, 6, 1024, 10000), .0102048, 1e-15);
    EXPECT_NEAR(adapted_kl_coef(0.01, 5.7, 6, 1024, 10000), .0099488, 1e-15);
    EXPECT_NEAR(adapted_kl_coef(0.01, 0, 6, 5000, 10000), .009, 1e-15);
    EXPECT_EQ(adapted_kl_coef(0.01, 6, 6, 1024, 10000), 0.01);
}

using Setting = std::function<void(PolicyLossOptions &)>;

static PolicyLossOptions with(const Setting &set) {
    PolicyLossOptions o;
    set(o);
    return o;
}

struct LossResult {
    PolicySums sums;
    Answers d_logp;
};

static LossResult loss(const PolicyLossOptions &o, const Answers &logp = ::logp) {
    check_options(o);
    const Answers a = advantages(estimator("group_norm"), batch()).advantages;
    LossResult out;
    for (size_t i = 0; i < logp.size(); i++) {
        Numbers &d = out.d_logp.emplace_back(logp[i].size());
        out.sums += policy_loss(o, {logp[i], logp_old[i], logp_ref[i], a[i], logp_smp[i]}, {12, 6, 4}, d);
    }
    return out;
}

// The derivatives of cispo are not those of its reported loss, so they are known values. The test below compares the others with differences.
TEST(PolicyLoss, EqualsKnownValues) {
    const std::pair<double, Setting> known[] = {
        {0.07532745, [](auto &) {}},
        {0.06342107, [](auto &o) { o.clip_high = 0.28; }},
        {0.05396923, [](auto &o) { o.dual_clip = 3; }},
        {0.11315284, [](auto &o) { o.aggregation = Aggregation::sequence_mean; }},
        {0.03766373, [](auto &o) { o.aggregation = Aggregation::constant; }},
        {0.06509063, [](auto &o) { o.type = PolicyLossType::gspo, o.clip_low = o.clip_high = 0.1; }},
        {0.07215914, [](auto &o) { o.type = PolicyLossType::cispo, o.clip_high = 1.25; }},
        {0.07532745 + 0.00523708, [](auto &o) { o.kl_coef = 0.1, o.kl = KlEstimator::k2; }},
        {0.07532745 + 0.00492673, [](auto &o) { o.kl_coef = 0.1, o.kl = KlEstimator::k3; }},
        {0.11315284 + 0.00478695, [](auto &o) { o.kl_coef = 0.1, o.aggregation = Aggregation::sequence_mean; }},
        {0.03766373 + 0.00246336, [](auto &o) { o.kl_coef = 0.1, o.aggregation = Aggregation::constant; }},
    };
    for (const auto &[want, set] : known) {
        const PolicySums sums = loss(with(set)).sums;
        EXPECT_NEAR(sums.policy_loss + sums.kl_loss, want, 12e-9);
    }
    expect_answers("cispo", loss(with([](auto &o) { o.type = PolicyLossType::cispo, o.clip_high = 1.25; })).d_logp,
                   {{-.116760, -.084519},
                    {.049427, .083400, .083400},
                    {.028056},
                    {.045766, .060141},
                    {.041411},
                    {-.119904, -.067809, -.096225}});
    const PolicySums ppo = loss({}).sums;
    EXPECT_EQ(ppo.clipped / ppo.tokens, 0.25);
    EXPECT_NEAR(ppo.moved / ppo.tokens, -0.1225, 1e-12);
    EXPECT_EQ(ppo.weights + ppo.cut + ppo.stale, 0);
}

// w is exp(1.7) = 5.47 at the third token of the second answer, and exp(-0.8) = 0.449 in the fifth answer.
TEST(PolicyLoss, CorrectionsOfStaleAnswers) {
    double others = 1;  // the weights of ten tokens without a correction; the first token of the fourth answer has 1
    for (double log_weight : {0.02, -0.03, 0.02, -0.05, -0.02, 0.02, 0.02, -0.03, 0.01}) others += std::exp(log_weight);
    const struct {
        Correction correction;
        double value, cut, weights;
    } known[] = {{Correction::tis, 0.93654991, 2, others + 5 + 0.5},
                 {Correction::icepop, -0.19174757, 2, others},
                 {Correction::seq_mask_tis, 1.02083257, 1, others + std::exp(1.7)}};
    for (const auto &[correction, value, cut, weights] : known) {
        const PolicySums sums = loss(with([&](auto &o) { o.correction = correction; })).sums;
        EXPECT_NEAR(sums.policy_loss, value, 6e-9) << name_of(correction);
        EXPECT_EQ(sums.cut, cut) << name_of(correction);
        EXPECT_NEAR(sums.weights, weights, 1e-6) << name_of(correction);
        EXPECT_NEAR(sums.stale, -0.02 + 0.03 - 0.02 + 0.05 - 1.7 + 0.02 - 0.02 + 0.8 - 0.02 + 0.03 - 0.01, 1e-12);
    }
    // An answer is masked by its mean: its first token is as likely as at sampling, and its second far likelier.
    const Numbers now = {-1, -1}, sampled = {-1, -6}, a = {1, 1};
    Numbers d(2);
    const PolicySums sums =
        policy_loss(with([](auto &o) { o.correction = Correction::seq_mask_tis; }), {now, now, {}, a, sampled}, {2, 1, 2}, d);
    EXPECT_EQ(sums.cut, 2);
    EXPECT_EQ(sums.weights, 0);
    EXPECT_EQ(d, Numbers(2, 0));
}

// Expects differences of the loss for the derivative with respect to each element of x.
static void expect_derivatives(const Answers &derivatives, const Answers &x, const std::function<double(const Answers &)> &loss) {
    const double h = 1e-6;
    for (size_t i = 0; i < x.size(); i++)
        for (size_t t = 0; t < x[i].size(); t++) {
            Answers up = x, down = x;
            up[i][t] += h, down[i][t] -= h;
            EXPECT_NEAR((loss(up) - loss(down)) / (2 * h), derivatives[i][t], 1e-8) << i << " " << t;
        }
}

TEST(PolicyLoss, DerivativesEqualFiniteDifferences) {
    const struct {
        PolicyLossType type;
        Correction correction;
        KlEstimator kl;
    } cases[] = {{PolicyLossType::ppo, Correction::none, KlEstimator::k2},
                 {PolicyLossType::gspo, Correction::none, KlEstimator::k3},
                 {PolicyLossType::ppo, Correction::tis, KlEstimator::k3},
                 {PolicyLossType::ppo, Correction::icepop, KlEstimator::k3},
                 {PolicyLossType::ppo, Correction::seq_mask_tis, KlEstimator::k3}};
    for (const auto &[type, correction, kl] : cases)
        for (const Aggregation aggregation : {Aggregation::token_mean, Aggregation::sequence_mean, Aggregation::constant}) {
            SCOPED_TRACE(name_of(type) + " " + name_of(correction) + " " + name_of(aggregation));
            PolicyLossOptions o;
            o.type = type, o.aggregation = aggregation, o.correction = correction, o.kl = kl;
            o.clip_low = 0.13, o.clip_high = 0.31, o.dual_clip = 2.5, o.kl_coef = 0.7;
            expect_derivatives(loss(o).d_logp, logp, [&](const Answers &x) {
                const PolicySums sums = loss(o, x).sums;
                return sums.policy_loss + sums.kl_loss;
            });
        }
}

TEST(PolicyLoss, HugeRatiosStayFinite) {
    const Numbers far = {-1000, -0.1}, near = {-0.1, -0.1}, a = {1, 1};
    for (const Correction correction : {Correction::none, Correction::tis, Correction::icepop, Correction::seq_mask_tis})
        for (const Numbers &now : {far, near})
            for (const Numbers &then : {far, near})
                for (const Numbers &sampled : {far, near}) {
                    Numbers d(2);
                    const PolicyLossOptions o = with([&](auto &o) { o.kl_coef = 1, o.correction = correction; });
                    const PolicySums sums = policy_loss(o, {now, then, near, a, sampled}, {2, 1, 2}, d);
                    EXPECT_TRUE(std::isfinite(sums.policy_loss + sums.kl_loss + d[0] + d[1])) << name_of(correction);
                    EXPECT_GE(sums.clipped, now != then) << name_of(correction);
                }
}

TEST(PolicyLoss, WrongOptionsAreRefused) {
    const std::pair<std::vector<std::string>, Setting> wrong[] = {
        {{"k1", "k2 or k3"}, [](auto &o) { o.kl = KlEstimator::k1, o.kl_coef = 0.1; }},
        {{"cispo", "0.2", "0,5"}, [](auto &o) { o.type = PolicyLossType::cispo; }},
        {{"dual_clip", "0.5"}, [](auto &o) { o.dual_clip = 0.5; }},
        {{"eps_clip"}, [](auto &o) { o.clip_low = -1; }},
        {{"--is_correction tis,2,5", "0.5,5"}, [](auto &o) { o.correction = Correction::tis, o.correction_low = 2; }},
        {{"--is_correction tis", "gspo", "leave it out"},
         [](auto &o) { o.correction = Correction::tis, o.type = PolicyLossType::gspo; }},
    };
    for (const auto &[words, set] : wrong) expect_error([&] { check_options(with(set)); }, words);
}

struct ValueResult {
    ValueSums sums;
    Answers d_values;
};

static ValueResult loss_of_values(double clip, const Answers &values = ::values) {
    const Answers returns = advantages(gae(), batch()).returns;
    ValueResult out;
    for (size_t i = 0; i < values.size(); i++) {
        Numbers &d = out.d_values.emplace_back(values[i].size());
        out.sums += value_loss(clip, {values[i], values_old[i], returns[i]}, 12, d);
    }
    return out;
}

TEST(ValueLoss, EqualsKnownValuesAndFiniteDifferences) {
    const ValueSums clipped = loss_of_values(0.2).sums;
    EXPECT_NEAR(clipped.value_loss, 0.03169262, 6e-9);
    EXPECT_EQ(clipped.clipped, 2);
    EXPECT_NEAR(loss_of_values(0).sums.value_loss, 0.03133845, 6e-9);
    for (double clip : {0.0, 0.13})
        expect_derivatives(loss_of_values(clip).d_values, values,
                           [&](const Answers &x) { return loss_of_values(clip, x).sums.value_loss; });
}

TEST(ValueLoss, ExplainedVariance) {
    const Answers perfect = advantages(gae(), batch()).returns;
    EXPECT_NEAR(loss_of_values(0.2, perfect).sums.explained_variance(), 1, 1e-12);
    EXPECT_NEAR(loss_of_values(0.2, for_tokens(Numbers(6, 3.7))).sums.explained_variance(), 0, 1e-12);
    Numbers d(2);
    const Numbers any = {1, 2}, equal = {0.1, 0.1}, zeros = {2e-14, -1e-14};
    EXPECT_TRUE(std::isnan(value_loss(0, {any, any, equal}, 2, d).explained_variance()));
    EXPECT_TRUE(std::isnan(value_loss(0, {any, any, zeros}, 2, d).explained_variance()));  // of values, by rounding
}

// The numbers of DAPO (arXiv:2503.14476, section 3.4): at most 20480 tokens, with a penalty for the last 4096.
TEST(Shaping, RewardsByHand) {
    const ShapingOptions dapo{.longest = 20480, .overlong_buffer = 4096};
    const struct {
        ShapingOptions options;
        double reward;
        size_t tokens;
        bool cut_off;
        double want;
    } rows[] = {
        {dapo, 1, 1, false, 1},
        {dapo, 1, 16384, false, 1},
        {dapo, 1, 18432, false, 0.5},
        {dapo, 1, 20480, false, 0},
        {{.longest = 20480, .overlong_buffer = 4096, .overlong_factor = 0.5}, 0, 18432, false, -0.25},
        {{.longest = 8}, 3, 8, true, 3},
        {{.longest = 8, .stop_coef = 0.25}, 3, 8, true, 0.75},
        {{.longest = 8, .stop_coef = -0.5}, 3, 8, true, -0.5},
        {{.longest = 8, .stop_coef = -0.5}, 3, 8, false, 3},
        {{.longest = 8, .overlong_buffer = 4, .stop_coef = 0.5}, 3, 8, true, 1},  // after the penalty
    };
    for (const auto &[options, reward, tokens, cut_off, want] : rows)
        EXPECT_EQ(shaped_reward(options, reward, tokens, cut_off), want) << tokens;
    const auto refused = [](const ShapingOptions &o, const char *words) { expect_error([&] { check_options(o); }, {words}); };
    refused({.longest = 8, .overlong_buffer = 9}, "--overlong_buffer 9");
    refused({.longest = 8, .stop_coef = 1.5}, "--stop_properly_coef 1.5");
    refused({.longest = 8, .overlong_factor = -1}, "--overlong_buffer 0,-1");
}
