#!/usr/bin/env python3
"""Post-training in ten minutes on two cores: SFT, a reward model and DPO on the bundled data (data/make_demo.py), and a table of results.

    make train_llama && python3 scripts/demo.py [flags for all three runs, such as --ranks 2]
    make train_llama && python3 scripts/demo.py --rl [flags]      GRPO from the SFT model, which is trained first if it is missing

Writes out/demo (the SFT model, as ./train_llama without arguments does), out/demo/rm and out/demo/dpo. Both start from the SFT model. The reward
model learns to distinguish a right answer from the answer to another task. DPO learns to omit the exclamation mark; answers with and without it
are right. GRPO (out/demo/grpo) sees no answers: it learns the same from its own answers, with a reward for right answers without the mark. All
models are measured on 200 prompts with words that no training file contains.
"""
import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA, OUT = ROOT / "data" / "demo", ROOT / "out" / "demo"


def train_llama(*arguments, read=False):
    """Runs the program. Returns its lines if they are read instead of shown."""
    command = [str(word) for word in (ROOT / "train_llama", *arguments)]
    result = subprocess.run(command, text=True, stdout=subprocess.PIPE if read else None, stderr=subprocess.DEVNULL if read else None)
    if result.returncode:
        sys.exit(f"scripts/demo.py: failed with code {result.returncode}: {' '.join(command)}")
    return result.stdout.splitlines() if read else []


def timed(*arguments):
    print(f"\n== train_llama {' '.join(str(word) for word in arguments)}", flush=True)
    start = time.monotonic()
    train_llama(*arguments)
    return time.monotonic() - start


def last_evaluation(out, key):
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if key in line][-1]


def answers(model, n=1, temperature=0):
    """Returns two shares of the answers: the right ones, with or without the mark, and the right ones without the mark."""
    wanted = [json.loads(line)["answer"] for line in (DATA / "prompts.jsonl").read_text().splitlines() for _ in range(n)]
    lines = train_llama("generate", "--model", model, "--prompts", DATA / "prompts.jsonl", "--max_new_tokens", 16, "--n", n,
                        "--temperature", temperature, read=True)
    said = [json.loads(line)["completion"] for line in lines if line.startswith("{")]
    pairs = list(zip(said, wanted, strict=True))
    return sum(a in (b, b + "!") for a, b in pairs) / len(pairs), sum(a == b for a, b in pairs) / len(pairs)


def sft(flags):
    return timed("--overwrite", *flags)


def preferences(flags):
    """Trains by SFT, a reward model and DPO. Returns the rows of the table."""
    pairs = ["--model", OUT, "--train_batch_size", 32, "--row_tokens", 2048, "--overwrite"]
    seconds = [
        sft(flags),
        timed("rm", *pairs, "--data", DATA / "right.safetensors", "--eval_data", DATA / "right_test.safetensors", "--output_dir", OUT / "rm",
              "--learning_rate", 1e-3, "--max_epochs", 3, *flags),
        timed("dpo", *pairs, "--data", DATA / "plain.safetensors", "--eval_data", DATA / "test.safetensors", "--output_dir", OUT / "dpo",
              "--learning_rate", 1e-4, "--loss_type", "sigmoid,sft", *flags),
    ]
    right, plain = answers(OUT)
    right_after, plain_after = answers(OUT / "dpo")
    return [("sft", "right answers", "", f"{right:.1%}", seconds[0]),
            ("rm", "right answer ranked first", "", f"{last_evaluation(OUT / 'rm', 'eval_accuracy'):.1%}", seconds[1]),
            ("dpo", "right answers without a mark", f"{plain:.1%}", f"{plain_after:.1%}", seconds[2]),
            ("", "right answers", f"{right:.1%}", f"{right_after:.1%}", None)]


def reinforcement(flags):
    """Trains by GRPO. Returns the rows of the table."""
    if not (OUT / "model.safetensors").exists():
        sft(flags)
    seconds = timed("grpo", "--model", OUT, "--data", DATA / "asked.safetensors", "--output_dir", OUT / "grpo", "--overwrite",
                    "--reward", "exact_match", "--n", 8, "--max_new_tokens", 12, "--rollout_batch_size", 32, "--train_batch_size", 256,
                    "--num_episodes", 2, "--max_steps", 100, "--learning_rate", 3e-4, "--lr_scheduler", "linear", "--kl_coef", 1e-3,
                    "--kl_use_loss", "--row_tokens", 2048, *flags)
    greedy, sampled = {}, {}
    for model in (OUT, OUT / "grpo"):
        greedy[model], sampled[model] = answers(model), answers(model, n=8, temperature=1)
    rows = [("grpo", "sampled answers rewarded", 1, sampled), ("", "greedy answers rewarded", 1, greedy),
            ("", "greedy answers right", 0, greedy)]
    return [(task, what, *(f"{shares[i]:.1%}" for shares in of_models.values()), seconds) for task, what, i, of_models in rows]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--rl", action="store_true", help="GRPO from the SFT model")
    args, flags = parser.parse_known_args()
    if not (ROOT / "train_llama").exists():
        sys.exit("scripts/demo.py: ./train_llama is not built\n  fix: make")
    python = ROOT / ".venv/bin/python3"  # needed for the prompts later; missing packages are reported now
    if subprocess.run([python if python.exists() else "python3", ROOT / "data/prepare.py", "--help"], stdout=subprocess.DEVNULL).returncode:
        sys.exit(1)
    rows = (reinforcement if args.rl else preferences)(flags)
    print(f"\n{'':5}{'of 200 unseen prompts':30}{'before':>8}{'after':>8}{'seconds':>9}")
    for task, what, before, after, seconds in rows:
        print(f"{task:5}{what:30}{before:>8}{after:>8}{f'{seconds:.0f}' if task else '':>9}")


if __name__ == "__main__":
    main()
