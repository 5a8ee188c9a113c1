#!/usr/bin/env python3
"""Runs command lines and files of other trainers in TRL and in train_llama, and compares the figures of each step.

    .venv-compare/bin/python scripts/check_trl.py CHECKOUT [--only TEXT]

A checkout is one of TRL, OpenRLHF or Axolotl. Both sides get every sft, dpo, reward, kto and distillation line of TRL unchanged, and the lines of LINES;
a file of OTHERS goes to train_llama, and TRL gets a manual translation. Both train a tiny random model on similar data for three steps, in floats on
the CPU, in the order of the file, without dropout. Chats have assistant_only_loss; without it the conversion reports that TRL trains on all
tokens. Distillation learns from the answers of the data on both sides, because TRL cannot sample the same ones. The learning rate, samples and target tokens of each step must be equal, and loss and gradient norm must agree within 1e-4. Adapters
start from the same random matrices."""

import argparse
import importlib
import json
import multiprocessing
import os
import random
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import check_dialects
from compare import ROOT
from port import door  # adds data/ to sys.path
from port.reading import read_flags
from errors import DataError

STEPS, PACKED = 3, 256
AGREE = 1e-4
SCRIPTS = {"sft": "sft", "dpo": "dpo", "reward": "reward", "reward_modeling": "reward", "kto": "kto", "distillation": "distillation"}  # of TRL, by task
# Options of the machine or the hub, or set by the check.
WITHOUT = {"push_to_hub", "report_to", "run_name", "eos_token", "accelerate_config", "num_processes", "attn_implementation", "dtype", "torch_dtype",
           "bf16", "output_dir", "max_steps", "no_remove_unused_columns", "model_name_or_path"}
SMALL = "--model_name_or_path M --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --learning_rate 1e-3"
KTO = f"{SMALL} --dataset_name trl-lib/kto-mix-14k --per_device_train_batch_size 4 --gradient_accumulation_steps 1"  # a divergence of a step, not of a micro-batch
DISTILLATION = f"{SMALL} --dataset_name trl-lib/ultrafeedback-prompt --teacher_model_name_or_path T"
LORA = "--use_peft --lora_r 4 --lora_alpha 8 --lora_target_modules all-linear"
BINARIZED, ZEN = "--dataset_name trl-lib/ultrafeedback_binarized", "--dataset_name trl-internal-testing/zen"
LINES = [  # losses and options that no line of TRL's repository has
    f"trl sft {SMALL} --dataset_name trl-lib/Capybara --packing --max_length 512",
    f"trl sft {SMALL} --dataset_name trl-lib/Capybara --lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{{\"min_lr_rate\": 0.1}}' "
    "--warmup_steps 2 --weight_decay 0.1 --max_grad_norm 0.3",
    f"trl sft {SMALL} --dataset_name trl-lib/tldr --max_length 24 --adam_beta2 0.95 --adam_epsilon 1e-6",
    *(f"trl dpo {SMALL} {BINARIZED} --loss_type {loss}" for loss in (
        "sigmoid --beta 0.5", "ipo", "hinge", "robust --label_smoothing 0.1", "exo_pair --label_smoothing 0.2", "sigmoid --label_smoothing 0.3",
        "nca_pair", "sppo_hard", "apo_zero", "apo_down", "discopop", "bco_pair",
        "sigmoid sft --loss_weights 1.0 0.5 --gradient_accumulation_steps 1")),
    f"trl dpo {SMALL} {ZEN} --dataset_config standard_preference --max_length 20",
    *(f"trl kto {more} {KTO}" for more in ("", "--beta 0.5 --desirable_weight 1.3 --undesirable_weight 0.7", "--loss_type apo_zero_unpaired --beta 0.3", LORA)),
    *(f"trl distillation {more} {DISTILLATION}" for more in ("", "--beta 0", "--beta 0.5 --temperature 0.7", f"--beta 0.1 {LORA}")),
    f"trl reward {SMALL} {BINARIZED} --center_rewards_coefficient 0.1",
    f"trl reward {SMALL} {ZEN} --dataset_config standard_implicit_prompt_preference --max_length 36",  # some pairs are longer
]
OPENRLHF = ("--per_device_train_batch_size 16 --gradient_accumulation_steps 16 --num_train_epochs 1 --lr_scheduler_type cosine_with_min_lr "
            "--lr_scheduler_kwargs '{\"min_lr_rate\": 0.1}' --warmup_steps 0.03 --adam_beta2 0.95")
