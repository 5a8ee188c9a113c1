"""The objectives of the cases in float64, with switches for known bugs as in reference.py. Each function returns what a trainer reports of one step."""

import math

import torch
from reference import Model

logs = torch.nn.functional.logsigmoid


# ---- targets ----

def targets(document, bugs):
    """Positions of the tokens that are learned."""
    ids, mask = document["ids"], list(document["mask"])
    if "prompt_learned" in bugs:
        mask = [0] + [1] * (len(ids) - 1)
    found = [t for t, m in enumerate(mask) if m]
    if "first_token_lost" in bugs:
        found = [t for t in found if mask[t - 1]]
    if "eos_is_padding" in bugs:
        found = [t for t in found if ids[t] != 2]
    return found


def token_logps(z, document, at, bugs=frozenset(), temperature=1.0):
    """log p of the tokens at these positions, of one document."""
    shift = 2 if "shifted_twice" in bugs else 1
    at = [t for t in at if t >= shift]
    rows = torch.tensor([t - shift for t in at], dtype=torch.long)
    return torch.log_softmax(z[rows] / temperature, -1).gather(1, torch.tensor([document["ids"][t] for t in at], dtype=torch.long)[:, None])[:, 0]


def logps_of(model, documents, bugs):
    """Of each document, log p of its targets."""
    z = model.logits([d["ids"] for d in documents])
    found = [token_logps(z[i], d, targets(d, bugs), bugs) for i, d in enumerate(documents)]
    if "target_across_border" in bugs:  # the last token of a document predicts the first one of the next
        for i in range(1, len(documents)):
            crossing = torch.log_softmax(z[i - 1][-1], -1)[documents[i]["ids"][0]]
            found[i] = torch.cat([crossing[None], found[i]])
    return found


def mean_of_means(parts):
    return sum(torch.cat(part).mean() for part in parts) / len(parts)


# ---- sft ----

def sft(model, documents, s, bugs):
    groups = s.get("micro_batches") or [list(range(len(documents)))]
    nll = [-logp for logp in logps_of(model, documents, bugs)]
    every = torch.cat(nll)
    loss = every.mean()
    if "mean_of_micro_batches" in bugs:
        loss = mean_of_means([[nll[i] for i in group] for group in groups])
    if "mean_of_ranks" in bugs:
        loss = mean_of_means([nll[::2], nll[1::2]])
    if "mean_of_documents" in bugs:
        loss = mean_of_means([[values] for values in nll if len(values)])
    if bugs & {"target_lost_between_ranks", "mean_of_pieces"}:
        begins = [sum(len(d["ids"]) for d in documents[:i]) for i in range(len(documents))]
        place = torch.tensor([begin + t for begin, d in zip(begins, documents) for t in targets(d, bugs)])
        half = (begins[-1] + len(documents[-1]["ids"])) // 2
        pieces = [every[place < half], every[place > half]]  # the target at `half` would be predicted by the other rank's last token
        if "mean_of_pieces" in bugs:
            pieces[1] = every[place >= half]
            loss = (pieces[0].mean() + pieces[1].mean()) / 2
        else:
            assert (place == half).any()
            loss = torch.cat(pieces).mean()
    if "log_of_ranks_added" in bugs:
        loss = loss + math.log(2)
    if s.get("router_aux_loss_coef") and "balance_dropped" not in bugs:
        loss = loss + s["router_aux_loss_coef"] * model.aux_loss()
    return dict(loss=loss, logps=[logp.sum().item() for logp in logps_of(model, documents, bugs)])


# ---- preferences ----

