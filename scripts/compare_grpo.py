#!/usr/bin/env python3
"""Times steps of GRPO in TRL and in train_llama, alternately in one run.

    .venv-compare/bin/python scripts/compare_grpo.py [--dtype f32|bf16] [--out docs/benchmarks.md]

The model is SmolLM2-135M with random weights. A step samples 8 answers of 128 tokens to each of 8 prompts of 32 tokens, at temperature 1 from all
tokens, judges them with the same Python function, and trains on them once. There is no reference. TRL samples with transformers' generate, all 64
answers at a time, and trains on 8 at a time without gradient checkpointing; train_llama packs the answers into rows of 2048 tokens. Both sides use
all cores. In each of two rounds each side runs one warm-up step and one timed step while the other side is idle; the faster step is reported. Only
the tokens of answers are counted. The mean rewards of both sides must agree within 5 %, because they sample from the same distribution. Memory is the
peak resident size of the process (VmHWM), including libraries. There is one difference in bf16: TRL keeps AdamW's moments and the only copy of the
weights in bfloat16; train_llama keeps moments, gradients and weights in float.
"""
import argparse
import json
import random
import sys
import tempfile
from pathlib import Path

import compare
import compare_generate
import compare_trl
from compare import ROOT

ROUNDS, WARM_UP, COUNTED = 2, 1, 1
PROMPTS, PROMPT, ANSWERS, NEW, ROW_TOKENS, MICRO_BATCH = 8, 32, 8, 128, 2048, 8
RATE, AGREE = 1e-6, 5e-2
REWARD = "def reward(prompts, answers, labels):\n    return [float(len(set(answer))) for answer in answers]\n"  # number of different letters


def make_prompts():
    rng = random.Random(1)
    return ["".join(rng.choices("abcdefgh ", k=PROMPT)) for _ in range(PROMPTS)]


# ---- TRL: a process of its own that does one step for each line it is sent ---------------------------------------------------------------

def worker(dtype, model_dir):
    import datasets
    import torch
    import transformers
    import trl

    answers, judge = compare_trl.quiet_libraries(), {}
    exec(REWARD, judge)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(len(tokenizer) - 1)  # TRL requires one; min_new_tokens prevents it

    def reward(prompts, completions, **_):
        return judge["reward"](prompts, completions, None)

    with tempfile.TemporaryDirectory() as folder:
        batches = PROMPTS * ANSWERS // MICRO_BATCH
        args = trl.GRPOConfig(output_dir=folder, report_to="none", use_cpu=True, bf16=False, disable_tqdm=True, save_strategy="no", logging_steps=1,
                              num_generations=ANSWERS, max_completion_length=NEW, generation_kwargs=dict(min_new_tokens=NEW), temperature=1.0,
                              per_device_train_batch_size=MICRO_BATCH, gradient_accumulation_steps=batches, steps_per_generation=batches,
                              activation_checkpointing=False, num_train_epochs=1000, beta=0.0, learning_rate=RATE, lr_scheduler_type="constant",
                              weight_decay=compare.WEIGHT_DECAY, adam_beta1=compare.BETAS[0], adam_beta2=compare.BETAS[1], max_grad_norm=compare.MAX_NORM)
        trainer = trl.GRPOTrainer(model, reward, args, train_dataset=datasets.Dataset.from_dict(dict(prompt=make_prompts())), processing_class=tokenizer)
        compare_trl.train_on_demand(trainer, answers, lambda logs: dict(reward=logs["reward"], length=logs["completions/mean_length"]))


# ---- train_llama: short runs of the program ------------------------------------------------------------------------------------------------

def make_model(folder):
    """Saves random weights and a byte tokenizer. No token ends an answer."""
    import torch
    import transformers

    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(**compare_generate.SHAPE, bos_token_id=None, eos_token_id=None)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    compare_generate.write_tokenizer(folder)


