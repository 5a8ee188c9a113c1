"""Tables of command lines and files of other trainers: their conversion by --convert, refusals, and notes. A row here tests a rule of scripts/port; the
pages of docs/porting pin the plain rows of its tables."""

import json
import re
import runpy
import shlex
import shutil
import subprocess

import pytest
from runs import DEMO, ENVIRONMENT, GOLDEN, PROGRAM, ROOT  # adds scripts/ to sys.path
from port import door, page, peers, reading, table

TRL = "--from trl --model_name_or_path M --dataset_name D --output_dir O"
OPENRLHF = "--from openrlhf --model.model_name_or_path M --data.dataset D --ckpt.output_dir O"
VERL = "verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=M data.train_files=D trainer.default_local_dir=O --reward r.py"
AXOLOTL = {"base_model": "M", "datasets": [{"path": "a/b", "type": "alpaca"}], "output_dir": "O", "learning_rate": 2e-5}
FACTORY = {"model_name_or_path": "Qwen/Qwen3-4B", "stage": "sft", "template": "qwen3", "dataset": "d.jsonl", "output_dir": "O"}


def call(words, tmp_path, config=None, program=PROGRAM, **environment):
    words = shlex.split(words) if isinstance(words, str) else words
    if config is not None:
        (tmp_path / "c.yml").write_text(json.dumps(config))
        words = [*words, "--config", "c.yml"]
    return subprocess.run([program, *words], cwd=tmp_path, env=ENVIRONMENT | environment, capture_output=True, text=True, timeout=60)


def converted(words, tmp_path, config=None, **environment):
    """The task, the flags with their values, and the notes of a command."""
    result = call([*(shlex.split(words) if isinstance(words, str) else words), "--convert"], tmp_path, config, **environment)
    assert result.returncode == 0 and result.stderr == "", result.stderr
    command, *notes = result.stdout.splitlines()
    _, task, *rest = shlex.split(command)
    return task, dict(zip([word[2:] for word in rest[::2]], rest[1::2], strict=True)), "\n".join(notes)


def refused(words, tmp_path, config=None):
    result = call([*shlex.split(words), "--convert"], tmp_path, config)
    assert result.returncode == 1 and result.stdout == "", result.stdout
    return result.stderr


# ---- conversions -------------------------------------------------------------------------------------------------------------------

LORA = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16}
DPO = {"rl": "dpo", "datasets": [{"path": "a/b"}]}
CHATS = [{"path": "a/b", "type": "chat_template"}]
TWO = [{"path": path, "type": "alpaca"} for path in ("a/b", "c/d")]
STARTS = [  # the beginning of a command, and the task
    (f"reward {TRL}", "rm"), (f"trl sft {TRL}", "sft"), (f"trl reward {TRL}", "rm"), (f"python -m trl.scripts.dpo {TRL}", "dpo"),
    (f"accelerate launch --num_processes 1 trl/scripts/grpo.py {TRL}", "grpo"), (f"python examples/scripts/reward_modeling.py {TRL}", "rm"),
    (f"deepspeed --module openrlhf.cli.train_sft {OPENRLHF}", "sft"), (f"openrlhf.cli.train_rm {OPENRLHF}", "rm"),
    (f"ray job submit --address=a -- python3 -m openrlhf.cli.train_ppo_ray {OPENRLHF}", "ppo"),
    (f"openrlhf.cli.train_ppo_ray {OPENRLHF} --algo.advantage.estimator group_norm", "grpo"),
    (f"openrlhf.cli.train_sft {OPENRLHF} --model.pretrain_mode_enable", "pretrain"),
    ("swift pt --model M --dataset a/b --output_dir O", "pretrain"), ("swift rlhf --rlhf_type dpo --model M --dataset a/b --output_dir O", "dpo"),
    (f"python3 -m {VERL}", "grpo"), (VERL.replace("=grpo", "=gae"), "ppo"), (VERL.replace("algorithm.adv_estimator=grpo ", ""), "ppo"), (f"recipe/dapo/{VERL[13:].replace('main_ppo', 'main_dapo')}", "grpo"),
    ("grpo actor_rollout_ref.model.path=M data.train_files=D --reward r.py", "grpo"), ("grpo --from verl --reward r.py data.train_files=D actor_rollout_ref.model.path=M", "grpo"),
    ("megatron pt --model M --dataset a/b --save O", "pretrain"), ("megatron rlhf --rlhf_type rm --model M --dataset a/b --save O", "rm"),
]
TASKS = [  # fields of a file of Axolotl in addition to AXOLOTL, and the task
    ({}, "sft"), (DPO, "dpo"), (DPO | {"rl": "ipo"}, "dpo"),
    ({"reward_model": True, "datasets": [{"path": "a/b", "type": "bradley_terry.chat_template"}]}, "rm"),
    ({"datasets": None, "pretraining_dataset": [{"path": "a/b", "type": "pretrain"}]}, "pretrain"),
    ({"datasets": [{"path": "a/b", "type": "completion", "field": "content"}]}, "pretrain")]
