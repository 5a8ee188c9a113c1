#!/usr/bin/env python3
"""Writes test/golden/foreign_names.json: the names that other trainers take, with the versions that they are of.

    python3 test/golden/make_foreign_names.py PACKAGES

PACKAGES is a directory with unpacked wheels of the trainers. Their classes of configurations, argument parsers and files of defaults are read, not run. The
names of a trainer that is not there stay as they are."""

import ast
import json
import re
import sys
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
# For each trainer: its distribution, the folders with its classes, and the classes that its commands and files are read into.
TRAINERS = {
    "TRL": ("trl", ("trl/trainer", "trl/scripts/utils.py", "transformers/training_args.py"), "(SFT|DPO|Reward|GRPO)Config|ScriptArguments|ModelConfig|DatasetMixtureConfig"),
    "transformers": ("transformers", ("transformers/training_args.py",), "TrainingArguments"),
    "Axolotl": ("axolotl", ("axolotl/utils/schemas", "axolotl/integrations"), r"AxolotlInputConfig|SwanLabConfig|(?!Modal|Nebius|Baseten|Core)\w+Args"),
    "LLaMA-Factory": ("llamafactory", ("llamafactory/hparams",), "(Model|Data|Training|Finetuning|Generating)Arguments"),
    "ms-swift": ("ms_swift", ("swift/arguments", "swift/trainers", "swift/rlhf_trainers", "swift/ray", "swift/ray_utils"), "(Sft|Pretrain|RLHF)Arguments"),
    "Megatron-SWIFT": ("ms_swift", ("swift/arguments", "swift/megatron/arguments", "swift/ray", "swift/ray_utils"), "Megatron(Sft|Pretrain|RLHF)Arguments")}
PARSERS = {"OpenRLHF": ("openrlhf", ("openrlhf/cli/train_*.py",)), "accelerate": ("accelerate", ("accelerate/commands/launch.py",))}
DEFAULTS = {"verl": ("verl", "verl/trainer/config/_generated_ppo_trainer.yaml")}


def classes_of(folders):
    """Returns {class: (names of its bases, {field: classes in its annotation})}."""
    found = {}
    for path in (path for folder in folders for path in ([folder] if folder.is_file() else sorted(folder.rglob("*.py")))):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                fields = {item.target.id: set(re.findall(r"\w+", ast.unparse(item.annotation))) for item in node.body if isinstance(item, ast.AnnAssign)
                          and "init=False" not in ast.unparse(item) and "ClassVar" not in ast.unparse(item.annotation) and not item.target.id.startswith("_")}
                found.setdefault(node.name, ([ast.unparse(base) for base in node.bases], fields))
    return found


def names_of(name, classes, prefix=""):
    """Returns the names of a class's fields, those of its bases, and those inside its fields: trl.beta."""
    bases, fields = classes.get(name, ((), {}))
    names = {prefix + field for field in fields}.union(*(names_of(base, classes, prefix) for base in bases))
    return names.union(*(names_of(inner, classes, f"{prefix}{field}.") for field, inners in fields.items() for inner in inners & classes.keys() - {name}))


def arguments_of(paths):
    """Returns the flags of argument parsers, and for a flag with a variable in its name (f"--{prefix}.adam.lr") one for each value of the loop around it."""
    names = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            prefixes = [ast.literal_eval(value) for value in node.iter.elts] if isinstance(node, ast.For) and isinstance(node.iter, (ast.Tuple, ast.List)) else []
            for call in ast.walk(node) if prefixes else [node]:
                if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument":
                    names |= {ast.unparse(word).removeprefix("f").strip("'\"").replace("{prefix}", prefix) for word in call.args for prefix in prefixes or [""] if "--" in ast.unparse(word)}
    return {name[2:].replace("-", "_") for name in names if name.startswith("--") and not name.startswith("--.")}


def keys_of(value, prefix=""):
    """Returns the names of the values in nested objects: data.train_files."""
    return set().union(*(keys_of(inner, f"{prefix}{key}.") if isinstance(inner, dict) and inner else {prefix + key} for key, inner in value.items()))


def main(packages):
    found = json.loads((HERE / "foreign_names.json").read_text())
    for trainer, (package, *_) in (TRAINERS | PARSERS | DEFAULTS).items():
        if not (info := next(packages.glob(f"{package}-*.dist-info"), None)):
            continue
        if trainer in PARSERS:
            names = arguments_of(path for pattern in PARSERS[trainer][1] for path in packages.glob(pattern))
        elif trainer in DEFAULTS:
            names = keys_of(yaml.safe_load((packages / DEFAULTS[trainer][1]).read_text()))
        else:
            classes = classes_of([packages / folder for folder in TRAINERS[trainer][1]])
            names = set().union(*(names_of(name, classes) for name in classes if re.fullmatch(TRAINERS[trainer][2], name)))
        found["versions"][trainer], found[trainer] = info.name.removesuffix(".dist-info").rpartition("-")[2], sorted(names)
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items()]
    (HERE / "foreign_names.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
