#!/usr/bin/env python3
"""Rollouts, and what the policy losses make of them on models of make.py, by transformers and torch in float64.

    python3 test/golden/make_policy.py

writes test/golden/policy.json:
  rollouts         prompt_ids, completion_ids, reward and group of each
  masks            a completion_mask for each of them, for the cases whose flags are under "masked"
  models.NAME
    reference      the reference model's directory (make_preference.py)
    logprobs       of each rollout: of each token of the completion when it was sampled, near those of the model
    losses.CASE    flags, or masked: of train_llama grpo; policy_loss; loss, which may add a KL divergence and subtract entropy; its gradient's norm
    score          the head of a critic with the model's weights: the row of score.weight
    ppo.CASE       flags, or masked: of train_llama ppo; steps: of a few steps on all rollouts, with AdamW: policy_loss, value_loss, explained_variance,
                   and the norms of both gradients

The formulas are written here once more, from the papers that llmc/train/advantages.h and policy_loss.h name. Each rollout is run by itself.
"""
import numpy as np
import torch
import transformers
from make import HERE, flat_gradients, load, stream_of, widened, write_json
from make_preference import FIRST_ID, load_reward_model, make_score, reference_of, vocabulary

NAMES = ["llama2", "qwen3", "phi3", "gpt2"]
GROUPS = [(5, (7, 2, 12)), (1, (1, 9)), (21, (30, 3, 17, 8)), (9, (25, 25)), (3, (4, 6, 5))]  # tokens of a prompt; of its answers
CASES = {
    "ppo": dict(),
    "clip": dict(eps_clip="0.1,0.3", dual_clip=1.5),
    "gspo": dict(policy_loss_type="gspo", eps_clip=0.05),
    "cispo": dict(policy_loss_type="cispo", eps_clip="0,1.2"),
    "rloo": dict(advantage_estimator="rloo", loss_aggregation="sequence_mean"),
    "dr_grpo": dict(advantage_estimator="dr_grpo", loss_aggregation="constant", max_new_tokens=40),
    "kl_in_loss": dict(kl_coef=0.2, kl_use_loss="true", kl_estimator="k3"),
    "kl_in_reward": dict(advantage_estimator="reinforce_baseline", kl_coef=0.1, kl_estimator="k1", reward_clip_range="-0.5,0.5"),
    "entropy": dict(advantage_estimator="reinforce", gamma=0.9, entropy_coef=0.3, temperature=1.3),
}
MASKED = {
    "masked": dict(),
    "masked gspo": dict(policy_loss_type="gspo", eps_clip=0.05),
    "masked means": dict(advantage_estimator="rloo", loss_aggregation="sequence_mean", kl_coef=0.2, kl_use_loss="true", kl_estimator="k3"),
    "masked constant": dict(advantage_estimator="dr_grpo", loss_aggregation="constant", max_new_tokens=40),
    "masked discounts": dict(advantage_estimator="reinforce", gamma=0.9, kl_coef=0.1, kl_estimator="k1", entropy_coef=0.3),
}
PPO = {
    "gae": dict(gamma=0.9, gae_lambda=0.8, value_clip=0.02),
    "kl_in_reward": dict(kl_coef=0.1, kl_estimator="k1", value_clip=0, no_std_norm="true"),
    "frozen": dict(gae_lambda=0.95, freezing_steps=1, value_clip=0.05),
}
MASKED_PPO = {"masked": dict(gamma=0.9, gae_lambda=0.8, kl_coef=0.1, kl_estimator="k1", value_clip=0.02)}
RATES = dict(learning_rate=1e-4, critic_learning_rate=2e-3, lr_scheduler="constant")


def make_rollouts():
    random = np.random.Generator(np.random.PCG64(stream_of("rollouts")))
    vocab = min(vocabulary(name) for name in NAMES)
    ids = lambda n: random.integers(FIRST_ID, vocab, n).tolist()
    rollouts = []
    for group, (prompt_length, lengths) in enumerate(GROUPS):
        prompt = ids(prompt_length)
        for length in lengths:
            rollouts.append(dict(prompt_ids=prompt, completion_ids=ids(length), reward=float(random.integers(0, 9) / 8), group=group))
    return rollouts


def make_masks(rollouts):
    """Completions that begin and end with given tokens, have several runs of them, or nothing else."""
    random = np.random.Generator(np.random.PCG64(stream_of("masks")))
    masks = [random.integers(0, 2, len(r["completion_ids"])) for r in rollouts]
    masks[1][:] = 0
    return [mask.tolist() for mask in masks]


def mask_of(rollout):
    return np.array(rollout.get("completion_mask", np.ones(len(rollout["completion_ids"]))), float)


def discounted(values, mask, factor):
    """Sums of values to the end, where each step over a sampled token multiplies by the factor, and given tokens are skipped."""
    out, later = np.zeros(len(values)), 0.0
    for t in reversed(range(len(values))):
        out[t] = values[t] + factor * later
        later = mask[t] * out[t] + (1 - mask[t]) * later
    return out


