"""Tasks and scripts of other trainers that are not here."""

import re

# For each script or task: a pattern of its path, its purpose, and the alternative here.
INSTEAD = [(re.compile(rf"({pattern})(\W|$)"), what, fix) for pattern, what, fix in (
    (r"(\w+/)?\w*(vlm|carla)\w*", "trains on images", "a text model with pretrain, sft, dpo, rm, distill, grpo or ppo"),
    (r"(openenv|harbor|openreward)/\w+|grpo_agent", "plays several turns with an environment",
     "grpo, with --environment FILE.py (docs/rl.md#episodes)"),
    ("rloo", "is an estimator here", "grpo, with --advantage_estimator rloo"),
    ("bco", "is a loss here", "dpo, with --loss_type bco_pair"),
    ("cpo", "trains pairs without a reference", "dpo, with --loss_type simpo,sft --loss_weights 1,ALPHA, which is CPO-SimPO"),
    ("tpo", "learns from three answers to a prompt", "dpo, with two of them"),
    ("online_dpo|dpo_online|nash_md|xpo", "samples its pairs from the policy", "grpo, with --reward"),
    ("kd|gold|minillm|sdft|sdpo", "learns a teacher's probabilities", "distill, with a teacher of the same tokenizer: --teacher_model DIR"),
    ("ssd", "trains on its own answers", "generate --model DIR --prompts FILE, and sft on its output"),
    ("prm|process_reward", "rewards each step of an answer", "rm, with one reward for each answer"),
    (r"(fsdp_)?sft_trainer\w*", "has names that are not translated", "sft, with the names of this program"),
    (r"main_(generation|eval)\w*", "writes or judges answers", "generate --model DIR --prompts FILE"),
    (r"(sft|dpo|grpo)_\w+", "is a script for one model or data set", "sft, dpo or grpo, with its --model and --data"),
    ("lora_combiner", "adds an adapter to a model", "merge --model DIR --adapter DIR --output_dir DIR"),
    ("batch_inference|interactive_chat|ssd_eval", "writes answers", "generate --model DIR --prompts FILE"),
    ("serve_rm", "serves a reward model", "scripts/serve_rm.py --model DIR, or grpo or ppo with --reward DIR, which load the model themselves"))]


def instead(name):
    return next(((what, fix) for pattern, what, fix in INSTEAD if pattern.match(name)), None)


def no_task(name, tasks=("pretrain", "sft", "dpo", "rm", "distill", "grpo", "ppo")):
    what, fix = instead(name) or ("", f"{', '.join(tasks[:-1])} or {tasks[-1]}")
    return f'there is no task "{name}"{what and f", which {what}"}\n  fix: use {fix}'