AXOLOTL = "--per_device_train_batch_size 2 --learning_rate 2e-4 --lr_scheduler_type cosine --warmup_steps 0.1 --max_length 2048"
OTHERS = {  # a file: the task, the format of its data and of TRL's, and its options under TRL's names
    "examples/scripts/train_sft.sh": ("sft", "OpenOrca", "user-assistant", f"{OPENRLHF} --learning_rate 5e-6 --max_length 2048"),
    "examples/scripts/train_dpo_llama.sh": ("dpo", "binarized", "binarized", f"{OPENRLHF} --learning_rate 5e-7 --max_length 8192"),
    "examples/scripts/train_rm.sh": ("reward", "binarized", "binarized", f"{OPENRLHF} --learning_rate 9e-6 --max_length 8192"),
    "examples/llama-3/lora-1b.yml": ("sft", "GPT4-LLM-Cleaned", "alpaca", f"{AXOLOTL} --gradient_accumulation_steps 2 --packing "
                                     "--use_peft --lora_r 16 --lora_alpha 32 --lora_target_modules all-linear"),
    "examples/qwen2/dpo.yaml": ("dpo", "alpaca_messages_2k_dpo_test", "Capybara-Preferences", f"{AXOLOTL} --gradient_accumulation_steps 4"),
    "examples/qwen2/reward-model.yaml": ("reward", "intel-orca-dpo-pairs", "binarized", f"{AXOLOTL} --gradient_accumulation_steps 4"),
}


# ---- models and data ---------------------------------------------------------------------------------------------------------------------

TEMPLATE = ("{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{% if message['role'] == 'assistant' %}"
            "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}{% else %}"
            "{{ message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")


def make_models(folder):
    """A tiny Qwen2, a reward model of the same shape and a larger teacher, all with the demo's tokenizer, which has bytes."""
    import torch
    import transformers
    importlib.import_module("trl")  # once, before the processes are forked
    torch.set_num_threads(1)
    torch.manual_seed(1)
    language, rewards = transformers.AutoModelForCausalLM, transformers.AutoModelForSequenceClassification
    for kind, name, width in (language, "qwen2", 64), (rewards, "qwen2_reward", 64), (language, "qwen2_teacher", 96):
        config = transformers.Qwen2Config(
            vocab_size=260, hidden_size=width, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            initializer_range=0.1, max_position_embeddings=4096, eos_token_id=259, bos_token_id=None, pad_token_id=0, num_labels=1)
        kind.from_config(config, dtype=torch.float32).save_pretrained(folder / name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name / file).write_bytes((ROOT / "data/demo/model" / file).read_bytes())
        tokenizer = json.loads((folder / name / "tokenizer_config.json").read_text())
        (folder / name / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "pad_token": "<|user|>"}))
        (folder / name / "chat_template.jinja").write_text(TEMPLATE)


def text(rng, words):
    return " ".join(rng.choice(("red", "blue", "sun", "moon", "tree", "is", "was", "not", "big", "old")) for _ in range(words))


