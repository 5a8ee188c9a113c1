"""All peers, and the words that start their programs."""

import re

from .accelerate import ACCELERATE
from .axolotl import AXOLOTL
from .llama_factory import LLAMA_FACTORY
from .openrlhf import OPENRLHF
from .reading import PortError, Setting
from .swift import SWIFT
from .trainer import TRAINER
from .trl import TRL

PEERS = (TRL, OPENRLHF, AXOLOTL, LLAMA_FACTORY, SWIFT)  # of equals the first is taken
HELPERS = (TRAINER, ACCELERATE)

# The tasks of OpenRLHF's and TRL's scripts, with settings that come with them.
TASKS = {"sft": ("sft",), "dpo": ("dpo",), "rm": ("rm",), "reward": ("rm",), "reward_modeling": ("rm",), "grpo": ("grpo",), "ppo": ("ppo",), "ppo_tldr": ("ppo",),
         "gspo": ("grpo", "importance_sampling_level", "sequence"), "orpo": ("dpo", "loss_type", "orpo"), "pt": ("pretrain",)}
# Tasks and scripts of theirs that are not here: a pattern of their path, what they do, and what there is instead.
INSTEAD = [(re.compile(rf"({pattern})(\W|$)"), what, fix) for pattern, what, fix in (
    (r"(\w+/)?\w*(vlm|carla)\w*", "trains on pictures", "models of text alone are trained, by pretrain, sft, dpo, rm, grpo or ppo"),
    (r"(openenv|harbor|openreward)/\w+|grpo_agent", "plays several turns with an environment",
     "grpo, with one answer to each prompt and --reward FILE.py"),
    ("rloo", "is an estimator here", "grpo, with --advantage_estimator rloo"),
    ("kto", "learns from answers that are good or bad by themselves", "dpo, with pairs of a better and a worse answer"),
    ("bco", "is a loss here", "dpo, with --loss_type bco_pair"),
    ("cpo", "is a loss here", "dpo, with --loss_type simpo,sft --loss_weights 1,ALPHA"),
    ("tpo", "learns from three answers to a prompt", "dpo, with two of them"),
    ("online_dpo|dpo_online|nash_md|xpo", "samples its pairs from the policy", "grpo, with --reward"),
    ("kd|gkd|gold|distillation|minillm|sdft|sdpo", "learns a teacher's probabilities",
     "sft on the teacher's answers, which generate --model TEACHER writes"),
    ("ssd", "trains on answers of its own", "generate --model DIR --prompts FILE, and sft on what it writes"),
    ("prm|process_reward", "rewards each step of an answer", "rm, with one reward for each answer"),
    (r"(sft|dpo|grpo)_\w+", "is a script for one model or data set", "sft, dpo or grpo, with its --model and --data"),
    ("lora_combiner", "adds an adapter to a model", "merge --model DIR --adapter DIR --output_dir DIR"),
    ("batch_inference|interactive_chat|ssd_eval", "writes answers", "generate --model DIR --prompts FILE"),
    ("serve_rm", "serves a reward model", "scripts/serve_rm.py --model DIR, or grpo or ppo with --reward DIR, which load one themselves"))]


def launched(words):
    """Returns the peer, the task, and settings that the words before the flags say: deepspeed --module openrlhf.cli.train_sft, trl sft, axolotl train."""
    line = " ".join(words)
    for pattern, peer in ((r"\bopenrlhf[./]cli[./](?:train_)?(\w+)", OPENRLHF), (r"\btrain_(\w+)(?:\.py)?$", OPENRLHF), (r"\btrl (\w+)", TRL),
                          (r"\btrl\.scripts\.(\w+)", TRL), (r"\btrl/scripts/(\w+)\.py", TRL), (r"\bexamples/scripts/((?:\w+/)?\w+)\.py", TRL), (r"\bswift (sft|pt|rlhf)\b", SWIFT),
                          (r"\baxolotl(?:\.cli)?[. ](train)\b", AXOLOTL), (r"\bllamafactory-cli (train)\b", LLAMA_FACTORY)):
        found = re.search(pattern, line)
        if not found:
            continue
        name = found[1].removesuffix("_ray") if peer is OPENRLHF else found[1].removeprefix("ppo/")
        if name in ("train", "rlhf"):
            return peer, None, []
        return (peer, *task_called(name, line))
    if len(words) == 1 and (words[0] in TASKS or instead(words[0])):
        return (TRL if words[0] != "pt" else SWIFT, *task_called(words[0], line))
    raise PortError(f'there is no task "{words[0]}"\n  fix: pretrain, sft, dpo, rm, grpo, ppo, eval, generate or merge; or a command of {", ".join(p.name for p in PEERS)}')


def task_called(name, line):
    if name in TASKS:
        task, *setting = TASKS[name]
        return task, [Setting(setting[0], [setting[1]], line)] if setting else []
    what, fix = instead(name) or ("", "pretrain, sft, dpo, rm, grpo or ppo")
    raise PortError(f'there is no task "{name}"{what and f", which {what}"}\n  fix: {fix}')


def instead(name):
    return next(((what, fix) for pattern, what, fix in INSTEAD if pattern.match(name)), None)
