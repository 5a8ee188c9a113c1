#!/usr/bin/env python3
"""Measures this machine's GPU: ops, attention compared with PyTorch's, training compared with transformers', each as a table in Markdown.

    scripts/gpu_bench.py [--out docs/benchmarks.md] [--quick] [ops] [attention] [training]      (all three, if none is named)

The script needs the programs of `make train_llama` and `make -C dev/cuda`. All sections but `ops` need PyTorch, and `training` also needs
transformers.

ops        The shipped version of each op, at the shape of its ladder in dev/cuda: checked, then timed. Rates of bytes are shares of a
           large copy's rate, rates of FLOP of an 8192^3 bf16 product's, all on the same GPU in the same minute.
attention  The middle part of attention, causal, in bf16, 16 query and 4 key heads, compared with scaled_dot_product_attention with the cuDNN
           and the flash backend. A dense row is one document; a packed row has eight documents of growing lengths. FLOP are 4 D for each
           visible pair of query and key and each head, and 2.5 times as many backward, for every kernel. PyTorch's packed rows use
           varlen_attn under "flash" if PyTorch has it; otherwise, and under "cuDNN", one dense call for each document of several tokens.
training   A step (forward, backward, clipping, AdamW) of Qwen2.5 shapes with random weights on random tokens. transformers: float weights,
           bf16 autocast, torch.compile, SDPA, fused AdamW; a batch of rows. train_llama: the same rows packed. Each side runs alone on the
           GPU; the time is the median step after the warm-up. Memory is the GPU's used memory, including driver and caches; in
           brackets the peak memory of PyTorch's tensors.

Times of ops and attention are measured with CUDA events around the calls: the median of 31 calls after a warm-up of 3 calls and 50 ms, with 512 MB
read before each call so that L2 is cold.
"""
import argparse
import csv
import datetime
import importlib.metadata
import importlib.util
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import compare
from compare import ROOT

# Without the ladders for Hopper: their only shipped op is attention, which the other attention ladders also run on Hopper.
LADDERS = sorted(path.stem for path in (ROOT / "dev" / "cuda").glob("*.cu") if path.stem != "timing" and "hopper" not in path.stem)
WARM_UP, WARM_UP_S, RUNS = 3, 0.05, 31  # as in dev/cuda/timing.cu
H, KV, DOCUMENTS = 16, 4, 8
STEPS_WARM_UP, STEPS_COUNTED = 3, 10

LEAST_SHARE_OF_COPY = 0.85
LEAST_OF_CUDNN = dict(forward=0.5, backward=0.4)  # at D 128, T 16384
LEAST_PACKED = 0.93
LEAST_SPEED, MOST_MEMORY = 1.5, 0.7  # of transformers', Qwen2.5-0.5B


# ---- tables -------------------------------------------------------------------------------------------------------------------------

def number(value, digits=3):
    """Returns a number with three significant digits and no exponent, or a dash if it was not measured."""
    if value is None:
        return "-"
    if value >= 10 ** (digits - 1):
        return f"{value:.0f}"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(value)) if value > 0 else 1)}f}"


def ratio(a, b):
    return a / b if a and b else None


def target(what, value, least=None, most=None):
    wanted = f"at least {least}" if most is None else f"at most {most}"
    if value is None:
        return f"- {what}: not measured ({wanted} wanted)"
    met = value >= least if most is None else value <= most
    return f"- {what}: {value:.2f}, {wanted} wanted: {'met' if met else '**missed**'}"


def table(columns, rows):
    return ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)] + ["| " + " | ".join(row) + " |" for row in rows]


def write_section(path, text):
    """Replaces the section with the same heading, or appends the section."""
    old = path.read_text() if path.exists() else "# Benchmarks\n"
    heading = text.splitlines()[0]
    parts = [part for part in re.split(r"(?m)^(?=## )", old) if part.strip()]
    kept = [text if part.splitlines()[0] == heading else part for part in parts]
    if text not in kept:
        kept.append(text)
    path.write_text("\n\n".join(part.strip() for part in kept) + "\n")


class Report:
    """A section of the file. It is written again after every row, so an interrupted run keeps its finished rows."""

    def __init__(self, out, title, machine, columns):
        self.out, self.columns, self.rows, self.targets = out, columns, [], []
        self.failed = False  # true if a program of this project failed
        self.head = [f"## {machine['gpu']}: {title}", "", f"{datetime.date.today()}, {machine['versions']}. "
                     "`scripts/gpu_bench.py` repeats it and says what is measured.", ""]

    def text(self):
        return "\n".join(self.head + table(self.columns, self.rows) + ([""] + self.targets if self.targets else [])) + "\n"

    def add(self, *row):
        self.rows.append([str(cell) for cell in row])
        print(f"  {'  '.join(self.rows[-1])}", file=sys.stderr, flush=True)
        self.save()

    def add_target(self, *arguments, **limits):
        self.targets.append(target(*arguments, **limits))
        self.save()

    def save(self):
        if self.out:
            write_section(self.out, self.text())


