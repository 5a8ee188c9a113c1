#!/usr/bin/env python3
"""Checks that two builds of the project compute the same: the losses and gradient norms of twenty steps, bit for bit.

    python3 scripts/same_bits.py OTHER_CHECKOUT        with train_llama and train_gpt2 built there and here

For changes that only move code. The runs: the demo in f32 and bf16 on one rank and on four, GPT-2, DPO and a reward model.
"""
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAIRS = ["--model", "test/golden/llama3", "--data", "test/golden/pairs.safetensors", "--train_batch_size", "3", "--max_epochs", "100",
         "--row_tokens", "256", "--max_len", "128", "--learning_rate", "1e-3"]
RUNS = {
    "demo f32": ["train_llama", "--dtype", "f32"],
    "demo bf16": ["train_llama", "--dtype", "bf16"],
    "demo f32, four ranks": ["train_llama", "--dtype", "f32", "--ranks", "4", "--zero_stage", "2"],
    "demo bf16, four ranks, recompute": ["train_llama", "--dtype", "bf16", "--ranks", "4", "--recompute", "layer"],
    "GPT-2": ["train_gpt2"],
    "GPT-2 bf16, recompute": ["train_gpt2", "--dtype", "bf16", "--recompute", "cheap"],
    "dpo": ["train_llama", "dpo", *PAIRS, "--ref_mode", "resident"],
    "rm": ["train_llama", "rm", *PAIRS],
}


def numbers(root, run):
    """Loss and gradient norm of each step, as the log has them: every digit that tells two doubles apart."""
    program, *arguments = RUNS[run]
    with tempfile.TemporaryDirectory() as out:
        command = [root / program, *arguments, "--device", "cpu", "--threads", "1", "--max_steps", "20", "--logging_steps", "1", "--eval_steps", "1000000", "--output_dir", f"{out}/run"]
        result = subprocess.run(command, cwd=root, capture_output=True)
        if result.returncode:
            sys.exit(f"{root}: {run} failed\n{result.stderr.decode(errors='replace')}")
        lines = [json.loads(line) for line in Path(out, "run/log.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines if "grad_norm" in line]


def main():
    if len(sys.argv) != 2 or not Path(sys.argv[1], "train_llama").exists():
        sys.exit("scripts/same_bits.py: needs another checkout with train_llama and train_gpt2\n  fix: git worktree add ../old COMMIT && make -C ../old")
    other, different = Path(sys.argv[1]).resolve(), 0
    for run in RUNS:
        old, new = numbers(other, run), numbers(ROOT, run)
        first = next((pair for pair in zip(old, new, strict=True) if pair[0] != pair[1]), None)
        different += first is not None
        print(f"{run:34} {f'differs: {first[0]} there, {first[1]} here' if first else f'{len(new)} steps, the same bits'}", flush=True)
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
