#!/usr/bin/env python3
"""The same training on pairs in TRL and in train_llama, timed in one run, the two in turn.

    .venv-compare/bin/python scripts/compare_preference.py DIR [--only NAME] [--out docs/benchmarks.md]

DIR is made by scripts/smollm2.py: a model and pairs. The model takes one SFT step, which makes the policy, whose reference is the model;
or gets a reward head. Then both sides train what they find in files, from the same token ids in the same order, in bf16: 32 pairs
a step, in TRL as 4 batches of 8 pairs without gradient checkpointing, its defaults else; in train_llama packed into rows.

    dpo, reference in memory    TRL keeps the reference and asks it in every step; train_llama's sweep before training is not counted
    dpo, reference in advance   both sweep over the pairs before training; the sweep's time is added, as if it had the pairs of one epoch
    rm                          a reward model

Counted are the pairs' own tokens, once for each step: no padding, no reference. In each of two rounds either side does one step to warm up
and two that count, while the other is idle, and of each step the faster round is reported. Both sides must have taken the same tokens, and
their first losses must agree within 1 %. Memory is the peak resident size of the process (VmHWM), libraries included. What differs: TRL
keeps AdamW's moments and the only copy of the weights in bfloat16; train_llama keeps moments, gradients and a master copy in float.
"""
import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import compare
from compare import ROOT

ROUNDS, WARM_UP, COUNTED = 2, 1, 2
BATCH, MICRO_BATCH, MAX_LEN, BETA = 32, 8, 512, 0.1
ROW_TOKENS = 4 * MAX_LEN
SFT_RATE, RATE = 2e-5, 1e-6  # TRL's defaults of the two
AGREE = 1e-2  # of the first losses: bf16 keeps 8 bits, and a loss is a mean over many tokens

KINDS = {"memory": "dpo, reference in memory", "advance": "dpo, reference in advance", "rm": "rm"}


def prepare(kind, records, model, out):
    command = [sys.executable, ROOT / "data/prepare.py", kind, "--input", records, "--tokenizer", model, "--max_len", str(MAX_LEN), "--out", out]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


# ---- TRL: a process of its own that does one step for each line it is sent ---------------------------------------------------------------

def read_pairs(file, count):
    """The first pairs of a prepared file, as TRL's trainers take token ids."""
    import datasets
    from safetensors.numpy import load_file

    arrays = load_file(file)
    bounds = arrays["doc_offsets"][:2 * count + 1]
    records = []
    for begin, middle, end in zip(bounds[:-2:2], bounds[1:-1:2], bounds[2::2]):
        prompt = int(arrays["loss_mask"][begin:middle].argmax())  # the same for both answers
        chosen, rejected = arrays["tokens"][begin:middle].tolist(), arrays["tokens"][middle:end].tolist()
        assert chosen[:prompt] == rejected[:prompt]
        records.append(dict(prompt_ids=chosen[:prompt], chosen_ids=chosen[prompt:], rejected_ids=rejected[prompt:]))
    return datasets.Dataset.from_list(records)


def make_trainer(kind, start, reference, pairs, options):
    import torch
    import transformers
    import trl

    class DPOTrainer(trl.DPOTrainer):
        sweep_s = 0

        def _prepare_dataset(self, dataset, *_):  # which would tokenise
            return dataset

        def _precompute_ref_logps(self, *arguments):
            begin = time.perf_counter()
            dataset = super()._precompute_ref_logps(*arguments)
            self.sweep_s = time.perf_counter() - begin
            return dataset

    tokenizer = transformers.AutoTokenizer.from_pretrained(start)
    # Transformers reads a reward at the last token that is not padding; eos, the tokenizer's own choice, ends every document.
    tokenizer.pad_token = tokenizer.unk_token
    if kind == "rm":
        whole = pairs.map(lambda pair: {name: pair["prompt_ids"] + pair[name] for name in ("chosen_ids", "rejected_ids")})
        model = transformers.AutoModelForSequenceClassification.from_pretrained(start, dtype=torch.bfloat16)
        return trl.RewardTrainer(model, trl.RewardConfig(**options), train_dataset=whole, processing_class=tokenizer)
    policy, model = (transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16) for path in (start, reference))
    args = trl.DPOConfig(beta=BETA, precompute_ref_log_probs=kind == "advance", **options)
    trainer = DPOTrainer(policy, model, args, train_dataset=pairs, processing_class=tokenizer)
    if kind == "advance":
        trainer.ref_model = None  # it is not asked again
    return trainer


def trl_worker(kind, start, reference, file, count):
    import datasets
    import transformers

    answers, sys.stdout = sys.stdout, sys.stderr  # whatever libraries print stays out of the answers
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()

    class OnDemand(transformers.TrainerCallback):
        tokens = 0

        def wait(self, control):
            control.should_training_stop = not sys.stdin.readline()
            self.begin = time.perf_counter()

        def on_train_begin(self, args, state, control, **_):
            print("ready", file=answers, flush=True)
            self.wait(control)

        def on_log(self, args, state, control, logs, **_):
            if "loss" not in logs:  # the last line, of the whole training
                return
            step = dict(step_s=time.perf_counter() - self.begin, loss=logs["loss"], tokens=logs["num_tokens"] - self.tokens,
                        sweep_s=getattr(trainer, "sweep_s", 0), peak_mem=compare.peak_memory())
            self.tokens = logs["num_tokens"]
            print(json.dumps(step), file=answers, flush=True)
            self.wait(control)

    with tempfile.TemporaryDirectory() as folder:
        options = dict(output_dir=folder, report_to="none", use_cpu=True, bf16=False, disable_tqdm=True, save_strategy="no", logging_steps=1,
                       max_length=MAX_LEN, activation_checkpointing=False, per_device_train_batch_size=MICRO_BATCH,
                       gradient_accumulation_steps=BATCH // MICRO_BATCH, train_sampling_strategy="sequential", num_train_epochs=1000,
                       learning_rate=RATE, lr_scheduler_type="constant", weight_decay=compare.WEIGHT_DECAY, adam_beta1=compare.BETAS[0],
                       adam_beta2=compare.BETAS[1], max_grad_norm=compare.MAX_NORM)
        trainer = make_trainer(kind, start, reference, read_pairs(file, count), options)
        trainer.add_callback(OnDemand)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()