def record(rng, name, packed=False):
    """Returns a record in the form of a data set, None for an unknown one. With `packed` it has PACKED tokens, which divide a row exactly."""
    question, good, bad = text(rng, 3), text(rng, rng.randint(2, 6)), text(rng, rng.randint(2, 6))
    alpaca = ("Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n### Instruction:\n"
              f"{question}\n\n### Response:\n")
    instruction, answer = question, good
    if packed:
        answer = good.ljust(PACKED, ".")[:PACKED - len(alpaca) - 1]
        question, good, bad = (content.ljust(PACKED, ".")[:PACKED // 4 - 2] for content in (question, good, bad))  # two turns with 8 special tokens
    asked = [{"role": "user", "content": question}]
    chosen, rejected = ([{"role": "assistant", "content": content}] for content in (good, bad))
    pair = {"prompt": asked, "chosen": chosen, "rejected": rejected}
    forms = {
        "imdb": {"text": f"{question} {good}", "label": 1}, "language_modeling": {"text": f"{question} {good}"},
        "tldr": {"prompt": question, "completion": f" {good}"},
        # No space before the answer: here a space is a separate token, which TRL would train.
        "hh-rlhf": {"chosen": f"\n\nHuman: {question}\n\nAssistant:{good}", "rejected": f"\n\nHuman: {question}\n\nAssistant:{bad}"},
        "standard_preference": {"prompt": question, "chosen": f" {good}", "rejected": f" {bad}"},
        "implicit_prompt_preference": {"chosen": f"{question} {good}", "rejected": f"{question} {bad}"},
        "tldr-preference": pair, "Infinity-Preference": pair, "preferences-sentiment": pair, "Capybara-Preferences": pair,
        "binarized": {"chosen": asked + chosen, "rejected": asked + rejected, "score_chosen": 8.0, "score_rejected": 2.0},
        "kto-mix-14k": {"prompt": asked, "completion": chosen, "label": len(good) % 2 == 0},
        "ultrafeedback-prompt": {"prompt": asked, "completion": chosen},
        "Capybara": {"messages": asked + chosen + asked + rejected, "source": "x", "num_turns": 2},
        "OpenOrca": {"system_prompt": "", "question": question, "response": good},
        "user-assistant": {"prompt": f"User: {question}\nAssistant: ", "completion": good},
        "GPT4-LLM-Cleaned": {"instruction": instruction, "input": "", "output": answer},
        "alpaca": {"prompt": alpaca, "completion": answer},
        "alpaca_messages_2k_dpo_test": {"conversation": asked, "chosen": chosen[0], "rejected": rejected[0]},
        "intel-orca-dpo-pairs": {"system": "", "input": question, "chosen": good, "rejected": bad}}
    return next((form for part, form in forms.items() if name.endswith(part)), None)


def write_data(folder, form, count, packed):
    """Writes the same texts for both sides. With packing all records are equal, because TRL packs in its own order."""
    rng = random.Random(1)
    folder.mkdir(parents=True)
    for split, records in (("train", count), ("test", 2)):
        lines = [json.dumps(record(random.Random(1) if packed else rng, form, packed)) + "\n" for _ in range(records)]
        (folder / f"{split}.jsonl").write_text("".join(lines))


# ---- lines ---------------------------------------------------------------------------------------------------------------------------------

class Line(NamedTuple):
    name: str
    script: str  # of TRL
    settings: dict  # TRL's flags with their values, without model and data
    forms: tuple  # of the data: ours and theirs
    ours: list = None  # the equivalent words of another peer

    def number(self, name, otherwise):
        return int(float(self.settings.get(name, [otherwise])[0]))

    def samples(self):
        """Returns the number of samples of all steps."""
        step = self.number("per_device_train_batch_size", 8) * self.number("gradient_accumulation_steps", 1)
        return STEPS * step * (self.number("max_length", 1024) // PACKED if "packing" in self.settings else 1)

    def words(self, **more):
        """Returns the words of the TRL command for both sides; `more` replaces settings."""
        settings = {**self.settings, **{name: [str(value)] for name, value in more.items()}}
        objects = {}
        for name in [name for name in settings if "." in name]:  # {"min_lr_rate": 0.1}
            whole, _, key = name.partition(".")
            objects.setdefault(whole, {})[key] = json.loads(settings.pop(name)[0])
        settings |= {name: [json.dumps(value)] for name, value in objects.items()}
        return [word for name, values in settings.items() for word in (f"--{name}", *values)]


def trl_line(name, words, models):
    """Returns the Line of a TRL command line, or None if it cannot run here."""
    words = [word for before, word in zip(["", *words], words) if "--config_file" not in (before, word.partition("=")[0])]
    _, _, name_of_task, launcher, words = door.start({"tasks": []}, words)
    script = SCRIPTS.get(name_of_task)
    settings = {s.name: list(s.values) for s in launcher + read_flags(words)[1] if s.name not in WITHOUT}
    data, subset = (settings.pop("dataset_name", None) or settings.pop("datasets", [""]))[0].split(",")[0], settings.pop("dataset_config", [""])[0]
    example = record(random.Random(1), data + subset)
    if not script or not example or any(name.startswith("load_in") for name in settings):
        return None
    settings |= {"assistant_only_loss": []} if script == "sft" and "messages" in example else {}
    settings |= {"lora_dropout": ["0"]} if "use_peft" in settings else {}
    settings |= {"teacher_model_name_or_path": [str(models / "qwen2_teacher")]} if script == "distillation" else {}
    return Line(name, script, settings, (data + subset,) * 2)


def lines_of(checkout, folder):
    """Returns the runnable command lines of the checkout, without duplicates."""
    peer, lines, seen = check_dialects.peer_of(checkout), [], set()
    added = [(line.replace(SMALL, "..."), shlex.split(line)) for line in LINES]
    of_trl = [*check_dialects.read_lines(checkout, peer, folder), *added] if peer == "TRL" else []
    for name, words in of_trl:
        try:
            line = trl_line(name, words, folder)
        except DataError:  # a missing file
            continue
        key = json.dumps(line and line[1:])
        if line and key not in seen:
            seen.add(key)
            lines.append(line)
    for file, (task, mine, theirs, words) in OTHERS.items():
        if (checkout / file).exists():
            ours = ["axolotl", "train", file] if file.endswith(("yml", "yaml")) else next(
                words for name, words in check_dialects.read_lines(checkout, peer, folder) if name.startswith(file))
            line = trl_line(file, ["trl", task, "--dataset_name", theirs, *shlex.split(words)], folder)
            lines.append(line._replace(forms=(mine, theirs), ours=ours))
    return lines


# ---- both sides ------------------------------------------------------------------------------------------------------------------------------

def give_answers(trainer):
    """Lets distillation read the answers of its data instead of sampling them."""
    generate = trainer._generate_and_score_completions

    def generate_given(self, inputs):
        self.given = [self.processing_class(record["completion"][0]["content"] + "<|end|>")["input_ids"] for record in inputs]
        return generate(self, inputs)

    trainer._generate_and_score_completions, trainer._generate_single_turn = generate_given, lambda self, *_, **__: self.given


def train_in_trl(script, words, adapter, out, log):
    """Runs TRL's own script in a separate process, counts its trained tokens, and writes the figures of its steps."""
    import transformers

    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    steps, now = [], {"samples": 0, "target_tokens": 0}
    train = transformers.Trainer.train

    def counted(original):
        def compute(self, model, inputs, *arguments, **more):
            packed, documents = inputs.get("position_ids"), inputs.get("input_ids", inputs.get("completion_ids"))
            now["samples"] += len(documents) // (2 if script in ("dpo", "reward") else 1) if packed is None else int((packed == 0).sum())
            if "labels" in inputs:
                now["target_tokens"] += int((inputs["labels"][:, 1:] != -100).sum())
            elif "completion_mask" in inputs:
                now["target_tokens"] += int(inputs["completion_mask"].sum())
            return original(self, model, inputs, *arguments, **more)
        return compute

    class Log(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs, **_):
            if "loss" in logs:
                steps.append({**now, "lr": logs["learning_rate"], "loss": logs["loss"], "grad_norm": float(logs["grad_norm"])})
                now.update(samples=0, target_tokens=0)

    def loaded(self, *arguments, **more):
        if adapter:
            from peft import set_peft_model_state_dict
            from safetensors.torch import load_file

            wrong = set_peft_model_state_dict(self.model, load_file(f"{adapter}/adapter_model.safetensors"))
            assert not wrong.unexpected_keys and not [key for key in wrong.missing_keys if "lora_" in key], wrong
        type(self).compute_loss = counted(type(self).compute_loss)
        self.add_callback(Log)
        return train(self, *arguments, **more)

    transformers.Trainer.train = loaded
    if script == "distillation":
        give_answers(importlib.import_module("trl").DistillationTrainer)
    module = importlib.import_module(f"trl.scripts.{script}")
    module.main(*module.make_parser().parse_args_and_config(words, fail_with_unknown_args=False))
    Path(out).write_text(json.dumps(steps))


def ours(line, folder, model, rate=None):
    out = folder / "ours"
    names = ("model", "data", "output_dir") if line.ours else ("model_name_or_path", "dataset_name", "output_dir")
    given = dict(zip(names, (model, folder / "data", out)), max_steps=STEPS, **({"learning_rate": rate} if rate else {}))
    words = [*line.ours, *"--moments f32 --eval_fraction 0".split(), *("--lora_dropout 0".split() if "use_peft" in line.settings else []),
             *(word for name, value in given.items() for word in (f"--{name}", str(value)))] if line.ours else ["trl", line.script, *line.words(**given)]
    words += ["--on_policy", "0"] if line.script == "distillation" else []
    result = subprocess.run([ROOT / "train_llama", *words, *"--shuffle false --dtype f32 --device cpu --threads 1".split()],
                            capture_output=True, text=True, env=dict(os.environ, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}"))
    if result.returncode:
        return result.stderr.strip()
    steps = [json.loads(text) for text in (out / "log.jsonl").read_text().splitlines()]
    return [step for step in steps if "grad_norm" in step]


def theirs(line, folder, model, adapter):
    words = line.words(model_name_or_path=model, dataset_name=folder / "their_data", max_steps=STEPS, output_dir=folder / "theirs",
                       train_sampling_strategy="sequential", bf16="false", logging_steps=1, report_to="none", save_strategy="no",
                       disable_tqdm="true", use_cpu="true", **({"shuffle_dataset": "false"} if line.script == "distillation" else {}))
    arguments = line.script, words, adapter, folder / "steps.json", folder / "theirs.txt"
    child = multiprocessing.get_context("fork").Process(target=train_in_trl, args=arguments)
    child.start()
    child.join()
    return json.loads((folder / "steps.json").read_text()) if child.exitcode == 0 else (folder / "theirs.txt").read_text().strip().splitlines()[-1]


def compare_line(line, models, folder):
    """Returns the largest relative differences, or a text with the reason if the runs cannot be compared."""
    for name, form in zip(("data", "their_data"), line.forms):
        write_data(folder / name, form, line.samples(), "packing" in line.settings)
    model, adapter = models / ("qwen2_reward" if line.script == "reward" else "qwen2"), None
    if "use_peft" in line.settings:  # a step with rate 0 does not change the matrices
        adapter = folder / "adapter"
        if isinstance(made := ours(line, folder, model, rate=1e-30), str):
            return f"train_llama: {made}"
        (folder / "ours").rename(adapter)
    mine, peer = ours(line, folder, model), theirs(line, folder, model, adapter)
    for side, name in ((mine, "train_llama"), (peer, "TRL")):
        if isinstance(side, str):
            return f"{name}: {side}"
    if len(mine) != len(peer):
        return f"{len(mine)} steps here, {len(peer)} there"
    for number, (before, a, b) in enumerate(zip([None, *mine], mine, peer), 1):
        for key in ("samples", "target_tokens")[:1 if line.script == "reward" else 2]:
            count = a[key] - (before[key] if before else 0)
            if count != b[key]:
                return f"step {number}: {key} {count} here, {b[key]} there"
    far = {key: max(abs(a[key] - b[key]) / max(abs(b[key]), 1e-12) for a, b in zip(mine, peer)) for key in ("lr", "loss", "grad_norm")}
    words = "  ".join(f"{key} {value:.1e}" for key, value in far.items())
    return words + ("" if max(far.values()) <= AGREE else "  DIFFER: " + "; ".join(
        f"{a['lr']:.3g} {a['loss']:.5f} {a['grad_norm']:.5f} here, {b['lr']:.3g} {b['loss']:.5f} {b['grad_norm']:.5f} there"
        for a, b in zip(mine, peer)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", metavar="CHECKOUT", type=lambda path: Path(path).resolve())
    parser.add_argument("--only", default="", metavar="TEXT", help="only lines that contain TEXT")
    options = parser.parse_args()
    os.chdir(options.checkout)  # the lines name files of the current repository
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        make_models(folder)
        for number, line in enumerate(lines_of(options.checkout, folder)):
            if options.only not in f"{line.name} {line.words()}":
                continue
            place = folder / str(number)
            place.mkdir()
            print(f"{line.name[:110]}\n    {compare_line(line, folder, place)}", flush=True)


if __name__ == "__main__":
    main()