SAME = [  # words, and the flags of this program
    (f"sft {TRL} --num_train_epochs 2.0 --warmup_ratio 0.1 --learning_rate 2.0e-4", {"max_epochs": "2", "lr_warmup": "0.1", "learning_rate": "2.0e-4"}),
    (f"sft {TRL} --adam_beta2 0.99 --adam_epsilon 1e-6 --max_grad_norm 0.5", {"adam_betas": "0.9,0.99", "adam_eps": "1e-6", "max_norm": "0.5"}),
    (f"sft {TRL} --ranks 4 --sp_size 2 --per_device_train_batch_size 2 --gradient_accumulation_steps 8", {"train_batch_size": "32", "ring_attn_size": "2"}),
    (f"sft {TRL} --packing --per_device_train_batch_size 2 --max_length 512", {"train_batch_tokens": "1024"}),
    (f"sft {TRL} --packing", {"train_batch_tokens": "8192", "max_len": "1024"}),
    (f"sft {TRL} --train_batch_size 32 --per_device_train_batch_size 2", {"train_batch_size": "32"}),
    (f"sft {TRL} --use_peft", {"lora_rank": "16", "lora_alpha": "32", "lora_dropout": "0.05", "lora_targets": "q_proj,v_proj"}),
    (f"sft {TRL} --lr_scheduler_type constant --warmup_ratio 0.1", {"lr_scheduler": "constant", "lr_warmup": None}),  # no effect
    (f"dpo {TRL} --use_peft --lora_dropout 0.1", {"lora_rank": "16", "lora_dropout": None}),  # TRL disables all dropout, unless:
    (f"dpo {TRL} --use_peft --disable_dropout false", {"lora_dropout": "0.05"}),
    (f"sft {TRL} --lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{{\"min_lr_rate\": 0.2}}'", {"lr_scheduler": "cosine_with_min_lr", "min_lr_ratio": "0.2"}),
    (f"sft {TRL} --learning_rate 1e-4 --lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{{\"min_lr\": 1e-5}}'", {"min_lr_ratio": "0.1"}),
    *((f"swift sft --model M --dataset a/b --output_dir O --tuner_type {kind} --lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{{\"min_lr\": 1e-6}}'", {"min_lr_ratio": ratio})
      for kind, ratio in (("full", "0.1"), ("lora", "0.01"))),  # of its default rate
    (f"trl sft {TRL} --optim adamw_bnb_8bit --bf16 True --gradient_checkpointing", {"moments": "8bit", "dtype": "bf16", "recompute": "layer"}),
    (f"sft {TRL} --accelerate_config zero2 --num_processes 4", {"zero_stage": "2", "ranks": "4", "train_batch_size": "32"}),
    (f"sft {TRL} --dataset_config c --dataset_train_split d --model_revision v2", {"data": "D:c[d]", "model": "M@v2"}),
    (f"sft {TRL} --eval_strategy steps --eval_steps 50", {"eval_data": "D[test]", "eval_steps": "50"}),
    (f"dpo {TRL} --loss_type ipo --beta 0.2 --no_remove_unused_columns", {"loss_type": "ipo_mean", "beta": "0.2"}),
    (f"trl dpo {TRL} --loss_type sft ipo", {"loss_type": "sft,ipo_mean"}),
    (f"trl sft {TRL} --shuffle_dataset false", {"shuffle": None}),  # its sampler shuffles
    (f"trl grpo {TRL} --shuffle_dataset false", {"shuffle": "false"}), (f"trl sft {TRL} --dataset_streaming", {"shuffle": "false"}),
    (f"trl grpo {TRL} --dataset_streaming", {"shuffle": None}), (f"trl sft {TRL} --test_split_size 0.1", {"eval_fraction": "0.1"}),
    (f"trl sft {TRL} --eval_delay 0 --average_tokens_across_devices false --packing --packing_strategy bfd", {"eval_steps": None}),
    (f"trl grpo {TRL} --beta 0.1 --use_bias_correction_kl false --multi_objective_aggregation sum_then_normalize", {"kl_coef": "0.1"}),
    (f"trl grpo {TRL} --use_bias_correction_kl true", {"kl_coef": None}),
    (f"trl grpo {TRL} --environment F.py --max_tool_calling_iterations 3", {"environment": "F.py", "max_turns": "4"}),
    (f"trl grpo {TRL} --max_tool_calling_iterations 3", {"max_turns": None}),
    (f"grpo {TRL} --beta 0.04 --epsilon 3e-4 --epsilon_high 4e-4 --num_generations 4 --loss_type dr_grpo",
     {"kl_coef": "0.04", "kl_use_loss": "true", "eps_clip": "3e-4,4e-4", "n": "4", "loss_aggregation": "constant", "rollout_batch_size": "2",
      "max_new_tokens": "512", "reward_clip_range": None}),
    (f"grpo {TRL} --reward_funcs accuracy_reward think_format_reward",
     {"reward": ",".join(f"{ROOT}/scripts/rewards/{name}.py" for name in ("accuracy_reward", "think_format_reward")), "input_template": "{}"}),
    (f"reward {TRL}", {"max_len": "1024", "truncation": None}), (f"dpo {TRL}", {"truncation": "keep"}),
    (f"dpo {TRL} --label_smoothing 0.1", {"label_smoothing": None}),  # TRL's sigmoid ignores it
    (f"dpo {TRL} --label_smoothing 0.1 --loss_type robust", {"label_smoothing": "0.1"}),
    (f"trl distillation {TRL} --teacher_model_name_or_path T --beta 0.5",
     {"teacher_model": "T", "divergence_beta": "0.5", "max_new_tokens": "512", "learning_rate": None, "on_policy": None, "input_template": "{}"}),
    (f"trl distillation {TRL} --teacher_model_name_or_path T --on_policy 0", {"on_policy": "0", "divergence_beta": None, "temperature": None, "learning_rate": None}),
    (f"trl gkd {TRL} --teacher_model_name_or_path T --beta 1 --use_peft", {"divergence_beta": "1", "temperature": "0.9", "on_policy": "0.5", "max_new_tokens": None, "max_len": "1024",
                                                                         "learning_rate": "2e-5", "lora_dropout": None}),
    (f"trl gkd {TRL} --teacher_model_name_or_path T --lmbda 0 --temperature 1", {"on_policy": "0", "temperature": "1", "max_new_tokens": None, "divergence_beta": "0.5"}),
    ("swift rlhf --rlhf_type grpo --model M --dataset a/b --output_dir O --teacher_model T --teacher_kl_coef 0.5 --reward_funcs r.py --per_device_train_batch_size 8", {"teacher_model": "T", "teacher_coef": "0.5"}),
    ("swift rlhf --rlhf_type gkd --model M --dataset a/b --output_dir O --teacher_model T --lmbda 1 --sft_alpha 0",
     {"teacher_model": "T", "divergence_beta": "0.5", "on_policy": "1", "temperature": "0.9", "max_new_tokens": "512"}),
    (f"trl kto {TRL} --desirable_weight 1.5 --undesirable_weight 0.5", {"loss_type": "kto", "desirable_weight": "1.5", "undesirable_weight": "0.5", "shuffle": "false",
                                                                       "max_len": "1024", "truncation": "keep"}),
    (f"trl kto {TRL} --loss_type apo_zero_unpaired --train_sampling_strategy random", {"loss_type": "apo_zero_unpaired", "shuffle": None}),
    *((f"trl {words} {TRL} --precompute_ref_log_probs", {"ref_mode": mode}) for words, mode in (("dpo", "precompute"), ("kto", None), ("kto --loss_type apo_zero_unpaired", "precompute"))),
    (f"openrlhf.cli.train_kto --pretrain M --dataset D --save_path O --undesirable_loss_weight 2 --micro_train_batch_size 2",
     {"loss_type": "kto", "undesirable_weight": "2", "beta": "0.01", "max_len": "2048", "row_tokens": "4096"}),
    (f"sft {OPENRLHF} --train.micro_batch_size 2 --data.max_len 100", {"row_tokens": "200"}),
    (f"dpo {OPENRLHF} --train.micro_batch_size 2 --data.max_len 100 --model.ipo_enable", {"row_tokens": "400", "loss_type": "ipo_sum", "learning_rate": "1e-5"}),
    (f"sft {OPENRLHF} --data.input_template ''", {"input_template": "{}"}),
    (f"openrlhf.cli.train_ppo_ray {OPENRLHF}", {"n": None, "kl_coef": "0.01", "kl_estimator": "k1", "max_new_tokens": "2048", "row_tokens": "4096",
      "reward_clip_range": "-10,10"}),
    (f"openrlhf.cli.train_ppo_ray {OPENRLHF} --reward.clip_range -5 5", {"reward_clip_range": "-5,5"}),
    ("openrlhf.cli.train_ppo_ray --pretrain M --prompt_data D --save_path O --prompt_max_len 512 --generate_max_len 256 --actor_learning_rate 5e-7 "
     "--advantage_estimator reinforce --n_samples_per_prompt 8 --enforce_eager --dynamic_filtering --dynamic_filtering_reward_range 0.1 0.9",
     {"max_len": "512", "max_new_tokens": "256", "row_tokens": "768", "learning_rate": "5e-7", "n": "8", "dynamic_filtering": "0.1,0.9"}),
    (f"openrlhf.cli.train_ppo_ray {OPENRLHF} --algo.advantage.estimator rloo --critic.adam.lr 9e-6", {"critic_learning_rate": None, "learning_rate": None}),
    (f"openrlhf.cli.train_ppo_ray {OPENRLHF} --actor.loss_agg_mode seq-mean-token-mean --algo.advantage.is_correction_level token --algo.advantage.is_correction_mode clip "
     "--algo.advantage.is_correction_threshold 5", {"loss_aggregation": "sequence_mean", "is_correction": "tis,0,5"}),
    (f"openrlhf.cli.train_ppo_ray {OPENRLHF} --algo.advantage.is_correction_level seq --algo.advantage.is_correction_threshold 0.4 4", {"is_correction": "seq-mask-tis,0.4,4"}),
    (f"openrlhf.cli.train_ppo_ray {OPENRLHF} --algo.advantage.is_correction_level off --eval.temperature 0.6", {"is_correction": None, "temperature": None}),
    (f"openrlhf.cli.train_ppo_ray {OPENRLHF} --actor.adam.betas 0.8 0.95 --critic.adam.betas 0.8 0.95 --critic.optim adam --critic.lr_scheduler cosine_with_min_lr",
     {"adam_betas": "0.8,0.95", "optimizer": None}),
    (f"openrlhf.cli.train_ppo_ray {OPENRLHF}", {"router_aux_loss_coef": "0"}), (f"openrlhf.cli.train_sft {OPENRLHF} --optim muon", {"optimizer": "muon"}),
    (f"openrlhf.cli.train_ppo_ray {OPENRLHF} --actor.aux_loss_coef 0.01", {"router_aux_loss_coef": "0.01"}),
    (f"accelerate launch --cpu --num_cpu_threads_per_process 4 trl/scripts/sft.py {TRL}", {"device": "cpu", "threads": "4"}),
    ("swift sft --model M --dataset 'a/b#500' --output_dir O --tuner_type full", {"data": "a/b[train[:500]]", "learning_rate": "1e-5", "weight_decay": "0.1",
                                                                                  "train_batch_size": "16", "lora_rank": None}),
    ("swift sft --model M --dataset a/b --output_dir O --enable_thinking false", {"chat_template_kwargs": '{"enable_thinking": false}'}),
    ("megatron sft --model M --dataset a/b --save O --expert_model_parallel_size 4 --moe_aux_loss_coeff 1e-3 --moe_grouped_gemm true --global_batch_size 32 --lr 1e-4 --min_lr 1e-5",
     {"expert_parallel": "4", "router_aux_loss_coef": "1e-3", "train_batch_size": "32", "learning_rate": "1e-4", "lr_scheduler": "cosine_with_min_lr", "min_lr_ratio": "0.1",
      "lora_rank": None, "output_dir": "O"}),
    ("megatron sft --model M --dataset a/b --dataloader_type single --exp_avg_dtype bf16 --main_grads_dtype bf16 --recompute_granularity none",
     {"shuffle": "false", "moments": "bf16", "grad_dtype": "bf16", "recompute": "none"}),
    ("megatron sft --model M --dataset a/b --train_type lora --packing true --max_length 1024 --context_parallel_size 2 --recompute_granularity full --moe_router_load_balancing_type none",
     {"lora_rank": "8", "train_batch_tokens": "16384", "ring_attn_size": "2", "recompute": "layer", "router_aux_loss_coef": "0", "lr_scheduler": "cosine"}),
    ("swift sft --model M --dataset a/b --output_dir O", {"lora_rank": "8", "lora_alpha": "32", "learning_rate": "1e-4"}),
    *((f"swift {words} --model M --dataset a/b#5 c.jsonl --output_dir O", flags) for words, flags in (
        ("sft --model_revision v2", {"model": "M@v2", "data": "a/b[train[:5]],c.jsonl"}),
        ("sft --interleave_prob 0.3 0.7", {"dataset_probs": "0.3,0.7", "stopping_strategy": "first_exhausted"}),
        ("sft --interleave_prob 0.3 0.7 --stopping_strategy all_exhausted", {"stopping_strategy": "all_exhausted"}),
        ("sft --stopping_strategy all_exhausted", {"stopping_strategy": None}), ("sft --dataset_shuffle false", {"shuffle": None}),
        ("sft --dataset_shuffle false --train_dataloader_shuffle false", {"shuffle": "false"}),
        ("sft --enable_thinking true --preserve_thinking false", {"chat_template_kwargs": '{"enable_thinking": true, "preserve_thinking": false}'}),
        ("sft --template chatml --loss_scale ignore_empty_think --enable_thinking false --use_chat_template true", {"tokenizer_chat_template": "chatml"}),
        ("pt --use_chat_template false --loss_scale all", {"truncation": "drop"}), ("pt --truncation_strategy split", {"truncation": "split"}),
        ("rlhf --rlhf_type kto --desirable_weight 2", {"loss_type": "kto", "desirable_weight": "2"}),
        ("rlhf --rlhf_type simpo", {"loss_type": "simpo,sft", "loss_weights": "1,1", "beta": "2.0", "simpo_gamma": "1"}),
        ("rlhf --rlhf_type simpo --cpo_alpha 0 --beta 1 --simpo_gamma 2", {"loss_type": "simpo", "loss_weights": None, "beta": "1", "simpo_gamma": "2"}),
        ("rlhf --rlhf_type dpo --rpo_alpha 0.5 --loss_scale last_round", {"loss_type": "sigmoid,sft", "loss_weights": "1,0.5"}),
        *((f"rlhf --rlhf_type grpo --per_device_train_batch_size 8 {more}", flags) for more, flags in (
            ("", {"loss_aggregation": "sequence_mean", "kl_coef": "0.04", "kl_use_loss": "true", "advantage_estimator": None, "temperature": "0.9"}),
            ("--loss_type dapo --scale_rewards none", {"loss_aggregation": "token_mean", "advantage_estimator": "dr_grpo"}),
            ("--advantage_estimator rloo", {"advantage_estimator": "rloo", "kl_use_loss": None, "kl_estimator": "k1"}),
            ("--kl_in_reward true --beta 0.1", {"kl_use_loss": None, "kl_coef": "0.1"}), ("--kl_in_reward true --beta 0", {"kl_estimator": None}))))),
]
FILES = [  # fields of a file of Axolotl in addition to AXOLOTL, and the flags of this program
    ({}, {"input_template": "alpaca", "lr_scheduler": "cosine", "max_len": "512", "adam_betas": "0.9,0.999", "train_batch_size": "1", "output_dir": "O"}),
    ({"shuffle_merged_datasets": False}, {"shuffle": None}), ({"curriculum_sampling": True}, {"shuffle": "false"}),
    ({"curriculum_sampling": True, "shuffle_merged_datasets": False, "datasets": TWO}, {"shuffle": "false", "data": "a/b,c/d"}),
    ({"rl": "simpo", "datasets": CHATS}, {"loss_type": "simpo,sft", "loss_weights": "1,1"}),
    ({"rl": "simpo", "cpo_alpha": 0.0, "datasets": CHATS}, {"loss_type": "simpo", "loss_weights": None}),
    ({"chat_template": "jinja", "chat_template_jinja": "x.jinja", "chat_template_kwargs": {"a": 1}, "datasets": CHATS}, {"tokenizer_chat_template": "x.jinja", "chat_template_kwargs": '{"a": 1}'}),
    ({"datasets": [CHATS[0] | {"chat_template": "chatml", "train_on_eos": "turn"}]}, {"tokenizer_chat_template": "chatml"}),
    ({"rl": "grpo", "datasets": CHATS, "micro_batch_size": 8, "trl": {"scale_rewards": False, "chat_template_kwargs": {"a": 1}}},
     {"advantage_estimator": "dr_grpo", "chat_template_kwargs": '{"a": 1}', "loss_aggregation": "token_mean"}),
    ({"datasets": None, "pretraining_dataset": [{"path": "a/b"}]}, {"truncation": "keep", "train_batch_size": "1"}),
    ({"datasets": None, "pretraining_dataset": [{"path": "a/b"}], "pretraining_sample_concatenation": True}, {"truncation": "keep", "train_batch_tokens": "512"}),
    ({"datasets": None, "pretraining_dataset": [{"path": "a/b"}], "sample_packing": True}, {"truncation": None, "train_batch_tokens": "512"}),
    ({"context_parallel": {"size": 2, "backend": "ulysses"}, "wandb_project": "p"}, {"ring_attn_size": "2", "sp_mode": "ulysses"}),
    ({"cosine_min_lr_ratio": 0.1}, {"lr_scheduler": "cosine_with_min_lr", "min_lr_ratio": "0.1"}),
    (LORA | {"lora_target_linear": True}, {"lora_rank": "8", "lora_alpha": "16", "lora_targets": "all-linear"}),
    ({"adapter": "qlora", "lora_r": 8, "lora_alpha": 16, "lora_target_modules": ["self_attn.q_proj", "mlp.up_proj"]},
     {"load_in": "4bit", "lora_targets": "q_proj,up_proj"}),
    (LORA | {"lora_target_modules": r"model.layers.[\d]+.(mlp|self_attn).(up|q)_proj"}, {"lora_targets": "q_proj,up_proj"}),
    (LORA | {"lora_target_modules": r"model.language_model.layers.[\d]+.(mlp|self_attn).(up|q)_proj"}, {"lora_targets": "q_proj,up_proj"}),
    ({"lora_r": 8}, {"lora_rank": None}),
    (LORA | {"lora_modules_to_save": ["embed_tokens", "lm_head"], "tokens": ["<a>"]},
     {"lora_modules_to_save": "embed_tokens,lm_head", "add_tokens": "<a>"}),
    (LORA | {"reward_model": True, "lora_modules_to_save": ["score"],
      "datasets": [{"path": "a/b", "type": "bradley_terry.chat_template"}]}, {"lora_modules_to_save": None}),
    ({"lora_modules_to_save": ["embed_tokens"]}, {"lora_modules_to_save": None}),  # without an adapter
    ({"sample_packing": True, "micro_batch_size": 2, "gradient_accumulation_steps": 4, "sequence_len": 1024}, {"train_batch_tokens": "8192"}),
    ({"val_set_size": 0.05, "evals_per_epoch": 4, "num_epochs": 2}, {"eval_fraction": "0.05", "eval_steps": "0.125"}),
    ({"rl": "orpo", "orpo_alpha": 0.3, "datasets": [{"path": "a/b", "type": "chat_template.argilla"}]}, {"loss_type": "orpo", "beta": "0.3"}),
    ({"rl": "kto", "datasets": [{"path": "a/b"}], "kto_desirable_weight": 0.2, "kto_undesirable_weight": 3}, {"loss_type": "kto", "desirable_weight": "0.2",
                                                                                                             "undesirable_weight": "3"}),
    ({"rl": "dpo", "datasets": [{"path": "a/b", "type": "llama3.intel"}]},
     {"tokenizer_chat_template": "llama3", "prompt_key": "question", "apply_chat_template": "true"}),
    ({"chat_template": "llama3", "datasets": [{"path": "a/b", "type": "chat_template", "field_messages": "talk"}]},
     {"tokenizer_chat_template": "llama3", "input_key": "talk", "multiturn": "true"}),
    ({"chat_template": "qwen3", "base_model": "Qwen/Qwen3-8B", "datasets": [{"path": "a/b", "type": "chat_template"}]}, {"tokenizer_chat_template": None}),
    ({"datasets": [{"path": "a/b", "type": {"field_instruction": "q", "field_output": "a", "format": "[INST] {instruction} [/INST]"}}]},
     {"input_key": "q", "output_key": "a", "input_template": "[INST] {} [/INST]"}),
    ({"datasets": [{"path": "a/b", "type": {"field_instruction": "q", "field_output": "a"}}]}, {"input_key": "q", "input_template": "{} "}),
    (DPO | {"datasets": [{"path": "a/b", "type": {"field_prompt": "q", "field_chosen": "c"}}]}, {"prompt_key": "q", "chosen_key": "c", "input_template": "{}"}),
    (DPO | {"datasets": [{"path": "a/b", "type": {"prompt_format": "Q: {prompt}", "chosen_format": "{chosen}"}}]}, {"input_template": "Q: {}"}),
    ({"datasets": [{"path": "json", "data_files": {"train": "x.jsonl"}, "type": "alpaca"}, {"path": "c/d", "name": "e", "split": "train[:1%]", "type": "alpaca"}]},
     {"data": "x.jsonl,c/d:e[train[:1%]]"}),
    ({"datasets": [{"path": "a/b", "type": "completion", "field": "content"}]}, {"input_key": "content", "input_template": None}),
    ({"rl": "grpo", "datasets": [{"path": "a/b"}], "micro_batch_size": 8, "trl": {"num_generations": 4, "max_completion_length": 64, "beta": 0.01}},
     {"n": "4", "max_new_tokens": "64", "kl_coef": "0.01", "rollout_batch_size": "2"}),
    ({"fsdp_config": {"reshard_after_forward": True, "fsdp_version": 2}, "context_parallel_size": 2, "ring_attn_func": "varlen_llama3"},
     {"zero_stage": "3", "ring_attn_size": "2", "sp_mode": "gather"}),
]
CONVERTED = [
    *((words, None, {"task": task}) for words, task in STARTS), *((words, None, flags) for words, flags in SAME),
    *(("axolotl train c.yml", AXOLOTL | more, {"task": task}) for more, task in TASKS),
    *(("", AXOLOTL | more, flags) for more, flags in FILES),
    (f"sft {TRL}", {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}, "num_processes": 2}, {"zero_stage": "3", "ranks": "2"}),
    ("swift sft --model M --dataset a/b --output_dir O", {"max_length": None}, {"max_len": None}),
    ("trl sft --model_name_or_path M --output_dir O", {"datasets": [{"path": "a/b", "split": "s"}, {"path": "json", "data_files": ["c.jsonl"]}], "test_split_size": 0.1},
     {"data": "a/b[s],c.jsonl", "eval_fraction": "0.1"}),
    # Flags of this program take precedence over a file.
    ("sft --eval_fraction 0 --input_template 'Q: {}'", AXOLOTL | {"val_set_size": 0.1}, {"eval_fraction": "0", "input_template": "Q: {}"}),
    *(("llamafactory-cli train", FACTORY | {"stage": stage}, {"task": task}) for stage, task in (("pt", "pretrain"), ("sft", "sft"), ("dpo", "dpo"), ("rm", "rm"))),
    ("", FACTORY | {"stage": "kto", "kto_chosen_weight": 1.2, "kto_rejected_weight": 0.7},
     {"task": "dpo", "loss_type": "kto", "desirable_weight": "1.2", "undesirable_weight": "0.7"}),
    ("", FACTORY | {"add_tokens": "<a>", "resize_vocab": True}, {"add_tokens": "<a>", "lora_modules_to_save": "embed_tokens,lm_head"}),
    ("", FACTORY | {"additional_target": "embed_tokens"}, {"lora_modules_to_save": "embed_tokens"}),
    ("", FACTORY | {"finetuning_type": "full", "resize_vocab": True}, {"lora_modules_to_save": None})]


