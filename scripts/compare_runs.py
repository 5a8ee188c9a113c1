#!/usr/bin/env python3
"""Checks that two runs of a trainer are equal: every figure of their logs, except times, memory and bytes sent, and every weight.

    scripts/compare_runs.py OUT_A OUT_B            bit for bit
    scripts/compare_runs.py OUT_A OUT_B --loss R   only the losses, which may differ by R times their size: for two devices or types
"""
import argparse
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "data"))
from program import run  # noqa: E402

OF_THE_MACHINE = {"tok_s", "step_s", "mfu", "peak_mem", "peak_mem_min", "compute_s", "comm_s", "optimizer_s",
                  "sent_kv", "sent_dkv", "sent_grads", "sent_params", "sent_experts"}  # or of its ranks


def lines(out):
    """Returns the lines of the log without the first one, which describes the run, and the last one, which summarises it."""
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in OF_THE_MACHINE} for line in log if "step" in line]


def first_difference(a, b):
    """Returns a text on the first difference between two runs, or None without one."""
    logs = lines(a), lines(b)
    for one, other in zip(*logs):
        for key in one | other:
            if one.get(key) != other.get(key):
                return f"step {one['step']}: {key} is {one.get(key)} in {a} and {other.get(key)} in {b}"
    if len(logs[0]) != len(logs[1]):
        return f"{a} has logged {len(logs[0])} times, {b} {len(logs[1])}"
    for file in sorted(a.glob("*.safetensors")):
        if file.read_bytes() != (b / file.name).read_bytes():
            return f"{file} and {b / file.name} differ"
    return None


def largest_difference(a, b):
    """Relative to the losses."""
    losses = [[line["loss"] for line in lines(out) if "loss" in line] for out in (a, b)]
    if not losses[0] or len(losses[0]) != len(losses[1]):
        sys.exit(f"{a} has logged {len(losses[0])} losses, {b} {len(losses[1])}")
    return max((abs(one - other) / abs(one) for one, other in zip(*losses)), key=lambda d: math.inf if math.isnan(d) else d)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs=2, type=Path, metavar="OUT")
    parser.add_argument("--loss", type=float, metavar="R")
    options = parser.parse_args()
    for output in options.runs:
        if not (output / "log.jsonl").exists():
            sys.exit(f"{output} is not the output of a run: it has no log.jsonl\n  fix: give the --output_dir of a run")
    if options.loss is None:
        difference = first_difference(*options.runs)
        print(difference or f"bit-identical: {len(lines(options.runs[0]))} log lines, and the weights")
        return difference is not None
    difference = largest_difference(*options.runs)
    print(f"the relative difference of the losses is {difference:.2g}; {options.loss:.2g} is allowed")
    return not difference <= options.loss


if __name__ == "__main__":
    run(main)