# ---- train_llama: short runs of the program ------------------------------------------------------------------------------------------------

def shared_flags(count):
    return ["--device", "cpu", "--dtype", "bf16", "--shuffle", "false", "--max_len", MAX_LEN, "--row_tokens", ROW_TOKENS,
            "--train_batch_size", BATCH, "--max_steps", count]


def train_llama_steps(kind, start, reference, file, count, out):
    flags = [] if kind == "rm" else ["--beta", BETA, "--ref_model", reference, "--max_samples", BATCH * count]
    steps, said = compare.train_llama("rm" if kind == "rm" else "dpo", out, RATE, "--model", start, "--data", file, *shared_flags(count), *flags)
    sweep = re.search(r"reference: \d+ pairs in ([\d.]+) s", said)
    totals = [0] + [step["tokens"] for step in steps]
    for step, before in zip(steps, totals):
        step.update(tokens=step["tokens"] - before, sweep_s=float(sweep[1]) if sweep else 0)
    return steps


# ---- both, and the table ----------------------------------------------------------------------------------------------------------------

def make_start(task, model, data, out):
    """The model that both sides start from. Returns what it took: of sft, the peak memory that dpo's is compared with."""
    steps, _ = compare.train_llama(task, out, SFT_RATE, "--model", model, "--data", data, *shared_flags(1))
    return steps[0]["peak_mem"]


def expect_equal(theirs, ours):
    for a, b in zip(theirs, ours):
        if a["tokens"] != b["tokens"]:
            sys.exit(f"TRL took {a['tokens']} tokens where train_llama took {b['tokens']}")
    if abs(ours[0]["loss"] / theirs[0]["loss"] - 1) > AGREE:
        sys.exit(f"the first losses differ: TRL {theirs[0]['loss']:.6f}, train_llama {ours[0]['loss']:.6f}")


def compare_kind(kind, start, model, file, folder):
    count = WARM_UP + COUNTED
    peer = compare.Peer(__file__, kind, str(start), str(model), str(file), BATCH * count)
    theirs, ours = [], []
    for r in range(ROUNDS):
        theirs.append(peer.steps(count))
        ours.append(train_llama_steps(kind, start, model, file, count, folder / "run"))
        both = ["  ".join(f"{step['step_s']:6.2f}" for step in side[r]) + f" (sweep {side[r][0]['sweep_s']:.1f})" for side in (theirs, ours)]
        print(f"{kind}, seconds of the steps in round {r + 1}:  TRL {both[0]}   train_llama {both[1]}", file=sys.stderr, flush=True)
    peer.close()
    expect_equal(theirs[0], ours[0])

    def speed(rounds):
        seconds = sum(min(steps[i]["step_s"] for steps in rounds) for i in range(WARM_UP, count))
        if kind == "advance":
            seconds += min(steps[0]["sweep_s"] for steps in rounds) / count * COUNTED
        return sum(step["tokens"] for step in rounds[0][WARM_UP:]) / seconds

    def memory(rounds):
        return max(step["peak_mem"] for steps in rounds for step in steps) / 2**30

    return (f"| {KINDS[kind]} | {speed(theirs):.0f} | {speed(ours):.0f} | **{speed(ours) / speed(theirs):.2f}** "
            f"| {memory(theirs):.2f} | {memory(ours):.2f} | {theirs[0][0]['loss']:.4f} / {ours[0][0]['loss']:.4f} |")


def compare_all(directory, kinds):
    model, rows = directory / "model", []
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        chats, pairs = folder / "chats.safetensors", folder / "pairs.safetensors"
        prepare("sft", directory / "chats.jsonl", model, chats)
        prepare("pref", directory / "pairs.jsonl", model, pairs)
        sft_memory = make_start("sft", model, chats, folder / "dpo")
        make_start("rm", model, pairs, folder / "rm")
        for kind in kinds:
            rows.append(compare_kind(kind, folder / ("rm" if kind == "rm" else "dpo"), model, pairs, folder))
    return rows, sft_memory


def main():
    if sys.argv[1:2] == ["worker"]:
        return trl_worker(*json.loads(sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR", help="made by scripts/smollm2.py")
    parser.add_argument("--only", choices=KINDS, help="all three, if not given")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="also write the table there, in place of the last one of this CPU")
    options = parser.parse_args()
    if not (ROOT / "train_llama").exists():
        sys.exit("scripts/compare_preference.py: ./train_llama is not built\n  fix: make")
    load = os.getloadavg()[0]
    rows, sft_memory = compare_all(options.directory, [options.only] if options.only else KINDS)
    columns = ["training", "TRL tokens/s", "train_llama tokens/s", "ratio", "TRL GiB", "train_llama GiB", "first loss of each"]
    rows += ["", f"For comparison: sft with rows of as many tokens takes train_llama {sft_memory / 2**30:.2f} GiB."]
    text = compare.section("smollm2-135m on pairs against TRL", ["trl", "transformers", "torch"], load, columns, rows)
    print(text)
    if options.out:
        compare.write_section(options.out, text)


if __name__ == "__main__":
    main()
