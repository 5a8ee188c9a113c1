#!/usr/bin/env python3
"""What TRL's DPOTrainer, KTOTrainer and RewardTrainer compute of the pairs of make_preference.py. In float32: so are TRL's log-probabilities,
whatever the model is.

    pip install torch transformers safetensors numpy trl
    python3 test/golden/make_trl.py

writes test/golden/trl.json:
  policy, reference    directories of the two models, a pair of preference.json
  tokens, logps        of the answers, by pair: chosen, rejected; logps also by the reference: reference_chosen, reference_rejected
  dpo.TYPE             by TRL's name of a loss: beta, label_smoothing, loss, grad_norm (L2, all parameters, tied ones once), and
                       metrics: what the trainer logs, by its names. Its "ipo" is our ipo_mean, its "sigmoid" knows no
                       label_smoothing, and "sft" is the mean of -log p over the tokens of all chosen answers
  kto.TYPE             beta, desirable_weight, undesirable_weight, learning_rate, batch_size, labels; steps: for each step of an epoch, in the order of
                       pairs.safetensors, what the trainer logs. The models have changed places, so that the divergence is above 0
  reward.NAME          of the reward model and the losses of preference.json: margin, center_rewards_coefficient, loss, grad_norm,
                       rewards (chosen, rejected by pair), metrics

Except for kto, one batch holds all pairs. TRL tokenizes and pads them, from text in which token i is spelled "<i>", and its compute_loss gives loss
and metrics. Padding is id 0, which no document has: transformers reads a reward at the last token that is not padding, so with eos as
padding, TRL's choice for a tokenizer without any, it would read each document before its final eos, and the loss be another.
"""
import json
import tempfile

import datasets
import numpy as np
import torch
import transformers
import trl
from safetensors.numpy import load_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer

from make import HERE, global_norm, load, write_json
from make_preference import BETA, EOS, PAIRS, REWARD_LOSSES, load_reward_model, vocabulary

POLICY = "llama2"
KTO_BATCH = 7  # of 20 answers
SMOOTHED = {"exo_pair", "robust"}
BETAS = {"discopop": 0.02}  # with which its gate, at beta (u - v) / 0.05, is neither open nor shut; all others BETA
LOSSES = ["sigmoid", "sigmoid_norm", "robust", "hinge", "ipo", "apo_zero", "apo_down", "sppo_hard", "nca_pair", "bco_pair",
          "exo_pair", "discopop", "sft"]


def make_tokenizer():
    tokenizer = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(vocabulary(POLICY))}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"<\d+>"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"<{EOS}>", pad_token="<0>")


def read_pairs():
    """Documents' ids, and the pairs as text."""
    arrays = load_file(HERE / "pairs.safetensors")
    documents = np.split(arrays["tokens"].astype(int), arrays["doc_offsets"][1:-1])
    spell = lambda ids: "".join(f"<{i}>" for i in ids)
    columns = dict(prompt=[], chosen=[], rejected=[], margin=arrays["margin"].tolist())
    for (prompt, *_), chosen, rejected in zip(PAIRS, documents[::2], documents[1::2]):
        columns["prompt"].append(spell(chosen[:prompt]))
        columns["chosen"].append(spell(chosen[prompt:]))
        columns["rejected"].append(spell(rejected[prompt:]))
    return documents, datasets.Dataset.from_dict(columns)


def options(**more):
    return dict(output_dir=tempfile.gettempdir(), report_to="none", use_cpu=True, bf16=False, disable_tqdm=True, **more)


def whole_batch(trainer, documents):
    """All pairs as TRL tokenizes and collates them."""
    trainer.model.train()  # for the metrics of training; these models have no dropout
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(len(PAIRS))])
    for ids, mask, want in zip(batch["input_ids"], batch["attention_mask"], documents[::2] + documents[1::2]):
        assert ids[mask.bool()].tolist() == want.tolist()
    return batch


def describe(trainer, loss):
    """Loss, gradient norm, and the metrics of the one call of compute_loss."""
    loss.backward()
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return dict(loss=loss.item(), grad_norm=global_norm(trainer.model.parameters()).item(), metrics=metrics)


def dpo_trainer(loss_type, reference, pairs, tokenizer):
    smoothing = 0.1 if loss_type in SMOOTHED else 0.0
    args = DPOConfig(**options(loss_type=[loss_type], beta=BETAS.get(loss_type, BETA), label_smoothing=smoothing))
    return DPOTrainer(load(HERE / POLICY, torch.float32), load(HERE / reference, torch.float32), args, train_dataset=pairs,
                      processing_class=tokenizer)


