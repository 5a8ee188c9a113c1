#!/usr/bin/env python3
"""Checks that two builds of the project give the same results bit for bit, and plan the same memory. For changes that only move code.

    .venv/bin/python scripts/same_bits.py OTHER_CHECKOUT             short runs of every kind: losses, gradient norms, weights, optimizer
    .venv/bin/python scripts/same_bits.py OTHER_CHECKOUT --plans     plans over a grid of flags: bytes, and the largest change
    .venv/bin/python scripts/same_bits.py --gpu                      the runs on this GPU: the same bits twice, and the CPU's first loss

The script builds train_llama and train_gpt2 in both. --only PART selects the cases with PART in their names.
"""
import argparse
import hashlib
import itertools
import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "data"))

from token_file import TokenFile  # noqa: E402

LLAMA, GPT2 = "train_llama sft --model test/golden/qwen3 --data {documents}", "train_gpt2 sft --model test/golden/gpt2 --data {documents}"
PAIRS = "--model test/golden/llama3 --data test/golden/pairs.safetensors --train_batch_size 3 --row_tokens 256 --max_len 128"
GIVEN = "--model test/golden/qwen3 --rollouts {rollouts} --max_len 67 --recompute cheap"
OWN = "--model test/golden/qwen3 --data {prompts} --rollout_batch_size 6 --n 4 --max_new_tokens 9 --max_len 67"
STORES = "--offload activations,optimizer,weights --offload_dir {place}"
RUNS = {
    "demo f32": "train_llama --dtype f32",
    "demo bf16, tiles": "train_llama --dtype bf16 --recompute layer",
    "demo f32, four ranks": "train_llama --dtype f32 --ranks 4 --zero_stage 2",
    "demo bf16, four ranks, a ring": "train_llama --dtype bf16 --ranks 4 --ring_attn_size 2 --recompute layer",
    "gather, stage 3": f"{LLAMA} --ranks 4 --ring_attn_size 2 --sp_mode gather --zero_stage 3",
    "ulysses, groups": f"{LLAMA} --ranks 4 --ring_attn_size 2 --sp_mode ulysses --zero_stage 3 --zero_group 2 --dtype bf16",
    "gpt2": GPT2,
    "gpt2 bf16, recompute": f"{GPT2} --dtype bf16 --recompute layer --ranks 2 --zero_stage 3",
    "stage 3, gradients bf16": f"{LLAMA} --ranks 2 --zero_stage 3 --grad_dtype bf16 --dtype bf16 --recompute cheap",
    "offload": f"{LLAMA} {STORES} --recompute layer",
    "offload, stage 3": f"{LLAMA} {STORES} --ranks 2 --zero_stage 3 --dtype bf16",
    "offload, gpt2": f"{GPT2} {STORES}",
    "muon, moments": f"{LLAMA} --optimizer muon --ranks 2 --zero_stage 1",
    "moments in 8 bits, noise": f"{LLAMA} --moments 8bit --neftune_noise_alpha 5",
    "lora": f"{LLAMA} --lora_rank 4 --lora_dropout 0.1 --ranks 2 --zero_stage 2 --recompute layer",
    "qlora": f"{LLAMA} --lora_rank 4 --load_in 4bit --grad_dtype bf16",
    "lora, offload": f"{LLAMA} --lora_rank 4 {STORES} --ranks 2 --zero_stage 3",
    "dpo": f"train_llama dpo {PAIRS} --ref_mode resident --ranks 2 --zero_stage 3",
    "dpo of adapters": f"train_llama dpo {PAIRS} --lora_rank 4",
    "rm": f"train_llama rm {PAIRS} --ranks 3 --zero_stage 1",
    "grpo, given": f"train_llama grpo {GIVEN} --kl_coef 0.1 --ranks 2 --ring_attn_size 2",
    "grpo, own answers": f"train_llama grpo {OWN} --kl_coef 0.1 --train_batch_size 12",
    "grpo, ahead": f"train_llama grpo {OWN} --async_steps 1 --ranks 2 --dtype bf16 --train_batch_size 12",
    "ppo, given": f"train_llama ppo {GIVEN} --max_epochs 3",
    "ppo, own answers": f"train_llama ppo {OWN} --ranks 2 --zero_stage 3 --train_batch_size 12",
}