@pytest.mark.parametrize("words, config, flags", CONVERTED)
def test_conversions(tmp_path, words, config, flags):
    task, found, _ = converted(words, tmp_path, config)
    assert {name: task if name == "task" else found.get(name) for name in flags} == flags


MIXED = {"dataset": "d.jsonl,e.jsonl"}
STRATEGY = "stopping_strategy"
FACTORY_VALUES = [  # fields of a file of LLaMA-Factory, and the flags of this program
    (MIXED, {"data": "d.jsonl,e.jsonl", STRATEGY: None}),
    (MIXED | {"max_samples": 10}, {"data": "d.jsonl[train[:10]],e.jsonl[train[:10]]", "max_samples": None}),
    ({"eval_dataset": "e.jsonl", "max_samples": 10}, {"data": "d.jsonl[train[:10]]", "eval_data": "e.jsonl[train[:10]]"}),
    (MIXED | {"mix_strategy": "concat"}, {STRATEGY: None}),
    (MIXED | {"mix_strategy": "interleave_under"}, {STRATEGY: "first_exhausted", "dataset_probs": None}),
    (MIXED | {"mix_strategy": "interleave_over", "interleave_probs": "0.5,0.5"}, {STRATEGY: "all_exhausted", "dataset_probs": "0.5,0.5"}),
    (MIXED | {"mix_strategy": "interleave_once"}, {STRATEGY: "all_exhausted_without_replacement"}),
    ({"enable_thinking": False, "preserve_thinking": True}, {"chat_template_kwargs": '{"enable_thinking": false, "preserve_thinking": true}'}),
    ({"stage": "pt", "enable_thinking": False}, {"chat_template_kwargs": None}), ({"enable_thinking": None}, {"chat_template_kwargs": '{"enable_thinking": false}'}),
    ({"stage": "pt", "cutoff_len": 128}, {"train_batch_tokens": "1024", "truncation": None}),
    ({"stage": "pt", "packing": False}, {"train_batch_size": "8", "truncation": "keep"}),
    ({"packing": False, "neat_packing": True, "cutoff_len": 128}, {"train_batch_tokens": "1024"}),
    ({"packing": True, "neat_packing": False, "cutoff_len": 128}, {"train_batch_tokens": "1024"}),
    ({"do_train": True, "do_eval": True, "val_size": 0.1}, {"eval_fraction": "0.1"}), ({"tokenized_path": "new"}, {"data": "d.jsonl"}),
    ({"temperature": 0.5, "max_new_tokens": 9}, {"temperature": None, "max_new_tokens": None})]  # of generation


@pytest.mark.parametrize("more, flags", FACTORY_VALUES)
def test_values_of_llama_factory(tmp_path, more, flags):
    _, found, _ = converted("llamafactory-cli train", tmp_path, FACTORY | more)
    assert {name: found.get(name) for name in flags} == flags


SHAREGPT = {"file_name": "c.json", "formatting": "sharegpt"}
ENTRIES = [  # an entry of dataset_info.json, other fields of the file, and the flags of this program or a refusal
    (SHAREGPT | {"columns": {"messages": "talk"}}, {}, {"data": "data/c.json", "input_key": "talk", "multiturn": "true", "apply_chat_template": None}),
    (SHAREGPT | {"tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user"}}, {}, {"input_key": None}),
    (SHAREGPT | {"tags": {"user_tag": "customer"}}, {}, "\"d\" has the user_tag 'customer'\n  fix: write the records"),
    ({"file_name": "c.json", "columns": {"prompt": "q", "response": "a"}}, {}, {"input_key": "q", "output_key": "a", "apply_chat_template": "true"}),
    ({"file_name": "c.json", "columns": {"prompt": "instruction", "history": "turns"}}, {}, "has its history in the field 'turns'"),
    ({"file_name": "c.json", "columns": {"images": "i"}}, {}, "contains images or audio"),
    ({"file_name": "c.json", "columns": {"prompt": "instruction", "query": "", "feedback": "f"}}, {}, {"data": "data/c.json", "input_key": None}),
    ({"hf_hub_url": "a/b", "subset": "s", "folder": "f", "split": "test"}, {}, {"data": "a/b:s@f[test]"}),
    ({"hf_hub_url": "a/b", "split": "test[:7]"}, {"max_samples": 10}, {"data": "a/b[test[:7]]"}),
    ({"hf_hub_url": "a/b", "num_samples": 9}, {"max_samples": 10}, {"data": "a/b[train[:9]]"}),
    ({"hf_hub_url": "a/b", "split": "test[10%:]"}, {"max_samples": 10}, "has the split 'test[10%:]', which cannot be cut further\n  fix: leave max_samples out")]


