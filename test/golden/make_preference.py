#!/usr/bin/env python3
"""Pairs of answers, and what DPO and a reward model make of them on the models of make.py, by transformers in float64.

    python3 test/golden/make_preference.py [NAME ...]

writes, of all models or of these alone, test/golden/:
  pairs.safetensors    prepared data of kind "pref": the documents chosen, rejected, chosen, rejected, ..., each prompt + answer.
                       tokens U16, ids of every model; loss_mask U8 (1: the answer's tokens, final eos too); doc_offsets I64;
                       margin F32 (pairs)
  reference101, reference112    models of one layer, for the vocabularies that only one of make.py's models has: references only
  preference.json      models.NAME, of each model of make.py:
    reference          the reference model's directory; never the policy
    logps, reference_logps    of each document: sum of log p over its answer's tokens
    entropy            mean over the answers' tokens of the policy's entropy (nats)
    rewards_chosen, rewards_rejected, margins, accuracy    means over pairs of beta u, beta v, beta (u - v), and u > v;
                       u, v: logp - reference's logp of the chosen, of the rejected answer; beta as in `dpo`
    dpo.NAME           loss_type, beta, label_smoothing: which loss of llmc/train/preference.h; loss: its mean over pairs
    score              the reward model: this row (C) takes the place of lm_head, and a document's reward is its product with the
                       last token's state behind the final norm. The last by length: several documents end in several eos
    rewards            of each document
    rewards_accuracy   mean over pairs of chosen > rejected
    reward.NAME        loss: mean over pairs of -log s(chosen - rejected - margin), margin 0 unless `margin` is true, plus
                       center_rewards_coefficient times the mean of (chosen + rejected)^2
    With each loss: grad_norm, the L2 norm of its gradient by all parameters (tied embeddings once; of a reward model with
    score.weight and without lm_head), and projections, which show the gradient's sign: sum_i gradient[i] * sign[i] / sqrt(n) for
    k < 4 over all tensors, n their elements together, signs by the tensor's name as in golden.json.

Documents are run one by one, so nothing is padded and a document's last position is its last token.
"""
import json
import shutil
import sys

import numpy as np
import torch
import transformers
from transformers import AutoModelForSequenceClassification

from make import (HERE, LLAMA3_SCALING, MODELS, SMALL, flat_gradients, load, rope, save_arrays, signs, stream_of, widened,
                  write_json, write_model)

EOS, FIRST_ID = 2, 3  # ids below FIRST_ID are special
PAIRS = [  # tokens of the prompt; of the chosen and of the rejected answer, and how many of those are eos, at the end
    (5, (7, 1), (12, 1)),
    (1, (1, 1), (4, 1)),  # an answer that is only eos
    (25, (40, 2), (36, 1)),  # long, but one row of 128 holds both
    (13, (9, 1), (9, 1)),
    (8, (22, 3), (15, 2)),
    (17, (3, 1), (30, 1)),
    (2, (11, 4), (6, 1)),
    (20, (16, 1), (1, 1)),
    (11, (28, 1), (33, 3)),
    (3, (19, 1), (5, 2)),
]
BETA = 0.1  # these models are so unlike each other that beta (u - v) is up to some units
DPO_LOSSES = {
    "sigmoid": dict(loss_type="sigmoid", beta=BETA, label_smoothing=0.0),
    "cdpo": dict(loss_type="sigmoid", beta=BETA, label_smoothing=0.2),
    "ipo_sum": dict(loss_type="ipo_sum", beta=BETA, label_smoothing=0.0),
}
REWARD_LOSSES = {
    "plain": dict(margin=False, center_rewards_coefficient=0.0),
    "margin": dict(margin=True, center_rewards_coefficient=0.0),
    "centered": dict(margin=False, center_rewards_coefficient=0.01),
}

REFERENCE = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, intermediate_size=16,
                 tie_word_embeddings=True)