def write_inputs(folder):
    rng = np.random.default_rng(1)
    golden = json.loads((ROOT / "test/golden/policy.json").read_text())
    lines = [{**r, "logprobs": logp} for r, logp in zip(golden["rollouts"], golden["models"]["qwen3"]["logprobs"])]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, count, longest in (("documents", 24, 60), ("prompts", 12, 30)):
        file = TokenFile(str(folder / f"{name}.safetensors"), 96)
        for _ in range(count):
            ids = np.append(rng.integers(4, 90, rng.integers(2, longest)), 7)
            file.append(ids, (np.arange(len(ids)) >= (len(ids) - 1 if name == "prompts" else 1)).astype(np.uint8), np.array([len(ids)]))
        file.write({"kind": "sft", "vocab_size": "96"})
        file.close()
    (folder / "place").mkdir()
    return {"documents": folder / "documents.safetensors", "prompts": folder / "prompts.safetensors", "rollouts": folder / "rollouts.jsonl",
            "place": folder / "place"}


def call(root, words):
    result = subprocess.run([root / words[0], *words[1:]], cwd=root, capture_output=True, text=True, errors="replace")
    if result.returncode:
        sys.exit(f"{root}: {' '.join(map(str, words))}\n{result.stderr}")
    return result.stdout


def tensors_hash(path):
    """Hashes names, shapes and values; other parts of a file's header may differ."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:8 + length])
    header.pop("__metadata__", None)
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode() + raw[8 + length:]).hexdigest()


def results(root, run, inputs, device="cpu"):
    """Returns {what: value} of a run: its losses and gradient norms to the last digit, and the hash of each file of tensors."""
    words = run.format(**inputs).split()
    common = ["--device", device, "--threads", "1"]
    if "--max_len" not in words and "--model" in words:
        common += ["--max_len", "64"]
    if "--train_batch_size" not in words and "sft" in words:
        common += ["--train_batch_size", "4"]
    with tempfile.TemporaryDirectory() as out:
        if device == "cuda" and "--offload_dir" in words:  # a GPU offloads to the host's memory alone
            at = words.index("--offload_dir")
            del words[at:at + 2]
        call(root, [*words, *common, "--learning_rate", "1e-3", "--max_steps", "4", "--logging_steps", "1", "--save_steps", "3",
                    "--eval_steps", "1000000", "--output_dir", f"{out}/run"])
        lines = [json.loads(line) for line in Path(out, "run/log.jsonl").read_text().splitlines()]
        found = {f"step {line['step']}, {key}": line[key] for line in lines if "grad_norm" in line for key in ("loss", "grad_norm") if key in line}
        return found | {str(path.relative_to(out)): tensors_hash(path) for path in sorted(Path(out).rglob("*.safetensors"))}


def compare_runs(other, part):
    different = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        inputs = write_inputs(Path(folder))
        for name, run in ((name, run) for name, run in RUNS.items() if part in name):
            old, new = pool.map(lambda root: results(root, run, inputs), (other, ROOT))
            differs = [what for what in {**old, **new} if old.get(what) != new.get(what)]
            different += bool(differs)
            print(f"{name:32} {'differ: ' + ', '.join(differs[:4]) if differs else f'{len(new)} results, the same bits'}", flush=True)
    return different


def compare_devices(part):
    """Checks that two runs on the GPU give the same bits, and that their first loss equals the CPU's within the rounding of the types. Answers
    sampled by a model may differ between devices."""
    failed = 0

    def on(device, run):
        if "--dtype" not in run:
            run += " --dtype f32"
        try:
            return results(ROOT, run, inputs, device)
        except SystemExit as error:
            return str(error)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(8) as pool:
        inputs = write_inputs(Path(folder))
        runs = {name: run for name, run in RUNS.items() if part in name}
        started = {name: [pool.submit(on, device, run) for device in ("cuda", "cuda", "cpu")] for name, run in runs.items()}
        for name, run in runs.items():
            first, second, cpu = (future.result() for future in started[name])
            errors = [result for result in (first, second, cpu) if isinstance(result, str)]
            if errors:
                verdict = f"FAILED: {errors[0]}"
            else:
                differs = [what for what in {**first, **second} if first.get(what) != second.get(what)]
                apart = abs(first["step 1, loss"] - cpu["step 1, loss"]) / max(abs(cpu["step 1, loss"]), 1e-2)
                allowed = 2e-2 if "bf16" in run else 1e-4
                verdict = f"FAILED: runs differ: {', '.join(differs[:4])}" if differs else f"{len(first)} results, bit-identical"
                if "own answers" not in name and "ahead" not in name:
                    verdict = "FAILED: " * (not apart <= allowed) + f"{verdict}; the first loss differs by {apart:.1e} from the CPU's ({allowed:.0e} is allowed)"
            failed += "FAILED" in verdict
            print(f"{name:32} {verdict}", flush=True)
    print(f"{len(runs) - failed} passed, {failed} failed")
    return failed


def grid():
    """Returns the flags of each plan."""
    models = ["train_llama sft --model test/golden/qwen3 --max_len 512", "train_gpt2 sft --model test/golden/gpt2 --max_len 64",
              "train_llama sft --model test/golden/llama3 --lora_rank 8 --max_len 512", "train_llama rm --model test/golden/qwen3 --max_len 512",
              "train_llama ppo --model test/golden/qwen3 --max_len 512", "train_llama sft --preset qwen3-0.6b",
              "train_llama sft --preset qwen3-8b --grad_dtype bf16", "train_gpt2 sft --preset d12"]
    ranks = ["", "--ranks 2 --zero_stage 2", "--ranks 8 --zero_stage 3 --ring_attn_size 2 --sp_mode gather",
             "--ranks 4 --zero_stage 3 --ring_attn_size 4", "--ranks 4 --zero_stage 1 --ring_attn_size 2 --sp_mode ulysses"]
    recompute = [f"--recompute {level}" for level in ("none", "cheap", "layer")]
    offload = ["", "--offload activations", "--offload activations,optimizer,weights"]
    yield from (" ".join(filter(None, words)) for words in itertools.product(models, ranks, recompute, offload))
    yield "train_llama sft --preset qwen3-8b --lora_rank 16 --load_in 4bit --recompute layer"
    yield "train_llama sft --preset qwen3-8b --optimizer muon --recompute layer"
    yield "train_llama dpo --preset smollm2-135m --ref_mode resident --recompute layer"


def placed(root, flags):
    """Returns the bytes of a plan, and its whole text."""
    said = call(root, [*flags.split(), "--plan", "--gpu", "h200", "--dtype", "bf16"])
    number, unit = re.search(r"^placed:.* ([\d.]+) ([KMGT]iB)$", said, re.M).groups()
    return float(number) * 1024 ** (1 + "KMGT".index(unit[0])), said


def compare_plans(other, part):
    flags = [words for words in grid() if part in words]
    with ThreadPoolExecutor(2) as pool:
        old, new = (list(pool.map(lambda words: placed(root, words), flags)) for root in (other, ROOT))
    changes = [after / before - 1 for (before, _), (after, _) in zip(old, new)]
    print(f"{len(flags)} plans, {sum(a[1] != b[1] for a, b in zip(old, new))} print different text, {sum(c != 0 for c in changes)} need a different number of bytes")
    for most, name in ((max(changes), "grows"), (min(changes), "shrinks")):
        if most:
            i = changes.index(most)
            print(f"what {name} most, {most:+.2%}: {flags[i]}: {old[i][0] / 1024:.1f} KiB there, {new[i][0] / 1024:.1f} here")
    return sum(c > 0 for c in changes)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("other", type=Path, nargs="?", default=ROOT)
    parser.add_argument("--plans", action="store_true")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    if (args.other == ROOT) != args.gpu:
        parser.error("name another checkout, or --gpu")
    if not all((root / program).exists() for root in (args.other, ROOT) for program in ("train_llama", "train_gpt2")):
        sys.exit("scripts/same_bits.py: train_llama and train_gpt2 are not built in both\n  fix: git worktree add ../old COMMIT && make -C ../old")
    if args.gpu:
        sys.exit(compare_devices(args.only) > 0)
    sys.exit((compare_plans if args.plans else compare_runs)(args.other.resolve(), args.only) > 0)


if __name__ == "__main__":
    main()
