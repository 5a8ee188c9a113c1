"""train_llama and train_gpt2, called as a user would: data as token ids or chats, one step in float, the first line of the log."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "data"))

from token_file import TokenFile  # noqa: E402

STEP = {"max_steps": 1, "max_len": 128, "learning_rate": 1e-6, "lr_scheduler": "constant", "shuffle": "false", "dtype": "f32", "device": "cpu", "threads": 1}


def write_data(path, documents, kind):
    file = TokenFile(str(path), 96)
    file.append(np.concatenate([d["ids"] for d in documents]), np.concatenate([d["mask"] for d in documents]), np.array([len(d["ids"]) for d in documents]),
                labels=[d["label"] for d in documents if "label" in d])
    vocabulary = json.loads((Path(path).parent / "vocabulary").read_text())
    file.write({"kind": kind, "vocab_size": str(vocabulary)})
    file.close()
    return path


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def with_tokenizer(case, folder):
    """A directory with the model's files and those of the tokenizer, with the case's chat template."""
    model = folder / "model"
    model.mkdir()
    for file in [*Path(case["model"]).iterdir(), Path(case["tokenizer"]) / "tokenizer.json"]:
        (model / file.name).symlink_to(file)
    config = json.loads((Path(case["tokenizer"]) / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": case["chat_template"]}))
    return str(model)


def call(folder, task, model, options):
    program = ROOT / ("train_gpt2" if "gpt2" in Path(model).name else "train_llama")
    words = [str(program), task]
    for name, value in {"model": model, **options}.items():
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value).lower() if isinstance(value, bool) else str(value)
        words += [f"--{name}", text]
    result = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache")})
    if result.returncode:
        raise RuntimeError(" ".join(result.stderr.split()))


def run(case, folder):
    task, records, settings = {"kto": "dpo"}.get(case["task"], case["task"]), case["records"], dict(case["settings"])
    (folder / "vocabulary").write_text(str(json.loads((Path(case["model"]) / "config.json").read_text())["vocab_size"]))
    models = "ref_model", "teacher_model", "critic_model", "adapter"
    options = {**STEP, "output_dir": folder / "run", **{name: case[name] for name in models if name in case}}
    micro = settings.pop("micro_batches", None)
    for name in ("packed", "padding_side"):  # rows are always packed, and nothing is padded on the left
        settings.pop(name, None)
    if task in ("grpo", "ppo"):
        lines = [{"completion_mask" if key == "mask" else key: value for key, value in r.items()} for r in records]
        options |= {"rollouts": write_lines(folder / "rollouts.jsonl", lines), "train_batch_size": len(records)}
        lengths = [len(r["prompt_ids"]) + len(r["completion_ids"]) for r in records]
    elif "tokenizer" in case:
        case = {**case, "model": with_tokenizer(case, folder)}
        options |= {"data": write_lines(folder / "chats.jsonl", records), "train_batch_size": len(records)}
        lengths = []
    else:
        kind = {"dpo": "pref", "kto": "unpaired", "rm": "pref"}.get(case["task"], "sft")
        options |= {"data": write_data(folder / "data.safetensors", records, kind), "train_batch_size": len(records) // (2 if kind == "pref" else 1)}
        options |= {"on_policy": 0} if task == "distill" else {}
        lengths = [len(d["ids"]) for d in records]
    options["row_tokens"] = max(sum(lengths[i] for i in group) for group in micro) if micro else max(128, sum(lengths) if task == "dpo" else 0)
    options["max_len"] = min(128, options["row_tokens"] // (2 if task in ("dpo", "rm") else 1))
    call(folder, task, case["model"], {**options, **settings})
    line = next(line for line in map(json.loads, (folder / "run/log.jsonl").read_text().splitlines()) if "grad_norm" in line)
    got = {key: line[key] for key in ("loss", "grad_norm", "value_loss") if key in line}
    if "logps" in case["right"]:
        mesh = {name: settings[name] for name in ("ranks", "ring_attn_size", "tensor_parallel") if name in settings}
        own = {key: options[key] for key in ("data", "dtype", "device", "threads", "adapter") if key in options}
        call(folder, "eval", case["model"], {**own, "scores": folder / "scores.jsonl", "log": folder / "eval.jsonl", "max_len": 128, **mesh})
        got["logps"] = [json.loads(line)["logp"] for line in (folder / "scores.jsonl").read_text().splitlines()]
    return got
