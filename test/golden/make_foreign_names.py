#!/usr/bin/env python3
"""Writes test/golden/foreign_names.json: the names that other trainers take, with the versions that they are of.

    .venv-compare/bin/python test/golden/make_foreign_names.py PACKAGES

PACKAGES is a directory with the unpacked wheels of Axolotl, LLaMA-Factory and ms-swift, whose classes of configurations are read, not run. The names of
TRL are those of the installed one."""

import ast
import json
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# For each trainer: its distribution, the folders with its classes, and the classes that its commands and files are read into.
TRAINERS = {
    "Axolotl": ("axolotl", ("axolotl/utils/schemas", "axolotl/integrations"), r"AxolotlInputConfig|SwanLabConfig|(?!Modal|Nebius|Baseten|Core)\w+Args"),
    "LLaMA-Factory": ("llamafactory", ("llamafactory/hparams",), "(Model|Data|Training|Finetuning|Generating)Arguments"),
    "ms-swift": ("ms_swift", ("swift/arguments", "swift/trainers", "swift/rlhf_trainers", "swift/ray", "swift/ray_utils"), "(Sft|Pretrain|RLHF)Arguments"),
    "Megatron-SWIFT": ("ms_swift", ("swift/arguments", "swift/megatron/arguments", "swift/ray", "swift/ray_utils"), "Megatron(Sft|Pretrain|RLHF)Arguments")}


def classes_of(folders):
    """Returns {class: (names of its bases, {field: classes in its annotation})}."""
    found = {}
    for path in (path for folder in folders for path in sorted(folder.rglob("*.py"))):
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


def main(packages):
    import dataclasses

    import accelerate
    import transformers
    import trl

    classes = (trl.SFTConfig, trl.DPOConfig, trl.RewardConfig, trl.GRPOConfig, trl.ScriptArguments, trl.ModelConfig)
    write({"TRL": trl.__version__, "transformers": transformers.__version__, "accelerate": accelerate.__version__},
          {"TRL": sorted({field.name for one in classes for field in dataclasses.fields(one)})}, Path(packages))


def write(versions, names, packages):
    for trainer, (package, folders, roots) in TRAINERS.items():
        versions[trainer] = next(packages.glob(f"{package}-*.dist-info")).name.removesuffix(".dist-info").rpartition("-")[2]
        classes = classes_of([packages / folder for folder in folders])
        names[trainer] = sorted(set().union(*(names_of(name, classes) for name in classes if re.fullmatch(roots, name))))
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in {"versions": versions, **names}.items()]
    (HERE / "foreign_names.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1])
