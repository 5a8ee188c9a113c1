#!/usr/bin/env python3
"""Times the bundled demo on an idle machine, beside one busy loop, and beside it at nice 5 (llmc/core/contention.h).

    dev/bench/contention.py [PROGRAM]... [--seconds 5] [--rounds 2]

For each program (./train_llama if none is given) and each case it prints the tokens per second of the steps of a few seconds, the best of the rounds, and
its share of the idle speed. The programs alternate, so builds of two commits can be compared. Other programs must be idle.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CASES = {"idle": (False, 0), "beside a busy loop": (True, 0), "the same, at nice 5": (True, 5)}


def steps(log):
    lines = log.read_text().splitlines() if log.exists() else []
    return [step for step in map(json.loads, lines[:-1]) if "step_s" in step]  # the last line may not be complete


def speed(program, nice, seconds):
    with tempfile.TemporaryDirectory() as out:
        command = ["nice", "-n", str(nice), program, "--output_dir", out, "--overwrite", "--max_steps", "100000"]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as run:
            log = Path(out) / "log.jsonl"
            while run.poll() is None and not steps(log):
                time.sleep(0.1)
            time.sleep(1)  # the watch needs a fraction of it
            first = len(steps(log))
            time.sleep(seconds)
            counted = steps(log)[first:]
            run.kill()
    if not counted:
        sys.exit(f"{program} made no step in {seconds} s\n  fix: --seconds {4 * seconds}, or run it alone to see why")
    return sum(step["tok_s"] * step["step_s"] for step in counted) / sum(step["step_s"] for step in counted)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("programs", nargs="*", default=[str(ROOT / "train_llama")], metavar="PROGRAM")
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    best = {}
    for _ in range(options.rounds):
        for case, (is_busy, nice) in CASES.items():
            loop = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if is_busy else None
            try:
                for program in options.programs:
                    best[case, program] = max(best.get((case, program), 0), speed(os.path.abspath(program), nice, options.seconds))
            finally:
                if loop:
                    loop.kill()
                    loop.wait()
    for (case, program), tokens in best.items():
        print(f"{program:32s} {case:20s} {tokens:8.0f} tokens/s {tokens / best['idle', program]:6.2f}")


if __name__ == "__main__":
    main()
