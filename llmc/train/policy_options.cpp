#include "policy_options.h"

#include "../core/common.h"

static void check_kl_target(const Options &o) {
    const double target = o.kl_target[0], horizon = kl_horizon(o);
    if (target == 0) return;
    if (o.kl_coef == 0)
        die("--kl_target %g adapts a coefficient that begins with --kl_coef 0\n  fix: --kl_coef 0.01, say", target);
    if (double(o.rollout_batch_size * o.n) >= 5 * horizon)
        die("--kl_target %g,%g: %g answers are a fifth or less of the %zu answers of a batch, after which the coefficient could be negative\n  fix: --kl_target %g,10000, say",
            target, horizon, horizon, o.rollout_batch_size * o.n, target);
}

// --is_correction NAME or NAME,C,D
static void set_correction(PolicyLossOptions &out, const std::string &text) {
    const std::string name = text.substr(0, text.find(','));
    const auto correction = find_choice<Correction>(name);
    char more;
    if (!correction) die("--is_correction %s is not known\n  fix: tis, icepop or seq-mask-tis", name.c_str());
    out.correction = *correction;
    if (name != text &&
        (name.empty() || sscanf(text.c_str() + name.size(), ",%lf,%lf%c", &out.correction_low, &out.correction_high, &more) != 2))
        die("--is_correction %s is not NAME,C,D with the smallest and the largest weight\n  fix: --is_correction %s,0.5,5, say",
            text.c_str(), name.empty() ? "tis" : name.c_str());
}

PolicyOptions policy_options(const Options &o, Task task) {
    if (!(o.temperature > 0))
        die("--temperature %g: greedy answers have no probabilities to learn from\n  fix: give the temperature at which the rollouts were sampled, 1 by default",
            o.temperature);
    PolicyOptions out{};
    out.advantage = {o.advantage_estimator, o.gamma, o.gae_lambda, o.no_std_norm};
    out.advantage.kl_coef = o.kl_use_loss ? 0 : o.kl_coef, out.advantage.kl = o.kl_estimator;
    out.advantage.teacher_coef = o.teacher_coef;
    if (const Numbers &range = o.reward_clip_range; !range.empty()) out.advantage.reward_clip = {range[0], range[1]};
    check_options(out.advantage);
    check_kl_target(o);
    if (task == GRPO && o.advantage_estimator == Estimator::gae)
        die("--advantage_estimator gae has a critic, and grpo has none\n  fix: use the task ppo, or another estimator");
    out.loss = {o.policy_loss_type, o.loss_aggregation, o.eps_clip.front(),
                o.eps_clip.back(),  o.dual_clip,        o.kl_use_loss ? o.kl_coef : 0,
                o.kl_estimator};
    set_correction(out.loss, o.is_correction);
    check_options(out.loss);
    out.shaping = {o.max_new_tokens, size_t(o.overlong_buffer[0]), o.overlong_buffer.size() > 1 ? o.overlong_buffer[1] : 1,
                   o.stop_properly_coef};
    check_options(out.shaping);
    if (o.mask_truncated && o.entropy_coef != 0)
        die("--entropy_coef %g rewards the entropy of all answers, and --mask_truncated leaves some out\n  fix: leave one of them out",
            o.entropy_coef);
    return out;
}
