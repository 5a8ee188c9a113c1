#!/usr/bin/env python3
"""Times the same training in TRL and in train_llama, alternately in one run.

    .venv-compare/bin/python scripts/compare_trl.py DIR [--only NAME] [--dtype f32|bf16] [--out docs/benchmarks.md]

scripts/smollm2.py makes DIR: a model, chats and pairs. Both sides train from the same weights on the same token ids in the same order, in
bf16 where the CPU has instructions for it. A step has 32 chats or pairs: in TRL 4 batches of 8, without gradient checkpointing and otherwise with its defaults; in train_llama they
are packed into rows of 2048 tokens.

    sft                         on chats of at most 512 tokens
    sft, LoRA                   the same with adapters of rank 16 on all linear layers, in TRL with PEFT
    sft, packed                 TRL also packs into rows of 2048 tokens; a step has the same 32 chats, in any order
    dpo, reference in memory    TRL keeps the reference and evaluates it in every step; train_llama's pass before training is not counted
    dpo, reference in advance   both evaluate the reference on all pairs before training; its time for the pairs of the timed steps is added
    rm                          a reward model

The policy of dpo is the model after one step of sft, and its reference is the model before it. The reward models of both sides start with the same
head. Tokens of the documents are counted once for each step, without padding and without the reference. In each of two rounds each side runs one
warm-up step and two timed steps while the other side is idle; the faster round of each step is reported. Both sides must train on the same
tokens, and their first losses must agree within 1 %. Memory is the peak resident size of the process (VmHWM), including libraries. There is one
difference: TRL keeps AdamW's moments and the only copy of the weights in bfloat16; train_llama keeps moments, gradients and weights in float.
"""
import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import compare
from compare import ROOT

ROUNDS, WARM_UP, COUNTED = 2, 1, 2
BATCH, MICRO_BATCH, MAX_LEN, ROW_TOKENS, BETA = 32, 8, 512, 2048, 0.1
SFT_RATE, RATE = 2e-5, 1e-6  # TRL's defaults, for sft and for the others

RANK, ADAPTER_RATE = 16, 2e-4
KINDS = {"sft": "sft", "lora": "sft, LoRA", "packed": "sft, packed", "memory": "dpo, reference in memory", "advance": "dpo, reference in advance", "rm": "rm"}


def prepare(kind, records, model, out):
    command = [sys.executable, ROOT / "data/prepare.py", kind, "--input", records, "--tokenizer", model, "--max_len", str(MAX_LEN), "--out", out]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


# ---- TRL: a process of its own that does one step for each line it is sent ---------------------------------------------------------------

def read_documents(file):
    """Returns token ids and loss mask of each document of a prepared file."""
    from safetensors.numpy import load_file

    arrays = load_file(file)
    return [(arrays["tokens"][begin:end].tolist(), arrays["loss_mask"][begin:end]) for begin, end in zip(arrays["doc_offsets"], arrays["doc_offsets"][1:])]


def read_chats(file, count):
    """Returns the first chats as token ids in the form for TRL's SFTTrainer."""
    import datasets

    return datasets.Dataset.from_list([dict(input_ids=tokens, labels=[token if target else -100 for token, target in zip(tokens, mask)])
                                       for tokens, mask in read_documents(file)[:count]])


def read_pairs(file, count):
    """Returns the first pairs as token ids in the form for TRL's preference trainers."""
    import datasets

    documents, records = read_documents(file), []
    for (chosen, mask), (rejected, _) in zip(documents[:2 * count:2], documents[1:2 * count:2]):
        prompt = int(mask.argmax())  # the same for both answers
        assert chosen[:prompt] == rejected[:prompt]
        records.append(dict(prompt_ids=chosen[:prompt], chosen_ids=chosen[prompt:], rejected_ids=rejected[prompt:]))
    return datasets.Dataset.from_list(records)


