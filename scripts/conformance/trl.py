"""TRL's trainers, in float on the CPU, with transformers' adapter for models. One process.

SFTTrainer, DPOTrainer, KTOTrainer and RewardTrainer run a step on token ids or texts. GRPOTrainer and DistillationTrainer would sample their own answers,
so their compute_loss gets the batch with the case's answers, log-probabilities and masks; what they compute before that, such as advantages, is not
run."""

import importlib.util
from pathlib import Path

import datasets
import torch
import trl
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

spec = importlib.util.spec_from_file_location("adapter_of_models", Path(__file__).with_name("transformers.py"))
base = importlib.util.module_from_spec(spec)
spec.loader.exec_module(base)
datasets.disable_progress_bars()


def tokenizer(size):
    """Token i is spelled <i>; 2 is EOS and, as in TRL for a tokenizer without padding, the padding."""
    words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(size)}))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"<\d+>"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<2>", pad_token="<2>")


def options(folder, count, apart=False, **more):
    return dict(output_dir=str(folder), bf16=False, per_device_train_batch_size=1 if apart else count, gradient_accumulation_steps=count if apart else 1,
                **base.QUIET, **more)


def chats(case):
    """Records, tokenizer and options. A single answer is a completion, which SFTTrainer finds with any template; several are found by marks."""
    words, records = base.tokenizer_of(case), [r["messages"] for r in case["records"]]
    words.chat_template = case["chat_template"]
    if all([m["role"] for m in messages].count("assistant") == 1 for messages in records):
        return [dict(prompt=messages[:-1], completion=messages[-1:]) for messages in records], words, {}
    words.chat_template = case.get("marked_template", case["chat_template"])
    return [dict(messages=messages) for messages in records], words, dict(assistant_only_loss=True)


def sft(case, folder, model, words):
    settings, more = case["settings"], {}
    if "tokenizer" in case:
        records, words, more = chats(case)
    else:
        records = base.as_records(case["records"])
    if settings.get("padding_side") == "left":
        raise NotImplementedError("SFTTrainer pads on the right")
    coefficient = settings.get("router_aux_loss_coef", 0.0)  # TRL's default is 0.001
    args = trl.SFTConfig(**options(folder, len(records), "micro_batches" in settings, max_length=None, padding_free=settings.get("packed", False),
                                   router_aux_loss_coef=coefficient, **more))
    try:
        return base.first_log(trl.SFTTrainer(model, args, train_dataset=datasets.Dataset.from_list(records), processing_class=words))
    except ValueError as error:
        if "can't keep packed sequences apart" not in str(error):
            raise
        raise NotImplementedError(f"refused: {error}") from None


class GivenPairs(trl.DPOTrainer):
    def _prepare_dataset(self, dataset, *_):  # would tokenise
        return dataset


def pairs_of(case):
    for chosen, rejected in zip(case["records"][::2], case["records"][1::2]):
        prompt = chosen["mask"].index(1)
        yield chosen["ids"][:prompt], chosen["ids"][prompt:], rejected["ids"][prompt:]


def dpo(case, folder, model, words):
    settings = case["settings"]
    names = {"sigmoid": "sigmoid", "ipo_mean": "ipo"}
    if settings["loss_type"] not in names:
        raise NotImplementedError(f"DPOTrainer has no {settings['loss_type']}")
    records = [dict(prompt_ids=p, chosen_ids=c, rejected_ids=r) for p, c, r in pairs_of(case)]
    args = trl.DPOConfig(**options(folder, len(records), beta=settings["beta"], loss_type=[names[settings["loss_type"]]],
                                   label_smoothing=settings.get("label_smoothing", 0.0)))
    reference = base.load(case, adapter=False, name="ref_model")
    return base.first_log(GivenPairs(model, reference, args, train_dataset=datasets.Dataset.from_list(records), processing_class=words))


def kto(case, folder, model, words):
    """KTOTrainer makes the mismatched pairs where it tokenises, so it gets texts."""
    text, answers = lambda ids: "".join(f"<{i}>" for i in ids), [(d, d["mask"].index(1)) for d in case["records"]]
    records = [dict(prompt=text(d["ids"][:n]), completion=text(d["ids"][n:]), label=d["label"]) for d, n in answers]
    args = trl.KTOConfig(**options(folder, len(records), max_length=None, **case["settings"]))
    reference = base.load(case, adapter=False, name="ref_model")
    return base.first_log(trl.KTOTrainer(model, reference, args, train_dataset=datasets.Dataset.from_list(records), processing_class=words))


def rm(case, folder, words):
    model = AutoModelForSequenceClassification.from_pretrained(case["model"], dtype=torch.float32, attn_implementation="eager")
    model.config.pad_token_id = words.pad_token_id
    records = [dict(chosen_ids=p + c, rejected_ids=p + r) for p, c, r in pairs_of(case)]
    args = trl.RewardConfig(**options(folder, len(records)))
    return base.first_log(trl.RewardTrainer(model, args, train_dataset=datasets.Dataset.from_list(records), processing_class=words))


# ---- losses of answers ----

def padded(rows, filler, left=False, dtype=torch.long):
    longest = max(map(len, rows))
    rows = [[filler] * (longest - len(row)) + row if left else row + [filler] * (longest - len(row)) for row in rows]
    return torch.tensor(rows, dtype=dtype)