def write_questions(path, model_dir, steps):
    """Writes the prompts once for each step, with an answer of one token, because every record has an answer."""
    import numpy as np
    import transformers

    sys.path.insert(0, str(ROOT / "data"))
    from token_file import TokenFile

    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    file = TokenFile(str(path), compare_generate.SHAPE["vocab_size"])
    for prompt in make_prompts() * steps:
        ids = tokenizer(prompt)["input_ids"]
        assert len(ids) == PROMPT
        file.append(np.array(ids + [0]), np.array([0] * PROMPT + [1], np.uint8), np.array([PROMPT + 1]))
    file.write(dict(kind="sft", vocab_size=str(compare_generate.SHAPE["vocab_size"])))
    file.close()


def our_steps(dtype, folder, steps):
    lines, _ = compare.train("train_llama", "grpo", folder / "run", RATE, "--model", folder / "model", "--data", folder / "questions.safetensors",
                             "--device", "cpu", "--dtype", dtype, "--reward", folder / "reward.py", "--n", ANSWERS, "--max_new_tokens", NEW,
                             "--rollout_batch_size", PROMPTS, "--train_batch_size", PROMPTS * ANSWERS, "--row_tokens", ROW_TOKENS,
                             "--max_sequences", PROMPTS * ANSWERS, "--max_steps", steps)
    return [dict(step_s=line["generation_s"] + line["step_s"], generation_s=line["generation_s"], reward=line["reward"], length=line["response_length"],
                 peak_mem=line["peak_mem"]) for line in lines]


# ---- both, and the table -----------------------------------------------------------------------------------------------------------------

def expect_same_work(theirs, ours):
    for name, step in (("TRL", theirs), ("train_llama", ours)):
        if step["length"] != NEW:
            sys.exit(f"{name}'s answers have {step['length']} tokens, not {NEW}")
    if abs(ours["reward"] / theirs["reward"] - 1) > AGREE:
        sys.exit(f"the first mean rewards differ: TRL {theirs['reward']:.3f}, train_llama {ours['reward']:.3f}")


def row(dtype, folder):
    make_model(folder / "model")
    write_questions(folder / "questions.safetensors", folder / "model", WARM_UP + COUNTED)
    (folder / "reward.py").write_text(REWARD)
    peer = compare.Peer(__file__, dtype, str(folder / "model"))
    theirs, ours = [], []
    for r in range(ROUNDS):
        theirs.append(peer.steps(WARM_UP + COUNTED))
        ours.append(our_steps(dtype, folder, WARM_UP + COUNTED))
        both = ["  ".join(f"{step['step_s']:6.2f}" for step in side[r]) for side in (theirs, ours)]
        print(f"seconds of the steps in round {r + 1}:  TRL {both[0]}   train_llama {both[1]}, of which sampling "
              f"{ours[r][-1]['generation_s']:.2f}", file=sys.stderr, flush=True)
    peer.close()
    expect_same_work(theirs[0][0], ours[0][0])

    def speed(rounds):
        return PROMPTS * ANSWERS * NEW / min(step["step_s"] for steps in rounds for step in steps[WARM_UP:])

    return compare.table_row(f"smollm2-135m, grpo, {PROMPTS} x {ANSWERS} x ({PROMPT} + {NEW})", dtype, "trl", speed(theirs), speed(ours),
                             compare.memory(theirs), compare.memory(ours), "not taken",
                             f"sampled; rewards {theirs[0][0]['reward']:.1f} / {ours[0][0]['reward']:.1f}")


def main():
    if sys.argv[1:2] == ["worker"]:
        return worker(*json.loads(sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["f32", "bf16"], default=compare.best_dtype())
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="also write the table to this file, replacing the previous one of this CPU")
    options = parser.parse_args()
    if not (ROOT / "train_llama").exists():
        sys.exit("scripts/compare_grpo.py: ./train_llama is not built\n  fix: make")
    with tempfile.TemporaryDirectory() as folder:
        compare.report([row(options.dtype, Path(folder))], options.out)


if __name__ == "__main__":
    main()