def make_trainer(kind, dtype, start, reference, file, count, options):
    import torch
    import transformers
    import trl

    class DPOTrainer(trl.DPOTrainer):
        sweep_s = 0

        def _prepare_dataset(self, dataset, *_):  # replaces TRL's method, which would tokenise
            return dataset

        def _precompute_ref_logps(self, *arguments):
            begin = time.perf_counter()
            dataset = super()._precompute_ref_logps(*arguments)
            self.sweep_s = time.perf_counter() - begin
            return dataset

    dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
    tokenizer = transformers.AutoTokenizer.from_pretrained(start)
    # Transformers reads a reward at the last token that is not padding; eos, the tokenizer's own choice, ends every document.
    tokenizer.pad_token = tokenizer.unk_token
    if kind in ("sft", "lora", "packed"):
        model = transformers.AutoModelForCausalLM.from_pretrained(start, dtype=dtype)
        if kind == "packed":  # a step is one row
            options |= dict(packing=True, max_length=ROW_TOKENS, per_device_train_batch_size=1, gradient_accumulation_steps=1)
        adapters = None
        if kind == "lora":
            import peft

            adapters = peft.LoraConfig(r=RANK, lora_alpha=RANK, lora_dropout=0, target_modules="all-linear", task_type="CAUSAL_LM")
        return trl.SFTTrainer(model, trl.SFTConfig(**options), train_dataset=read_chats(file, count), processing_class=tokenizer, peft_config=adapters)
    pairs = read_pairs(file, count)
    if kind == "rm":
        whole = pairs.map(lambda pair: {name: pair["prompt_ids"] + pair[name] for name in ("chosen_ids", "rejected_ids")})
        model = transformers.AutoModelForSequenceClassification.from_pretrained(start, dtype=dtype)
        return trl.RewardTrainer(model, trl.RewardConfig(**options), train_dataset=whole, processing_class=tokenizer)
    policy, model = (transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype) for path in (start, reference))
    args = trl.DPOConfig(beta=BETA, precompute_ref_log_probs=kind == "advance", **options)
    trainer = DPOTrainer(policy, model, args, train_dataset=pairs, processing_class=tokenizer)
    if kind == "advance":
        trainer.ref_model = None  # it is not evaluated again
    return trainer


def quiet_libraries():
    """Returns standard output for the answers, and redirects everything that libraries print."""
    import datasets
    import transformers

    answers, sys.stdout = sys.stdout, sys.stderr
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    return answers


def train_on_demand(trainer, answers, figures):
    """Runs a step for each line of standard input, and answers with its time, its memory and the result of `figures` on TRL's log."""
    import transformers

    class OnDemand(transformers.TrainerCallback):
        def wait(self, control):
            control.should_training_stop = not sys.stdin.readline()
            self.begin = time.perf_counter()

        def on_train_begin(self, args, state, control, **_):
            print("ready", file=answers, flush=True)
            self.wait(control)

        def on_log(self, args, state, control, logs, **_):
            if "loss" not in logs:  # the last line summarises the training
                return
            step = dict(step_s=time.perf_counter() - self.begin, peak_mem=compare.peak_memory(), **figures(logs))
            print(json.dumps(step), file=answers, flush=True)
            self.wait(control)

    trainer.add_callback(OnDemand)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()


def trl_worker(kind, dtype, start, reference, file, count):
    answers, seen = quiet_libraries(), 0

    def figures(logs):
        nonlocal seen
        before, seen = seen, logs["num_tokens"]
        return dict(loss=logs["loss"], tokens=seen - before, sweep_s=getattr(trainer, "sweep_s", 0))

    with tempfile.TemporaryDirectory() as folder:
        options = dict(output_dir=folder, report_to="none", use_cpu=True, bf16=False, disable_tqdm=True, save_strategy="no", logging_steps=1,
                       max_length=MAX_LEN, activation_checkpointing=False, per_device_train_batch_size=MICRO_BATCH,
                       gradient_accumulation_steps=BATCH // MICRO_BATCH, train_sampling_strategy="sequential", num_train_epochs=1000,
                       learning_rate=rate(kind), lr_scheduler_type="constant", weight_decay=compare.WEIGHT_DECAY, adam_beta1=compare.BETAS[0],
                       adam_beta2=compare.BETAS[1], max_grad_norm=compare.MAX_NORM)
        trainer = make_trainer(kind, dtype, start, reference, file, count, options)
        train_on_demand(trainer, answers, figures)


# ---- train_llama: short runs of the program ------------------------------------------------------------------------------------------------

FLAGS = ["--device", "cpu", "--shuffle", "false", "--max_len", MAX_LEN, "--row_tokens", ROW_TOKENS, "--train_batch_size", BATCH]


