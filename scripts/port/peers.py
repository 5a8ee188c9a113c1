"""All peers, and the command words that start their programs."""

import re

from .accelerate import ACCELERATE
from .axolotl import AXOLOTL
from .deepspeed import DEEPSPEED
from .instead import instead, no_task
from .llama_factory import LLAMA_FACTORY
from .megatron import MEGATRON
from .openrlhf import OPENRLHF
from .reading import PortError, Setting
from .swift import SWIFT
from .trainer import TRAINER
from .trl import TRL

PEERS = (TRL, OPENRLHF, AXOLOTL, LLAMA_FACTORY, SWIFT, MEGATRON)  # the first one wins a tie
HELPERS = (TRAINER, ACCELERATE)
TABLES = (*PEERS, *HELPERS, DEEPSPEED)

# The tasks of OpenRLHF's and TRL's scripts, with the settings that a script implies.
TASKS = {"sft": ("sft",), "dpo": ("dpo",), "rm": ("rm",), "reward": ("rm",), "reward_modeling": ("rm",), "grpo": ("grpo",), "ppo": ("ppo",), "ppo_tldr": ("ppo",),
         "gspo": ("grpo", "importance_sampling_level", "sequence"), "orpo": ("dpo", "loss_type", "orpo"), "pt": ("pretrain",)}


def launched(words):
    """Returns the peer, the task and the settings implied by the words before the flags: deepspeed --module openrlhf.cli.train_sft, trl sft, axolotl train."""
    line = " ".join(words)
    for pattern, peer in ((r"\bopenrlhf[./]cli[./](?:train_)?(\w+)", OPENRLHF), (r"\btrain_(\w+)(?:\.py)?$", OPENRLHF), (r"\btrl (\w+)", TRL),
                          (r"\btrl\.scripts\.(\w+)", TRL), (r"\btrl/scripts/(\w+)\.py", TRL), (r"\bexamples/scripts/((?:\w+/)?\w+)\.py", TRL), (r"\bswift (sft|pt|rlhf)\b", SWIFT),
                          (r"\bmegatron (sft|pt|rlhf)\b", MEGATRON),
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
    raise PortError(f'there is no task "{words[0]}"\n  fix: use pretrain, sft, dpo, rm, grpo, ppo, eval, generate or merge; or a command of {", ".join(p.name for p in PEERS)}')


def task_called(name, line):
    if name in TASKS:
        task, *setting = TASKS[name]
        return task, [Setting(setting[0], [setting[1]], line)] if setting else []
    raise PortError(no_task(name))
