#!/usr/bin/env python3
"""Writes the pages of docs/porting from the tables: for each peer a real file or command, its conversion, and its names.

    python3 scripts/port/page.py"""

import json
import shlex
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
from port.peers import TABLES  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "porting"
TASKS = ("pretrain", "sft", "dpo", "rm", "distill", "grpo", "ppo")

# An example from the repository of each peer: its path, the command, and the file in the command without comments and empty keys.
EXAMPLES = {
    "TRL": ("trl/scripts/sft.py", "trl sft --model_name_or_path Qwen/Qwen2-0.5B --dataset_name trl-lib/Capybara --learning_rate 2.0e-4 --num_train_epochs 1 --packing "
            "--per_device_train_batch_size 2 --gradient_accumulation_steps 8 --eos_token '<|im_end|>' --eval_strategy steps --eval_steps 100 --use_peft --lora_r 32 "
            "--lora_alpha 16 --output_dir Qwen2-0.5B-SFT", ""),
    "OpenRLHF": ("examples/scripts/train_dpo.sh", "openrlhf.cli.train_dpo --ckpt.output_dir ./checkpoint/llama3-8b-dpo --ckpt.save_steps -1 --logger.logging_steps 1 "
                 "--eval.steps -1 --train.batch_size 256 --train.micro_batch_size 1 --model.model_name_or_path OpenRLHF/Llama-3-8b-sft-mixture --ds.param_dtype bf16 "
                 "--train.max_epochs 1 --data.max_len 8192 --ds.zero_stage 3 --adam.lr 5e-7 --model.beta 0.1 --data.dataset "
                 "OpenRLHF/preference_dataset_mixture2_and_safe_pku --data.apply_chat_template --data.chosen_key chosen --data.rejected_key rejected "
                 "--ds.attn_implementation flash_attention_2 --ckpt.load_enable --ds.packing_samples --model.gradient_checkpointing_enable", ""),
    "Axolotl": ("examples/llama-3/qlora-1b.yml", "axolotl train qlora-1b.yml", """base_model: NousResearch/Llama-3.2-1B
load_in_8bit: false
load_in_4bit: true
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
dataset_prepared_path: last_run_prepared
val_set_size: 0.1
output_dir: ./outputs/qlora-out
adapter: qlora
sequence_len: 2048
sample_packing: true
eval_sample_packing: true
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_modules:
  - gate_proj
  - down_proj
  - up_proj
  - q_proj
  - v_proj
  - k_proj
  - o_proj
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
tf32: false
gradient_checkpointing: true
logging_steps: 1
attn_implementation: flash_attention_2
loss_watchdog_threshold: 5.0
loss_watchdog_patience: 3
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
  pad_token: "<|end_of_text|>"
"""),
    "LLaMA-Factory": ("examples/train_lora/qwen3_lora_sft.yaml", "llamafactory-cli train qwen3_lora_sft.yaml", """model_name_or_path: Qwen/Qwen3-4B-Instruct-2507
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: identity,alpaca_en_demo
template: qwen3_nothink
cutoff_len: 2048
max_samples: 1000
preprocessing_num_workers: 16
dataloader_num_workers: 4
output_dir: saves/qwen3-4b/lora/sft
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
"""),
    "ms-swift": ("examples/train/lora_sft.sh (with other data, and without the system message, which belongs in the records here)",
                 "swift sft --model Qwen/Qwen2.5-7B-Instruct --tuner_type lora --dataset 'AI-ModelScope/alpaca-gpt4-data-en#500' --torch_dtype bfloat16 --num_train_epochs 1 "
                 "--per_device_train_batch_size 1 --per_device_eval_batch_size 1 --learning_rate 1e-4 --lora_rank 8 --lora_alpha 32 --target_modules all-linear "
                 "--gradient_accumulation_steps 16 --eval_steps 50 --save_steps 50 --save_total_limit 2 --logging_steps 5 --max_length 2048 --output_dir output "
                 "--warmup_ratio 0.05 --dataset_num_proc 4 --dataloader_num_workers 4", ""),
    "verl": ("examples/grpo_trainer/run_qwen2-7b.sh (with a file of rewards)", "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=gsm8k/train.parquet "
             "data.val_files=gsm8k/test.parquet data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024 data.filter_overlong_prompts=True data.truncation=error "
             "actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.model.use_remove_padding=True "
             "actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=40 actor_rollout_ref.actor.use_kl_loss=True "
             "actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0 "
             "actor_rollout_ref.model.enable_gradient_checkpointing=True actor_rollout_ref.actor.fsdp_config.param_offload=False actor_rollout_ref.actor.fsdp_config.optimizer_offload=False "
             "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=40 actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=vllm "
             "actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=5 actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=40 "
             "actor_rollout_ref.ref.fsdp_config.param_offload=True algorithm.use_kl_in_reward=False trainer.critic_warmup=0 trainer.logger=console trainer.project_name=verl_grpo_example_gsm8k "
             "trainer.experiment_name=qwen2_7b_function_rm trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15 "
             "custom_reward_function.path=gsm8k.py", ""),
    "Megatron-SWIFT": ("examples/megatron/lora/moe.sh (without its second data set, loss_scale and the model's name)",
                       "megatron sft --model Qwen/Qwen3-30B-A3B --load_safetensors true --save_safetensors true --merge_lora false --dataset 'swift/Qwen3-SFT-Mixin#2000' "
                       "--train_type lora --lora_rank 8 --lora_alpha 32 --target_modules all-linear --split_dataset_ratio 0.01 --expert_model_parallel_size 2 "
                       "--moe_permute_fusion true --moe_grouped_gemm true --moe_shared_expert_overlap true --moe_aux_loss_coeff 1e-3 --micro_batch_size 8 "
                       "--global_batch_size 16 --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 --max_epochs 1 --finetune true "
                       "--cross_entropy_loss_fusion true --lr 1e-4 --lr_warmup_fraction 0.05 --min_lr 1e-5 --save megatron_output/Qwen3-30B-A3B --eval_interval 200 "
                       "--save_interval 200 --max_length 2048 --num_workers 8 --dataset_num_proc 8 --no_save_optim true --no_save_rng true --sequence_parallel true "
                       "--attention_backend flash", ""),
}