def train_llama_steps(kind, dtype, start, reference, file, samples, steps, out, *more):
    task = {"sft": "sft", "lora": "sft", "packed": "sft", "rm": "rm"}.get(kind, "dpo")
    flags = ["--beta", BETA, "--ref_model", reference] if task == "dpo" else ["--lora_rank", RANK, "--lora_alpha", RANK] if kind == "lora" else []
    steps, said = compare.train("train_llama", task, out, rate(kind), "--model", start, "--data", file, *FLAGS, "--dtype", dtype, "--max_samples", samples,
                                "--max_steps", steps, *flags, *more)
    sweep = re.search(r"reference: \d+ pairs in ([\d.]+) s", said)
    totals = [0] + [step["tokens"] for step in steps]
    for step, before in zip(steps, totals):
        step.update(tokens=step["tokens"] - before, sweep_s=float(sweep[1]) if sweep else 0)
    return steps, said


# ---- both, and the table ----------------------------------------------------------------------------------------------------------------

def rate(kind):
    return {"sft": SFT_RATE, "packed": SFT_RATE, "lora": ADAPTER_RATE}.get(kind, RATE)


def expect_equal(theirs, ours):
    for a, b in zip(theirs, ours):
        if a["tokens"] != b["tokens"]:
            sys.exit(f"TRL trained on {a['tokens']} tokens, train_llama on {b['tokens']}")
    compare.expect_same_loss(theirs[0], ours[0])


def compare_kind(kind, dtype, start, model, file, folder):
    steps = WARM_UP + COUNTED
    samples = BATCH if kind == "packed" else BATCH * steps
    peer = compare.Peer(__file__, kind, dtype, str(start), str(model), str(file), samples)
    theirs, ours = [], []
    for r in range(ROUNDS):
        theirs.append(peer.steps(steps))
        ours.append(train_llama_steps(kind, dtype, start, model, file, samples, steps, folder / "run")[0])
        both = ["  ".join(f"{step['step_s']:6.2f}" for step in side[r]) + f" (sweep {side[r][0]['sweep_s']:.1f})" for side in (theirs, ours)]
        print(f"{kind}, seconds of the steps in round {r + 1}:  TRL {both[0]}   train_llama {both[1]}", file=sys.stderr, flush=True)
    peer.close()
    expect_equal(theirs[0], ours[0])
    share = compare.product_share(train_llama_steps(kind, dtype, start, model, file, samples, steps, folder / "run", "--profile")[1])

    def speed(rounds):
        seconds = sum(min(steps[i]["step_s"] for steps in rounds) for i in range(WARM_UP, WARM_UP + COUNTED))
        if kind == "advance":
            seconds += min(steps[0]["sweep_s"] for steps in rounds) / (WARM_UP + COUNTED) * COUNTED
        return sum(step["tokens"] for step in rounds[0][WARM_UP:]) / seconds

    return compare.table_row(f"smollm2-135m, {KINDS[kind]}", dtype, "trl", speed(theirs), speed(ours), compare.memory(theirs), compare.memory(ours),
                             f"{share} %", compare.first_losses(theirs, ours))


def compare_all(directory, kinds, dtype):
    model = directory / "model"
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        chats, pairs = folder / "chats.safetensors", folder / "pairs.safetensors"
        prepare("sft", directory / "chats.jsonl", model, chats)
        prepare("pref", directory / "pairs.jsonl", model, pairs)
        for task, data, out in ("sft", chats, folder / "policy"), ("rm", pairs, folder / "reward"):
            compare.train("train_llama", task, out, SFT_RATE, "--model", model, "--data", data, *FLAGS, "--dtype", dtype, "--max_steps", 1)
        inputs = {"sft": (model, chats), "lora": (model, chats), "packed": (model, chats), "rm": (folder / "reward", pairs)}
        return [compare_kind(kind, dtype, start, model, file, folder)
                for kind in kinds for start, file in [inputs.get(kind, (folder / "policy", pairs))]]


def main():
    if sys.argv[1:2] == ["worker"]:
        return trl_worker(*json.loads(sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR", help="made by scripts/smollm2.py")
    parser.add_argument("--only", choices=KINDS, help="default: all")
    parser.add_argument("--dtype", choices=["f32", "bf16"], default=compare.best_dtype())
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="also write the table to this file, replacing the previous one of this CPU")
    options = parser.parse_args()
    if not (ROOT / "train_llama").exists():
        sys.exit("scripts/compare_trl.py: ./train_llama is not built\n  fix: make")
    compare.report(compare_all(options.directory, [options.only] if options.only else KINDS, options.dtype), options.out)


if __name__ == "__main__":
    main()