OWN_REFERENCES = {  # as MODELS
    "reference101": ("llama", dict(vocab_size=101, **REFERENCE, **rope(1e4)), {}),
    "reference112": ("llama", dict(vocab_size=112, **REFERENCE, rope_parameters=LLAMA3_SCALING), {}),
}


def vocabulary(name):
    return {**MODELS, **OWN_REFERENCES}[name][1].get("vocab_size", SMALL["vocab_size"])


def reference_of(name):
    """The next of the models with the same vocabulary, but no mixture of experts; of GPT-2's, which another trainer runs, the next of those."""
    models = {**MODELS, **OWN_REFERENCES}
    kind = lambda other: (vocabulary(other), models[other][0] == "gpt2")
    alike = [other for other in models if kind(other) == kind(name) and (other == name or not models[other][0].endswith(("moe", "mixtral")))]
    return alike[(alike.index(name) + 1) % len(alike)]


# ---- pairs ----------------------------------------------------------------------------------------------------------------------

def make_pairs():
    random = np.random.Generator(np.random.PCG64(stream_of("pairs")))
    vocab = min(vocabulary(name) for name in MODELS)
    documents, masks = [], []
    for prompt_length, *answers in PAIRS:
        prompt = random.integers(FIRST_ID, vocab, prompt_length)
        for length, ends in answers:
            answer = np.append(random.integers(FIRST_ID, vocab, length - ends), [EOS] * ends)
            documents.append(np.append(prompt, answer))
            masks.append(np.append(np.zeros(prompt_length), np.ones(length)))
    margin = np.float32(random.integers(0, 9, len(PAIRS)) / 4)
    arrays = dict(tokens=np.concatenate(documents).astype(np.uint16), loss_mask=np.concatenate(masks).astype(np.uint8),
                  doc_offsets=np.cumsum([0] + [len(d) for d in documents], dtype=np.int64), margin=margin)
    save_arrays(HERE / "pairs.safetensors", arrays, dict(kind="pref", vocab_size=str(vocab)))
    return [torch.from_numpy(d) for d in documents], [np.flatnonzero(m) for m in masks], torch.from_numpy(margin).double()


# ---- DPO ------------------------------------------------------------------------------------------------------------------------

def answer_logps(model, documents, targets):
    """Log-probability of each document's answer, and the mean entropy of its tokens' predictions."""
    logps, entropy = [], 0
    for ids, t in zip(documents, targets):
        logp = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0, t - 1], dim=-1)
        logps.append(logp.gather(1, ids[t, None]).sum())
        entropy -= (logp.exp() * logp).sum().item()
    return torch.stack(logps), entropy / sum(len(t) for t in targets)


def pair_losses(u, v, loss_type, beta, label_smoothing):
    if loss_type == "ipo_sum":
        return (u - v - 1 / (2 * beta)) ** 2
    log_s, x = torch.nn.functional.logsigmoid, beta * (u - v)
    return -(1 - label_smoothing) * log_s(x) - label_smoothing * log_s(-x)


def describe(loss, model):
    gradients = flat_gradients(model, torch.autograd.grad(loss, list(model.parameters()), retain_graph=True))
    n = sum(g.size for g in gradients.values())
    projections = [sum(float(g @ signs(name, k, g.size)) for name, g in gradients.items()) / n**0.5 for k in range(4)]
    return dict(loss=loss.item(), grad_norm=float(np.linalg.norm(np.concatenate(list(gradients.values())))), projections=projections)


def make_dpo(name, documents, targets):
    policy, reference = load(HERE / name, torch.float64), load(HERE / reference_of(name), torch.float64)
    with widened(policy):
        logps, entropy = answer_logps(policy, documents, targets)
    with widened(reference), torch.no_grad():
        reference_logps, _ = answer_logps(reference, documents, targets)
    u, v = (logps - reference_logps).view(-1, 2).T
    dpo = {key: {**options, **describe(pair_losses(u, v, **options).mean(), policy)} for key, options in DPO_LOSSES.items()}
    mean = lambda x: x.double().mean().item()
    return dict(reference=reference_of(name), logps=logps.tolist(), reference_logps=reference_logps.tolist(), entropy=entropy,
                rewards_chosen=mean(BETA * u), rewards_rejected=mean(BETA * v), margins=mean(BETA * (u - v)), accuracy=mean(u > v),
                dpo=dpo)