@pytest.mark.parametrize("entry, more, answer", ENTRIES)
def test_entries_of_dataset_info(tmp_path, entry, more, answer):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"d": entry}))
    if isinstance(answer, str):
        assert answer in refused("llamafactory-cli train", tmp_path, FACTORY | {"dataset": "d"} | more)
    else:
        _, found, _ = converted("llamafactory-cli train", tmp_path, FACTORY | {"dataset": "d"} | more)
        assert {name: found.get(name) for name in answer} == answer


def test_a_file_of_llama_factory(tmp_path):
    _, found, notes = converted("llamafactory-cli train", tmp_path, FACTORY)
    assert found == {"learning_rate": "5e-5", "max_epochs": "3", "lr_scheduler": "linear", "lr_warmup": "0", "adam_betas": "0.9,0.999", "truncation": "keep",
                     "model": "Qwen/Qwen3-4B", "output_dir": "O", "lora_rank": "8", "data": "d.jsonl", "train_batch_size": "8"}, found
    assert "LLaMA-Factory trains adapters unless finetuning_type is full" in notes


# ---- the names of this program, and the trainer of a command ----------------------------------------------------------------------------

OWN = "sft --model M --data D --output_dir O"
STRANGERS = [  # words, a file, and a part of the message
    (f"{OWN} --per_device_train_batch_size 2 --gradient_accumulation_steps 4", None, "--per_device_train_batch_size 2 x --gradient_accumulation_steps 4: --train_batch_size 8\n"),
    (OWN, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}, "per_device_train_batch_size 2 x gradient_accumulation_steps 4: --train_batch_size 8\n"),
    (f"{OWN} --ranks 2 --per_device_train_batch_size 2", None, "--per_device_train_batch_size 2 x 2 ranks: --train_batch_size 4\n"),
    (f"{OWN} --gradient_accumulation_steps 4", None, "--gradient_accumulation_steps 4: see per_device_train_batch_size"),
    (f"{OWN} --warmup_steps 5", None, "--warmup_steps 5: --lr_warmup 5\n"), (f"{OWN} --dtype f32 --tf32 true", None, "--tf32 true: --dtype tf32\n"),
    (f"{OWN} --deepspeed no.json", None, "--deepspeed no.json: cannot read no.json"),
    (f"{OWN} --lr_scheduler_kwargs '{{\"min_lr\": 1e-6}}'", None, "lr_scheduler_kwargs.min_lr 1e-06: --min_lr_ratio 0.2\n"),
    (f"{OWN} --data_seed 6", None, "--data_seed 6"), (f"{OWN} --lr 1e-4 --bf16", None, "--lr 1e-4: --learning_rate 1e-4\n  --bf16: --dtype bf16\n"),
    (f"{OWN} --lr_warmup_ratio 0 --row_tokens 64", None, "--lr_warmup_ratio 0: --lr_warmup 0\n"),
    (f"{OWN} --micro_batch_size 2", None, "--micro_batch_size 2 has several meanings: --row_tokens 4096 (OpenRLHF); --train_batch_size 2 (Axolotl); "),
    (f"{OWN} --num_generations 4", None, "--num_generations 4: --n, which belongs to distill, grpo, ppo, generate, not to sft\n"),
    (f"{OWN} --use_dora", None, "--use_dora: is not supported; adapters are LoRA"), ("--dataset_name D", None, "--dataset_name D: --data D\n"),
    (f"{OWN} --frobnicate --num_epochs 2", None, "1 name is other trainers', and no trainer is named:\n  --num_epochs 2: --max_epochs 2\n"),
    (f"{OWN} --frobnicate --num_epochs 2", None, "unknown flag --frobnicate\n"), 
    ("reward --data D", None, 'there is no task "reward"\n  fix: use pretrain, sft, dpo, rm, distill, grpo, ppo, eval, generate, merge or show\n'),
    ("sft --from nemo", None, '--from "nemo" is unknown\n  fix: trl, openrlhf, axolotl, llamafactory, swift, megatron, verl'), ("sft --from trl --from swift", None, "--from is given twice"),
    ("swift sft --from trl", None, "swift sft names ms-swift, and --from trl names TRL\n  fix: leave one of them out"),
    ("trl sft", AXOLOTL, "c.yml is a file of Axolotl, the only trainer with the key base_model, but trl sft names TRL"),
    ("sft --from llamafactory", AXOLOTL, "but --from llamafactory names LLaMA-Factory"),
    (f"trl sft {TRL} --cutoff_length 8 --base_model M", None, "1 name is not of TRL:\n  --base_model M: --model M\n"),
    ("axolotl train", AXOLOTL | {"train_on_eos": "none"}, 'train_on_eos in c.yml "none" is not supported'),
    (f"{VERL} data.frobnicate=1 base_model=M", None, "1 name is not of verl:\n  base_model M: --model M\n"), (f"{VERL} data.frobnicate=1 base_model=M", None, "unknown flag data.frobnicate\n"),
    ("trl sft --convert", {"actor_rollout_ref": {"model": {"path": "M"}}}, "c.yml is a file of verl, the only trainer with the key actor_rollout_ref, but trl sft names TRL"),
    ("torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=F", None, 'there is no task "fsdp_sft_trainer", which has names that are not translated\n  fix: use sft, with the names'),
    ("verl.trainer.main_generation data.path=F", None, 'there is no task "main_generation", which writes or judges answers\n  fix: use generate'),
    (f"{VERL} --config-name x", None, "--config-name x is in a folder of verl's own\n  fix: --config-path DIR"), (f"{VERL} --config-path . --config-name none", None, "none.yaml"),
    (f"{VERL} data.seed='${{oc.env:SEED}}'", None, "data.seed is ${oc.env:SEED}, which only verl resolves\n  fix: write the value"),
    ("srun swift sft --model M", None, 'unexpected argument "srun"'), ("accelerate launch mine.py", None, "accelerate starts no program of TRL, "),
    ("swift sft stray --model M", None, 'unexpected argument "stray"'),
]


@pytest.mark.parametrize("words, config, message", STRANGERS)
def test_names_of_no_named_trainer_are_refused(tmp_path, words, config, message):
    assert message in refused(words, tmp_path, config)


# Commands of verl's examples, with their values: GRPO on GSM8K, with adapters, GSPO, RLOO, and PPO with a reward model.
GSM8K = """data.train_files=gsm8k/train.parquet data.val_files=gsm8k/test.parquet data.max_prompt_length=512 data.max_response_length=1024
    data.filter_overlong_prompts=True data.truncation=error actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.fsdp_config.param_offload=False actor_rollout_ref.actor.fsdp_config.optimizer_offload=False actor_rollout_ref.ref.fsdp_config.param_offload=True
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=40 actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=40 actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=40
    trainer.logger='["console","wandb"]' trainer.nnodes=1 trainer.n_gpus_per_node=8 trainer.critic_warmup=0 trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15"""
KL_LOSS = """actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.entropy_coeff=0 algorithm.use_kl_in_reward=False actor_rollout_ref.rollout.n=5"""
OF_GSM8K = {"data": "gsm8k/train.parquet", "eval_data": "gsm8k/test.parquet", "max_len": "512", "max_new_tokens": "1024", "row_tokens": "1536", "recompute": "layer", "num_episodes": "15",
            "weight_decay": "0.01", "adam_betas": "0.9,0.999", "lr_scheduler": "constant", "resume": "auto", "reward": "r.py"}
