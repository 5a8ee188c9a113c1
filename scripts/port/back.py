"""The way back: the same run as a command of TRL or OpenRLHF, or as YAML of Axolotl."""

import shlex

from .axolotl import AXOLOTL
from .openrlhf import OPENRLHF
from .reading import PortError
from .translate import RL, STEADY
from .trl import TRL

PEERS = {"trl": TRL, "openrlhf": OPENRLHF, "axolotl": AXOLOTL}
VALUES = {("loss_type", "ipo_mean"): "ipo", ("dtype", "bf16"): "bfloat16", ("dtype", "f32"): "float32", ("max_steps", "0"): "-1", ("truncation_mode", "keep"): "keep_start",
          ("excess_length_strategy", "keep"): "truncate"}
SAID = {"lora_rank": "lora_r", "lora_targets": "lora_target_modules", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}  # of Together


def name_of(peer, task, flag, value):
    """Returns the peer's name and value for a flag of this program, or None."""
    if flag == "eps_clip" and "," in value:
        return ("actor.eps_clip_low_high", value) if peer is OPENRLHF else None
    if flag == "max_epochs" and peer is TRL and task not in RL:  # of grpo it is num_iterations
        return "num_train_epochs", value
    if flag == "min_lr_ratio" and peer is not OPENRLHF:
        return ("cosine_min_lr_ratio", value) if peer is AXOLOTL else ("lr_scheduler_kwargs", f'{{"min_lr_rate": {value}}}')
    if flag == "lr_warmup" and peer is not OPENRLHF:
        return "warmup_steps", value
    if flag == "lr_warmup" and float(value) >= 1:
        return None
    for row in peer.every_row():
        if row.kind == "same" and flag in row.text.split(","):
            dotted = [name for name in row.names if "." in name] if peer is OPENRLHF else []
            name = (dotted or row.names)[0]
            return name, VALUES.get((flag, value), VALUES.get((name, value), value))
        if row.kind == "sets" and row.text == f"{flag} {value}":
            return row.names[0], (row.values or ("true",))[0]
    return (SAID[flag], value) if flag in SAID and peer is not OPENRLHF else None


def program_of(peer, task):
    name = "sft" if task == "pretrain" else task
    if peer is OPENRLHF:
        return "python3 -m openrlhf.cli.train_ppo_ray" if task in ("grpo", "ppo") else f"deepspeed --module openrlhf.cli.train_{name}"
    return f"trl {'reward' if task == 'rm' else name}"


def command_as(run):
    """Returns the peer's command for {"as", "task", "settings": [[flag, value], ...], "ranks"}, followed by comments on flags without an equivalent."""
    if run["as"] not in PEERS:
        raise PortError(f'--as "{run["as"]}" is unknown\n  fix: trl, openrlhf or axolotl')
    peer, world, task = PEERS[run["as"]], run["ranks"], run["task"]
    if peer is AXOLOTL and task in RL:
        raise PortError(f"--as axolotl does not write files of {task}\n  fix: --as trl or openrlhf")
    theirs, missing, flags = [], [], dict(run["settings"])
    all_rows = peer.every_row()
    if peer is TRL and task == "grpo":  # its divergence is always in the loss, its average does not depend on the ratio
        if float(flags.get("kl_coef", 0)) > 0 and flags.pop("kl_use_loss", "false") != "true":
            missing.append("# has no equivalent there: --kl_coef without --kl_use_loss")
        if flags.get("policy_loss_type") == "gspo" and "loss_aggregation" not in flags:
            theirs.append(("loss_type", "grpo"))
    if peer is TRL and "min_lr_ratio" in flags and "lr_scheduler" not in flags:
        theirs.append(("lr_scheduler_type", "cosine_with_min_lr"))
    if peer is TRL and task == "dpo" and "label_smoothing" in flags and not {"robust", "exo_pair"} & set(flags.get("loss_type", "sigmoid").split(",")):
        missing.append(f"# has no equivalent there: --label_smoothing {flags.pop('label_smoothing')} of this loss")
    if peer is not OPENRLHF and "lora_rank" in flags:
        theirs.append(("use_peft", "true") if peer is TRL else ("adapter", "qlora" if flags.get("load_in") == "4bit" else "lora"))
        own = {"lora_alpha": "16", "lora_dropout": "0", "lora_targets": "all-linear"}  # the defaults of this program
        theirs += [(SAID[flag], value) for flag, value in own.items() if flag not in flags]
        if float(flags.get("lora_dropout", 0)) > 0 and task in STEADY:
            (theirs if peer is TRL else missing).append(("disable_dropout", "false") if peer is TRL else "# has no equivalent there: dropout in dpo and rm")
    batch = int(flags["train_batch_size"]) if "train_batch_size" in flags and peer is not OPENRLHF else 0
    for flag, value in run["settings"]:
        if flag not in flags:
            continue
        parts = {row.text: row.names[0] for row in all_rows if row.kind == "part"}
        numbers = [(parts[f"{flag} {i}"], number) for i, number in enumerate(value.split(",")) if f"{flag} {i}" in parts]
        found = name_of(peer, task, flag, value)
        if numbers:
            theirs += numbers
        elif found:
            theirs.append(found)
        elif flag == "ranks" and peer is TRL:
            theirs.append(("num_processes", value))
        elif not (batch and flag == "train_batch_size"):
            missing.append(f"# has no equivalent there: --{flag} {value}")
    if batch:
        ring = int(flags.get("ring_attn_size", 1))
        samples = batch * ring // world  # per step and rank
        theirs += [("per_device_train_batch_size" if peer is TRL else "micro_batch_size", "1"), ("gradient_accumulation_steps", str(samples))]
        if samples * world != batch * ring:
            missing.append(f"# a step of {batch} samples cannot be shared by {world // ring} ranks there")
    if peer is AXOLOTL:
        first = {"dpo": [("rl", "dpo")], "rm": [("reward_model", "true")]}.get(task, [])
        text = "\n".join(f"datasets:\n  - path: {value}" if name == "datasets" else f"{name}: {value}" for name, value in first + theirs)
    else:
        text = " ".join([program_of(peer, task), *(f"--{name} {shlex.quote(value)}" for name, value in theirs)])
    given = {alias for name, _ in theirs for row in all_rows if name in row.names for alias in row.names}
    others = ", ".join(f"{name} {value}" for name, value in peer.defaults(task).items() if name not in given)
    return "\n".join([text, *missing, *([f"# {peer.name}'s defaults where nothing is set: {others}"] if others else [])]) + "\n"
