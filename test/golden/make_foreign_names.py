#!/usr/bin/env python3
"""Writes test/golden/foreign_names.json: the names that TRL's command line and Axolotl's YAML take, with the versions that they are of.

    .venv-compare/bin/python test/golden/make_foreign_names.py AXOLOTL

AXOLOTL is a checkout of Axolotl, whose classes of configurations are read, not run."""

import ast
import dataclasses
import json
import sys
from pathlib import Path

import accelerate
import transformers
import trl

HERE = Path(__file__).resolve().parent
NESTED = {"datasets", "multimodal", "quantization", "vllm", "utils", "dynamic_checkpoint"}  # files whose names stand within others


def fields(tree):
    """The annotated names of the classes at the top of a file, but for those of entries of lists and of keys within keys."""
    inner = {"LrGroup", "SelectiveCheckpointingConfig", "EBFTConfig"}
    return {item.target.id for node in tree.body if isinstance(node, ast.ClassDef) and node.name not in inner
            for item in node.body if isinstance(item, ast.AnnAssign)}


def main(axolotl):
    classes = (trl.SFTConfig, trl.DPOConfig, trl.RewardConfig, trl.GRPOConfig, trl.ScriptArguments, trl.ModelConfig)
    schemas = [path for path in (Path(axolotl) / "src/axolotl/utils/schemas").glob("*.py") if path.stem not in NESTED]
    names = {"TRL": sorted({field.name for one in classes for field in dataclasses.fields(one)}),
             "Axolotl": sorted(set().union(*(fields(ast.parse(path.read_text())) for path in schemas)))}
    versions = {"TRL": trl.__version__, "transformers": transformers.__version__, "accelerate": accelerate.__version__,
                "Axolotl": (Path(axolotl) / "VERSION").read_text().strip()}
    (HERE / "foreign_names.json").write_text(json.dumps({"versions": versions, **names}, indent=0) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