OF_KL = {"n": "5", "kl_coef": "0.001", "kl_estimator": "k3", "kl_use_loss": "true", "entropy_coef": "0"}
OF_VERL = [
    (f"""algorithm.adv_estimator=grpo {GSM8K} {KL_LOSS} data.train_batch_size=1024 actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct actor_rollout_ref.actor.optim.lr=1e-6
     actor_rollout_ref.actor.ppo_mini_batch_size=256 trainer.project_name=verl_grpo_example_gsm8k trainer.experiment_name=qwen2_7b_function_rm""", "grpo",
     OF_GSM8K | OF_KL | {"model": "Qwen/Qwen2-7B-Instruct", "learning_rate": "1e-6", "rollout_batch_size": "1024", "train_batch_size": "1280", "save_steps": "80", "eval_steps": "20",
                         "advantage_estimator": "group_norm", "loss_aggregation": "token_mean", "dual_clip": "3", "run_name": "qwen2_7b_function_rm", "lora_rank": None, "eps_clip": None,
                         "output_dir": "checkpoints/verl_grpo_example_gsm8k/qwen2_7b_function_rm"}),
    (f"""algorithm.adv_estimator=grpo {GSM8K} {KL_LOSS} data.train_batch_size=16 data.shuffle=False actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct trainer.val_before_train=False
     actor_rollout_ref.model.lora_rank=64 actor_rollout_ref.model.lora_alpha=32 actor_rollout_ref.model.target_modules=all-linear actor_rollout_ref.actor.optim.lr=3e-6
     actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.rollout.load_format=safetensors actor_rollout_ref.rollout.layered_summon=True trainer.experiment_name=lora""", "grpo",
     OF_GSM8K | OF_KL | {"lora_rank": "64", "lora_alpha": "32", "lora_targets": "all-linear", "learning_rate": "3e-6", "shuffle": "false", "rollout_batch_size": "16", "train_batch_size": "80",
                         "save_steps": "20", "eval_steps": "5", "output_dir": "checkpoints/verl_examples/lora"}),
    (f"""algorithm.adv_estimator=grpo {GSM8K} actor_rollout_ref.model.path=M data.train_files="['gsm8k/train.parquet', 'math/train.parquet']" data.train_batch_size=512 actor_rollout_ref.actor.ppo_mini_batch_size=128
     actor_rollout_ref.rollout.n=16 actor_rollout_ref.actor.policy_loss.loss_mode=gspo actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean actor_rollout_ref.actor.clip_ratio_low=0.0003
     actor_rollout_ref.actor.clip_ratio_high=0.0004 actor_rollout_ref.actor.clip_ratio_c=10.0 actor_rollout_ref.actor.use_kl_loss=false actor_rollout_ref.actor.kl_loss_coef=0.0 data.max_response_length=8192
     algorithm.kl_ctrl.kl_coef=0.0 actor_rollout_ref.rollout.top_p=1.0 actor_rollout_ref.rollout.top_k=-1 actor_rollout_ref.rollout.temperature=1.0 actor_rollout_ref.actor.optim.lr_warmup_steps=10
     actor_rollout_ref.rollout.val_kwargs.top_p=0.7 actor_rollout_ref.actor.use_dynamic_bsz=true actor_rollout_ref.actor.ppo_max_token_len_per_gpu=20480 trainer.total_training_steps=500
     reward_model.reward_manager=dapo +reward_model.reward_kwargs.overlong_buffer_cfg.enable=true +reward_model.reward_kwargs.overlong_buffer_cfg.len=4096
     +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 +reward_model.reward_kwargs.max_resp_len=8192 actor_rollout_ref.actor.fsdp_config.fsdp_size=-1""", "grpo",
     OF_GSM8K | {"data": "gsm8k/train.parquet,math/train.parquet", "policy_loss_type": "gspo", "loss_aggregation": "sequence_mean", "eps_clip": "0.0003,0.0004", "dual_clip": None, "kl_coef": None,
                 "train_batch_size": "2048", "max_steps": "2000", "lr_scheduler": "constant_with_warmup", "lr_warmup": "40", "overlong_buffer": "4096,1.0", "max_new_tokens": "8192", "row_tokens": "8704",
                 "save_steps": "80", "temperature": "1.0"}),
    (f"""algorithm.adv_estimator=rloo {GSM8K} actor_rollout_ref.model.path=M data.train_batch_size=1024 actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.rollout.n=5 actor_rollout_ref.actor.use_kl_loss=False
     algorithm.use_kl_in_reward=True algorithm.kl_penalty=kl algorithm.kl_ctrl.kl_coef=0.001 actor_rollout_ref.actor.optim.lr=1e-6 ray_kwargs.ray_init.runtime_env.py_executable=null""", "grpo",
     OF_GSM8K | {"advantage_estimator": "rloo", "kl_coef": "0.001", "kl_estimator": "k1", "kl_use_loss": "false"}),
    (f"""algorithm.adv_estimator=gae {GSM8K} actor_rollout_ref.model.path=M data.train_batch_size=1024 actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1
     critic.optim.lr_warmup_steps_ratio=0.1 critic.optim.lr=1e-5 critic.model.path=DIR/critic critic.model.enable_gradient_checkpointing=True critic.ppo_micro_batch_size_per_gpu=32 algorithm.lam=0.95
     critic.model.fsdp_config.param_offload=False reward_model.enable=True reward_model.model.path=DIR/rm reward_model.rollout.name=vllm trainer.critic_warmup=2""", "ppo",
     OF_GSM8K | {"reward": "DIR/rm", "critic_model": "DIR/critic", "critic_learning_rate": "1e-5", "gae_lambda": "0.95", "freezing_steps": "8", "lr_scheduler": "constant_with_warmup", "lr_warmup": "0.1",
                 "train_batch_size": "256", "advantage_estimator": None}),
]
VERL_VALUES = [  # further words, and the flags of this program
    ("actor_rollout_ref.actor.ppo_epochs=2 data.train_batch_size=1000 trainer.save_freq=3", {"max_epochs": "2", "save_steps": "24"}),
    ("algorithm.norm_adv_by_std_in_grpo=False actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm", {"advantage_estimator": "dr_grpo", "loss_aggregation": "constant"}),
    ("algorithm.adv_estimator=reinforce_plus_plus algorithm.gamma=0.99", {"advantage_estimator": "reinforce", "gamma": "0.99"}),
    ("actor_rollout_ref.actor.clip_ratio=0.3", {"eps_clip": "0.2"}), ("actor_rollout_ref.actor.clip_ratio=0.3 actor_rollout_ref.actor.clip_ratio_low=null actor_rollout_ref.actor.clip_ratio_high=null", {"eps_clip": "0.3"}),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=cispo actor_rollout_ref.actor.clip_ratio_low=10 actor_rollout_ref.actor.clip_ratio_high=0.2", {"policy_loss_type": "cispo", "eps_clip": "0,1.2", "dual_clip": None}),
    ("algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.target_kl=0.2", {"kl_target": "0.2,10000", "kl_coef": "0.001", "kl_estimator": "k1"}),
    ("algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc data.gen_batch_size=1536", {"dynamic_filtering": "0,1"}),
    ("algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=2.0", {"is_correction": "tis,0,2.0"}),
    ("algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=0.5_5.0", {"is_correction": "icepop,0.5,5.0"}), ("actor_rollout_ref.actor.tis_imp_ratio_cap=2", {"is_correction": "tis,0,2"}),
    ("actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", {"ring_attn_size": "2", "sp_mode": "ulysses"}),
    ("+data.apply_chat_template_kwargs.enable_thinking=False ++data.apply_chat_template_kwargs.effort=high", {"chat_template_kwargs": '{"enable_thinking": false, "effort": "high"}'}),
    ("actor_rollout_ref.actor.optim.lr_scheduler_type=cosine actor_rollout_ref.actor.optim.min_lr_ratio=0.1", {"lr_scheduler": "cosine_with_min_lr", "min_lr_ratio": "0.1", "lr_warmup": "0"}),
    ("actor_rollout_ref.model.target_modules='.*\\.(q_proj|v_proj)$' actor_rollout_ref.model.lora_rank=8", {"lora_targets": "q_proj,v_proj", "lora_rank": "8", "lora_alpha": None}),
    ("actor_rollout_ref.rollout.multi_turn.enable=True actor_rollout_ref.rollout.multi_turn.tool_config_path=t.yaml actor_rollout_ref.rollout.multi_turn.max_assistant_turns=5 --environment e.py", {"max_turns": "5", "environment": "e.py"}),
    ("actor_rollout_ref.rollout.multi_turn.max_user_turns=5 actor_rollout_ref.rollout.multi_turn.max_tool_response_length=512 --environment e.py", {"max_turns": "6", "max_observation": "512"}),
    ("trainer.resume_mode=disable trainer.max_actor_ckpt_to_keep=2 trainer.rollout_data_dir=x", {"resume": "never", "max_num": "2", "save_rollouts": "true"}),
    ("custom_reward_function.path=mine.py custom_reward_function.name=compute_score", {"reward": "mine.py"}),
]
VERL_REFUSED = [  # further words, and a part of the message
    ("actor_rollout_ref.actor.use_kl_loss=True algorithm.use_kl_in_reward=True", "actor_rollout_ref.actor.use_kl_loss with algorithm.use_kl_in_reward is not supported"),
    ("algorithm.adv_estimator=remax", 'algorithm.adv_estimator "remax" is not supported'), ("actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov", 'loss_mode "clip_cov" is not supported'),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=cispo", "cispo with a clip_ratio_low of 0.2 is not supported"), ("actor_rollout_ref.actor.loss_agg_mode=token-sum", "loss_agg_mode"),
    ("actor_rollout_ref.actor.loss_scale_factor=99", "--loss_aggregation constant divides by max_response_length"), ("data.truncation=left", 'data.truncation "left" is not supported'),
    ("actor_rollout_ref.rollout.multi_turn.enable=True", "actor_rollout_ref.rollout.multi_turn.enable: the tools are not here\n  fix: --environment FILE.py"),
    ("actor_rollout_ref.rollout.multi_turn.tool_config_path=t.yaml", "multi_turn.tool_config_path: the tools are not here"),
    ("actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent", "default_agent_loop: the tools are not here"), ("actor_rollout_ref.rollout.agent.default_agent_loop=mine", 'default_agent_loop "mine" is not supported'),
    ("algorithm.adv_estimator=gae critic.optim.weight_decay=0.1", "critic.optim.weight_decay is 0.1, which the critic alone cannot have"), ("distillation.enabled=True", "distillation.enabled is not supported\n  fix: distill"),
    ("actor_rollout_ref.rollout.top_p=0.9", 'top_p "0.9" is not supported'), ("actor_rollout_ref.actor.megatron.param_dtype=x", "the settings of FSDP"), ("trainer.device=npu", 'trainer.device "npu"'),
    ("algorithm.rollout_correction.rollout_is=sequence", 'rollout_is "sequence" is not supported'), ("algorithm.rollout_correction.rollout_rs=seq_mean_k1", "rollout_rs"),
    ("actor_rollout_ref.actor.kl_loss_type=abs", 'kl_loss_type "abs" is not supported'), ("reward_model.reward_manager=prime", 'reward_manager "prime" is not supported'),
    ("trainer.v1.trainer_mode=separate_async", "--async_steps 1"), ("actor_rollout_ref.actor.optim.optimizer=AdamW8bit", "--moments"), ("critic.model.lora_rank=8", "the critic is trained as a whole"),
    ("+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True +reward_model.reward_kwargs.overlong_buffer_cfg.len=9 +reward_model.reward_kwargs.max_resp_len=99", "the value of data.max_response_length"),
    ("trainer.save_freq=x", 'trainer.save_freq "x" is not a number'), ("actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=x", 'kl_loss_coef "x" is not a number'),
    ("actor_rollout_ref.actor.ppo_mini_batch_size=x", 'ppo_mini_batch_size "x" is not a whole number'), ("actor_rollout_ref.model.override_config.num_layers=2", "change config.json"),
]


@pytest.mark.parametrize("line, task, flags", OF_VERL)
def test_commands_of_verl(tmp_path, line, task, flags):
    words = f"python3 -m verl.trainer.main_ppo {line}"
    if flags["reward"] == "r.py":
        error = refused(words, tmp_path)
        assert error.startswith("train_llama: the command names no reward") and "compute_score" in error and error.count("fix:") == 1
        words += " --reward r.py"
    found = converted(words, tmp_path)
    assert found[0] == task and {name: found[1].get(name) for name in flags} == flags


@pytest.mark.parametrize("more, flags", VERL_VALUES)
def test_values_of_verl(tmp_path, more, flags):
    words = VERL.replace(" --reward r.py", "") if "environment" in more or "custom_reward" in more else VERL
    found = converted(f"{words} {more}", tmp_path)[1]
    assert {name: found.get(name) for name in flags} == flags


@pytest.mark.parametrize("more, message", VERL_REFUSED)
def test_settings_of_verl_that_are_refused(tmp_path, more, message):
    error = refused(f"{VERL} {more}", tmp_path)
    assert message in error and error.count("fix:") == 1


def test_a_file_of_verl(tmp_path):
    """Files in the form of Hydra's; names that refer to others have their value, or verl's default."""
    (tmp_path / "f").mkdir()
    (tmp_path / "f/x.yaml").write_text("""hydra: {searchpath: [a]}
defaults: [ppo_trainer, _self_]
data: {train_files: D, max_prompt_length: 64, max_response_length: 32, apply_chat_template_kwargs: {enable_thinking: false}}
actor_rollout_ref:
  hybrid_engine: true
  model: {path: M}
  actor: {optim: {lr: 2.0e-06, betas: [0.9, 0.95], lr_warmup_steps: -1}, checkpoint: {save_contents: [model], load_contents: "${.save_contents}"}, clip_ratio_low: null}
  rollout:
    name: ???
    n: 4
    response_length: ${oc.select:data.max_response_length,512}
    multi_turn: {enable: false, max_assistant_turns: null}
algorithm: {adv_estimator: grpo}
trainer: {default_local_dir: "out/${trainer.project_name}", project_name: p, logger: [console, wandb]}
""")
    want = {"data": "D", "max_len": "64", "max_new_tokens": "32", "model": "M", "learning_rate": "2e-06", "n": "4", "output_dir": "out/q", "chat_template_kwargs": '{"enable_thinking": false}', "resume": "auto"}
    for words in ("verl.trainer.main_ppo --config-path f --config-name x --reward r.py trainer.project_name=q", "--config f/x.yaml --reward r.py --from verl trainer.project_name=q"):
        task, flags, _ = converted(words, tmp_path)
        assert task == "grpo" and {name: flags.get(name) for name in want} == want