def dpo(model, documents, s, bugs, reference):
    own, ref = logps_of(model, documents, bugs), [x.detach() for x in logps_of(reference or model, documents, bugs)]
    if "reference_is_the_policy" in bugs:
        ref = [x.detach() for x in own]
    beta, losses = s["beta"], []
    for i in range(0, len(documents), 2):
        (c, r), (c0, r0) = (x.sum() for x in own[i:i + 2]), (x.sum() for x in ref[i:i + 2])
        n, m = len(own[i]), len(own[i + 1])
        if "length_of_the_document" in bugs:
            n, m = (len(d["ids"]) for d in documents[i:i + 2])
        u, v, e = c - c0, r - r0, s.get("label_smoothing", 0)
        if s["loss_type"] == "sigmoid":
            e = 0 if "smoothing_ignored" in bugs else e
            loss = -(1 - e) * logs(beta * (u - v)) - e * logs(-beta * (u - v))
        elif s["loss_type"] == "ipo_mean":
            n, m = (1, 1) if "log_probabilities_summed" in bugs else (n, m)
            loss = (u / n - v / m - 1 / (2 * beta))**2
        elif s["loss_type"] == "simpo":
            loss = -logs(beta * (c / n - r / m) - s["simpo_gamma"])
        losses.append(loss)
    return dict(loss=torch.stack(losses).mean())


def kto(model, documents, s, bugs, reference):
    whole = torch.mean if "log_probabilities_averaged" in bugs else torch.sum

    def log_ratios(some):
        return torch.stack([whole(own - ref.detach()) for own, ref in zip(logps_of(model, some, bugs), logps_of(reference, some, bugs))])

    u, good = log_ratios(documents), torch.tensor([d["label"] for d in documents])
    z = torch.zeros_like(u)
    if s["loss_type"] == "kto":
        first = [d["mask"].index(1) for d in documents]
        answers = [d["ids"][n:] for d, n in zip(documents, first)]
        answers = answers[::-1] if "answers_reversed" in bugs else answers[-1:] + answers[:-1]
        mismatched = [dict(ids=d["ids"][:n] + a, mask=[0] * n + [1] * len(a)) for d, n, a in zip(documents, first, answers)]
        z = z + log_ratios(mismatched).mean().clamp(min=0)
        if "divergence_of_the_other_label" in bugs:
            z = torch.where(good, u[~good].mean(), u[good].mean()).clamp(min=0)
        z = z if "divergence_has_a_gradient" in bugs else z.detach()
    weights = [1.0, 1.0] if "weights_ignored" in bugs else [s.get("undesirable_weight", 1.0), s.get("desirable_weight", 1.0)]
    weight, sign = (torch.tensor(pair, dtype=torch.float64)[good.long()] for pair in (weights, [-1.0, 1.0]))
    return dict(loss=(weight * torch.sigmoid(-sign * s["beta"] * (u - z))).mean())


def rm(model, documents, s, bugs):
    def last(ids):
        return ids.index(2) if "first_eos_read" in bugs else len(ids) - 1

    score = torch.stack([scores[last(d["ids"])] for d, scores in zip(documents, model.scores([d["ids"] for d in documents]))])
    return dict(loss=-logs(score[::2] - score[1::2]).mean())


# ---- policies ----

def whitened(rows, masks):
    every = torch.cat([row[mask == 1] for row, mask in zip(rows, masks)])
    return [(row - every.mean()) / every.std(correction=0) for row in rows]


def advantages(rollouts, s, bugs):
    """One number for each token of each completion."""
    rewards = torch.tensor([r["reward"] for r in rollouts], dtype=torch.float64)
    estimator, shaped = s.get("advantage_estimator", "group_norm"), rewards.clone()
    for group in sorted({r["group"] for r in rollouts}):
        own = torch.tensor([r["group"] == group for r in rollouts])
        others = torch.ones_like(own) if "groups_merged" in bugs else own
        if estimator != "reinforce":
            shaped[own] = rewards[own] - rewards[others].mean()
        if estimator == "group_norm":
            shaped[own] = shaped[own] / ((rewards if "deviation_of_the_batch" in bugs else rewards[others]).std() + 1e-9)
    out = []
    for r, value in zip(rollouts, shaped):
        mask, values, later = r["mask"], [0.0] * len(r["mask"]), 0.0
        last = max(t for t, m in enumerate(mask) if m)
        for t in reversed(range(len(mask))):
            values[t] = later = (value.item() if t == last else 0.0) + s.get("gamma", 1.0) * later
            if not mask[t] and t < last:
                later = 0.0 if "return_reset_by_observation" in bugs else later / s.get("gamma", 1.0)
        out.append(torch.tensor(values, dtype=torch.float64))
    if estimator == "reinforce":
        out = whitened(out, [torch.tensor(r["mask"]) for r in rollouts])
    return out