# ---- the machine --------------------------------------------------------------------------------------------------------------------

def output_of(*command):
    try:
        done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def describe_machine():
    gpus = output_of("nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader").splitlines()
    if not gpus:
        sys.exit("scripts/gpu_bench.py: there is no GPU: nvidia-smi shows none\n  fix: run it on a machine that has one")
    name, driver, power = (field.strip() for field in gpus[0].split(",", 2))
    release = output_of(str(compiler()), "--version").partition("release ")[2].partition(",")[0]
    versions = [f"driver {driver}", f"power limit {power}", f"CUDA {release or 'unknown'}"]
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    commit = output_of("git", "-C", str(ROOT), "describe", "--always", "--dirty")
    return dict(gpu=name, versions=", ".join(versions + [f"commit {commit}"] * bool(commit)))


def compiler():
    usual = Path("/usr/local/cuda/bin/nvcc")
    return usual if usual.exists() else "nvcc"


# ---- the ladders of dev/cuda ---------------------------------------------------------------------------------------------------------

def read_csv(text):
    """Parses the last row of a ladder's --csv: its rate in FLOP or bytes per second, true if these are bytes, and its share."""
    rows = list(csv.DictReader(text.splitlines()))
    if not rows:
        return None
    row = rows[-1]
    bytes = "gb_s" in row
    return dict(op=row["op"], shape=row["shape"], us=float(row["us"]), bytes=bytes, share=float(row["share"]),
                rate=float(row["gb_s"]) * 1e9 if bytes else float(row["tflop_s"]) * 1e12)


def run_ladder(name, shape=None):
    """Returns the program's rows, or None if it failed; its message is on stderr."""
    command = [str(ROOT / "build" / "dev" / "cuda" / name), "shipped", "--csv"]
    if shape:
        command += ["--shape", "x".join(map(str, shape))]
    try:
        done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE)
    except OSError as error:
        print(f"  {command[0]}: {error.strerror}\n  fix: make -C dev/cuda", file=sys.stderr)
        return None
    return read_csv(done.stdout) if done.returncode == 0 else None


def ops(machine, out, quick):
    report = Report(out, "ops", machine, ["op", "shape", "us", "GB/s or TFLOP/s", "share of a copy or product"])
    for name in LADDERS:
        measured = run_ladder(name)
        if not measured:
            report.failed = True
            report.add(name, "failed", "-", "-", "-")
            continue
        unit, scale = ("GB/s", 1e9) if measured["bytes"] else ("TFLOP/s", 1e12)
        report.add(name, measured["shape"], number(measured["us"]), f"{number(measured['rate'] / scale)} {unit}", f"{measured['share']:.2f}")
        if measured["bytes"]:
            report.add_target(f"{name}, share of a copy", measured["share"], least=LEAST_SHARE_OF_COPY)
    return report


# ---- attention and PyTorch's ---------------------------------------------------------------------------------------------------------