def test_the_words_of_a_launcher(tmp_path):
    (tmp_path / "a.yaml").write_text("compute_environment: LOCAL_MACHINE\nmixed_precision: bf16\nnum_processes: 4\n")
    for line in ("accelerate launch --config_file a.yaml trl", "accelerate launch --config_file=a.yaml -m trl.scripts.", "trl"):
        words = f"{line}{'' if line.endswith('.') else ' '}sft {TRL}" + (" --accelerate_config a.yaml" if line == "trl" else "")
        found = converted(words, tmp_path)[1]
        assert (found["ranks"], found["dtype"], found["train_batch_size"]) == ("4", "bf16", "32"), words
    found = converted("llamafactory-cli train learning_rate=3e-4 --template qwen3", tmp_path, FACTORY)[1]
    assert found["learning_rate"] == "3e-4"
    assert "c.yml is a file of LLaMA-Factory, the only trainer with the key stage" in converted("", tmp_path, FACTORY)[2]


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """The program's description of itself, which it passes to scripts/port: a copy of it, whose scripts/port writes the argument to a file."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "scripts/port").mkdir(parents=True)
    (folder / "scripts/port/main.py").write_text("import sys; open('own.json', 'w').write(sys.argv[1])")
    shutil.copy(ROOT / "train_llama", folder)
    call("sft --from trl --convert", folder, program=folder / "train_llama")
    return json.loads((folder / "own.json").read_text())


def answer(own, words):
    """The settings of an answer, and a text that has the names in it."""
    try:
        out = door.answer(own, words)
    except reading.PortError as error:
        return [], str(error)
    return out["settings"], "\n".join([s["where"] for s in out["settings"]] + out["notes"] + out["problems"])


def absent(name, text):
    return not re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", text)


@pytest.mark.parametrize("key", peers.NAMES)
def test_no_name_vanishes(own, key):
    """Every name of a peer, with each value of its rows and with others, sets flags, or is in a note or a problem: in a command of the peer, and in one of
    this program."""
    rows, vanished, pairs = peers.NAMES[key].every_row(), [], set()
    for row in rows:
        tasks = ("sft", "dpo", "grpo") if row.kind == "together" else ("sft",)
        plain = {task: answer(own, [task, "--from", key]) for task in tasks}
        for name, value in {(name, value) for name in row.names for value in (*row.values, "3", "true", "none")} - pairs:
            pairs.add((name, value))
            for task in tasks:
                settings, text = answer(own, [task, "--from", key, f"--{name}", value])
                if absent(f"--{name}", text) and settings == plain[task][0]:
                    vanished.append((task, name, value))
    pairs = sorted(pairs)
    for first in range(0, len(pairs), 50):  # of a command of this program, whose message has many names
        words = ["sft", *(word for name, value in pairs[first:first + 50] for word in (f"--{name}", value))]
        text = answer(own, words)[1]
        vanished += [("own", name, value) for name, value in pairs[first:first + 50] if absent(f"--{name}", text)]
    print(f"{key}: {len({name for name, _ in pairs})} names, {len(pairs)} with values")
    assert vanished == []


def test_keys_name_one_trainer():
    for peer, keys in peers.KEYS[:-1]:
        for key in keys:
            assert [other.name for other in peers.PEERS if any(key in row.names for row in other.rows)] in ([peer.name], [peer.name] * 2), key


def test_functions_of_trl_are_called(tmp_path, monkeypatch):
    """With a stand-in for TRL, whose function gives no reward without a solution."""
    (tmp_path / "trl").mkdir()
    (tmp_path / "trl" / "rewards.py").write_text("def accuracy_reward(completions, solution):\n"
                                                 "    return [float(c[0]['content'] == s) if s else None for c, s in zip(completions, solution)]\n")
    monkeypatch.syspath_prepend(tmp_path)
    reward = runpy.run_path(str(ROOT / "scripts" / "rewards" / "accuracy_reward.py"))["reward"]
    assert reward(["Q"] * 3, ["4", "5", "6"], ["4", "4", ""]) == [1.0, 0.0, 0.0]


# ---- refusals and notes --------------------------------------------------------------------------------------------------------------

NOT_HERE = [  # words, the task, its definition, and the fix
    ("rloo", "rloo", "is an estimator here", "grpo, with --advantage_estimator rloo"),
    ("trl bco", "bco", "is a loss here", "dpo, with --loss_type bco_pair"),
    ("openrlhf.cli.lora_combiner", "lora_combiner", "adds an adapter to a model", "merge --model"),
    ("python examples/scripts/sft_vlm.py", "sft_vlm", "trains on images", "a text model with"),
    ("python examples/scripts/openenv/echo.py", "openenv/echo", "plays several turns with an environment", "grpo, with --environment FILE.py"),
    ("stf", "stf", None, "pretrain, sft, dpo, rm, distill, grpo, ppo, eval, generate, merge or show")]
WORDS = [
    (f"sft {TRL} --bf16 3", '--bf16 "3" is not a value of this flag\n  fix: true, full, auto, false, or leave it out'),
    (f"sft {TRL} --per_device_train_batch_size 0", '--per_device_train_batch_size "0" is not a whole number above 0'),
    (f"trl sft {TRL} --assistant_only_loss false", '--assistant_only_loss "false" is not supported\n  fix: the assistant\'s messages, or the completion, are trained; --train'),
    (f"trl sft {TRL} --packing --packing_strategy wrapped", '--packing_strategy "wrapped" with packing is not supported\n  fix: bfd'),
    (f"trl sft {TRL} --dataset_kwargs '{{\"skip_prepare_dataset\": true}}'", "skip_prepare_dataset of --dataset_kwargs is not supported"),
    (f"trl sft {TRL} --accelerator_config '{{\"split_batches\": true}}'", "split_batches of --accelerator_config is not supported\n  fix: per_device_train_batch_size counts"),
    (f"trl sft {TRL} --num_processes 2 --average_tokens_across_devices false", "--average_tokens_across_devices false is not supported"),
    (f"trl grpo {TRL} --beta 0.1 --use_bias_correction_kl true", "--use_bias_correction_kl with beta is not supported"),
    (f"sft {TRL} --epsilon_high 4", "--epsilon_high belongs to grpo, ppo, not to sft"),
    (f"grpo {TRL} --num_generations 7", "is not a multiple of num_generations, 7\n  fix: --rollout_batch_size N"),
    (f"grpo {TRL} --reward_funcs helpers.mine", '"helpers.mine" is a function, which this program cannot load\n  fix: --reward FILE.py'),
    (f"grpo {TRL} --reward_funcs get_soft_overlong_punishment", "is not a separate reward here\n  fix: --overlong_buffer 256"),
    (f"grpo {TRL} --reward_funcs a.b c.d --reward_weights 1 2", 'train_llama: --reward_funcs "a.b" is a function'),  # and no message about weights
    *((f"swift {words} --model M --dataset a/b", message) for words, message in (
        ("sft --train_dataloader_shuffle false", "--train_dataloader_shuffle repeats one random order in every epoch\n  fix: with dataset_shuffle false"),
        ("sft --loss_scale last_round", '--loss_scale "last_round" is not supported\n  fix: default; '), ("rlhf --rlhf_type dpo --loss_scale default", "fix: last_round; "),
        ("sft --loss_scale default+ignore_empty_think", "excludes empty thoughts from the targets\n  fix: --enable_thinking false"),
        ("pt --use_chat_template true", "--use_chat_template is not supported in pretrain"), ("sft --template gemma", '--template "gemma" is an unknown template'),
        ("sft --bnb_4bit_use_double_quant false", "always have quantised scales"), ("sft --acc_strategy seq", "the mean over the targets of a step"),
        ("sft --val_dataset swift/self-cognition", "--val_dataset has records with {{NAME}} and {{AUTHOR}} in place of names\n  fix: write the names into a copy"),
        ("rlhf --rlhf_type grpo --advantage_estimator reinforce_plus_plus", "reinforce_plus_plus with scale_rewards group is not supported\n  fix: grpo with group or none"))),
    (f"openrlhf.cli.train_ppo_ray {OPENRLHF} --algo.advantage.estimator flash_reinforce", '--algo.advantage.estimator "flash_reinforce" is not supported\n  fix: reinforce with'),
    (f"openrlhf.cli.train_ppo_ray {OPENRLHF} --algo.kl.unbiased_gradient", "--algo.kl.unbiased_gradient is not supported"),
    (f"openrlhf.cli.train_ppo_ray {OPENRLHF} --algo.advantage.is_correction_level token --algo.advantage.is_correction_gating tv", '--algo.advantage.is_correction_gating "tv" is not'),
    (f"openrlhf.cli.train_ppo_ray {OPENRLHF} --algo.advantage.is_correction_level seq --algo.advantage.is_correction_mode clip", 'is_correction_mode "clip" is not supported'),
    (f"openrlhf.cli.train_ppo_ray {OPENRLHF} --critic.adam.weight_decay 0.1", "--critic.adam.weight_decay is 0.1, which the critic alone cannot have"),
    (f"openrlhf.cli.train_ppo_ray {OPENRLHF} --train.partial_rollout_enable", "--train.partial_rollout_enable is not supported"),
    (f"openrlhf.cli.train_sft {OPENRLHF} --optim muon --muon.lr 0.02", '--muon.lr "0.02" is not supported'),
    (f"accelerate launch --use_megatron_lm --megatron_lm_tp_degree 2 trl/scripts/sft.py {TRL}", "--use_megatron_lm is not supported"),
    ("megatron sft --model M --dataset a/b --save O --calculate_per_token_loss false", "the loss is the mean over the targets of a step"),
    ("megatron sft --model M --dataset a/b --save O --lr_decay_style linear --min_lr 1e-6", "--min_lr is not 0, but --lr_scheduler linear has no minimum"),
    (f"sft {OPENRLHF} --pretrain_mode", "--pretrain_mode asks for the task pretrain, not sft\n  fix: start with pretrain, or leave --pretrain_mode out"),
    (f"sft {OPENRLHF} --critic.model_name_or_path C", "belongs to ppo, not to sft"),  # is not the model
    ("sft --model M --data D --output_dir O --max_lenn 4", "unknown flag --max_lenn\n  fix: did you mean --max_len?"),
    ("sft --model M --data D --output_dir O --ds_type 1", "lists the flags of sft"),
    ("sft --model M stray", '--model has more than one value: "M" and "stray"'),
    ("sft --config missing.yml", "cannot read missing.yml: No such file"),
]
LINES = [
    (LORA | {"lora_modules_to_save": ["norm"]}, 'has "norm", but only the embedding and the head'),
    ({"adapter": "lora"}, '"lora" needs lora_r, which has no default in Axolotl\n  fix: --lora_rank 16'),
    ({"datasets": [{"path": ["a/b"]}]}, 'the path of datasets in c.yml is ["a/b"], not a name'),
    ({"datasets": [{"path": "a/b", "type": "pygmalion"}]}, '"pygmalion" is not a supported format of records'),
    ({"chat_template": "gemma3"}, '"gemma3" is an unknown template'),
    *(({"datasets": [CHATS[0] | {name: value}]}, f'{name} of datasets in c.yml "{value}" is not supported\n  fix: the end of each trained turn is a target, and no other')
      for name, value in (("train_on_eos", "none"), ("train_on_eos", "all"), ("train_on_eot", "last"))),
    ({"datasets": [CHATS[0] | {"roles_to_train": []}]}, "roles_to_train of datasets in c.yml is not supported\n  fix: the fields of a record determine the targets"),
    ({"datasets": [CHATS[0] | {"weight": 0.5}]}, "fix: a slice takes the first part: --data 'NAME[train[:50%]]'"),
    ({"curriculum_sampling": True, "datasets": TWO}, "repeats one random order of several data sets in every epoch\n  fix: shuffle_merged_datasets: false"),
    ({"datasets": [CHATS[0] | {"chat_template": name} for name in ("chatml", "llama3")]}, "chat_template differs between data sets: chatml, llama3"),
    ({"pretrain_multipack_attn": False}, "samples never attend to each other"), ({"s2_attention": True}, "attention is exact"),
    (DPO | {"rl": "grpo", "trl": {"vllm_sync_interval": 2}}, 'trl.vllm_sync_interval in c.yml "2" is not supported'),
    ({"liger_use_token_scaling": True}, "sft has only the plain cross-entropy"), ({"fp8_config": {"recipe": "rowwise"}}, "torchao's tensorwise"),
    ({"val_set_size": 2000}, '"2000" is a number of samples\n  fix: --eval_fraction'),
    ({"lr_scheduler": "polynomial"}, '--lr_scheduler is "polynomial"\n  fix: use one of'),
    (LORA | {"lora_target_modules": r"model.layers.[13].mlp.up_proj"}, "is a regular expression that does not match the same"),
    ({"datasets": [{"path": "a/b", "field_instruction": "x"}, {"path": "c/d", "field_instruction": "y"}]}, "field_instruction differs between data sets: x, y"),
]
FACTORY_LINES = [
    ({"mix_strategy": "interleave"}, 'mix_strategy in c.yml "interleave" is not supported\n  fix: concat, interleave_under'),
    ({"interleave_probs": "0.5,0.5"}, "interleave_probs in c.yml needs a mix_strategy that interleaves"),
    ({"do_eval": True}, "do_eval in c.yml without do_train only evaluates\n  fix: ./train_llama eval"),
    ({"enable_thinking": "no"}, 'enable_thinking in c.yml "no" is not a value'), ({"double_quantization": False}, "always have quantised scales"),
    ({"ignore_pad_token_for_loss": False}, "rows have no padding"), ({"tokenized_path": "c.yml"}, "tokenized_path in c.yml holds the data in place of dataset"),
    ({"max_samples": 0.5}, 'max_samples in c.yml "0.5" is not a whole number above 0'), ({"dataset": None, "max_samples": 5}, "max_samples in c.yml belongs to dataset\n"),
    ({"val_size": 500}, "val_size in c.yml is a number of samples"),
    ({"adapter_name_or_path": "a,b"}, "adapter_name_or_path in c.yml has several adapters"),
]
REFUSED = [
    (f"trl sft {TRL}", {"max_length": None}, 'max_length in c.yml "null" is not supported\n  fix: a number'),
    *((f"{words} --beta 1", None, f'train_llama: there is no task "{name}"{f", which {what}" if what else ""}\n  fix: use {fix}') for words, name, what, fix in NOT_HERE),
    *((words, None, message) for words, message in WORDS), *(("", AXOLOTL | more, message) for more, message in LINES),
    *((other, AXOLOTL | more, f"asks for the task {task}, not {other}\n  fix: start with {task}") for more, task in TASKS[1:5] for other in ["rm" if task == "dpo" else "dpo"]),
    *(("llamafactory-cli train", FACTORY | more, message) for more, message in FACTORY_LINES),
    ("llamafactory-cli train --data x.jsonl", FACTORY | {"max_samples": 5}, "max_samples in c.yml belongs to dataset\n  fix: --data 'NAME[train[:5]]'"),
    ("", FACTORY | {"stage": "kto", "pref_ftx": 0.5}, "pref_ftx in c.yml is not supported with stage kto"), ("", FACTORY | {"stage": "ppo"}, 'stage in c.yml "ppo" is not supported'),
    ("swift rlhf --rlhf_type ppo --model M --dataset a/b", None, 'train_llama: --rlhf_type "ppo" is not supported\n  fix: the task ppo with flags of this program'),
    ("swift rlhf --rlhf_type grpo --model M --dataset a/b --teacher_model T", None, "without reward_funcs is the whole objective of grpo\n  fix: --rlhf_type gkd"),
    ("swift rlhf --rlhf_type gkd --model M --dataset a/b --teacher_model T --gkd_logits_topk 64", None, "over the whole vocabulary; leave it out"),
    (f"trl gkd {TRL} --teacher_model_name_or_path T --seq_kd true", None, "fix: --on_policy 0, with --data from generate"),
    ("", FACTORY | {"dataset": "identity"}, 'train_llama: dataset in c.yml "identity" is a name in LLaMA-Factory\'s data/dataset_info.json, which is not here'),
    ("", AXOLOTL | {"model_type": "Llama4ForConditionalGeneration"}, "model_type in c.yml Llama4ForConditionalGeneration reads images")]


@pytest.mark.parametrize("words, config, message", REFUSED)
def test_refusals(tmp_path, words, config, message):
    assert message in refused(words, tmp_path, config)


ZERO = {"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"}
AUTO = {"warmup_num_steps": "auto", "warmup_type": "linear"}
TOTAL = AUTO | {"total_num_steps": "auto"}
FILES_OF_DEEPSPEED = [  # sections in addition to ZERO, words, and the flags of this program or a part of the message
    ({}, "--max_grad_norm 0.5", {"zero_stage": "2", "max_norm": "0.5", "lr_scheduler": "linear"}),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "stage3_max_live_parameters": 1e9}}, "", {"zero_stage": "3"}),
    ({"zero_optimization": {"stage": 3, "stage3_max_live_parameter": 1}}, "", "is not a setting of DeepSpeed\n  fix: did you mean zero_optimization.stage3_max_live_parameters?"),
    ({"gradient_clipping": 0.3}, "", {"max_norm": "0.3"}), ({"gradient_clipping": 0.3}, "--max_grad_norm 0.3", {"max_norm": "0.3"}),
    ({"gradient_clipping": 0.3}, "--max_grad_norm 1", "gradient_clipping in ds.json is 0.3, but --max_grad_norm is 1\n  fix: give both the same value"),
    ({"gradient_clipping": None}, "", {"max_norm": "0"}),  # DeepSpeed does not read max_grad_norm
    ({"gradient_clipping": None}, "--max_grad_norm 0.5", {"max_norm": "0.5"}),
    ({"scheduler": {"type": "WarmupLR", "params": AUTO}}, "--warmup_steps 5 --lr_scheduler_type cosine", {"lr_scheduler": "constant_with_warmup", "lr_warmup": "5"}),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-5}}}, "", {"lr_scheduler": "constant_with_warmup", "lr_warmup": "1000", "learning_rate": "3e-05"}),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7}}}, "--warmup_steps 5", "warmup_num_steps in ds.json is 7, but --warmup_steps is 5"),
    ({"scheduler": {"type": "WarmupLR", "params": AUTO | {"warmup_type": "log"}}}, "", 'warmup_type in ds.json "log" is not supported\n  fix: the warm-up is linear'),
    ({"scheduler": {"type": "WarmupDecayLR", "params": TOTAL | {"warmup_max_lr": "auto"}}}, "--lr_scheduler_type constant", {"lr_scheduler": "linear", "learning_rate": "2e-5"}),
    ({"scheduler": {"type": "WarmupDecayLR", "params": AUTO}}, "", "has no total_num_steps, which WarmupDecayLR needs"),
    ({"scheduler": {"type": "WarmupDecayLR", "params": TOTAL | {"total_num_steps": 90}}}, "--max_steps 80", "total_num_steps in ds.json is 90, but the number of steps is 80"),
    ({"scheduler": {"type": "WarmupCosineLR", "params": TOTAL}}, "", {"lr_scheduler": "cosine_with_min_lr", "min_lr_ratio": "0.0001"}),
    ({"scheduler": {"type": "OneCycle", "params": {}}}, "", 'scheduler.type in ds.json "OneCycle" is not supported\n  fix: WarmupLR, '),
    ({"scheduler": {"type": "WarmupLR", "params": AUTO | {"warmup_min_lr": 1e-6}}}, "", "is not supported\n  fix: the warm-up begins at 0"),
    ({"optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 0.1}}}, "--optim adamw_8bit",
     {"learning_rate": "3e-05", "adam_betas": "0.8,0.99", "adam_eps": "1e-07", "weight_decay": "0.1", "moments": None}),
    ({"optimizer": {"type": "Adam", "params": {"lr": "auto", "betas": "auto"}}}, "--adam_beta2 0.9", {"learning_rate": "2e-5", "adam_betas": "0.9,0.9"}),
    ({"optimizer": {"type": "AdamW"}}, "", {"learning_rate": "1e-3"}),  # its default
    ({"optimizer": {"type": "AdamW", "params": {"lr": 3e-5}}}, "--learning_rate 1e-5", "optimizer.params.lr in ds.json is 3e-05, but --learning_rate is 1e-5"),
    ({"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 400}}}, "",
     'train_llama: optimizer.type in ds.json "OneBitAdam" is not supported\n  fix: AdamW or Adam; or --optimizer muon without the section optimizer\nWhat'),
    ({"data_types": {"grad_accum_dtype": None}, "compile": {"x": None}}, "", {"grad_dtype": None}),  # null
    ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "", "adam_w_mode"),
    ({"fp16": {"enabled": False, "loss_scale": 0}, "bf16": {"enabled": True}, "amp": {"enabled": False}}, "", {"dtype": "bf16"}),
    ({"fp16": {"enabled": "auto", "loss_scale": 0}, "bf16": {"enabled": "auto"}}, "", {"dtype": None}),
    ({"fp16": {"enabled": True, "loss_scale": 0}}, "", "fp16 in ds.json is not supported\n  fix: --dtype bf16 or f32: there is no fp16"),
    ({"bf16": {"enabled": False}}, "--bf16", 'bf16.enabled in ds.json is f32, but --bf16 is bf16'), ({"bf16": {"enabled": "auto"}}, "--bf16", {"dtype": "bf16"}),
    ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, "--num_processes 2", {"train_batch_size": "16"}),
    ({"train_batch_size": 48}, "--num_processes 2", {"train_batch_size": "48"}), ({"train_batch_size": 48}, "--gradient_accumulation_steps 4", {"train_batch_size": "48"}),
    ({"train_batch_size": 48, "train_micro_batch_size_per_gpu": 5}, "", "train_batch_size in ds.json is 48, but 5 samples per device"),
    ({"gradient_accumulation_steps": 4}, "--gradient_accumulation_steps 8", "gradient_accumulation_steps in ds.json is 4, but --gradient_accumulation_steps is 8"),
    ({"gradient_accumulation_steps": "x"}, "", 'gradient_accumulation_steps in ds.json "x" is not a whole number above 0'),
    ({"elasticity": {"enabled": True, "micro_batch_sizes": [1]}}, "", "elasticity in ds.json is not supported"), ({"elasticity": {"enabled": False, "x": 1}}, "", {"zero_stage": "2"}),
    ({"gradient_cliping": 1}, "", "gradient_cliping in ds.json is not a setting of DeepSpeed\n  fix: did you mean gradient_clipping?"),
    ({"data_types": {"grad_accum_dtype": "bf16"}, "wall_clock_breakdown": True, "steps_per_print": 100}, "", {"grad_dtype": "bf16"}),
]


@pytest.mark.parametrize("more, words, wanted", FILES_OF_DEEPSPEED)
def test_files_of_deepspeed(tmp_path, more, words, wanted):
    (tmp_path / "ds.json").write_text(json.dumps({key: value for key, value in (ZERO | more).items() if value is not None}))
    line = f"trl sft {TRL} --deepspeed ds.json {words}"
    if isinstance(wanted, str):
        assert wanted in refused(line, tmp_path)
    else:
        _, found, _ = converted(line, tmp_path)
        assert {name: found.get(name) for name in wanted} == wanted


def test_deepspeed_s_settings_have_a_file(tmp_path):
    """A file that is not there, or no JSON; two of them; an object in the place of a file; accelerate's file; the file of another trainer."""
    assert "--deepspeed: cannot read ds.json: No such file or directory\n  fix: give the path of a file" in refused(f"trl sft {TRL} --deepspeed ds.json", tmp_path)
    (tmp_path / "ds.json").write_text("{")
    assert "ds.json is not valid JSON" in refused(f"trl sft {TRL} --deepspeed ds.json", tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps(ZERO | {"scheduler": {"type": "WarmupLR", "params": AUTO}}))
    file = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json", "zero3_init_flag": False}}
    for words, config in ((f"trl sft {TRL}", file), ("", AXOLOTL | {"deepspeed": "ds.json"}), ("", FACTORY | {"deepspeed": "ds.json"}),
                          ("swift sft --model M --dataset a/b --output_dir O --deepspeed ds.json", None),
                          (["trl", "sft", *TRL.split(), "--deepspeed", (tmp_path / "ds.json").read_text()], None),
                          (f"trl sft {TRL}", {"deepspeed": json.loads((tmp_path / "ds.json").read_text())})):
        _, found, notes = converted(words, tmp_path, config)
        assert (found["lr_scheduler"], found["zero_stage"]) == ("constant_with_warmup", "2") and "rates come one step later" in notes
    assert converted("swift sft --model M --dataset a/b --output_dir O --deepspeed zero2_offload --max_grad_norm 0.5", tmp_path)[1]["zero_stage"] == "2"
    assert "are two files of DeepSpeed" in refused(f"trl sft {TRL} --deepspeed other.json", tmp_path, file)
    clip = {"deepspeed_config": {"zero_stage": 2, "gradient_clipping": 0.3, "gradient_accumulation_steps": 4}}
    _, found, _ = converted(f"trl sft {TRL}", tmp_path, clip)
    assert (found["max_norm"], found["train_batch_size"]) == ("0.3", "32")
    assert "deepspeed_config.gradient_clipping in c.yml is 0.3, but --max_grad_norm is 1" in refused(f"trl sft {TRL} --max_grad_norm 1", tmp_path, clip)