def gae(rollouts, values, s, bugs):
    """The advantages of each completion's tokens, whitened, and the critic's targets."""
    masks, raw = [torch.tensor(r["mask"]) for r in rollouts], []
    for r, mask, V in zip(rollouts, masks, values):
        sampled = [t for t in range(len(mask)) if mask[t]]
        steps = range(len(mask)) if "observations_are_steps" in bugs else sampled
        rewarded, own = len(mask) - 1 if "reward_of_the_last_token" in bugs else sampled[-1], torch.zeros_like(V)
        later = next_value = 0.0
        for t in reversed(steps):
            if "observation_valued" in bugs:
                next_value = V[t + 1] if t + 1 < len(V) else 0.0
            own[t] = later = (r["reward"] if t == rewarded else 0.0) + s["gamma"] * next_value - V[t] + s["gamma"] * s["gae_lambda"] * later
            next_value = V[t]
        raw.append(own)
    parts = [slice(0, None, 2), slice(1, None, 2)] if "whitened_by_rank" in bugs else [slice(None)]
    advantages = list(raw)
    for part in parts:
        advantages[part] = whitened(raw[part], masks[part])
    return advantages, [own + V for own, V in zip(raw, values)]


def ppo(model, rollouts, s, bugs, critic):
    shift = 0 if "value_behind_the_token" in bugs else 1
    begins = [len(r["prompt_ids"]) - shift for r in rollouts]
    scores = critic.scores([r["prompt_ids"] + r["completion_ids"] for r in rollouts])
    values = [v[n:n + len(r["mask"])].detach() for v, n, r in zip(scores, begins, rollouts)]
    given, returns = gae(rollouts, values, s, bugs)
    errors = torch.cat([(v - G)[torch.tensor(r["mask"]) == 1] for v, G, r in zip(values, returns, rollouts)])
    return dict(grpo(model, rollouts, s, bugs, given=given), value_loss=(errors**2).mean().item() / 2)


def grpo(model, rollouts, s, bugs, reference=None, given=None):
    documents = [dict(ids=r["prompt_ids"] + r["completion_ids"]) for r in rollouts]
    temperature = 1.0 if "temperature_ignored" in bugs else s.get("temperature", 1.0)
    ends = [range(len(r["prompt_ids"]), len(d["ids"])) for r, d in zip(rollouts, documents)]
    z = model.logits([d["ids"] for d in documents])
    ref = reference and [x.detach() for x in reference.logits([d["ids"] for d in documents])]
    groups, kind = s.get("micro_batches") or [list(range(len(rollouts)))], s.get("policy_loss_type", "ppo")
    low, high = s.get("eps_clip") or [0.2, 0.2]
    given = given or advantages(rollouts, s, bugs)
    sums, counts, entropies, divergences = [], [], [], []
    for i, r in enumerate(rollouts):
        logp = token_logps(z[i], documents[i], ends[i], temperature=temperature)
        d, mask, A = logp - torch.tensor(r["logprobs"], dtype=torch.float64), torch.tensor(r["mask"], dtype=torch.float64), given[i]
        counted = torch.ones_like(mask) if "observations_counted" in bugs else mask.clone()
        if "observations_learned" in bugs:
            mask = counted = torch.ones_like(mask)
        if s.get("mask_truncated") and r.get("truncated"):
            mask = torch.zeros_like(mask)
            counted = counted if "truncated_counted" in bugs else mask
        d = torch.where(torch.tensor(r["mask"]) == 1, d, torch.zeros_like(d)) if "observations_learned" not in bugs else d
        if kind == "gspo":
            d = ((d * mask).sum() / (1 if "ratio_of_the_sum" in bugs else mask.sum().clamp(min=1))).expand(len(d))
        ratio = d.exp()
        if kind == "cispo" and "cispo_as_ppo" not in bugs:
            terms = -ratio.detach().clamp(max=high) * A * logp
        else:
            bound = ratio.clamp(1 - low, 1 + high) if kind != "cispo" else ratio.clamp(max=high)
            objective = bound * A if "clipped_on_both_sides" in bugs else torch.minimum(ratio * A, bound * A)
            if s.get("dual_clip"):
                limited = torch.maximum(objective, s["dual_clip"] * A)
                objective = limited if "dual_clip_of_gains" in bugs else torch.where(A < 0, limited, objective)
            terms = -objective
        if s.get("kl_coef"):
            k = logp - token_logps(ref[i], documents[i], ends[i], temperature=temperature)
            kl = torch.exp(-k) - 1 + k if "kl_mirrored" not in bugs else torch.exp(k) - 1 - k
            if "kl_of_every_token" in bugs:
                divergences.append(kl)
            else:
                terms = terms + s["kl_coef"] * kl
        p = torch.log_softmax(z[i][ends[i].start - 1:ends[i].stop - 1] / temperature, -1)
        entropies.append(-(p.exp() * p).sum(-1) * mask)
        sums.append((terms * mask).sum())
        counts.append(counted.sum())
    total, n = torch.stack(sums), torch.stack(counts)
    if s.get("loss_aggregation", "sequence_mean" if kind == "gspo" else "token_mean") == "sequence_mean":
        loss = (total / n.clamp(min=1)).mean()
    elif s.get("loss_aggregation") == "constant":
        loss = total.sum() / (n.sum() if "constant_is_tokens" in bugs else len(rollouts) * s["max_new_tokens"])
    else:
        loss = total.sum() / n.sum()
    if "mean_of_micro_batches" in bugs:
        loss = sum(total[g].sum() / n[g].sum() for g in map(torch.tensor, groups)) / len(groups)
    if "divided_by_micro_batches_too" in bugs:
        loss = loss / len(groups)
    if divergences:
        loss = loss + s["kl_coef"] * torch.cat(divergences).mean()
    if s.get("entropy_coef"):
        every = torch.cat(entropies).sum() / n.sum()
        if "entropy_sum_of_means" in bugs:
            every = sum(e.sum() for e in entropies) / len(entropies)
        loss = loss - s["entropy_coef"] * every
    return dict(loss=loss)