def answers(prompts, completions, masks):
    ones = lambda rows: [[1] * len(row) for row in rows]
    return dict(prompt_ids=padded(prompts, 2, left=True), prompt_mask=padded(ones(prompts), 0, left=True), completion_ids=padded(completions, 2),
                completion_mask=padded(ones(completions), 0), tool_mask=padded(masks, 1))


def norm_of(model):
    return torch.sqrt(sum((p.grad**2).sum() for p in model.parameters() if p.grad is not None)).item()


def step(trainer, batch, groups, per_answer):
    """Backward of compute_loss on each micro-batch."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = len(groups)
    total = 0.0
    for group in groups:
        part = {key: value[group] if key in per_answer else value for key, value in batch.items()}
        loss = trainer.compute_loss(trainer.model, part)
        loss.backward()
        total += loss.item()
    return {"loss": total, "grad_norm": norm_of(trainer.model)}


def dummy(records):
    return datasets.Dataset.from_list([{"prompt": "<5>"}] * records)


def grpo(case, folder, model, words):
    settings, rollouts = case["settings"], case["records"]
    if case["name"] in ("grpo_groups", "grpo_deviation", "grpo_truncated") or settings.get("advantage_estimator") == "reinforce":
        raise NotImplementedError("GRPOTrainer computes advantages and masks where it samples, which this adapter replaces")
    kind = settings.get("policy_loss_type", "ppo")
    low, high = settings.get("eps_clip", [0.2, 0.2])
    aggregation = settings.get("loss_aggregation", "sequence_mean" if kind == "gspo" else "token_mean")
    loss_type = "cispo" if kind == "cispo" else {"token_mean": "dapo", "sequence_mean": "grpo", "constant": "dr_grpo"}[aggregation]
    args = trl.GRPOConfig(**options(folder, len(rollouts), num_generations=3, loss_type=loss_type, epsilon=low, epsilon_high=high,
                                    importance_sampling_level="sequence" if kind == "gspo" else "token", beta=settings.get("kl_coef", 0.0),
                                    max_completion_length=settings.get("max_new_tokens", 64), temperature=settings.get("temperature", 1.0),
                                    delta=settings.get("dual_clip"), entropy_coef=settings.get("entropy_coef", 0.0), use_bias_correction_kl=False))
    trainer = trl.GRPOTrainer(model, lambda completions, **_: [0.0] * len(completions), args, train_dataset=dummy(len(rollouts)), processing_class=words)
    batch = answers([r["prompt_ids"] for r in rollouts], [r["completion_ids"] for r in rollouts], [r["mask"] for r in rollouts])
    advantages = torch.zeros(len(rollouts))
    for group in {r["group"] for r in rollouts}:
        own = torch.tensor([r["group"] == group for r in rollouts])
        rewards = torch.tensor([r["reward"] for r in rollouts])[own]
        advantages[own] = (rewards - rewards.mean()) / (1.0 if settings.get("advantage_estimator") == "dr_grpo" else rewards.std() + 1e-9)
    batch["advantages"] = advantages
    batch["old_per_token_logps"] = padded([r["logprobs"] for r in rollouts], 0.0, dtype=torch.float32)
    batch["num_items_in_batch"] = (batch["completion_mask"] * batch["tool_mask"]).sum()
    per_answer = set(batch) - {"num_items_in_batch"}
    if "ref_model" in case:
        ids, mask = (torch.cat([batch[f"prompt_{key}"], batch[f"completion_{key}"]], 1) for key in ("ids", "mask"))
        with torch.no_grad():
            z = base.load(case, False, "ref_model")(input_ids=ids, attention_mask=mask).logits[:, -batch["completion_ids"].shape[1] - 1:-1]
            logp = torch.log_softmax(z / settings.get("temperature", 1.0), -1)
            batch["ref_per_token_logps"] = logp.gather(2, batch["completion_ids"][..., None])[..., 0]
    return step(trainer, batch, settings.get("micro_batches") or [list(range(len(rollouts)))], per_answer)


def distill(case, folder, model, words):
    settings, documents = case["settings"], case["records"]
    args = trl.DistillationConfig(**options(folder, len(documents), beta=settings["divergence_beta"], temperature=settings.get("temperature", 1.0)))
    trainer = trl.DistillationTrainer(model, base.load(case, False, "teacher_model"), args=args, train_dataset=dummy(len(documents)), processing_class=words)
    first = [d["mask"].index(1) for d in documents]
    batch = answers([d["ids"][:n] for d, n in zip(documents, first)], [d["ids"][n:] for d, n in zip(documents, first)],
                    [d["mask"][n:] for d, n in zip(documents, first)])
    batch["num_items_in_batch"] = (batch["completion_mask"] * batch["tool_mask"]).sum()
    return step(trainer, batch, settings.get("micro_batches") or [list(range(len(documents)))], set(batch) - {"num_items_in_batch"})


def run(case, folder):
    base.one_process(case["settings"])
    words = tokenizer(128)
    if case["task"] == "rm":
        return rm(case, folder, words)
    model = base.load(case)
    tasks = {"sft": sft, "dpo": dpo, "kto": kto, "grpo": grpo, "distill": distill}
    if case["task"] not in tasks:
        raise NotImplementedError(f"TRL has no trainer for {case['task']}")
    return tasks[case["task"]](case, folder, model, words)
