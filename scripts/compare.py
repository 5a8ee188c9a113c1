#!/usr/bin/env python3
"""Times the same training step in Hugging Face transformers and in train_llama or train_gpt2, alternately in one run.

    scripts/install_compare.sh
    .venv-compare/bin/python scripts/compare.py [--model NAME] [--dtype f32|bf16|moments|autocast] [--out docs/benchmarks.md]

A step is forward, backward, clipping to norm 1 and AdamW on rows of T random tokens; every token but the first of a row is a target. A step
has one row, or four with GPT-2; all rows are equal, and there is no dropout. Both sides start from the same random weights, so their first
losses must agree, and both use all cores. In each of three rounds each side runs one warm-up step and two timed steps while the other side
is idle; the fastest step is reported. Memory is the peak resident size of the process (VmHWM), including libraries.

A CPU without instructions for bf16 (avx512_bf16, amx_bf16) is measured in f32 alone, unless --dtype is given: PyTorch takes minutes for a step
in bf16 there.

There is one difference: with bf16, transformers keeps AdamW's moments and the only copy of the weights in bfloat16. This project's programs
keep moments and gradients in float, and also the lower halves of the weights, so the weights are floats. With autocast, transformers keeps
everything in float and multiplies in bfloat16; this project's programs run as with bf16. All of this is for CPUs; scripts/gpu_bench.py
compares GPUs with the functions below.

If LLMC_SOURCE names a checkout of karpathy/llm.c, its train_gpt2.c is a third side of gpt2-short in f32, in a separate row. It is compiled
with the flags of its Makefile and starts from the same weights. A round is a run that is stopped after the same number of steps. A step
is one printed by llm.c: forward, backward and AdamW with its own settings, without clipping, and every token has a target.
"""
import argparse
import datetime
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROUNDS, WARM_UP, COUNTED = 3, 1, 2
LEARNING_RATE, WEIGHT_DECAY, BETAS, MAX_NORM = 1e-4, 0.1, (0.9, 0.95), 1.0
AGREE = 1e-2  # of the first losses: bf16 keeps 8 bits, and a loss is a mean over many tokens
CORES = len(os.sched_getaffinity(0))
LLMC_SOURCE = os.environ.get("LLMC_SOURCE")

GPT2 = dict(model_type="gpt2", n_embd=768, n_layer=12, n_head=12, vocab_size=50257, n_positions=1024,
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)

MODELS = {  # shape, rows per step, T, program
    "smollm2-135m": (dict(model_type="llama", hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
                          intermediate_size=1536, vocab_size=49152, max_position_embeddings=8192, rms_norm_eps=1e-5,
                          tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=1e5)), 1, 2048, "train_llama"),
    "qwen2.5-0.5b": (dict(model_type="qwen2", hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
                          intermediate_size=4864, vocab_size=151936, max_position_embeddings=32768, rms_norm_eps=1e-6,
                          tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=1e6)), 1, 1024, "train_llama"),
    "qwen2.5-1.5b": (dict(model_type="qwen2", hidden_size=1536, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
                          intermediate_size=8960, vocab_size=151936, max_position_embeddings=131072, rms_norm_eps=1e-6,
                          tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=1e6)), 1, 1024, "train_llama"),
    "qwen3-moe": (dict(model_type="qwen3_moe", hidden_size=768, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4, head_dim=64,
                       num_experts=32, num_experts_per_tok=4, moe_intermediate_size=384, intermediate_size=3072, norm_topk_prob=True, vocab_size=32000,
                       max_position_embeddings=32768, rms_norm_eps=1e-6, rope_parameters=dict(rope_type="default", rope_theta=1e6)), 1, 1024, "train_llama"),
    "qwen3.5-0.8b, 4 layers": (dict(model_type="qwen3_5_text", hidden_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=256,
                                    intermediate_size=3584, linear_num_key_heads=16, linear_num_value_heads=16, vocab_size=248320,
                                    max_position_embeddings=262144, rms_norm_eps=1e-6, tie_word_embeddings=True,
                                    rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25)), 1, 2048, "train_llama"),
    "gpt2": (GPT2, 4, 1024, "train_gpt2"),
    "gpt2-short": (GPT2, 4, 64, "train_gpt2"),
}


def random_tokens(V, T):
    import numpy as np

    return np.random.default_rng(1).integers(0, V, T)


# ---- the transformers side: a separate process that runs one step for each line it receives ----------------------------------------