@pytest.mark.parametrize("more", [
    {"datasets": [{"path": "a/b", "data_files": 1}]}, {"datasets": [{"path": None}]}, {"sequence_len": "1e400"}, {"val_set_size": "x"}, {"num_epochs": "x", "evals_per_epoch": 2,
     "val_set_size": 0.1}, {"micro_batch_size": 1.5}, {"cosine_min_lr_ratio": [1, 2]}, {"trl": {"beta": "x"}, "rl": "grpo"}, {"lr_scheduler_kwargs": {"min_lr": "x"}}])
def test_bad_values_end_in_a_message(tmp_path, more):
    said = refused("", tmp_path, AXOLOTL | more)
    assert "Traceback" not in said and ("\n  fix: " in said or " is not a " in said)


def test_all_problems_are_in_one_message(tmp_path):
    """The message also has the command in the names of this program."""
    said = call("sft --from axolotl --base_model M --datasets 'D;x' --output_dir O --warmup_steps 2.5 --use_dora --learning_rate x --max_grad_norm -1 --frobnicate", tmp_path).stderr
    assert said.startswith("train_llama: 5 problems:\n"), said
    for part in ("--use_dora is not supported\n", '--learning_rate "x" is not a number\n', "unknown flag --frobnicate\n", "--max_norm is -1.0 but must be 0",
                 "--lr_warmup is 2.5 but must be 0"):
        assert part in said
    assert re.search(r"\nWhat was understood, in the names of this program:\n  \./train_llama sft .*--data 'D;x' --output_dir O .*--max_norm -1", said)