# ---- the reward model -----------------------------------------------------------------------------------------------------------

def load_reward_model(name, dtype, score):
    model = AutoModelForSequenceClassification.from_pretrained(HERE / name, dtype=dtype, num_labels=1,
                                                               attn_implementation="eager", experts_implementation="eager")
    with torch.no_grad():
        model.score.weight.copy_(torch.tensor([score]))
    return model.eval()


def make_score(name, number):
    """float32, and about as long as gives rewards of order 1: the states come from a norm."""
    C = MODELS[name][1].get("hidden_size", SMALL["hidden_size"])
    generator = torch.Generator().manual_seed(stream_of(f"{name}.score.weight") + number)
    return (torch.randn(C, generator=generator) / C**0.5).tolist()


def reward_loss(rewards, margins, margin, center_rewards_coefficient):
    c, r = rewards.view(-1, 2).T
    log_s = torch.nn.functional.logsigmoid(c - r - margins * margin)
    return -log_s.mean() + center_rewards_coefficient * ((c + r) ** 2).mean()


def make_reward(name, documents, margins, number=0):
    if MODELS[name][0] == "granite":  # of which transformers has no reward models
        return {}
    score = make_score(name, number)
    model = load_reward_model(name, torch.float64, score)
    assert model.config.pad_token_id is None  # then the last position is read, and none is looked for by its id
    with widened(model):
        rewards = torch.cat([model(input_ids=ids[None], use_cache=False).logits[0] for ids in documents])
        with torch.no_grad():
            by_id = torch.cat([model(input_ids=ids[None, ids != EOS], use_cache=False).logits[0] for ids in documents])
    c, r = rewards.view(-1, 2).T
    losses = {key: {**options, **describe(reward_loss(rewards, margins, **options), model)}
              for key, options in REWARD_LOSSES.items()}
    wrong = reward_loss(by_id, margins, **REWARD_LOSSES["plain"]).item()
    if abs(wrong - losses["plain"]["loss"]) < 1e-2:  # the loss does not notice where a reward is read
        return make_reward(name, documents, margins, number + 1)
    return dict(score=score, rewards=rewards.tolist(), rewards_accuracy=(c > r).double().mean().item(), reward=losses)


def main():
    torch.set_num_threads(1)  # the order of sums, and with it the last digits
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name, model in OWN_REFERENCES.items() if not sys.argv[1:] else ():
        shutil.rmtree(HERE / name, ignore_errors=True)
        write_model(name, HERE / name, *model)
    documents, targets, margins = make_pairs()
    models = json.loads((HERE / "preference.json").read_text())["models"] if sys.argv[1:] else {}
    print("model         reference        sigmoid      cdpo   ipo_sum   margins accuracy    reward    margin  centered accuracy")
    for name in sys.argv[1:] or MODELS:
        models[name] = {**make_dpo(name, documents, targets), **make_reward(name, documents, margins)}
        m = models[name]
        losses = lambda task: " ".join(f"{loss['loss']:9.4f}" for loss in m.get(task, {}).values())
        print(f"{name:13} {m['reference']:13} {losses('dpo')} {m['margins']:9.4f} {m['accuracy']:8.2f} {losses('reward')} "
              f"{m.get('rewards_accuracy', 0):8.2f}", flush=True)
    versions = dict(transformers=transformers.__version__, torch=torch.__version__)
    write_json(HERE / "preference.json", dict(**versions, models=models), depth=3)


if __name__ == "__main__":
    main()
