"""Counts instructions and memory accesses of the shipped kernels in the PTX interpreter, and writes docs/gpu_counts.md, or checks that no count grew.

    scripts/gpu_counts.py --nvcc NVCC PROGRAM...            as `make count` does; the programs are build/ptx/dev/cuda/*
    scripts/gpu_counts.py --nvcc NVCC --check PROGRAM...    the last line is "N passed, M failed", with a test per kernel and shape

Worse are more sectors per request, more bank conflicts, more spilled bytes, or a longer predicted time on one of the GPUs. The counts are exact
and the same on every machine, but another nvcc may make another kernel: then nothing is checked.
"""

import argparse
import csv
import os
import re
import subprocess
import sys

PAGE = "docs/gpu_counts.md"
# In addition to each ladder's own shape: attention of Qwen2.5-0.5B and of Llama-3-8B, half a head group of it; weights in 8 bits.
SHAPES = {
    "attention_forward": ["2048x1x1x2048x14x2x64", "2048x2x1x2048x14x2x64"],
    "attention_backward": ["1024x1x1x1024x14x2x64"],
    "dequantise": ["8x128x4096"],
}
COLUMNS = ["what", "kernel", "blocks", "registers", "spilled", "occupancy", "warp inst.", "active", "Mflop", "requests", "per req.", "kB read",
           "kB written", "kB L2", "wavefronts", "conflicts", "barriers"]
GPUS = ["H100 us", "A100 us", "RTX 4090 us"]
WORSE = ["spilled", "per req.", "conflicts", *GPUS]  # if it grows


def nvcc_version(nvcc):
    return re.search(r"release (\S+),", subprocess.run([nvcc, "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout)[1]


def rows_of(program):
    """A dictionary for each launch of the shipped version, at each shape."""
    name = os.path.basename(program)
    for shape in [None, *SHAPES.get(name, [])]:
        command = [program, "shipped", "--count", "--csv", *(["--shape", shape] if shape else [])]
        header, *lines = csv.reader(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines())
        for line in lines:
            row = dict(zip(header, line))
            row["what"] = f"{name} {shape}" if shape else name
            for gpu in GPUS:
                row[gpu] = f"{row[gpu]} {line[header.index(gpu) + 1]}"
            yield {column: row[column] for column in COLUMNS + GPUS}


def page(rows, version):
    text = f"""# What the shipped kernels do

After this page you can look up the instructions and bytes of each shipped kernel's launch, and its predicted time on a GPU.

`make count` wrote it, with nvcc {version}: the PTX interpreter ran the last version of each ladder, in bf16 where there is one. **No time was measured**:
times are predictions by the model of [gpu_model.md](gpu_model.md), each with the unit that it is the time of; [a GPU took longer](gpu_model.md#beside-a-gpu). Registers, spilled bytes and
occupancy are ptxas's for sm_90. `make test-all` fails if sectors per request, conflicts, spilled bytes or a predicted time grow.

"""
    header = COLUMNS + GPUS
    text += "| " + " | ".join(header) + " |\n|" + "---|" * len(header) + "\n"
    for row in rows:
        text += "| " + " | ".join(f"`{row[c]}`" if c == "kernel" else row[c] for c in header) + " |\n"
    return text


def read_page():
    """The version of nvcc, and the rows by (what, kernel, blocks)."""
    text = open(PAGE).read()
    table = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    header, _, *lines = table
    rows = [dict(zip(header, line)) for line in lines]
    return re.search(r"with nvcc ([0-9.]+):", text)[1], {key(row): row for row in rows}


def key(row):
    return row["what"], row["kernel"], row["blocks"]


def number(cell):
    first = cell.split()[0]
    return float(first) if first != "-" else 0.0


def what_is_worse(row, known):
    """Sentences; none if all is as good as it was."""
    if known is None:
        return ["the page has no such row"]
    return [f"{column} is {row[column]}, and was {known[column]}" for column in WORSE if number(row[column]) > number(known[column])]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--nvcc", required=True)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("programs", nargs="+")
    args = parser.parse_args()
    version = nvcc_version(args.nvcc)
    if args.check:
        written, known = read_page()
        if written != version:
            print(f"left out: {PAGE} is of nvcc {written}, and this is {version}\n0 passed, 0 failed")
            return 0
    rows = [row for program in args.programs for row in rows_of(program)]
    if not args.check:
        open(PAGE, "w").write(page(rows, version))
        return 0
    failed = 0
    for row in rows:
        worse = what_is_worse(row, known.get(key(row)))
        failed += bool(worse)
        for sentence in worse:
            print(f"FAILED: {row['what']}, {row['kernel']}: {sentence}\n  fix: look for what has changed; make count, if it is worth it")
    print(f"{len(rows) - failed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