def make_dpo(golden, documents, pairs, tokenizer):
    out = {}
    for loss_type in LOSSES:
        trainer = dpo_trainer(loss_type, golden["reference"], pairs, tokenizer)
        batch = whole_batch(trainer, documents)
        loss = trainer.compute_loss(trainer.model, dict(batch))
        out[loss_type] = dict(beta=trainer.beta, label_smoothing=trainer.label_smoothing, **describe(trainer, loss))
        print(f"{loss_type:13}", " ".join(f"{out[loss_type][key]:10.5f}" for key in ("loss", "grad_norm")), flush=True)
    logps = dict(zip(("chosen", "rejected"), trainer.compute_ref_log_probs(trainer.model, batch)))
    logps.update(zip(("reference_chosen", "reference_rejected"), trainer.compute_ref_log_probs(trainer.ref_model, batch)))
    tokens = dict(zip(("chosen", "rejected"), batch["completion_mask"].sum(1).view(2, -1).tolist()))
    return dict(tokens=tokens, logps={key: value.tolist() for key, value in logps.items()}, dpo=out)


def make_kto(golden, documents, pairs, tokenizer):
    labels = [i % 3 != 1 for i in range(len(documents))]
    completions = [text for pair in zip(pairs["chosen"], pairs["rejected"]) for text in pair]
    answers = datasets.Dataset.from_dict(dict(prompt=np.repeat(pairs["prompt"], 2).tolist(), completion=completions, label=labels))
    settings = dict(beta=BETA, desirable_weight=1.5, undesirable_weight=0.5, learning_rate=1e-3)
    out = {}
    for loss_type in ("kto", "apo_zero_unpaired"):
        args = KTOConfig(**options(loss_type=loss_type, per_device_train_batch_size=KTO_BATCH, num_train_epochs=1, lr_scheduler_type="constant", logging_steps=1,
                                   gradient_checkpointing=False, save_strategy="no", **settings))
        trainer = KTOTrainer(load(HERE / golden["reference"], torch.float32), load(HERE / POLICY, torch.float32), args, train_dataset=answers,
                             processing_class=tokenizer)
        trainer.train()
        names = ("loss", "grad_norm", "kl", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected")
        steps = [{name: line[name] for name in names if name in line} for line in trainer.state.log_history if "grad_norm" in line]
        out[loss_type] = dict(**settings, batch_size=KTO_BATCH, labels=labels, steps=steps)
        print(f"{loss_type:13}", steps, flush=True)
    return out


def make_reward(golden, documents, pairs, tokenizer):
    out = {}
    for name, loss_options in REWARD_LOSSES.items():
        columns = pairs if loss_options["margin"] else pairs.remove_columns("margin")
        args = RewardConfig(**options(center_rewards_coefficient=loss_options["center_rewards_coefficient"] or None))
        model = load_reward_model(POLICY, torch.float32, golden["score"])
        trainer = RewardTrainer(model, args, train_dataset=columns, processing_class=tokenizer)
        loss, outputs = trainer.compute_loss(trainer.model, whole_batch(trainer, documents), return_outputs=True)
        chosen, rejected = outputs.logits.view(2, -1).tolist()
        out[name] = dict(**loss_options, rewards=dict(chosen=chosen, rejected=rejected), **describe(trainer, loss))
        print(f"{name:13}", " ".join(f"{out[name][key]:10.5f}" for key in ("loss", "grad_norm")), flush=True)
    return out


def main():
    torch.set_num_threads(1)  # the order of sums, and with it the last digits
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    golden = json.loads((HERE / "preference.json").read_text())["models"][POLICY]
    documents, pairs = read_pairs()
    tokenizer = make_tokenizer()
    versions = dict(trl=trl.__version__, transformers=transformers.__version__, torch=torch.__version__)
    made = dict(policy=POLICY, reference=golden["reference"], **make_dpo(golden, documents, pairs, tokenizer),
                kto=make_kto(golden, documents, pairs, tokenizer), reward=make_reward(golden, documents, pairs, tokenizer))
    write_json(HERE / "trl.json", {**versions, **made}, depth=2)


if __name__ == "__main__":
    main()
