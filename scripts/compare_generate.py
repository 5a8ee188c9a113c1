#!/usr/bin/env python3
"""Times generation in Hugging Face transformers and in train_llama, alternately in one run.

    scripts/install_compare.sh && make build/dev/bench/few_tokens
    .venv-compare/bin/python scripts/compare_generate.py [--dtype f32|bf16] [--out docs/benchmarks.md]

The model is SmolLM2-135M with random weights, in bf16 where the CPU has instructions for it. Each of 1, 8 or 64 prompts of 32 tokens is continued by 128 tokens, sampled at temperature
1 from all tokens; transformers' generate gets the whole batch, with its KV cache. Both sides use all cores. In each of two rounds each side
generates once, after a warm-up, while the other side is idle; the faster time is reported and includes the prompts. Memory is the peak resident
size of the process, including libraries. Each row is printed and written as soon as it is measured, because transformers takes minutes for the
last one.

The limit is the larger of two times: reading all weights once for each token of the batch at the rate at which all cores read memory, and the FLOPs
of the products at the rate of a large product (dev/bench/few_tokens.cpp measures both rates). It excludes attention, sampling and the prompts.
"""
import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import compare
from compare import ROOT

ROUNDS, PROMPT, NEW, BATCHES = 2, 32, 128, (1, 8, 64)
SHAPE = compare.MODELS["smollm2-135m"][0]


# ---- the transformers side: a process of its own that generates once for each line it is sent --------------------------------------------

def worker(batch, dtype, folder):
    import torch
    import transformers

    answers, sys.stdout = sys.stdout, sys.stderr
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**SHAPE), 
                                                              dtype=torch.bfloat16 if dtype == "bf16" else torch.float32).eval()
    model.generation_config.eos_token_id = model.config.eos_token_id = model.config.bos_token_id = None
    if folder:
        model.save_pretrained(folder)  # train_llama has the same weights
    ids = torch.randint(0, 256, (batch, PROMPT))

    def generate(count):
        with torch.inference_mode():
            return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                                  max_new_tokens=count, min_new_tokens=count, pad_token_id=0)

    generate(4)
    print("ready", file=answers, flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        out = generate(NEW)
        assert out.shape == (batch, PROMPT + NEW)
        print(json.dumps(dict(step_s=time.perf_counter() - start, peak_mem=compare.peak_memory())), file=answers, flush=True)


# ---- our side ------------------------------------------------------------------------------------------------------------------------

def write_tokenizer(folder):
    """Writes a tokenizer with one token per byte, padded to the model's vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    names += [f"t{i}" for i in range(len(names), SHAPE["vocab_size"])]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def our_run(batch, dtype, folder):
    rng = random.Random(1)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "".join(rng.choices("abcdefgh ", k=PROMPT))}) + "\n" for _ in range(batch)))
    command = [ROOT / "train_llama", "generate", "--model", folder / "model", "--prompts", prompts, "--max_new_tokens", NEW, "--temperature", 1,
               "--max_sequences", batch, "--dtype", dtype, "--threads", compare.CORES]
    with subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        said = process.stderr.read()
        _, code, usage = os.wait4(process.pid, 0)
        process.returncode = code
    found = re.search(r"(\d+) tokens in (\S+) s", said)
    if code or not found or int(found[1]) != batch * NEW:
        sys.exit(f"{said}\n./train_llama generate failed with code {code}; its last output is above")
    return dict(step_s=float(found[2]), peak_mem=usage.ru_maxrss * 1024)


# ---- both, and the table -----------------------------------------------------------------------------------------------------------------

def limits(dtype):
    """Returns the memory's bytes per second, and the FLOPs per second of a large product."""
    said = subprocess.run([ROOT / "build/dev/bench/few_tokens", str(compare.CORES), dtype], text=True, stdout=subprocess.PIPE, check=True).stdout
    print(said, file=sys.stderr)
    found = re.search(r"memory (\S+) GB/s, product (\S+) GFLOP/s", said)
    return float(found[1]) * 1e9, float(found[2]) * 1e9


def parameters():
    C, F, L, V = (SHAPE[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"))
    kv = C // SHAPE["num_attention_heads"] * SHAPE["num_key_value_heads"]
    return L * (2 * C * C + 2 * C * kv + 3 * C * F) + V * C


def row(batch, dtype, folder, memory_rate, product_rate):
    peer = compare.Peer(__file__, batch, dtype, "" if (folder / "model").exists() else str(folder / "model"))
    if not (folder / "model/tokenizer.json").exists():
        write_tokenizer(folder / "model")
    theirs, ours = [], []
    for r in range(ROUNDS):
        theirs += peer.steps(1)
        ours.append(our_run(batch, dtype, folder))
        print(f"batch of {batch}, round {r + 1}: transformers {theirs[-1]['step_s']:.2f} s, train_llama {ours[-1]['step_s']:.2f} s", file=sys.stderr)
    peer.close()
    fastest = [min(step["step_s"] for step in steps) for steps in (theirs, ours)]
    limit = NEW * max((2 if dtype == "bf16" else 4) * parameters() / memory_rate, 2 * parameters() * batch / product_rate)
    return compare.table_row(f"smollm2-135m, generate, {batch} x ({PROMPT} + {NEW})", dtype, "transformers", *(batch * NEW / s for s in fastest),
                             compare.memory([theirs]), compare.memory([ours]), f"{limit / fastest[1]:.0%} of the limit", "sampled")


def main():
    if sys.argv[1:2] == ["worker"]:
        return worker(*json.loads(sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["f32", "bf16"], default=compare.best_dtype())
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="also write the table to this file")
    options = parser.parse_args()
    for file, target in (("train_llama", "train_llama"), ("build/dev/bench/few_tokens", "build/dev/bench/few_tokens")):
        if not (ROOT / file).exists():
            sys.exit(f"scripts/compare_generate.py: {file} is not built\n  fix: make {target}")
    with tempfile.TemporaryDirectory() as folder:
        rates = limits(options.dtype)
        for batch in BATCHES:
            compare.report([row(batch, options.dtype, Path(folder), *rates)], options.out)


if __name__ == "__main__":
    main()