def document_lengths(T, documents):
    """Returns the lengths of documents as attention_case in dev/cuda/attention_common.h does: they grow, and the first of several is one token."""
    if documents == 1:
        return [T]
    ends = [1 + (T - 1) * i * i // (documents - 1) ** 2 for i in range(documents)]
    return [1] + [end - begin for begin, end in zip(ends, ends[1:])]


def attention_flops(lengths, D, backward=False):
    return (10 if backward else 4) * D * H * sum(length * (length + 1) // 2 for length in lengths)


def equal_dense(lengths):
    """Returns the length, a multiple of 64, of one document with about the same number of visible query-key pairs."""
    return max(1, round(math.sqrt(sum(length**2 for length in lengths)) / 64)) * 64


def our_rate(direction, T, documents, D):
    measured = run_ladder(f"attention_{direction}", (T, documents, 1, T, H, KV, D))
    return measured and measured["rate"]


class TorchAttention:
    """Stores inputs on the GPU, and calls a backend for the documents of a row."""

    def __init__(self, lengths, D):
        import torch

        self.torch, self.lengths = torch, lengths
        T = sum(lengths)
        with torch.device("cuda"):
            self.flush = torch.zeros(512 << 18)  # 512 MB
            self.q, self.dout = (torch.randn(T, H, D, dtype=torch.bfloat16) for _ in range(2))
            self.k, self.v = (torch.randn(T, KV, D, dtype=torch.bfloat16) for _ in range(2))
        self.offsets = torch.tensor([0, *lengths], device="cuda", dtype=torch.int32).cumsum(0, dtype=torch.int32)

    def heads(self, backend):
        """Returns queries, keys and values. Keys and values are repeated for every query head if the backend cannot share them."""
        tensors = [self.q, self.k, self.v]
        try:
            self.document(backend, *[x[:128] for x in tensors])
        except (RuntimeError, TypeError):
            tensors[1:] = [x.repeat_interleave(H // KV, dim=1) for x in tensors[1:]]
        return [x.detach().requires_grad_() for x in tensors]

    def document(self, backend, q, k, v):
        from torch.nn.attention import sdpa_kernel

        shared = dict(enable_gqa=True) if k.shape[1] != q.shape[1] else {}
        with sdpa_kernel([backend]):
            out = self.torch.nn.functional.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, **shared)
        return out[0].transpose(0, 1)

    def documents(self, backend):
        q, k, v = self.heads(backend)
        rows = zip(*(x.split(self.lengths) for x in (q, k, v)))
        parts = [[x.detach().requires_grad_() for x in row] for row in rows if len(row[0]) > 1]
        return [x for part in parts for x in part], lambda: [self.document(backend, *part) for part in parts]

    def varlen(self, varlen_attn):
        import inspect

        known = inspect.signature(varlen_attn).parameters
        causal = dict(is_causal=True) if "is_causal" in known else dict(window_size=(-1, 0))
        tensors = [self.q, self.k, self.v]
        if "enable_gqa" in known:
            causal["enable_gqa"] = True
        else:
            tensors[1:] = [x.repeat_interleave(H // KV, dim=1) for x in tensors[1:]]
        tensors = [x.detach().requires_grad_() for x in tensors]
        longest = max(self.lengths)
        return tensors, lambda: [varlen_attn(*tensors, self.offsets, self.offsets, longest, longest, **causal)]

    def seconds(self, tensors, forward):
        """Returns the seconds of the forward and of the backward pass."""
        with self.torch.no_grad():
            forward_s = self.time(forward)
        outs = forward()
        douts = self.dout[-sum(map(len, outs)):].split([len(out) for out in outs])
        return forward_s, self.time(lambda: self.torch.autograd.grad(outs, tensors, douts, retain_graph=True))

    def time(self, call):
        def cold():
            self.flush.sum()
            begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) * 1e-3

        start, runs = time.perf_counter(), 0
        while runs < WARM_UP or time.perf_counter() - start < WARM_UP_S:
            cold()
            runs += 1
        return statistics.median(cold() for _ in range(RUNS))


def torch_rates(lengths, D):
    """Returns {(backend, direction): FLOP a second}, with None if PyTorch cannot do it."""
    from torch.nn.attention import SDPBackend

    rows, rates = TorchAttention(lengths, D), {}

    def varlen():
        from torch.nn.attention.varlen import varlen_attn

        return rows.varlen(varlen_attn)

    ways = dict(cuDNN=[lambda: rows.documents(SDPBackend.CUDNN_ATTENTION)], flash=[lambda: rows.documents(SDPBackend.FLASH_ATTENTION)])
    if len(lengths) > 1:
        ways["flash"].insert(0, varlen)
    for name, makers in ways.items():
        seconds = (None, None)
        for make in makers:
            try:
                seconds = rows.seconds(*make())
                break
            except (ImportError, RuntimeError, TypeError) as error:
                print(f"  {name}, D {D}, documents of up to {max(lengths)}: {str(error).splitlines()[0][:200]}", file=sys.stderr)
        for direction, s in zip(("forward", "backward"), seconds):
            rates[name, direction] = s and attention_flops(lengths, D, direction == "backward") / s
    rows.torch.cuda.empty_cache()
    return rates


def attention(machine, out, quick):
    report = Report(out, "attention", machine, ["D", "T", "row", "pass", "train_llama TFLOP/s", "cuDNN", "flash", "of cuDNN", "of flash",
                                                "of a dense row of equal work"])
    have_torch = torch_with_gpu()
    dense_rates = {}

    def ours(direction, T, D):
        if (direction, T, D) not in dense_rates:
            dense_rates[direction, T, D] = our_rate(direction, T, 1, D)
        return dense_rates[direction, T, D]

    for D in (128, 64):
        for T in (1024, 16384) if quick else (1024 << i for i in range(7)):
            for row, documents in (("dense", 1), ("packed", DOCUMENTS)):
                lengths = document_lengths(T, documents)
                theirs = torch_rates(lengths, D) if have_torch else {}
                for direction in ("forward", "backward"):
                    rate = ours(direction, T, D) if documents == 1 else our_rate(direction, T, documents, D)
                    report.failed |= rate is None
                    cudnn, flash = (theirs.get((backend, direction)) for backend in ("cuDNN", "flash"))
                    of_dense = ratio(rate, ours(direction, equal_dense(lengths), D)) if documents > 1 else None
                    report.add(D, T, row, direction, *(number(r and r / 1e12) for r in (rate, cudnn, flash)),
                               number(ratio(rate, cudnn)), number(ratio(rate, flash)), number(of_dense))
                    if (D, T) != (128, 16384):
                        continue
                    if documents == 1:
                        report.add_target(f"{direction} at D 128, T 16384, of cuDNN", ratio(rate, cudnn), least=LEAST_OF_CUDNN[direction])
                    else:
                        report.add_target(f"{direction} at D 128, T 16384, packed, of a dense row of equal work", of_dense, least=LEAST_PACKED)
    return report


def torch_with_gpu():
    if not importlib.util.find_spec("torch"):
        print("  no PyTorch: only this project's kernels are timed", file=sys.stderr)
        return False
    import torch

    if not torch.cuda.is_available():
        print(f"  PyTorch {torch.__version__} finds no GPU: only this project's kernels are timed", file=sys.stderr)
    return torch.cuda.is_available()


# ---- training and transformers ---------------------------------------------------------------------------------------------------------

def typical(steps, tokens):
    """Returns the tokens per second of the median step, and the peak memory in GiB."""
    counted = [step["step_s"] for step in steps[STEPS_WARM_UP:]]
    return tokens / statistics.median(counted), max(step["peak_mem"] for step in steps) / 2**30


def attempt(side, steps):
    try:
        return steps()
    except SystemExit as error:  # the measurement of the other side continues
        print(f"  {side}: {error}", file=sys.stderr)
        return None


def their_steps(shape, T, batch, count):
    peer = compare.Peer(compare.__file__, shape, batch, T, "autocast", "", "cuda")
    steps = peer.steps(count)
    peer.close()
    return steps


def training(machine, out, quick):
    report = Report(out, "training in bf16 against transformers", machine,
                    ["model", "rows of a step", "transformers tokens/s", "train_llama tokens/s", "ratio", "mfu of train_llama", "transformers GiB (tensors)",
                     "train_llama GiB", "ratio", "first loss of each"])
    have_transformers = torch_with_gpu() and importlib.util.find_spec("transformers")
    count = STEPS_WARM_UP + STEPS_COUNTED
    for name in ("qwen2.5-0.5b",) if quick else ("qwen2.5-0.5b", "qwen2.5-1.5b"):
        shape = compare.MODELS[name][0]
        for batch, T in ((8, 1024),) if quick else ((8, 1024), (1, 8192)):
            with tempfile.TemporaryDirectory() as folder:
                compare.write_data(Path(folder) / "data.safetensors", shape["vocab_size"], T, batch * count)
                ours = attempt("train_llama", lambda: compare.our_run("train_llama", count, batch, T, "bf16", Path(folder),
                                                                        ["--preset", name], "cuda")[0])
            theirs = attempt("transformers", lambda: their_steps(shape, T, batch, count)) if have_transformers else None
            report.failed |= ours is None
            our_speed, our_memory = typical(ours, batch * T) if ours else (None, None)
            their_speed, their_memory = typical(theirs, batch * T) if theirs else (None, None)
            tensors = f" ({number(theirs[-1]['tensors'] / 2**30)})" if theirs else ""
            speed, memory = ratio(our_speed, their_speed), ratio(our_memory, their_memory)
            mfu = [step["mfu"] for step in ours[STEPS_WARM_UP:] if step["mfu"]] if ours else []
            losses = " / ".join(f"{steps[0]['loss']:.3f}" if steps else "-" for steps in (theirs, ours))
            report.add(name, f"{batch} x {T}", number(their_speed, 4), number(our_speed, 4), number(speed),
                       number(statistics.median(mfu) if mfu else None), number(their_memory) + tensors,
                       number(our_memory), number(memory), losses)
            if name == "qwen2.5-0.5b":
                report.add_target(f"{name}, {batch} x {T}, tokens/s of transformers'", speed, least=LEAST_SPEED)
                report.add_target(f"{name}, {batch} x {T}, memory of transformers'", memory, most=MOST_MEMORY)
    return report


# ---- main -----------------------------------------------------------------------------------------------------------------------------

SECTIONS = dict(ops=ops, attention=attention, training=training)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="only a few shapes per section")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="also write the tables to this file, replacing the previous ones of this GPU")
    options = parser.parse_args()
    for name in set(options.sections) - set(SECTIONS):
        parser.error(f"there is no section {name}; the sections are {', '.join(SECTIONS)}")
    machine = describe_machine()
    failed = False
    for name in options.sections or SECTIONS:
        print(f"{name}:", file=sys.stderr, flush=True)
        report = SECTIONS[name](machine, options.out, options.quick)
        print(report.text(), flush=True)
        failed |= report.failed
    return failed


if __name__ == "__main__":
    sys.exit(main())
