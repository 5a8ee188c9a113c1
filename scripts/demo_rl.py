#!/usr/bin/env python3
"""Reinforcement learning in a few minutes on two cores: a model that SFT has taught half of the demo's tasks learns the rest from exact match alone.

    make train_llama && python3 scripts/demo_rl.py [flags for both runs, such as --seed 2]

SFT (./train_llama without arguments) stops early: the model answers about half of the prompts right. Then GRPO samples 16 answers to a prompt, and an
answer is worth 1 if it is the right one, letter by letter, with its exclamation mark, else 0. Nobody tells the model what would have been right.
Writes out/demo_rl/sft and out/demo_rl/grpo. Asked, and answered greedily, are 200 prompts with words that no training prompt has.
"""
import json
import random
import sys
from pathlib import Path

import demo
from demo import ROOT, timed

sys.path.insert(0, str(ROOT / "data"))

import make_demo  # noqa: E402

OUT = ROOT / "out" / "demo_rl"


def write_questions(path, prompts):
    """Records with the answer that SFT's data has most: with the mark."""
    lines = [json.dumps({"prompt": " ".join(prompt), "answer": make_demo.right_answer(*prompt) + "!"}) + "\n" for prompt in prompts]
    path.write_text("".join(lines))
    return path


def log_of(out):
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def main():
    demo.expect_program_and_python()
    OUT.mkdir(parents=True, exist_ok=True)
    train, tests = make_demo.make_prompts(random.Random(1))
    questions, unseen = write_questions(OUT / "questions.jsonl", train), write_questions(OUT / "unseen.jsonl", tests)
    fields = ["--input_key", "prompt", "--output_key", "answer", "--apply_chat_template"]
    extra = sys.argv[1:]
    sft, grpo = OUT / "sft", OUT / "grpo"
    seconds = [
        timed("--output_dir", sft, "--max_steps", 340, "--overwrite", *extra),
        timed("grpo", "--model", sft, "--data", questions, *fields, "--eval_data", unseen, "--eval_steps", 40, "--output_dir", grpo, "--overwrite",
              "--n", 16, "--rollout_batch_size", 64, "--train_batch_size", 256, "--max_new_tokens", 12, "--max_sequences", 512, "--max_len", 64,
              "--row_tokens", 4096, "--learning_rate", 2e-4, "--lr_scheduler", "linear", "--kl_coef", 1e-3, "--kl_use_loss", "--max_steps", 400, *extra),
    ]
    steps = [line for line in log_of(grpo) if "reward" in line]
    right = [sum(a == b for a, b in pairs) / len(pairs) for pairs in (demo.answers(model, unseen) for model in (sft, grpo))]
    window = max(1, len(steps) // 20)
    rows = [("right answers to 200 unseen prompts, greedy", "{:.1%}", *right)]
    for key, what, layout in (("reward", "mean reward of sampled answers", "{:.2f}"), ("response_length", "their length in tokens", "{:.1f}"),
                              ("kl", "KL divergence from the SFT model, nats a token", "{:.3f}")):
        means = [sum(line[key] for line in part) / len(part) for part in (steps[:window], steps[-window:])]
        rows.append((what, layout, *means))
    print(f"\n{'':48}{'before':>8}{'after':>8}")
    for what, layout, before, after in rows:
        print(f"{what:48}{layout.format(before):>8}{layout.format(after):>8}")
    print(f"{seconds[0]:.0f} s of SFT, {seconds[1]:.0f} s of GRPO")


if __name__ == "__main__":
    main()
