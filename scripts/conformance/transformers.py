"""transformers: its models and its Trainer, in float on the CPU, with PEFT for adapters. Eager attention, and processes for the ranks of data
parallelism."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, DataCollatorWithFlattening, Trainer, TrainingArguments

QUIET = dict(report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no", logging_steps=1, max_steps=1, learning_rate=1e-12, max_grad_norm=1e9,
             train_sampling_strategy="sequential", lr_scheduler_type="constant", remove_unused_columns=False, optim="sgd")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def load(case, adapter=True, name="model", **changes):
    config = AutoConfig.from_pretrained(case[name], **changes)
    model = AutoModelForCausalLM.from_pretrained(case[name], config=config, dtype=torch.float32, attn_implementation="eager")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for key in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
        if hasattr(config, key):
            setattr(config, key, 0.0)
    if adapter and "adapter" in case:
        import peft

        model = peft.PeftModel.from_pretrained(model, case["adapter"], is_trainable=True)
    return model


def padded(side):
    def collate(records):
        longest = max(len(r["input_ids"]) for r in records)
        out = {"input_ids": [], "attention_mask": [], "labels": []}
        for r in records:
            n = longest - len(r["input_ids"])
            for key, values, filler in (("input_ids", r["input_ids"], 0), ("attention_mask", [1] * len(r["input_ids"]), 0), ("labels", r["labels"], -100)):
                out[key].append([filler] * n + values if side == "left" else values + [filler] * n)
        return {key: torch.tensor(values) for key, values in out.items()}

    return collate


def one_process(settings):
    if settings.get("ranks", 1) > 1:
        raise NotImplementedError("this adapter divides neither a sequence nor tensors over ranks")


def as_records(documents):
    return [{"input_ids": d["ids"], "labels": [i if m else -100 for i, m in zip(d["ids"], d["mask"])]} for d in documents]


def tokenizer_of(case):
    return transformers.PreTrainedTokenizerFast.from_pretrained(case["tokenizer"])


def by_marks(case):
    """The documents of chats, whose answers are found by the marks of the template."""
    template, words, documents = case.get("marked_template", case["chat_template"]), tokenizer_of(case), []
    if "generation %}" not in template:
        raise NotImplementedError("apply_chat_template finds answers only by marks of the template")
    for record in case["records"]:
        out = words.apply_chat_template(record["messages"], chat_template=template, return_dict=True, return_assistant_tokens_mask=True)
        documents.append({"ids": out["input_ids"], "mask": out["assistant_masks"]})
    return documents


def first_log(trainer):
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    [line] = [line for line in trainer.state.log_history if "grad_norm" in line]
    return {"loss": float(line["loss"]), "grad_norm": float(line["grad_norm"])}


def on_ranks(case, folder, file=__file__):
    """The same step in several processes, which run this file; -P, because its folder has a file transformers.py."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks, settings = case["settings"].get("ranks", 1), {name: value for name, value in case["settings"].items() if name != "ranks"}
    (folder / "case.json").write_text(json.dumps({**case, "settings": settings, "of_ranks": ranks}))
    mesh = dict(os.environ, WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    started = [subprocess.Popen([sys.executable, "-P", file, str(folder)], env=dict(mesh, RANK=str(rank), LOCAL_RANK=str(rank)), stderr=subprocess.PIPE, text=True)
               for rank in range(ranks)]
    errors = [process.communicate()[1] for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError(errors[0])
    return json.loads((folder / "got.json").read_text())


def run(case, folder, **more):
    """more: of TrainingArguments."""
    settings = case["settings"]
    if case["task"] != "sft":
        raise NotImplementedError(f"transformers has no trainer for {case['task']}")
    if settings == {"ranks": settings.get("ranks")}:
        return on_ranks(case, folder)
    one_process(settings)
    coefficient = settings.get("router_aux_loss_coef")
    model = load(case, **(dict(output_router_logits=True, router_aux_loss_coef=coefficient) if coefficient else {}))
    records, apart = as_records(by_marks(case) if "tokenizer" in case else case["records"]), "micro_batches" in settings
    options = TrainingArguments(output_dir=str(folder), per_device_train_batch_size=1 if apart else len(records) // case.get("of_ranks", 1),
                                gradient_accumulation_steps=len(records) if apart else 1, **QUIET, **more)
    collate = DataCollatorWithFlattening() if settings.get("packed") else padded(settings.get("padding_side", "right"))
    return first_log(Trainer(model, options, train_dataset=records, data_collator=collate))


def as_rank(run):
    """The end of a file that on_ranks starts."""
    folder = Path(sys.argv[1])
    got = run(json.loads((folder / "case.json").read_text()), folder / "run")
    if os.environ["RANK"] == "0":
        (folder / "got.json").write_text(json.dumps(got))


if __name__ == "__main__":
    as_rank(run)
