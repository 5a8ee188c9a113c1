"""All peers, and the words, files and names by which a command belongs to one of them."""

import re

from .accelerate import ACCELERATE
from .axolotl import AXOLOTL
from .deepspeed import DEEPSPEED
from .instead import no_task
from .llama_factory import LLAMA_FACTORY
from .megatron import MEGATRON
from .openrlhf import OPENRLHF
from .reading import PortError, Setting
from .swift import SWIFT
from .trainer import TRAINER
from .trl import TRL
from .verl import VERL

NAMES = {"trl": TRL, "openrlhf": OPENRLHF, "axolotl": AXOLOTL, "llamafactory": LLAMA_FACTORY, "swift": SWIFT, "megatron": MEGATRON, "verl": VERL}  # of --from
PEERS = tuple(NAMES.values())
HELPERS = (TRAINER, ACCELERATE)
TABLES = (*PEERS, *HELPERS, DEEPSPEED)

# The command words of a trainer. The group is the name of a task or of another program.
PROGRAMS = (
    (OPENRLHF, r"openrlhf[./]cli[./](?:train_)?(\w+?)(?:_ray)?(?:\.py)?"),
    (TRL, r"trl[./]scripts[./](\w+?)(?:\.py)?"), (TRL, r"examples/scripts/(?:ppo/)?((?:\w+/)?\w+)\.py"), (TRL, r"trl ([a-z][\w-]*)"),
    (SWIFT, r"(?:swift |swift[./]cli[./])(\w+?)(?:\.py)?"), (MEGATRON, r"(?:megatron |swift[./]cli[./]_megatron[./])(\w+?)(?:\.py)?"),
    (AXOLOTL, r"axolotl(?:\.cli\.| )(\w+)"), (LLAMA_FACTORY, r"(?:llamafactory-cli|lmf) (\w+)"), (LLAMA_FACTORY, r"src/(train)(?:_bash)?\.py"),
    (VERL, r"(?:verl[./]trainer|recipe[./]dapo)[./](\w+?)(?:\.py)?"))

# Keys of files that no other trainer has.
KEYS = ((AXOLOTL, {"base_model"}), (LLAMA_FACTORY, {"stage", "finetuning_type"}), (SWIFT, {"tuner_type", "train_type", "rlhf_type"}),
        (TRL, {"use_peft", "dataset_train_split", "dataset_test_split", "dataset_config", "assistant_only_loss", "completion_only_loss"}),
        (OPENRLHF, {"actor.model_name_or_path", "ckpt.output_dir", "ds.zero_stage"}), (VERL, {"actor_rollout_ref"}))

# Tasks of the trainers' programs, with a setting that a program implies. The settings of train and rlhf name the task.
TASKS = {"sft": ("sft",), "dpo": ("dpo",), "rm": ("rm",), "reward": ("rm",), "reward_modeling": ("rm",), "grpo": ("grpo",), "ppo": ("ppo",), "ppo_tldr": ("ppo",),
         "distillation": ("distill",), "gkd": ("distill", "lmbda", "0.5"),
         "gspo": ("grpo", "importance_sampling_level", "sequence"), "orpo": ("dpo", "loss_type", "orpo"), "kto": ("dpo", "loss_type", "kto"), "pt": ("pretrain",), "train": (None,), "rlhf": (None,), "main_ppo": (None,), "main_dapo": (None,)}


def program(words):
    """Returns the peer whose program the words begin with, the name of the task or program, and the number of its words; None if there is none."""
    for peer, pattern in PROGRAMS:
        if found := re.match(rf"(?:\S*/)?{pattern}(?=\s|$)", " ".join(words[:2])):
            return peer, found[1], 1 + found[0].count(" ")
    return None


def task_called(name, where):
    """Returns the task of a program's name, or None if its settings name the task, and the settings that the name implies."""
    if name not in TASKS:
        raise PortError(no_task(name))
    task, *setting = TASKS[name]
    return task, [Setting(setting[0], [setting[1]], where)] if setting else []


def writer(settings):
    """Returns the only peer that can have written a file with these settings, and the key that says so; None if there is not exactly one."""
    names = {name for s in settings for name in (s.name, s.name.partition(".")[0])}
    found = [(peer, min(keys & names)) for peer, keys in KEYS if keys & names]
    return found[0] if len(found) == 1 else (None, "")