def transformers_worker(shape, batch, T, dtype, folder, device="cpu"):
    """Runs steps of `batch` rows. dtype "autocast" is bf16 with float weights. On a GPU the model is compiled, as usual there."""
    import torch
    import transformers

    answers, sys.stdout = sys.stdout, sys.stderr  # keeps output of libraries out of the answers
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(1)
    gpu = device == "cuda"
    config = transformers.AutoConfig.for_model(**shape)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32,
                                                              attn_implementation="sdpa").train()
    if folder:
        model.save_pretrained(folder)  # train_llama starts from these weights
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    ids = torch.from_numpy(random_tokens(config.vocab_size, T))[None].repeat(batch, 1).to(device)
    forward = torch.compile(model) if gpu else model
    print("ready", file=answers, flush=True)

    for _ in sys.stdin:
        start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "autocast"):
            loss = forward(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if gpu:
            torch.cuda.synchronize()
        step = dict(step_s=time.perf_counter() - start, loss=loss.item(), **(gpu_memory() if gpu else dict(peak_mem=peak_memory())))
        print(json.dumps(step), file=answers, flush=True)


def gpu_memory():
    """Returns the used bytes of the GPU, counted as in train_llama (the allocator never frees memory, so this is the peak), and the peak bytes of
    tensors."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return dict(peak_mem=total - free, tensors=torch.cuda.max_memory_allocated())


def peak_memory(process="self"):
    return int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process}/status").read_text())[1]) * 1024


class Peer:
    """Runs `python3 script worker [arguments]`: a process that reports when it is ready, and then the time of each step."""

    def __init__(self, script, *arguments):
        environment = dict(os.environ, OMP_NUM_THREADS=str(CORES))
        self.process = subprocess.Popen([sys.executable, script, "worker", json.dumps(arguments)], text=True, env=environment,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.read()

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"the other side ended early, with code {self.process.wait()}; its message is above")
        return line

    def steps(self, count):
        out = []
        for _ in range(count):
            self.process.stdin.write("step\n")
            self.process.stdin.flush()
            out.append(json.loads(self.read()))
        return out

    def close(self):
        self.process.stdin.close()
        self.process.wait()


# ---- train_llama's side: a short run -------------------------------------------------------------------------------------------------

def write_data(path, V, T, documents):
    """Repeats the same row of tokens `documents` times, so every step has the same data in any order of samples."""
    import numpy as np

    sys.path.insert(0, str(ROOT / "data"))
    from token_file import TokenFile

    mask = np.ones(T, np.uint8)
    mask[0] = 0
    file = TokenFile(str(path), V)
    for _ in range(documents):
        file.append(random_tokens(V, T), mask, np.array([T]))
    file.write(dict(kind="pretrain", vocab_size=str(V)))
    file.close()


def train(program, task, out, learning_rate, *flags):
    """Trains with output directory `out`, without the cache of an earlier run, and returns the log's steps and the program's output."""
    command = [ROOT / program, task, "--output_dir", out, "--overwrite", "--threads", CORES, "--learning_rate", learning_rate,
               "--lr_scheduler", "constant", "--lr_warmup", 0, "--weight_decay", WEIGHT_DECAY,
               "--adam_betas", f"{BETAS[0]},{BETAS[1]}", "--max_norm", MAX_NORM, *flags]
    with tempfile.TemporaryDirectory() as cache:
        result = subprocess.run([str(word) for word in command], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                env=dict(os.environ, XDG_CACHE_HOME=cache))
    if result.returncode:
        sys.exit(f"{result.stdout[-2000:]}\n./{program} failed with code {result.returncode}; its last output is above")
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if "step_s" in line], result.stdout


def our_run(program, count, batch, T, dtype, folder, flags, device="cpu"):
    """Returns the log's steps and the program's output. `flags` select the model. The rows of a step are packed into one."""
    run = train(program, "pretrain", folder / "run", LEARNING_RATE, *flags, "--data", folder / "data.safetensors",
                     "--device", device, "--dtype", dtype, "--max_len", T, "--row_tokens", batch * T, "--train_batch_size", batch,
                     "--max_steps", count)
    shutil.rmtree(folder / "run")
    return run


# ---- llm.c's side: the beginning of a run of its train_gpt2 --------------------------------------------------------------------------

def make_llmc(folder, shape, batch, T, model):
    """Compiles llm.c's program, and writes the files that it reads in its directory: the weights of `model`, and the rows of the steps, end
    to end. The target of the last token of a row is the first token of the next row."""
    import numpy as np
    from safetensors.numpy import load_file

    sys.path.insert(0, str(ROOT / "data"))
    from shards import write_shard
    from whole_file import whole_file

    tokens = folder / "dev/data/tinyshakespeare"
    tokens.mkdir(parents=True)
    command = ["cc", "-Ofast", "-march=native", "-fopenmp", "-DOMP", "-w", Path(LLMC_SOURCE, "train_gpt2.c"), "-lm", "-lgomp",
               "-o", folder / "train_gpt2"]
    if subprocess.run(command).returncode:
        sys.exit(f"{LLMC_SOURCE}/train_gpt2.c does not compile; the compiler's message is above")

    row = random_tokens(shape["vocab_size"], T)
    steps = max(WARM_UP + COUNTED, 5)  # the evaluation at the start reads 5 batches
    for split in "train", "val":
        with whole_file(tokens / f"tiny_shakespeare_{split}.bin") as file:
            write_shard(file, np.append(np.tile(row, steps * batch), row[0]))

    weights = load_file(model / "model.safetensors")
    padding = -shape["vocab_size"] % 128
    header = np.zeros(256, "<i4")
    header[:8] = (20240326, 3, shape["n_positions"], shape["vocab_size"], shape["n_layer"], shape["n_head"], shape["n_embd"],
                  shape["vocab_size"] + padding)
    with open(folder / "gpt2_124M.bin", "wb") as file:
        header.tofile(file)
        np.pad(weights["transformer.wte.weight"], ((0, padding), (0, 0))).tofile(file)
        weights["transformer.wpe.weight"].tofile(file)
        for op in "ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj":
            for part in "weight", "bias":
                for layer in range(shape["n_layer"]):
                    weights[f"transformer.h.{layer}.{op}.{part}"].T.tofile(file)  # a matrix is (in, out) in transformers
        for part in "weight", "bias":
            weights[f"transformer.ln_f.{part}"].tofile(file)


def llmc_steps(count, folder):
    steps, said = [], ""
    with subprocess.Popen(["stdbuf", "-oL", "./train_gpt2"], cwd=folder, env=dict(os.environ, OMP_NUM_THREADS=str(CORES)), text=True,
                          stdout=subprocess.PIPE) as process:
        for line in process.stdout:
            said += line
            if match := re.match(r"step \d+: train loss (\S+) \(took (\S+) ms\)", line):
                steps.append(dict(step_s=float(match[2]) / 1000, loss=float(match[1]), peak_mem=peak_memory(process.pid)))
            if len(steps) == count:
                process.terminate()
                return steps
    sys.exit(f"{said}llm.c's train_gpt2 ended early, with code {process.returncode}; its last output is above")


# ---- all sides, and the table -----------------------------------------------------------------------------------------------------

DTYPES = {"f32": "f32", "bf16": "bf16", "moments": "bf16; ours: --moments bf16", "autocast": "bf16; transformers: autocast, float weights"}


def expect_same_loss(theirs, ours):
    if abs(ours["loss"] / theirs["loss"] - 1) > AGREE:
        sys.exit(f"the first losses differ: theirs {theirs['loss']:.6f}, ours {ours['loss']:.6f}")


def first_losses(theirs, ours):
    return f"{theirs[0][0]['loss']:.4f} / {ours[0][0]['loss']:.4f}"


def memory(rounds):
    return max(step["peak_mem"] for steps in rounds for step in steps) / 2**30


def product_share(log):
    """Returns the last figure of --profile: FLOP/s of a step as a percentage of a large matrix product in the same run."""
    return int(re.search(r"(\d+)% of the product's rate", log)[1])


def compare(name, dtype):
    """Returns a row of the table for each of the other programs."""
    shape, batch, T, program = MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        folder, steps = Path(folder), WARM_UP + COUNTED
        model = folder / "model"
        write_data(folder / "data.safetensors", shape["vocab_size"], T, batch * steps)
        peer = Peer(__file__, shape, batch, T, "bf16" if dtype == "moments" else dtype, str(model))
        arguments = [program, steps, batch, T, "f32" if dtype == "f32" else "bf16", folder]
        flags = ["--model", model, *(["--moments", "bf16"] if dtype == "moments" else [])]
        sides = {"transformers": lambda: peer.steps(steps), program: lambda: our_run(*arguments, flags)[0]}
        if LLMC_SOURCE and (name, dtype) == ("gpt2-short", "f32"):
            make_llmc(folder / "llm.c", shape, batch, T, model)
            sides["llm.c"] = lambda: llmc_steps(steps, folder / "llm.c")
        rounds = {side: [] for side in sides}
        for r in range(ROUNDS):
            for side, run in sides.items():
                rounds[side].append(run())
            seconds = [f"{side} " + "  ".join(f"{step['step_s']:6.2f}" for step in rounds[side][r]) for side in sides]
            print(f"{name} {dtype}, seconds of the steps in round {r + 1}:  {'   '.join(seconds)}", file=sys.stderr, flush=True)
        peer.close()
        share = product_share(our_run(*arguments, [*flags, "--profile"])[1])

    def best(rounds):
        return batch * T / min(step["step_s"] for steps in rounds for step in steps[WARM_UP:])

    ours = rounds.pop(program)
    rows = []
    task = f"{name}, {batch} x {T}"
    for side, theirs in rounds.items():
        expect_same_loss(theirs[0][0], ours[0][0])
        rows.append(table_row(task, DTYPES[dtype] if side == "transformers" else dtype, side, best(theirs), best(ours), memory(theirs), memory(ours),
                              f"{share} %", first_losses(theirs, ours)))
    return rows


def cpu_field(name):
    match = re.search(rf"^{name}\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    return match[1] if match else "unknown"


def vector_units():
    return [unit for unit in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if unit in cpu_field("flags").split()]


def best_dtype():
    """Returns the dtype in which this CPU multiplies fastest."""
    return "bf16" if {"avx512_bf16", "amx_bf16"} & set(vector_units()) else "f32"


def describe_cpu():
    return (f"{cpu_field('model name')} (family {cpu_field('cpu family')}, model {cpu_field('model')}; "
            f"{', '.join(vector_units()) or 'no vector units known'}), {CORES} cores")


# ---- a table for each kind of CPU --------------------------------------------------------------------------------------------------------

COLUMNS = ["training", "dtype", "peer", "date", "peer tokens/s", "ours tokens/s", "ratio", "peer GiB", "ours GiB", "ratio",
           "of the product's rate", "first loss of each"]


def table_row(task, dtype, peer, theirs, ours, their_memory, our_memory, share, first):
    version = f"{peer} {importlib.metadata.version(peer)}" if peer != "llm.c" else peer
    return (f"| {task} | {dtype} | {version} | {datetime.date.today()} | {theirs:.0f} | {ours:.0f} | **{ours / theirs:.2f}** | {their_memory:.2f} "
            f"| {our_memory:.2f} | **{our_memory / their_memory:.2f}** | {share} | {first} |")


def merge_rows(text, rows):
    """Returns a document in which these rows replace earlier rows on the same training, dtype and peer in this CPU's table."""
    heading = f"## {describe_cpu()}"
    parts = [part.strip() for part in re.split(r"(?m)^(?=## )", text) if part.strip()]
    if heading not in [part.splitlines()[0] for part in parts]:
        parts.append("\n".join([heading, "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]))

    def key(row):
        task, dtype, peer = (cell.strip() for cell in row.split("|")[1:4])
        return task, dtype, peer.split()[0]

    new = {key(row): row for row in rows}
    for i, part in enumerate(parts):
        if part.splitlines()[0] == heading:
            lines = [new.pop(key(line), line) if line.startswith("|") and line.count("|") > len(COLUMNS) else line for line in part.splitlines()]
            end = max(n for n, line in enumerate(lines) if line.startswith("|")) + 1
            parts[i] = "\n".join(lines[:end] + list(new.values()) + lines[end:])
    return "\n\n".join(parts) + "\n"


def report(rows, out):
    """Prints the rows as a table, and inserts them into the file `out`, if given."""
    print(merge_rows("", rows))
    if out:
        out.write_text(merge_rows(out.read_text() if out.exists() else "# Benchmarks\n", rows))


def main():
    if sys.argv[1:2] == ["worker"]:
        return transformers_worker(*json.loads(sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="smollm2-135m")
    parser.add_argument("--dtype", choices=DTYPES, help="default: all, or f32 on a CPU without bf16")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="also write the table to this file, replacing the previous one of this model and CPU")
    options = parser.parse_args()
    program = MODELS[options.model][-1]
    if not (ROOT / program).exists():
        sys.exit(f"scripts/compare.py: ./{program} is not built\n  fix: make")
    if LLMC_SOURCE and not Path(LLMC_SOURCE, "train_gpt2.c").exists():
        sys.exit(f"scripts/compare.py: LLMC_SOURCE: {LLMC_SOURCE} has no train_gpt2.c\n  fix: name a checkout of karpathy/llm.c, or unset it")
    if (load := os.getloadavg()[0]) > 1:  # other programs would slow down one side more than the other
        print(f"load average {load:.1f}: this machine is busy, so the figures are less reliable", file=sys.stderr)
    dtypes = [options.dtype] if options.dtype else DTYPES if best_dtype() == "bf16" else ["f32"]
    report([row for dtype in dtypes for row in compare(options.model, dtype)], options.out)


if __name__ == "__main__":
    main()