# ---- distillation ----

def distill(model, documents, s, bugs, teacher):
    groups, beta, tau = s.get("micro_batches") or [list(range(len(documents)))], s["divergence_beta"], s.get("temperature", 1.0)
    tau = 1.0 if "temperature_ignored" in bugs else tau
    student, known = (m.logits([d["ids"] for d in documents]) for m in (model, teacher))
    kl = lambda a, b: (a.exp() * (a - b)).sum(-1)
    losses = []
    for i, d in enumerate(documents):
        rows = torch.tensor([t - 1 for t in targets(d, bugs)])
        a, b = torch.log_softmax(student[i][rows] / tau, -1), torch.log_softmax(known[i].detach()[rows] / tau, -1)
        if beta in (0, 1):
            loss = kl(b, a) if (beta == 0) ^ ("divergence_turned_round" in bugs) else kl(a, b)
        else:
            share = 1 - beta if "mixture_turned_round" in bugs else beta
            m = torch.logaddexp(a + math.log(1 - share), b + math.log(share))
            if "mixture_of_logarithms" in bugs:
                m = (1 - share) * a + share * b
            loss = beta * kl(b, m) + (1 - beta) * kl(a, m)
        losses.append(loss * (tau**2 if "temperature_squared" in bugs else 1))
    loss = torch.cat(losses).mean()
    if "mean_of_micro_batches" in bugs:
        loss = mean_of_means([[losses[i] for i in group] for group in groups])
    return dict(loss=loss)


def compute(case, records, folder, bugs):
    """The loss, its gradient's norm and, for sft, log p of each document, and for ppo the critic's loss."""
    place = lambda name: name and folder(name)
    model = Model(folder(case["model"]), bugs, place(case.get("adapter")))
    other = case.get("ref_model") or case.get("teacher_model") or case.get("critic_model")
    other = Model(folder(other)) if other else None
    task, s = case["task"], case["settings"]
    more = [] if task in ("sft", "rm") else [other]
    got = {"sft": sft, "dpo": dpo, "kto": kto, "rm": rm, "grpo": grpo, "ppo": ppo, "distill": distill}[task](model, records, s, bugs, *more)
    return {**got, "grad_norm": model.gradient_norm(got["loss"]), "loss": got["loss"].item()}