def test_notes_on_differences(tmp_path):
    notes = converted(f"sft {TRL} --packing_strategy wrapped --push_to_hub --eos_token E", tmp_path)[2]
    for part in ("--packing_strategy: without packing it has no effect", "--push_to_hub: no model is uploaded", "--eos_token: it must be the tokenizer's own",
                 "in chats TRL trains on all tokens unless assistant_only_loss is set", "TRL's defaults, which differ from those of this program: learning_rate 2e-5, "
                 "max_epochs 3, lr_scheduler linear, lr_warmup 0, adam_betas 0.9,0.999, max_len 1024, truncation keep"):
        assert part in notes, part
    notes = converted(f"sft {TRL} --learning_rate 1e-5 --num_train_epochs 1 --lr_scheduler_type cosine --warmup_ratio 0.1 --adam_beta2 0.95 --max_length 64 "
                      "--assistant_only_loss --truncation_mode keep_start", tmp_path)[2]
    assert "defaults" not in notes and "trains on all tokens" not in notes
    notes = converted("", tmp_path, AXOLOTL)[2]
    assert "at most 100 steps" in notes and "M is not on this machine; a run checks at its start whether this program supports its architecture" in notes
    assert "OpenRLHF cuts them" in converted(f"sft {OPENRLHF}", tmp_path)[2]
    assert "TRL's is the mean over all tokens of a batch, with the prompts" in converted("", tmp_path, AXOLOTL | DPO | {"rl": "orpo"})[2]


def test_special_tokens_must_be_the_tokenizer_s(tmp_path):
    line = f"sft --from trl --model '{DEMO}' --dataset_name D --output_dir O --eos_token"
    assert "<|end|> is the tokenizer's own" in converted(f"{line} '<|end|>'", tmp_path)[2]
    assert f'--eos_token is "</s>", but the tokenizer in {DEMO} has "<|end|>"' in refused(f"{line} </s>", tmp_path)
    assert '"E" can only be compared with the tokenizer once M is on this machine' in call(f"sft {TRL} --eos_token E", tmp_path).stderr


def test_a_model_on_this_machine_is_checked(tmp_path):
    (tmp_path / "gemma").mkdir()
    (tmp_path / "gemma" / "config.json").write_text(json.dumps({"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}))
    assert "gemma2" in refused("", tmp_path, AXOLOTL | {"base_model": "gemma"})


def test_trl_s_loss_of_experts(tmp_path):
    """TRL adds it with config.json's weight, whatever output_router_logits says."""
    moe = f"--model_name_or_path {GOLDEN / 'mixtral'} --dataset_name D --output_dir O"
    weight = json.loads((GOLDEN / "mixtral" / "config.json").read_text())["router_aux_loss_coef"]
    assert float(converted(f"trl sft {moe}", tmp_path)[1]["router_aux_loss_coef"]) == weight
    assert converted(f"trl sft {moe} --router_aux_loss_coef 0.5", tmp_path)[1]["router_aux_loss_coef"] == "0.5"
    assert "router_aux_loss_coef" not in converted(f"trl sft {TRL}", tmp_path)[1]
    assert "TRL adds the auxiliary loss of experts" in converted("trl sft --model_name_or_path Qwen/Qwen3-30B-A3B --dataset_name D --output_dir O", tmp_path)[2]


def test_own_flags_need_no_python(tmp_path):
    """The program alone, without its scripts and without Python."""
    program = tmp_path / "train_llama"
    program.write_bytes((ROOT / "train_llama").read_bytes())
    program.chmod(0o755)
    line = ["sft", "--model", "M", "--data", "D", "--output_dir", "O"]
    assert call([*line, "--convert"], tmp_path, program=program, PATH="").stdout == "./train_llama sft --model M --data D --output_dir O\n"
    said = call([*line, "--warmup_ratio", "0.1"], tmp_path, program=program, PATH="").stderr
    assert "--warmup_ratio is not a flag of this program, and " in said and "\n  fix: leave the program in the tree" in said


# ---- files, tables -------------------------------------------------------------------------------------------------------------------------


def test_files_of_accelerate(tmp_path):
    config = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_activation_checkpointing": True, "fsdp_reshard_after_forward": True, "fsdp_version": 2},
              "mixed_precision": "bf16", "num_machines": 1, "num_processes": 2, "parallelism_config": {"parallelism_config_cp_size": 2}}
    _, found, notes = converted(f"sft {TRL}", tmp_path, config)
    assert (found["ranks"], found["ring_attn_size"], found["zero_stage"], found["recompute"], found["dtype"]) == ("2", "2", "3", "layer", "bf16")
    assert "TRL's defaults" in notes and "OpenRLHF" not in notes
    said = refused(f"sft {TRL}", tmp_path, {"num_machines": 2, "mixed_precision": "fp16"})
    assert said.startswith('train_llama: 2 problems:\nnum_machines in c.yml "2" is not supported\n  fix: --rank R')


def test_broken_files(tmp_path):
    (tmp_path / "wrong.yaml").write_text("base_model: M\nlearning_rate: 1e-5\n  num_epochs: 2\n")
    said = call("sft --config wrong.yaml", tmp_path).stderr
    assert said.startswith("train_llama: line 3, column 13 of wrong.yaml: broken YAML: mapping values are not allowed here\n  fix: ")
    (tmp_path / "twice.yaml").write_text("a: &a {b: 1}\nc: {<<: *a, b: 2}\nlearning_rate: 1e-5\nlearning_rate: 2e-5\n")
    assert call("sft --config twice.yaml", tmp_path).stderr == "train_llama: twice.yaml has 'learning_rate' twice\n  fix: leave one of them out\n"


def test_the_pages_have_the_tables():
    assert {path: path.read_text() for path in page.PAGES.glob("*.md")} == page.pages()


def test_rows_are_sound():
    """Every row can match, and sets a flag of this program."""
    flags = set(re.findall(r"^OPT\([\w:<>]+, (\w+),", (ROOT / "llmc/train/options.def").read_text(), re.M))
    for peer in peers.TABLES:
        seen = set()
        for row in peer.rows:
            if row.kind in ("same", "sets", "part"):
                assert {word.split()[0] for word in row.text.split(",") if row.kind == "same"} <= flags and row.text.split(",")[0].split()[0] in flags, row
            for name in row.names:
                keys = {(name, value.lower()) for value in row.values} or {(name, None)}
                assert not keys & seen and (name, None) not in seen, (peer.name, name)
                seen |= keys


SCHEMAS = json.loads((GOLDEN / "foreign_names.json").read_text())
# Objects with a row for each field, the parts of a value of --data, and descriptions of the machine.
HOLDERS = r"(trl|special_tokens|fp8_config|context_parallel|capabilities|env_capabilities)|.*\.(path|name|split|seed)|(env_)?capabilities\..*|config_file|help|n_gpu|n_node|compute_capability|torch_version"


@pytest.mark.parametrize("whose", [whose for whose in SCHEMAS if whose != "versions"])
def test_every_name_is_known(whose):
    """Each name of a trainer has a row in its own tables, or is a flag of this program."""
    peer = next(peer for peer in peers.TABLES if peer.name == whose)
    rows = peer.every_row()
    values = {"x", *(value for row in rows for value in row.values)}
    flags = set(re.findall(r"^OPT\([\w:<>]+, (\w+),", (ROOT / "llmc/train/options.def").read_text(), re.M))
    names = {re.sub(r"^(pretraining_dataset|test_datasets)\.", "datasets.", name) for name in SCHEMAS[whose]}
    unknown = [name for name in names if name.removeprefix("trl.") not in flags and not re.fullmatch(HOLDERS, name) and not any(table.find(rows, name, value) for value in values)]
    assert unknown == []
    assert SCHEMAS["versions"][whose].startswith(peer.version)