def add_reward(q, mask, reward):
    """Adds the reward to the last sampled token's."""
    if mask.any():
        q[np.flatnonzero(mask)[-1]] += reward


def token_logps(model, rollout, temperature=1.0):
    """Of each token of the completion: its log-probability, and the entropy of its distribution."""
    ids = torch.tensor(rollout["prompt_ids"] + rollout["completion_ids"])
    first = len(rollout["prompt_ids"])
    logp = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0, first - 1:-1] / temperature, dim=-1)
    return logp.gather(1, ids[first:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def make_advantages(rollouts, old, reference, advantage_estimator="group_norm", gamma=1.0, kl_coef=0.0, kl_use_loss=None,
                    reward_clip_range="-inf,inf", **_):
    reward = np.array([r["reward"] for r in rollouts])
    shaped = reward.copy()
    for group in {r["group"] for r in rollouts}:
        own = [i for i, r in enumerate(rollouts) if r["group"] == group]
        n, mean = len(own), reward[own].mean()
        if advantage_estimator == "rloo":
            shaped[own] = [reward[i] - (reward[own].sum() - reward[i]) / (n - 1) for i in own]
        elif advantage_estimator != "reinforce":
            shaped[own] = reward[own] - mean
        if advantage_estimator == "group_norm":
            shaped[own] /= reward[own].std(ddof=1) + 1e-9
    shaped = shaped.clip(*map(float, reward_clip_range.split(",")))
    advantages = []
    for i, logp in enumerate(old):
        q = -kl_coef * (logp - reference[i]) if kl_coef and not kl_use_loss else np.zeros(len(logp))
        mask = mask_of(rollouts[i])
        add_reward(q, mask, shaped[i])
        advantages.append(discounted(q, mask, gamma))
    if advantage_estimator.startswith("reinforce"):
        every = np.concatenate([a[mask_of(r) == 1] for a, r in zip(advantages, rollouts)])
        advantages = [(a - every.mean()) / every.std() for a in advantages]
    return [torch.from_numpy(a) for a in advantages]


def make_loss(model, rollouts, old, reference, **flags):
    kind, N = flags.get("policy_loss_type", "ppo"), sum(mask_of(r).sum() for r in rollouts)
    low, *high = map(float, str(flags.get("eps_clip", 0.2)).split(","))
    high = high[0] if high else low
    aggregation = flags.get("loss_aggregation", "sequence_mean" if kind == "gspo" else "token_mean")
    advantages = make_advantages(rollouts, old, reference, **flags)
    policy = extra = 0
    for rollout, then, ref, A in zip(rollouts, old, reference, advantages):
        logp, entropy = token_logps(model, rollout, flags.get("temperature", 1.0))
        mask, n = torch.from_numpy(mask_of(rollout)), max(1, mask_of(rollout).sum())
        ratio = torch.exp(logp - torch.from_numpy(then))
        if kind == "gspo":
            ratio = torch.exp(((logp - torch.from_numpy(then)) * mask).sum() / n).expand(len(logp))
        if kind == "cispo":
            terms = -ratio.detach().clamp(max=high) * A * logp
        else:
            objective = torch.minimum(ratio * A, ratio.clamp(1 - low, 1 + high) * A)
            if "dual_clip" in flags:
                objective = torch.where(A < 0, torch.maximum(objective, flags["dual_clip"] * A), objective)
            terms = -objective
        if aggregation == "token_mean":
            weights = mask / N
        elif aggregation == "sequence_mean":
            weights = mask / n / len(rollouts)
        else:
            weights = mask / (len(rollouts) * flags["max_new_tokens"])
        policy = policy + (terms * weights).sum()
        if flags.get("kl_use_loss"):
            d = logp - torch.from_numpy(ref)
            extra = extra + flags["kl_coef"] * ((torch.exp(-d) - 1 + d) * weights).sum()
        extra = extra - flags.get("entropy_coef", 0) * (entropy * mask).sum() / N
    gradients = flat_gradients(model, torch.autograd.grad(policy + extra, list(model.parameters())))
    norm = float(np.linalg.norm(np.concatenate(list(gradients.values()))))
    return dict(flags=flags, policy_loss=policy.item(), loss=(policy + extra).item(), grad_norm=norm)


def token_values(critic, rollout):
    """Of each token of the completion: what the critic says before it."""
    ids, first = torch.tensor(rollout["prompt_ids"] + rollout["completion_ids"]), len(rollout["prompt_ids"])
    hidden = critic.base_model(input_ids=ids[None], use_cache=False).last_hidden_state
    return critic.score(hidden)[0, first - 1:-1, 0]


def make_gae(rollouts, old, reference, values, gamma=1.0, gae_lambda=1.0, kl_coef=0.0, no_std_norm="false", **_):
    """A_t is the sum over u >= t of (gamma gae_lambda)^(u-t) delta_u. After a sampled token comes the next sampled one, over given ones."""
    advantages = []
    for rollout, then, ref, V in zip(rollouts, old, reference, values):
        q, mask, following = -kl_coef * (then - ref), mask_of(rollout), np.zeros(len(then))
        add_reward(q, mask, rollout["reward"])
        for t in range(len(V)):
            following[t] = next((V[u] for u in range(t + 1, len(V)) if mask[u]), 0)
        advantages.append(discounted(q + gamma * following - V, mask, gamma * gae_lambda))
    returns = [a + V for a, V in zip(advantages, values)]
    every = np.concatenate([a[mask_of(r) == 1] for a, r in zip(advantages, rollouts)])
    scale = 1 if no_std_norm == "true" else every.std()
    return [torch.from_numpy((a - every.mean()) / scale) for a in advantages], [torch.from_numpy(g) for g in returns]


def update(optimizer, parameters, gradients):
    """Returns the norm, to 1 of which the gradient is clipped."""
    norm = sum((g**2).sum() for g in gradients if g is not None)**0.5
    for p, g in zip(parameters, gradients):
        p.grad = None if g is None else g / max(norm, 1)
    optimizer.step()
    return norm.item()


def make_ppo(name, score, rollouts, old, reference, **flags):
    model, critic = load(HERE / name, torch.float64), load_reward_model(name, torch.float64, score)
    learners = [(m, list(m.parameters()), torch.optim.AdamW(m.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0))
                for m, lr in ((model, RATES["learning_rate"]), (critic, RATES["critic_learning_rate"]))]
    sampled = [torch.from_numpy(mask_of(r) == 1) for r in rollouts]
    N, clip, steps = sum(mask.sum() for mask in sampled), flags["value_clip"], []
    with widened(model), widened(critic):
        with torch.no_grad():
            values_old = [token_values(critic, r).numpy() for r in rollouts]
        advantages, returns = make_gae(rollouts, old, reference, values_old, **flags)
        G = torch.cat([g[mask] for g, mask in zip(returns, sampled)])
        for step in range(3):
            terms, errors, value_terms = [], [], []
            for rollout, mask, then, A, V_old, target in zip(rollouts, sampled, old, advantages, values_old, returns):
                ratio = torch.exp(token_logps(model, rollout)[0] - torch.from_numpy(then))
                terms.append(-torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A)[mask])
                V, before = token_values(critic, rollout), torch.from_numpy(V_old)
                near = before + (V - before).clamp(-clip, clip) if clip else V
                value_terms.append(torch.maximum((V - target)**2, (near - target)**2)[mask] / 2)
                errors.append((target - V).detach()[mask])
            policy_loss, value_loss = torch.cat(terms).sum() / N, torch.cat(value_terms).sum() / N
            norms = []
            for number, ((_, parameters, optimizer), loss) in enumerate(zip(learners, (policy_loss, value_loss))):
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
                if number == 0 and step < flags.get("freezing_steps", 0):
                    norms.append(sum((g**2).sum() for g in gradients if g is not None).sqrt().item())
                else:
                    norms.append(update(optimizer, parameters, gradients))
            explained = 1 - torch.cat(errors).var(correction=0) / G.var(correction=0)
            steps.append(dict(policy_loss=policy_loss.item(), value_loss=value_loss.item(), explained_variance=explained.item(),
                              grad_norm=norms[0], critic_grad_norm=norms[1]))
    return dict(flags={**flags, **RATES}, steps=steps)


def main():
    torch.set_num_threads(1)  # the order of sums, and with it the last digits
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rollouts, models = make_rollouts(), {}
    masks = make_masks(rollouts)
    masked = [dict(r, completion_mask=mask) for r, mask in zip(rollouts, masks)]
    renamed = lambda case: {"masked" if key == "flags" else key: value for key, value in case.items()}
    for name in NAMES:
        model, reference = load(HERE / name, torch.float64), load(HERE / reference_of(name), torch.float64)
        random = np.random.Generator(np.random.PCG64(stream_of(f"{name}.logprobs")))
        with widened(model), widened(reference):
            with torch.no_grad():
                now = [token_logps(model, r)[0].numpy() for r in rollouts]
                ref = [token_logps(reference, r)[0].numpy() for r in rollouts]
            old = [np.minimum(lp + random.normal(0, 0.2, len(lp)), 0).round(6) for lp in now]
            losses = {case: make_loss(model, rollouts, old, ref, **flags) for case, flags in CASES.items()}
            losses |= {case: renamed(make_loss(model, masked, old, ref, **flags)) for case, flags in MASKED.items()}
        score = make_score(name, 0)
        ppo = {case: make_ppo(name, score, rollouts, old, ref, **flags) for case, flags in PPO.items()}
        ppo |= {case: renamed(make_ppo(name, score, masked, old, ref, **flags)) for case, flags in MASKED_PPO.items()}
        models[name] = dict(reference=reference_of(name), logprobs=[lp.tolist() for lp in old], losses=losses, score=score, ppo=ppo)
        print(name, {case: round(loss["policy_loss"], 4) for case, loss in losses.items()}, flush=True)
    versions = dict(transformers=transformers.__version__, torch=torch.__version__)
    write_json(HERE / "policy.json", dict(**versions, rollouts=rollouts, masks=masks, models=models), depth=4)


if __name__ == "__main__":
    main()