def example(peer):
    place, words, file = EXAMPLES[peer.name]
    with tempfile.TemporaryDirectory() as folder:
        name = words.split()[-1]
        if file:
            (Path(folder) / name).write_text(file)
        (Path(folder) / "data").mkdir()  # of LLaMA-Factory
        (Path(folder) / "data/dataset_info.json").write_text(json.dumps({name: {"file_name": f"{name}.json"} for name in ("identity", "alpaca_en_demo")}))
        said = subprocess.run([ROOT / "train_llama", *shlex.split(words), "--convert"], cwd=folder, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    shown = [f"    # {name}", *(f"    {line}" for line in file.splitlines()), ""] if file else []
    return [f"{peer.name}'s {place} and its conversion:", "", *shown, f"    $ ./train_llama {words} --convert", *(f"    {line}" for line in said.stdout.splitlines()), ""]


def defaults_of(peer, names):
    """Returns a peer's default values for one of the names, with their tasks if the tasks differ."""
    if not peer.defaults:
        return ""
    found = {task: next((value for name, value in peer.defaults(task).items() if name in names), None) for task in TASKS}
    values = {value: [task for task in TASKS if found[task] == value] for value in found.values() if value is not None}
    if not values:
        return ""
    return f"`{next(iter(values))}`" if None not in found.values() and len(values) == 1 else ", ".join(f"`{value}` ({', '.join(tasks)})" for value, tasks in values.items())


def here(row):
    text = {"same": ", ".join(f"`--{flag}`" for flag in row.text.split(",")), "sets": f"`--{row.text}`", "part": f"one number of `--{row.text.split()[0]}`"}
    return text.get(row.kind, row.text).replace("|", "\\|")


def names_of(row):
    values = f" ({', '.join(f'`{value}`' for value in row.values)})" if row.values else ""
    return ", ".join(f"`{name}`{values}" for name in row.names).replace("|", "\\|")


def is_flag(row):
    """True if the names are that of the flag, with or without a part before a dot."""
    return row.kind == "same" and {name.rpartition(".")[2] for name in row.names} == {row.text}


def listed(text, found):
    return [*textwrap.wrap(f"{text}: {', '.join(found)}.", 160, break_long_words=False, break_on_hyphens=False), ""] if found else []


def tables(peer):
    """Returns the names that set something in a table, and the others in lists: --convert gives their reasons and alternatives."""
    rows = {kind: [names_of(row) for row in peer.rows if row.kind == kind] for kind in ("note", "refused")}
    defaults = {name: defaults_of(peer, row.names) for row in peer.rows for name in row.names[:1]}
    return [f"| {peer.name} | this program |", "|---|---|",
            *(f"| {names_of(row)} | {here(row)} |" for row in peer.rows if row.kind not in rows and not is_flag(row)), "",
            *listed("Flags of the same name, without a part before a dot", [names_of(row) for row in peer.rows if is_flag(row)]),
            *listed("Defaults that apply where nothing is set", [f"`{name}` {default}" for name, default in defaults.items() if default]),
            *listed("Without effect", rows["note"]), *listed("Refused", rows["refused"])]


def page_of(peer):
    lines = [f"# Coming from {peer.name}", "", *(example(peer) if peer.name in EXAMPLES else []), f"## Names of {peer.name} {peer.version}", "",
             "A name with values in brackets stands for these values, and without them for all others. `--convert` says why a name has no effect, and what replaces a refused one."]
    if peer.bases:
        lines.append(f"The names of {' and '.join(f'[{base.name}]({file_of(base)})' for base in peer.bases)} also apply.")
    return "\n".join([*lines, "", *tables(peer)])


def file_of(peer):
    return f"{peer.name.lower().replace('-', '_')}.md"


def pages():
    return {PAGES / file_of(peer): page_of(peer) for peer in TABLES}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
