#!/usr/bin/env python3
"""Writes the part of docs/porting.md that is made from the tables: for each peer an example, what becomes of it, and its names.

    python3 scripts/port/page.py"""

import subprocess
import sys
import tempfile
from pathlib import Path

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
from port.peers import HELPERS, PEERS  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "porting.md"
BEGIN, END = "<!-- made by scripts/port/page.py -->\n", "<!-- end -->\n"
TASKS = ("pretrain", "sft", "dpo", "rm", "grpo", "ppo")

# What a user of each peer has: a command, or a file and its name.
EXAMPLES = {
    "TRL": ("trl sft --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name trl-lib/Capybara --learning_rate 2e-4 --packing --use_peft --lora_r 32 "
            "--lora_alpha 16 --eos_token '<|im_end|>' --output_dir Qwen2.5-0.5B-SFT", ""),
    "OpenRLHF": ("openrlhf.cli.train_ppo_ray --actor.model_name_or_path OpenRLHF/Llama-3-8b-sft-mixture --reward.model_name_or_path "
                 "OpenRLHF/Llama-3-8b-rm-700k --data.prompt_dataset OpenRLHF/prompt-collection-v0.1 --data.input_key context_messages "
                 "--data.apply_chat_template --algo.advantage.estimator reinforce --train.colocate_all --vllm.num_engines 8 --ds.packing_samples", ""),
    "Axolotl": ("axolotl train qlora.yml", """base_model: NousResearch/Llama-3.2-1B
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
val_set_size: 0.1
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_target_modules: [gate_proj, down_proj, up_proj, q_proj, v_proj, k_proj, o_proj]
sequence_len: 2048
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: adamw_bnb_8bit
learning_rate: 0.0002
bf16: auto
evals_per_epoch: 4
special_tokens:
  pad_token: "<|end_of_text|>"
"""),
    "LLaMA-Factory": ("llamafactory-cli train lora.yaml", """model_name_or_path: Qwen/Qwen3-4B-Instruct-2507
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: chats.jsonl
template: qwen3_nothink
cutoff_len: 2048
output_dir: saves/qwen3-4b
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
"""),
    "ms-swift": ("swift sft --model Qwen/Qwen2.5-7B-Instruct --dataset 'AI-ModelScope/alpaca-gpt4-data-en#500' --use_hf true --torch_dtype bfloat16 "
                 "--learning_rate 1e-4 --max_length 2048 --warmup_ratio 0.05 --output_dir output", ""),
}


def example(peer):
    words, file = EXAMPLES[peer.name]
    with tempfile.TemporaryDirectory() as folder:
        name = words.split()[-1]
        if file:
            (Path(folder) / name).write_text(file)
        said = subprocess.run(f"{ROOT / 'train_llama'} {words} --convert", shell=True, cwd=folder, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    shown = [f"    # {name}", *(f"    {line}" for line in file.splitlines()), ""] if file else []
    return [*shown, f"    $ ./train_llama {words} --convert", *(f"    {line}" for line in said.stdout.splitlines()), ""]


def defaults_of(peer, names):
    """The values that a peer takes by default for one of the names, with their tasks where these differ."""
    if not peer.defaults:
        return ""
    found = {task: next((value for name, value in peer.defaults(task).items() if name in names), None) for task in TASKS}
    values = {value: [task for task in TASKS if found[task] == value] for value in found.values() if value is not None}
    if not values:
        return ""
    return f"`{next(iter(values))}`" if None not in found.values() and len(values) == 1 else ", ".join(f"`{value}` ({', '.join(tasks)})" for value, tasks in values.items())


def here(row):
    if row.kind == "same":
        return ", ".join(f"`--{flag}`" for flag in row.text.split(","))
    text = {"sets": f"`--{row.text}`", "part": f"one number of `--{row.text.split()[0]}`", "note": f"nothing: {row.text}", "refused": f"refused: {row.text}"}
    return text.get(row.kind, row.text).replace("|", "\\|")


def table(peer):
    lines = ["| there | default there | here |", "|---|---|---|"]
    said = set()
    for row in peer.rows:
        default = "" if said & set(row.names) else defaults_of(peer, row.names)
        said |= set(row.names)
        names = ", ".join(f"`{name}`" for name in row.names) + (": " + ", ".join(f"`{value}`" for value in row.values) if row.values else "")
        names = names.replace("|", "\\|")
        lines.append(f"| {names} | {default} | {here(row)} |")
    return [*lines, ""]


def made():
    lines = []
    for peer in PEERS:
        lines += [f"## {peer.name} {peer.version}", "", *example(peer)]
        if peer.bases:
            lines += [f"Names that are not below are those of {' and '.join(base.name for base in peer.bases)}.", ""]
        lines += table(peer)
    for peer in HELPERS:
        lines += [f"## {peer.name} {peer.version}", "", *table(peer)]
    return "\n".join(lines)


def text_of(text):
    """The page with its made part made anew."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + made() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(text_of(PAGE.read_text()))
